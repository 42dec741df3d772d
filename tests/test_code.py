"""What holds of all our code: its sizes, and names that say what they are of."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yopo

ALIKE = {"RobustAccuracy": "the same callback, for Lightning and for transformers"}
PACKAGE = Path(yopo.__file__).parent
TREES = {f.relative_to(PACKAGE).as_posix(): ast.parse(f.read_text()) for f in PACKAGE.rglob("*.py")}
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LINES, LINES_OF_A_CLASS, ATTRIBUTES = 60, 250, 12
LARGER = {
    "engine/kernel.py: _steps": "Triton makes one kernel of one function",
    "runs/settings.py: Config": "the settings, one a line",
    "runs/sections.py: DataConfig": "the settings of data, one a line",
    "runs/progress.py: Progress": "the counts of a run, one a line",
    "runs/schemas.py: _About": "what stands in a file, one a line",
    "bench/bench.py: Timing": "the columns of a table, one a line",
}


def own(node: ast.ClassDef) -> set[str]:
    """What an object of a class has: declared in the body, or set on `self`."""
    declared = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
    stored = (
        n
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        if isinstance(n.value, ast.Name) and n.value.id == "self"
    )
    return {n.id for n in declared if isinstance(n, ast.Name)} | {n.attr for n in stored}


def lines(node: DEFINITION) -> int:
    """Of the definition; a function's docstring, which has its arguments, is left out."""
    first = node.body[0]
    said = isinstance(first, ast.Expr) and not isinstance(node, ast.ClassDef)
    words = (first.end_lineno or 0) - first.lineno + 1 if said else 0
    return (node.end_lineno or 0) - node.lineno + 1 - words


def too_large(tree: ast.AST) -> Iterator[str]:
    """Functions and classes of more lines, and classes of more attributes, than one can survey."""
    for node in ast.walk(tree):
        large = many = False
        if isinstance(node, ast.ClassDef):
            large, many = lines(node) > LINES_OF_A_CLASS, len(own(node)) > ATTRIBUTES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            large = lines(node) > LINES
        if (large or many) and isinstance(node, DEFINITION):
            yield node.name


def test_functions_and_classes_can_be_surveyed() -> None:
    assert len(TREES) > 100
    large = {f"{file}: {name}" for file, tree in TREES.items() for name in too_large(tree)}
    assert large == {*LARGER}


def test_what_is_too_large_would_be_seen() -> None:
    def judged(text: str) -> list[str]:
        return [*too_large(ast.parse(text))]

    def body(many: int, indent: str = " ") -> str:
        return f"\n{indent}x = 0" * many

    assert judged("def f():" + body(59)) == []
    assert judged("def f():" + body(60)) == ["f"]
    assert judged('def f():\n """Says\n more."""' + body(59)) == []
    assert judged("class C:" + body(249)) == []
    assert judged("class C:" + body(250)) == ["C"]
    stored = "".join(f"\n  self.a{i} = 0" for i in range(11))
    assert judged(f"class C:\n b: int\n def f(self):{stored}") == []
    assert judged(f"class C:\n b: int\n c: int\n def f(self):{stored}") == ["C"]


def test_no_variable_is_called_found() -> None:
    """What was found is the name."""
    called = [
        f"{file}: {ast.unparse(node)}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if getattr(node, "id", getattr(node, "arg", None)) == "found"
    ]
    assert called == []


def test_a_class_or_type_has_a_name_of_its_own() -> None:
    """One meaning a name, over all rooms."""
    names: Counter[str] = Counter()
    for tree in TREES.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names[node.name] += 1
            elif isinstance(node, ast.Assign):
                aliases = (t.id for t in node.targets if isinstance(t, ast.Name))
                names.update(a for a in aliases if not (a.isupper() or a.islower()) and a[0] != "_")
    assert len(names) > 100
    assert {name for name, times in names.items() if times > 1 and name[0] != "_"} == {*ALIKE}
