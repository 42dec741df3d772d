"""What trackers are told: each epoch once, whatever becomes of the run or of a tracker."""

import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import yopo
from tests.pages import fenced
from tests.runs.test_api import config, tree
from tests.tiny import Silent, tiny_data
from yopo.core import seals
from yopo.integrations.trackers import TRACKERS
from yopo.runs import closeup, tracking
from yopo.runs.api import compare_runs, evaluate_run, train_run
from yopo.runs.folder import TRACKED, read_lines, read_tracked
from yopo.runs.progress import StopRequested
from yopo.runs.settings import Config
from yopo.runs.tracking import Tracking, beside, flat, numbers

pytestmark = pytest.mark.usefixtures("float32")
__all__ = ["config", "tree"]


class Mine:
    """A tracker of one's own: remembers what it was told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str | None]] = []
        self.settings: dict[str, Any] = {}
        self.told: list[tuple[int, dict[str, float]]] = []
        self.pictures: dict[str, np.ndarray] = {}
        self.cards: list[str | None] = []

    def start(
        self, run: Path, name: str, settings: Mapping[str, Any], before: str | None
    ) -> str | None:
        self.begun.append((name, before))
        self.settings = dict(settings)
        return "number 7"

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.told.append((step, dict(values)))

    def image(self, name: str, picture: np.ndarray, step: int) -> None:
        self.pictures[name] = picture

    def end(self, card: str | None) -> None:
        self.cards.append(card)

    @property
    def steps(self) -> list[int]:
        return [step for step, values in self.told if "loss" in values]


def test_a_run_and_its_evaluation_are_one_run_of_the_tracker(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mirrored(_model: object, x: Tensor, _y: object, threat: yopo.Linf, _seed: int) -> Tensor:
        assert threat.eps == config.threat.eps
        return x.flip(3) / 255

    monkeypatch.setattr(closeup, "attacked", mirrored)  # what it does is another file's test
    mine, out = Mine(), tmp_path / "run"
    result = train_run(config, out, device="cpu", track=[mine])
    assert mine.begun == [("run", None)]
    assert mine.settings["method.name"] == config.method.name
    assert mine.steps == [1, 2]
    lines, _ = read_lines(out)
    for line, (_, values) in zip(lines, mine.told, strict=False):
        assert values == numbers({k: v for k, v in line.items() if k != "check"})
        assert values["robust"] == line["robust"]
    assert mine.told[-1] == (2, numbers({f"test/{k}": result[k] for k in ("best", "last")}))
    assert [*mine.pictures] == ["test/clean", "test/adversarial"]
    clean, attacked = mine.pictures.values()
    assert clean.shape == (16, 8 * 16, 3)
    x = tiny_data().x_test[:8]  # of four classes by turns
    assert np.array_equal(clean[..., 0], torch.cat([*x[:, 0]], 1).numpy())
    assert np.array_equal(attacked[..., 0], torch.cat([*x[:, 0].flip(2)], 1).numpy())
    card = mine.cards[-1]
    assert card is not None
    assert f"test/last/clean: {100 * result['last']['clean']:.2f} %" in card
    later = Mine()
    found = evaluate_run(out, "clean,pgd-2", device="cpu", track=[later])
    assert later.begun == [("run", "number 7")]
    shares = {f"eval/{k}": v for k, v in found.result.accuracy.items()}
    assert later.told == [
        (2, shares | {"eval/worst": found.result.worst, "eval/eps": config.threat.eps})
    ]
    assert later.cards == [found.result.card()]
    assert np.array_equal(later.pictures["eval/clean"], clean)
    assert np.array_equal(later.pictures["eval/adversarial"], attacked)


def test_two_trackers_of_one_class_are_both_told(config: Config, tmp_path: Path) -> None:
    """Each is gone on with by its own name for the run."""

    class Numbered(Mine):
        def __init__(self, number: str) -> None:
            super().__init__()
            self.number = number

        def start(self, *run: Any) -> str:
            super().start(*run)
            return self.number

    out, first = tmp_path / "run", [Numbered("a"), Mine(), Numbered("b"), Numbered("c")]
    train_run(config, out, device="cpu", track=first)
    assert [t.steps for t in first] == [[1, 2]] * 4
    again = [Numbered("-"), Mine(), Numbered("-"), Numbered("-")]
    evaluate_run(out, "clean", device="cpu", eps=config.threat.eps / 2, track=again)
    assert [t.begun for t in again] == [[("run", name)] for name in ("a", "number 7", "b", "c")]
    for tracker in again:  # and of the radius
        assert tracker.told[0][1]["eval/eps"] == config.threat.eps / 2


class Stopping(Silent):
    """Sends this process a signal after the first epoch."""

    def epoch(self, line: dict[str, Any]) -> None:
        super().epoch(line)
        if line["epoch"] == 1:
            signal.raise_signal(signal.SIGTERM)


def test_a_resumed_run_tells_no_epoch_twice(config: Config, tmp_path: Path) -> None:
    first, out = Mine(), tmp_path / "run"
    with pytest.raises(StopRequested):
        train_run(config, out, device="cpu", watch=Stopping(), track=[first])
    assert (first.steps, first.cards) == ([1], [None])
    # As if it had been killed after it told of epoch 2, and before it was saved.
    kept = read_tracked(out)
    Tracking([first], out, "run", {}, print).epoch({"epoch": 2, "loss": 1.0})
    assert read_tracked(out)["Mine"] == kept["Mine"] | {"step": 2}
    second = Mine()
    train_run(config, out, device="cpu", resume=True, track=[second])
    assert second.begun == [("run", "number 7")]
    assert second.steps == []
    assert "test/clean" in second.pictures
    (out / "result.json").unlink()
    third = Mine()
    train_run(config, out, device="cpu", resume=True, track=[third])
    assert third.told == []  # the end was told of, too


def test_epochs_after_a_collapse_are_told_again(tmp_path: Path) -> None:
    """Told of 1 to 3, resumed after 1, back from 3 to 2."""
    for epochs, told in (([1, 2, 3], [1, 2, 3]), ([2, 3, 2, 3, 4], [2, 3, 4])):
        mine = Mine()
        tracking = Tracking([mine], tmp_path, "run", {}, print)
        for epoch in epochs:
            tracking.epoch({"epoch": epoch, "loss": 1.0})
        assert mine.steps == told


def test_each_compared_run_is_one_of_the_trackers(config: Config, tmp_path: Path) -> None:
    mine = Mine()
    configs = {name: config.model_copy(update={"epochs": 1}) for name in ("a", "b")}
    compare_runs(configs, tmp_path, device="cpu", track=[mine])
    assert mine.begun == [("a", None), ("b", None)]
    assert (mine.steps, len(mine.cards)) == ([1, 1], 2)


@pytest.mark.parametrize("breaks", ["start", "log", "image", "end"])
def test_a_tracker_that_fails_costs_a_line(breaks: str, config: Config, tmp_path: Path) -> None:
    class Broken(Mine):
        pass

    def fail(*_: object) -> None:
        raise ConnectionError("no network\nat all")

    setattr(Broken, breaks, fail)
    watch, mine, broken = Silent(), Mine(), Broken()
    result = train_run(config, tmp_path / "run", device="cpu", watch=watch, track=[broken, mine])
    assert "best" in result
    said = [line for line in watch.said if "failed" in line]
    assert said == ["Broken failed (no network); the run goes on without it"]
    assert mine.steps == [1, 2]
    assert mine.cards[-1] is not None


def test_what_is_asked_for_wrongly_is_refused_before_the_work(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no tracker 'wnadb'; --track knows tensorboard, wandb"):
        train_run(config, tmp_path / "run", device="cpu", track="wnadb")
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=rf"needs it installed: pip install 'yopo-.*{name}\]'"):
            train_run(config, tmp_path / "run", device="cpu", track=name)
    assert not (tmp_path / "run").exists()


def test_a_damaged_note_costs_the_trackers_name(tmp_path: Path) -> None:
    (tmp_path / TRACKED).write_text('{"trackers": {"Mine": {"id": 3}}}')
    mine, said = Mine(), list[str]()
    Tracking([mine], tmp_path, "run", {}, said.append).epoch({"epoch": 1, "loss": 1.0})
    assert mine.begun == [("run", None)]
    assert mine.steps == [1]
    assert len(said) == 1
    assert "trackers begin a run of their own" in said[0]


@pytest.mark.parametrize("how", ["another's", "edited", "without a secret", "of before"])
def test_a_strangers_note_does_not_say_which_run_trackers_go_on_with(
    how: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else numbers of a stranger's folder would go into any run of mine that it names."""
    mine, out, said = Mine(), tmp_path / "run", list[str]()
    monkeypatch.setenv("HOME", str(tmp_path / "stranger"))
    train_run(config, out, device="cpu", track=[mine])
    if how != "another's":
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        tree = seals.read_json(out / TRACKED)
        tree["trackers"]["Mine"]["id"] = "another"
        if how == "without a secret":
            (tmp_path / "home").write_text("no folder")
            tree["made_here"] = None
        elif how == "of before":
            del tree["made_here"]
        seals.write_json(out / TRACKED, tree)
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
    asked: dict[str, Any] = {"device": "cpu", "samples": 4, "say": said.append}
    note = (out / TRACKED).read_bytes()
    for trust in (False, True):
        (out / TRACKED).write_bytes(note)
        later = Mine()
        evaluate_run(out, "clean", track=[later], trust=trust, **asked)
        ((_, before),) = later.begun
        assert (before is not None) == trust
        assert any("not written by you on this machine" in line for line in said) is not trust
        del said[:]
    (out / TRACKED).write_bytes(note)
    later = Mine()  # a folder that one trains in is one's own
    Tracking([later], out, "run", {}, print).epoch({"epoch": 9, "loss": 1.0})
    assert later.begun[0][1] is not None


