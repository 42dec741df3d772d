"""Checkpoints of large runs are written beside the training, from a copy."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import yopo.runs.trainer
from tests.runs.test_trainer import assert_equal_runs
from tests.tiny import PATIENCE, Silent, forkserver, run_until_killed, tiny_trainer, wait_until
from yopo.runs import state, writing
from yopo.runs.overlay import Tree
from yopo.runs.progress import StopRequested

pytestmark = pytest.mark.usefixtures("float32")
RUNS: dict[str, Tree] = {
    "yopo, ema": {},
    "free, adamw": {"method": {"name": "free", "m": 2}, "optimizer": {"name": "adamw", "lr": 0.01}},
    "no way back": {"guard": {"action": "stop"}},
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LARGE", 0)
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 1)  # a checkpoint after every step


class Slow:
    """Writes a checkpoint only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, self.real = threading.Event(), threading.Event(), state.save
        monkeypatch.setattr(state, "save", self.save)

    def save(self, *args: Any, **kwargs: Any) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE)
        self.real(*args, **kwargs)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_saves_beside_its_training_is_the_same_and_goes_on_exactly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_trainer(tmp_path / "whole", RUNS[name]).run()
    monkeypatch.setattr(writing, "LARGE", 0)
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 1)
    stops: list[bool] = []
    while True:
        trainer = tiny_trainer(tmp_path / "pieces", RUNS[name])
        trainer.resume()
        steps = trainer._step

        def step(*args: Any, trainer: Any = trainer, steps: Any = steps) -> yopo.Step:
            trainer.stop = trainer.progress.step == 3
            found: yopo.Step = steps(*args)
            return found

        trainer._step = step  # type: ignore[method-assign, assignment]
        try:
            trainer.run()
            break
        except StopRequested as stop:
            stops.append(stop.saved)
    assert stops == [True] * 3
    assert_equal_runs(tmp_path / "whole", tmp_path / "pieces")


def test_what_is_written_is_the_state_at_the_call(
    large: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are taken before the file is written do not come into it."""
    trainer = tiny_trainer(tmp_path)
    trainer.learner.warm_up(*next(iter(trainer.loader.epoch(0))))
    trainer.keeper.keep_good()
    trainer.progress.step = 1
    slow = Slow(monkeypatch)
    for number, (x, y) in enumerate(trainer.loader.epoch(0)):
        if number == 2:
            expected = {k: v.clone() for k, v in trainer.learner.snapshot.take().items()}
            assert trainer.keeper.save()
            assert slow.begun.wait(PATIENCE)
            assert state.saved(tmp_path / "state") == []
        trainer._step(x, y, number)
    now = trainer.learner.snapshot.take()
    assert not all(torch.equal(now[k], v) for k, v in expected.items())
    slow.go.set()
    assert trainer.keeper.settle()
    found = state.load(state.saved(tmp_path / "state")[0])
    assert found.tensors.keys() == expected.keys()
    assert all(torch.equal(found.tensors[k], v) for k, v in expected.items())
    assert found.good is not None


def test_a_stop_waits_until_its_checkpoint_is_there(
    large: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    trainer = tiny_trainer(tmp_path)
    trainer.stop = True
    threading.Timer(0.5, slow.go.set).start()
    with pytest.raises(StopRequested) as stop:
        trainer.run()
    assert stop.value.saved
    assert tiny_trainer(tmp_path).resume()


def test_one_that_the_disk_refuses_is_said_and_the_run_goes_on(
    large: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = state.save, 0

    def save(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)

    monkeypatch.setattr(state, "save", save)
    watcher = Silent()
    tiny_trainer(tmp_path, watcher=watcher).run()
    said = [text for text in watcher.said if "No space left" in text]
    assert len(said) == 1
    assert "earlier ones are kept" in said[0]
    assert (tmp_path / "result.json").exists()


def test_memory_for_copies_is_made_once(large: None, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    snapshot, room = trainer.learner.snapshot, dict[str, torch.Tensor]()
    first = {k: v.data_ptr() for k, v in snapshot.copy(room).items()}
    again = snapshot.copy(room)
    assert {k: v.data_ptr() for k, v in again.items()} == first
    assert all(v.data_ptr() != again[k].data_ptr() for k, v in snapshot.take().items())


def test_kills_while_a_checkpoint_is_written_beside_cost_no_more_than_that_one(
    tmp_path: Path,
) -> None:
    """In its tensors, before its seal, before its name; training is further on meanwhile."""
    tiny_trainer(tmp_path / "whole").run()
    context, out, half_written = forkserver(), tmp_path / "killed", 0
    for flushes in (8, 10, 12, 14):  # four to six flushes a checkpoint
        (out / "held").unlink(missing_ok=True)
        process = context.Process(target=run_until_killed, args=(str(out), {}, 0, flushes, True))
        process.start()
        wait_until((out / "held").exists)
        process.kill()
        process.join()
        half_written += (out / "state" / state.WRITING).exists()
    assert half_written >= 2
    watcher = Silent()
    last = tiny_trainer(out, watcher=watcher)
    assert last.resume()
    assert not any("damaged" in text for text in watcher.said)
    last.run()
    assert_equal_runs(tmp_path / "whole", out)
