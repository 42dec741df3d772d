"""What holds of all our code: names that say what they are of."""

import ast
from collections import Counter
from pathlib import Path

import yopo

PACKAGE = Path(yopo.__file__).parent
TREES = {str(f.relative_to(PACKAGE)): ast.parse(f.read_text()) for f in PACKAGE.rglob("*.py")}


def test_no_variable_is_called_found() -> None:
    """What was found is the name."""
    assert len(TREES) > 100
    called = [
        f"{file}: {ast.unparse(node)}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if getattr(node, "id", getattr(node, "arg", getattr(node, "name", None))) == "found"
    ]
    assert called == []


def test_a_class_or_type_has_a_name_of_its_own() -> None:
    """One meaning a name, over all rooms."""
    names: Counter[str] = Counter()
    for tree in TREES.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names[node.name] += 1
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                aliases = (t.id for t in targets if isinstance(t, ast.Name))
                names.update(a for a in aliases if a.istitle() and len(a) > 1)
    assert len(names) > 100
    assert [name for name, times in names.items() if times > 1 and not name.startswith("_")] == []
