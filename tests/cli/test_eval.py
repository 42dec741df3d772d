"""`yopo eval`, as a user meets it."""

import copy
import itertools
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from tests.cli.test_commands import TINY, npz, yopo
from tests.robust import EPS, trained
from tests.tiny import PATIENCE, command_line, forkserver, wait_until
from yopo.cli import training
from yopo.core import files, tensor_files
from yopo.core.digest import weights_digest
from yopo.report.records import read_runs
from yopo.runs.overlay import Tree
from yopo.runs.settings import validate

__all__ = ["npz"]


pytestmark = pytest.mark.usefixtures("float32")


SETTINGS: Tree = {
    "model": {"name": "smallcnn", "options": {"width": 8, "hidden": 32, "dropout": 0.0}},
    "threat": {"name": "linf", "eps": EPS},
    "data": {"name": "mnist-subset"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder around the digits network that all tests share."""
    out, tree = tmp_path / "run", validate(SETTINGS).tree()
    out.mkdir()
    (out / "config.yaml").write_text(yaml.safe_dump(tree))
    for name in ("model.safetensors", "model-last.safetensors"):
        state = dict(trained()[0].state_dict())
        tensor_files.save_weights(out / name, state, {"config": json.dumps(tree)})
    return out


def test_eval_agrees_with_what_the_training_measured(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert yopo(monkeypatch, "train", "demo", "--out", out, "--data.path", npz, *TINY) == 0
    measured = json.loads((out / "result.json").read_text())
    for which in ("best", "last"):
        assert yopo(monkeypatch, "eval", out, "--weights", which) == 0
        tree = json.loads((out / "eval.json").read_text())
        assert tree["accuracy"]["clean"] == measured[which]["clean"]


def test_what_cannot_be_kept_is_known_first_or_shown_at_least(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    words = ("eval", run, "--attacks", "pgd-1", "--samples", "20")
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_text", full)
        assert yopo(monkeypatch, *words) == 2
    shown = capsys.readouterr()
    assert "worst case" in shown.out
    assert "No space left" in shown.err
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    for command in (words, ("diagnose", run)):
        assert yopo(monkeypatch, *command) == 2
        shown = capsys.readouterr()
        assert f"cannot write into {run} (No space left on device)" in shown.err
        assert not shown.out


@pytest.mark.parametrize("text", [b"a: b: c", b"", b"\xff"])
def test_broken_settings_are_named(
    text: bytes, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_bytes(text)
    for command in ("eval", "diagnose"):
        assert yopo(monkeypatch, command, run) == 2
        assert str(run / "config.yaml") in capsys.readouterr().err


def test_several_runs_at_once_all_checked_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    words = ["--attacks", "pgd-1", "--samples", "20"]
    assert yopo(monkeypatch, "eval", run, tmp_path / "nowhere", *words) == 2
    round_ = tmp_path / "round"
    shutil.copytree(run, round_)
    tree = yaml.safe_load((round_ / "config.yaml").read_text())
    tree["threat"] = {"name": "l2", "eps": 1.0}
    (round_ / "config.yaml").write_text(yaml.safe_dump(tree))
    for file in round_.glob("*.safetensors"):
        state = tensor_files.load_weights(file)
        tensor_files.save_weights(file, state, {"config": json.dumps(tree)})
    assert yopo(monkeypatch, "eval", run, round_, "--attacks", "cw-linf") == 2
    assert not (run / "eval.json").exists()
    assert yopo(monkeypatch, "eval", run, other, *words) == 0
    one, two = (json.loads((r / "eval.json").read_text()) for r in (run, other))
    assert one["accuracy"] == two["accuracy"]
    assert str(other) in capsys.readouterr().out


def test_eval_writes_json_card_and_table(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name for path in run.iterdir()}
    words = ["--attacks", "clean,pgd-5-2,cw", "--samples", "40", "--batch", "16"]
    assert yopo(monkeypatch, "eval", run, *words) == 0
    shown = capsys.readouterr().out
    assert {path.name for path in run.iterdir()} - before == {"eval.json", "eval.md"}
    tree = json.loads((run / "eval.json").read_text())
    assert 0 < tree["worst"]["accuracy"] <= min(tree["accuracy"].values()) < 1
    for word in ("pgd-5-2", "worst case", f"{100 * tree['worst']['accuracy']:.2f}%"):
        assert word in shown
    assert f"card: {run / 'eval.md'}" in shown
    card = (run / "eval.md").read_text()
    assert "40 images: mnist-subset test set, drawn from 2,000 with seed 0. Threat: L∞" in card
    assert "eps = 0.1." in card
    assert "model.safetensors" in card


def test_without_an_attack_there_is_no_worst_case(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yopo(monkeypatch, "eval", run, "--attacks", "clean", "--samples", "40") == 0
    shown, card = capsys.readouterr().out, (run / "eval.md").read_text()
    for text in (shown, card):
        assert "worst case" not in text
        assert "o attack was run; --attacks clean,pgd-20 attacks it" in text
    assert not read_runs([run])[0].evaluations


def test_samples_eps_weights_precision_and_examples(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--samples", "24", "--eps", "64/255", "--weights", "last", "--save-examples"]
    words += ["--precision", "bf16", "--attacks", "pgd-5"]
    assert yopo(monkeypatch, "eval", run, *words) == 0
    tree, card = json.loads((run / "eval.json").read_text()), (run / "eval.md").read_text()
    assert tree["about"]["eps"] == 64 / 255
    assert tree["about"]["images"] == 24
    for word in ("drawn from 2,000 with seed 0", "eps = 64/255", "bf16", "model-last.safetensors"):
        assert word in card
    found = tensor_files.load_weights(run / "eval-examples.safetensors")
    broken = round(24 * (tree["accuracy"]["clean"] - tree["accuracy"]["pgd-5"]))
    assert found["pgd-5.images"].shape == (broken, 1, 28, 28)
    assert len(found["pgd-5.index"]) == len(found["pgd-5.labels"]) == broken > 0


def test_a_lesser_evaluation_does_not_replace_a_greater_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(attacks: str, samples: int) -> tuple[str, set[Path]]:
        words = ["--attacks", attacks, "--samples", str(samples)]
        assert yopo(monkeypatch, "eval", run, *words) == 0
        return (run / "eval.json").read_text(), {*run.glob("eval-2*")}

    great, none = evaluate("clean,pgd-2,pgd-3", 20)
    _, aside = evaluate("pgd-2", 20)
    assert "which this one does not cover, is kept as eval-2" in capsys.readouterr().out
    assert not none
    assert sorted(path.suffix for path in aside) == [".json", ".md"]
    (kept,) = [path for path in aside if path.suffix == ".json"]
    assert kept.read_text() == great
    for attacks, samples in (("pgd-2,pgd-4", 20), ("pgd-2,pgd-4", 30)):  # more, each time
        assert evaluate(attacks, samples)[1] == aside
    for attacks in ("pgd-2", "pgd-3"):  # both less than before, perhaps in the same minute
        aside |= (now := evaluate(attacks, 20)[1])
        assert len(now) == len(aside)
    assert len(aside) == 6


def test_a_page_does_without_damaged_pictures(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "run", tmp_path / "report.html"
    assert yopo(monkeypatch, "train", "demo", "--out", out, "--data.path", npz, *TINY) == 0
    words = ["--attacks", "pgd-2", "--samples", "20", "--save-examples"]
    assert yopo(monkeypatch, "eval", out, *words) == 0
    (out / "eval-examples.safetensors").write_bytes(b"half")
    assert yopo(monkeypatch, "report", out, "--out", page) == 0
    why = f"no pictures, because {out / 'eval-examples.safetensors'}"
    assert f"run (YOPO-2-2): {why}" in capsys.readouterr().out
    assert page.exists()


def test_another_radius_or_other_weights_replace_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--attacks", "pgd-2", "--samples", "20"]
    best, last = trained()[0], copy.deepcopy(trained()[0])
    last.load_state_dict({k: 0.9 * v for k, v in best.state_dict().items()})
    settings = {"config": (run / "config.yaml").read_text()}
    tensor_files.save_weights(run / "model-last.safetensors", dict(last.state_dict()), settings)
    digests = {"best": weights_digest(best), "last": weights_digest(last)}
    measured: dict[str, object] = {"last": {"clean": 0.9, "pgd-2": 0.5}, "weights_sha256": digests}
    measured |= {"best_epoch": 1, "test_images": 20, "train_seconds": 1.0, "propagations": 1.0}
    (run / "result.json").write_text(json.dumps(measured))
    kept = {*run.glob("eval*.json")}
    for more in ([], ["--eps", "0.05"], ["--weights", "last"], ["--step", "0.01"], ["--seed", "1"]):
        assert yopo(monkeypatch, "eval", run, *words, *more) == 0
        before, kept = kept, {*run.glob("eval*.json")}
        assert len(kept) == len(before) + 1 or not more
    assert yopo(monkeypatch, "eval", run, *words, "--seed", "1") == 0  # the same again
    assert {*run.glob("eval*.json")} == kept


def test_a_weights_file_is_evaluated_by_its_own_metadata(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "net.safetensors"
    shutil.copy(run / "model.safetensors", alone)
    assert yopo(monkeypatch, "eval", alone, "--attacks", "pgd-3", "--samples", "30") == 0
    assert yopo(monkeypatch, "eval", run, "--attacks", "pgd-3", "--samples", "30") == 0
    ours, theirs = (
        json.loads(p.read_text()) for p in (tmp_path / "net.eval.json", run / "eval.json")
    )
    assert ours["accuracy"] == theirs["accuracy"]
    assert (tmp_path / "net.eval.md").exists()


def test_warnings_are_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--attacks", "pgd-5", "--step", "0.001", "--samples", "30"]
    assert yopo(monkeypatch, "eval", run, *words) == 0
    assert "warning (step-too-small): 5 steps reach 0.05·eps" in capsys.readouterr().out
    assert "**Warning (step-too-small)**" in (run / "eval.md").read_text()
    words = ["--attacks", "clean,cw", "--samples", "5", "--step", "0.001"]
    assert yopo(monkeypatch, "eval", run, *words) == 0
    assert "step-too-small" not in capsys.readouterr().out  # no attack takes these steps


def test_a_narrow_terminal_cuts_no_number_off(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert yopo(monkeypatch, "eval", run, "--attacks", "pgd-2", "--samples", "30") == 0
    assert "…" not in capsys.readouterr().out.partition("card:")[0]
    share = {"clean": 0.98765, "pgd-2": 0.12345}
    result = {"best": share, "last": share, "train_seconds": 1234.5, "propagations": 120.0}
    Console(width=40).print(training.result_table({"yopo-5-3": result | {"test_images": 10000}}))
    assert "…" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attacks", "pgd-5,pdg-20"], "did you mean pgd-20?"),
        (["--attacks", "clean,pdg-5"], "did you mean pgd-5?"),
        (["--atacks=clean"], "did not expect --atacks=clean; did you mean --attacks?"),
        (["--attacks", ""], "at least one attack"),
        (["--attacks", "pgd-5,pgd-5"], "each attack once"),
        (["--eps", "0"], "expected eps > 0, got 0"),
        (["--eps", "8/0"], "expected a number for --eps, as 0.3 or 8/255"),
        (["--samples", "2001"], "--samples from 1 to 2000, the test images there are, got 2001"),
        (["--samples", "0"], "--samples from 1 to 2000"),
        (["--batch", "0"], "batch to be a whole number"),
        (["--sample", "10"], "did not expect --sample 10"),
        (["--device", "cuda"], "torch finds no GPU here"),
        (["--device", "gpu"], "--device gpu: torch cannot use it here"),
        (["--device", "xpu"], "--device xpu: torch cannot use it here"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(
    words: list[str],
    message: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = sorted(run.iterdir())
    assert yopo(monkeypatch, "eval", run, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("yopo: ")
    assert message in error
    assert "Traceback" not in error
    assert sorted(run.iterdir()) == before


def test_a_run_or_checkpoint_that_does_not_fit_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*words: object) -> str:
        before = sorted(run.iterdir())
        assert yopo(monkeypatch, "eval", *words) == 2
        assert sorted(run.iterdir()) == before
        return capsys.readouterr().err

    assert "no run folder and no weights file" in error(tmp_path / "nowhere")
    assert "expected a run with config.yaml and model.safetensors" in error(tmp_path)
    assert f"did you mean {run}?" in error(run.parent)
    assert "chooses within a run folder" in error(run / "model.safetensors", "--weights", "last")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("width: 8", "width: 5"))
    shown = error(run)
    assert "model.safetensors is of another architecture than smallcnn with 10 classes" in shown
    assert "conv1.weight of shape (8, 1, 3, 3), not (5, 1, 3, 3)" in shown
    bare, pickled = tmp_path / "bare.safetensors", tmp_path / "model.pt"
    tensor_files.save_weights(bare, {"w": torch.zeros(2)}, {})
    assert "does not say which network it belongs to" in error(bare)
    torch.save({"w": torch.zeros(2)}, pickled)
    assert "is a pickle" in error(pickled)


def evaluate_until_held(words: list[str], folder: str) -> None:
    """After five finished batches it waits for what is done to it."""
    save, calls, at = tensor_files.save_weights, itertools.count(1), Path(folder)

    def counted(*args: Any, **more: Any) -> None:
        save(*args, **more)
        if next(calls) == 5:
            (at / "held").touch()
            wait_until((at / "signalled").exists)

    tensor_files.save_weights = counted
    command_line(words, str(at / "said"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_eval_goes_on_with_the_same_command(
    number: signal.Signals, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["eval", str(run), "--attacks", "pgd-3-3", "--samples", "40", "--batch", "8"]
    process = forkserver().Process(target=evaluate_until_held, args=(words, str(tmp_path)))
    process.start()
    wait_until(lambda: not process.is_alive() or (tmp_path / "held").exists())
    assert process.pid is not None
    os.kill(process.pid, number)
    (tmp_path / "signalled").touch()
    process.join(PATIENCE)
    state, shown = run / "eval-state", (tmp_path / "said").read_text()
    assert not (run / "eval.json").exists()
    if number != signal.SIGKILL:
        assert process.exitcode == 130
        assert f"To go on: yopo {' '.join(words)}" in shown
    kept = set(state.rglob("*.safetensors"))
    assert len(kept) >= 5
    written: list[Path] = []
    save = tensor_files.save_weights

    def noted(path: Path, *given: Any, **more: Any) -> None:
        written.append(path)
        save(path, *given, **more)

    monkeypatch.setattr(tensor_files, "save_weights", noted)
    assert yopo(monkeypatch, *words) == 0
    assert written
    assert not set(written) & kept  # no finished batch was attacked again
    assert not state.exists()
    ours = json.loads((run / "eval.json").read_text())
    assert yopo(monkeypatch, *words) == 0
    whole = json.loads((run / "eval.json").read_text())
    assert ours["accuracy"] == whole["accuracy"]
    propagations = [tree["attacks"]["pgd-3-3"]["propagations"] for tree in (ours, whole)]
    assert propagations[0] == pytest.approx(propagations[1])


def test_help_has_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert yopo(monkeypatch, "eval", "--help") == 0
    shown = capsys.readouterr().out
    assert "usage: yopo eval" in shown
    assert "examples:\n  yopo eval" in shown


def test_data_named_from_another_folder(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(npz.parent)
    assert (
        yopo(monkeypatch, "train", "demo", "--out", tmp_path / "r", "--data.path", npz.name, *TINY)
        == 0
    )
    monkeypatch.chdir(tmp_path)
    assert yopo(monkeypatch, "eval", "r") == 2
    assert "from the folder it was trained in; run this there" in capsys.readouterr().err
