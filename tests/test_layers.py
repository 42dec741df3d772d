"""Imports point down only, and `import yopo` is light."""

import ast
import subprocess
import sys
from pathlib import Path

import yopo

PACKAGE = Path(yopo.__file__).parent
# From the top down; a module may import from its own layer's row or from rows below it.
LAYERS = [
    {"yopo.cli", "yopo.__main__"},
    {"yopo.bench", "yopo.report"},
    {"yopo.reproduction"},
    {"yopo.recipes", "yopo.train"},
    {"yopo.measure", "yopo.run_folder"},
    {"yopo.build", "yopo.schedule", "yopo.snapshot", "yopo.strangers"},
    {"yopo.config", "yopo.sections", "yopo.distributed", "yopo.guard", "yopo.progress"},
    {"yopo"},
    {"yopo.engine", "yopo.evaluation"},
    {"yopo.compiled", "yopo.ema"},
    {"yopo.methods", "yopo.attacks", "yopo.diagnose"},
    {"yopo.literal", "yopo.kernels"},
    {"yopo.models", "yopo.data", "yopo.checkpoint"},
    {"yopo.argmin", "yopo.argmax"},
    {"yopo.pmp", "yopo.layers"},
    {"yopo.hamiltonian", "yopo.split", "yopo.propagation", "yopo.frozen", "yopo.threat"},
    {"yopo.exchange"},
    {"yopo.seals"},
    {"yopo.losses", "yopo.checks", "yopo.lbfgs", "yopo.paper", "yopo.files"},
]


def layer(name: str) -> int:
    """The row of a module; what is no module itself belongs to the package."""
    parts = name.split(".")
    top = ".".join(parts[:2])
    is_module = len(parts) > 1 and any(PACKAGE.glob(f"{parts[1]}*"))
    return next(i for i, row in enumerate(LAYERS) if (top if is_module else "yopo") in row)


def test_imports_point_down() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        parts = ("yopo", *file.relative_to(PACKAGE).with_suffix("").parts)
        me = ".".join(part for part in parts if part != "__init__")
        for node in ast.walk(ast.parse(file.read_text())):
            targets = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [f"{node.module}.{a.name}" for a in node.names]
            for target in targets:
                if target.split(".")[0] == "yopo":
                    assert layer(me) <= layer(target), f"{me} imports {target}"


def test_methods_and_attacks_do_not_know_each_other() -> None:
    for one, other in (("methods", "attacks"), ("attacks", "methods")):
        for file in (PACKAGE / one).glob("*.py"):
            assert f"yopo.{other}" not in file.read_text()


def test_import_needs_torch_and_numpy_only() -> None:
    """Of all that is installed, `import yopo` loads nothing that plain torch does not."""
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import yopo; "
        "print(*{m.split('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["yopo"]


def test_each_algorithm_fits_on_less_than_40_lines() -> None:
    """A reader with the paper in the other hand finds it in one glance."""
    for file in (PACKAGE / "methods").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and file.stem not in ("base", "__init__"):
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
