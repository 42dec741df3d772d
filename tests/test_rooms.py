"""Imports point down only, and `import yopo` is light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import yopo

PACKAGE = Path(yopo.__file__).parent
# From the top down; a room may import from its own row or from rows below it.
ROOMS = [
    {"cli", "__main__"},
    {"paper"},
    {"report", "bench"},
    {"runs"},
    {"yopo"},  # the public names
    {"integrations"},
    {"engine", "evaluation"},
    {"methods"},
    {"pmp"},
    {"attacks"},
    {"models", "data"},
    {"core"},
]
# A public name of a room further up. It is looked up when it is first used, so nothing goes round.
UP = {"yopo.runs.loading.load"}


def row(module: str) -> int:
    """The row of a module's room; what stands in no room is a public name."""
    room = [*module.split("."), ""][1]
    there = ((PACKAGE / room).is_dir() and room) or (room == "__main__" and room)
    return next(i for i, rooms in enumerate(ROOMS) if (there or "yopo") in rooms)


def imports(file: Path) -> Iterator[str]:
    """What a file of ours imports from us."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
        yield from (name for name in names if name.split(".")[0] == "yopo")


def test_imports_point_down() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        parts = ("yopo", *file.relative_to(PACKAGE).with_suffix("").parts)
        me = ".".join(part for part in parts if part != "__init__")
        for target in imports(file):
            if me == "yopo" and target in UP:
                continue
            assert row(me) <= row(target), f"{me} imports {target}"


def test_every_room_is_in_the_table_and_says_what_is_done_there() -> None:
    assert {file.name for file in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    rooms = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert rooms | {"yopo", "__main__"} == set().union(*ROOMS)
    for room in rooms:
        said = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
        assert said, room


def test_the_public_names_are_found_where_they_are_said_to_be() -> None:
    """Three lists of them: for type checkers, for `import *`, and for the first use."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        f"{node.module}.{alias.name}".removeprefix("yopo.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("yopo")
        for alias in node.names
    }
    homes = {f"{home}.{name}" for home, names in yopo._HOMES.items() for name in names.split()}
    assert typed == homes | {"attacks", "models", "pmp"}
    assert {name.rpartition(".")[2] for name in typed} == {*yopo.__all__}
    assert all(getattr(yopo, name) is not None for name in yopo.__all__)
    assert {*yopo.__all__} <= {*dir(yopo)}
    with pytest.raises(AttributeError, match="no attribute 'YOP'"):
        _ = yopo.YOP  # type: ignore[attr-defined]


def test_methods_and_attacks_do_not_know_each_other() -> None:
    for one, other in (("methods", "attacks"), ("attacks", "methods")):
        for file in (PACKAGE / one).glob("*.py"):
            assert f"yopo.{other}" not in file.read_text()


def test_import_needs_torch_and_numpy_only() -> None:
    """Of all that is installed, `import yopo` loads nothing that plain torch does not."""
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import yopo; "
        "[getattr(yopo, name) for name in yopo.__all__]; "
        "print(*{m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["yopo"]


def test_each_algorithm_fits_on_less_than_40_lines() -> None:
    """A reader with the paper in the other hand finds it in one glance."""
    for file in (PACKAGE / "methods").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and file.stem not in ("base", "registry", "__init__"):
                functions = [f for f in node.body if isinstance(f, ast.FunctionDef)]
                algorithm = [f for f in functions if f.name != "__init__"]
                lines = sum((f.end_lineno or 0) - f.lineno + 1 for f in algorithm)
                assert 0 < lines < 40, f"{file.name}: {lines} lines"


def test_the_command_without_its_packages_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['rich'] = None; sys.argv = ['yopo', '--help']; "
        "from yopo.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "the command line needs rich" in done.stderr
    assert "pip install 'yopo-torch[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
