"""`runs.folder` alone knows the files of a run, and writes through no link."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import yopo
from tests.runs.test_strangers import write
from tests.tiny import tiny_trainer
from yopo import cli
from yopo.core import files
from yopo.runs import folder

PACKAGE = Path(yopo.__file__).parent
NAMES = {
    value
    for key, value in vars(folder).items()
    if key.isupper() and isinstance(value, str) and not key.startswith("_")
} | {*folder.EVALUATIONS}
FILES = [*(name for name in NAMES if "." in name), "-examples.safetensors", "eval-state"]

pytestmark = pytest.mark.usefixtures("float32")


def spelled(text: str) -> Iterator[str]:
    """Names of a run's files in strings, and of its folders where a path is made of them."""
    tree = ast.parse(text)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
            yield from (name for name in NAMES if name == node.right.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (n for n in FILES if n in node.value and id(node) not in docstrings)


def test_no_other_module_spells_a_name_of_a_runs_files() -> None:
    assert {"config.yaml", "metrics.jsonl", "result.json", "model.safetensors"} < {*FILES}
    assert {"eval.json", "model-last.eval.json", "state", "untimed"} < NAMES
    modules = sorted(PACKAGE.rglob("*.py"))
    found = {
        file.relative_to(PACKAGE).as_posix()
        for file in modules
        if any(spelled(file.read_text(encoding="utf-8")))
    }
    assert found == {"runs/folder.py"}


@pytest.mark.parametrize(
    "line",
    [
        'run / "result.json"',
        'print(f"no {run}/config.yaml")',
        'run / "state"',
        'path.with_name(f"{stem}-examples.safetensors")',
    ],
)
def test_a_name_that_is_spelled_would_be_seen(line: str) -> None:
    assert [*spelled(line)]
    assert not [*spelled('"""A docstring names result.json."""\nrun / RESULT')]


@pytest.mark.parametrize("command", ["train", "compare", "eval", "eval, deeper", "tensorboard"])
def test_a_folder_that_a_link_stands_for_is_refused_before_anything_is_written(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run" / "natural"
    mine.mkdir()
    write(run)
    link, words = {
        "train": ("state", ["train", "demo", "--out", run, "--resume"]),
        "compare": ("state", ["compare", "demo", "--methods", "natural", "--out", run.parent]),
        "eval": ("eval-state", ["eval", run, "--samples", "4"]),
        "eval, deeper": ("eval-state/0123456789abcdef", ["eval", run, "--samples", "4"]),
        "tensorboard": (
            "tensorboard",
            ["train", "demo", "--out", run, "--track", "tensorboard", "--resume"],
        ),
    }[command]
    (run / link).parent.mkdir(exist_ok=True)
    (run / link).symlink_to(mine)
    there = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    monkeypatch.setattr("sys.argv", ["yopo", *map(str, words)])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert f"{run / link} is a link, and nothing of a run is written through one" in said
    assert not [*mine.iterdir()]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == there
    if link == "state":
        with pytest.raises(ValueError, match="state is a link"):
            tiny_trainer(run)


def test_a_link_that_appears_while_a_run_trains_is_replaced(tmp_path: Path) -> None:
    """Metrics are appended to, but never to the file that a link leads to."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    trainer = tiny_trainer(tmp_path / "run", {"epochs": 2})
    real = trainer.epoch_end.finish

    def finish(reason: str | None) -> None:
        metrics = tmp_path / "run" / "metrics.jsonl"
        metrics.unlink()
        metrics.symlink_to(victim)
        real(reason)

    trainer.epoch_end.finish = finish  # type: ignore[method-assign]
    trainer.run()
    assert victim.read_text() == "mine"
    assert [line["epoch"] for line in folder.read_lines(tmp_path / "run")[0]] == [1, 2]


def test_names_that_an_evaluation_was_given_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = folder.EvaluationFiles(tmp_path / "eval")
    there.values.write_text("{}")
    there.card.write_text("a card")
    seen: list[list[str]] = []
    monkeypatch.setattr(
        files, "flush", lambda path: seen.append(sorted(p.name for p in path.iterdir()))
    )
    there.set_aside("2026-01-02 03:04")
    assert seen == [["eval-202601020304.json", "eval-202601020304.md"]]
