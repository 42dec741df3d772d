"""What the loop tells who watches it, and how it stops while it attacks."""

import itertools
import re
from contextlib import suppress
from pathlib import Path
from statistics import mean

import pytest
from torch import Tensor

import yopo
from tests.tiny import Silent, tiny_trainer
from yopo.core import seals
from yopo.runs.overlay import Tree
from yopo.runs.progress import StopRequested
from yopo.runs.trainer import Trainer

pytestmark = pytest.mark.usefixtures("float32")


def test_the_loss_of_every_step_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of its epoch so far; at the last step once more, of what the device has done."""
    watcher, notes, losses = Silent(), list[str](), list[float]()
    monkeypatch.setattr(watcher, "step", lambda *told: notes.append(told[3]))
    trainer = tiny_trainer(tmp_path, watcher=watcher)
    assert len(trainer.loader) == 5
    real = trainer._step

    def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
        out: yopo.Step = real(x, y, number)
        losses.append(float(out.loss))
        return out

    trainer._step = step  # type: ignore[method-assign]
    trainer.run()
    epochs = [losses[i : i + 5] for i in range(0, 15, 5)]
    expected = [mean(epoch[:n]) for epoch in epochs for n in (1, 2, 3, 4, 5, 5)]
    assert all(re.fullmatch(r"loss \d\.\d{3}", note) for note in notes)
    assert [float(note.split()[1]) for note in notes] == pytest.approx(expected, abs=6e-4)


class StopsInAttack(Silent):
    """Asks its run to stop when it has heard so often of attacks."""

    trainer: Trainer

    def __init__(self, often: int) -> None:
        super().__init__()
        self.often, self.heard = often, list[str]()

    def attack(self, name: str, part: float, accuracy: float) -> None:
        self.heard.append(name)
        self.trainer.stop = len(self.heard) == self.often


@pytest.mark.parametrize("keep", ["best", "last"])
def test_stopping_in_any_attack_and_going_on_changes_nothing(keep: str, tmp_path: Path) -> None:
    """Of held-out images, or of the test set with either weights."""
    over: Tree = {"epochs": 2, "evaluate": {"keep": keep}}
    tiny_trainer(tmp_path / "whole", over).run()
    where: list[str] = []
    for life in itertools.count(1):
        watcher = StopsInAttack(life)
        watcher.trainer = tiny_trainer(tmp_path / "pieces", over, watcher)
        watcher.trainer.resume()
        with suppress(StopRequested):
            watcher.trainer.run()
            break
        where.append(watcher.heard[-1])
        assert watcher.trainer.keeper.is_saved
        assert not (tmp_path / "pieces" / "result.json").exists()
    assert {name.split()[0].rstrip(",") for name in where} == {"held-out", "test"}
    one, other = (seals.read_json(tmp_path / name / "result.json") for name in ("whole", "pieces"))
    for key in ("last", "best", "weights_sha256", "best_epoch"):
        assert one[key] == other[key]