@pytest.mark.parametrize("track", ["tensorboard", [Mine()]])
def test_no_note_is_written_through_a_link_beside_weights(
    track: Any, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "named", lambda _: Mine())
    train_run(config, tmp_path / "run", device="cpu")
    weights = tmp_path / "net.safetensors"
    shutil.copy(tmp_path / "run" / "model.safetensors", weights)
    mine = tmp_path / "mine"
    mine.mkdir()
    weights.with_suffix(".tracked").symlink_to(mine)
    with pytest.raises(ValueError, match=r"net.tracked is a link, and nothing of a run is written"):
        evaluate_run(weights, "clean", device="cpu", samples=4, track=track)
    assert not [*mine.iterdir()]
    assert not weights.with_suffix(".eval.json").exists()


def test_a_watcher_may_lack_what_it_does_not_want(config: Config, tmp_path: Path) -> None:
    """As docs/training.md says; an evaluation tells how far its attack is."""

    class Three:
        def __init__(self) -> None:
            self.heard: set[str] = set()

        def say(self, text: str) -> None:
            self.heard.add("say")

        def step(self, epoch: int, step: int, steps: int, note: str) -> None:
            self.heard.add("step")

        def epoch(self, line: dict[str, Any]) -> None:
            self.heard.add("epoch")

    three: Any = Three()
    train_run(config, tmp_path / "three", device="cpu", watch=three)
    assert three.heard == {"say", "step", "epoch"}


def test_the_pages_own_tracker_is_one(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (block,) = [b for b in fenced(page, "python") if "Printed" in b]

    def called(config: Config, out: Path, track: list[Any]) -> None:
        kind, mine = track
        assert kind in TRACKERS
        train_run(config, tmp_path / out.name, device="cpu", track=[mine])

    exec(block, {"train_run": called, "config": config, "Path": Path})
    said = capsys.readouterr().out
    assert said.startswith("1 {'train_seconds': ")
    assert "# printed\n" in said


def test_names_and_pictures() -> None:
    line = {"epoch": 3, "loss": 1.5, "hardware": "cpu", "best": None, "is": True, "d": {"k": 2}}
    assert numbers(line) == {"loss": 1.5, "d/k": 2.0}
    assert flat({"method": {"m": 3}, "seed": 0}, ".") == {"method.m": 3, "seed": 0}
    grey = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 1, 3, 4)
    row = beside(grey)
    assert row.shape == (3, 8, 3)
    assert (row[:, :4, 0] == grey[0, 0].numpy()).all()
    assert (row[:, 4:, 2] == grey[1, 0].numpy()).all()
    coloured = torch.rand(2, 3, 3, 4)
    assert np.array_equal(beside(coloured), beside((255 * coloured).round().byte()))
