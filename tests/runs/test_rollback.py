"""What a collapse goes back to is a function of the run: not of the clock, signals or kills."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import yopo.runs.epoch_end
import yopo.runs.trainer
from tests.tiny import Silent, tiny_trainer
from yopo.core import seals, tensor_files
from yopo.core.digest import tensors_digest
from yopo.runs import state
from yopo.runs.folder import BEST, LAST
from yopo.runs.guard import Health
from yopo.runs.overlay import Tree
from yopo.runs.progress import StopRequested
from yopo.runs.trainer import Trainer

BN: Tree = {"name": "preactresnet18", "options": {"width": 4, "blocks": [1]}}
RUNS: dict[str, Tree] = {
    "yopo+ema": {},
    "free+bn": {"method": {"name": "free", "m": 2}, "model": BN},
    "adamw+accumulate+bf16": {
        "method": {"name": "fast"},
        "optimizer": {"name": "adamw", "lr": 0.01, "accumulate": 2},
        "precision": "bf16",
        "ema": 0,
    },
}
# Robust accuracy by (epoch, rollbacks so far): epochs 3 and 4 collapse once each.
SCORES = {(0, 0): 0.5, (1, 0): 0.6, (2, 0): 0.02, (2, 1): 0.65, (3, 1): 0.02, (3, 2): 0.7}


class Killed(BaseException):
    """As a SIGKILL, nothing of ours runs after it."""


@pytest.fixture(autouse=True)
def _one_look_a_step(monkeypatch: pytest.MonkeyPatch, float32: None) -> None:
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 2)
    monkeypatch.setattr(
        yopo.runs.epoch_end, "Health", lambda **seen: Health(**seen | {"train": 0.95})
    )


def built(out: Path, over: Tree, often: bool, attacked: tuple[int, ...] | None = None) -> Trainer:
    """A run that collapses twice; `often`: it saves whenever it may, else hardly ever.

    Its scores are made up; in the epoch and after the rollbacks of `attacked` it attacks, too.
    """
    saves: Tree = {"minutes": 0, "pause": 0} if often else {"minutes": 1e6, "pause": 1e6}
    trainer = tiny_trainer(out, over | {"epochs": 4, "checkpoint": saves}, train=100)

    real = trainer.epoch_end.evaluate

    def evaluate(images: int) -> tuple[float, float]:
        p = trainer.progress
        if attacked == (p.epoch, p.rollbacks):
            real(images)
        return 0.9, SCORES[p.epoch, p.rollbacks]

    trainer.epoch_end.evaluate = evaluate  # type: ignore[method-assign]
    return trainer


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Everything that a run leaves, apart from times."""
    lines, torn = seals.read_lines(trainer.files.path / "metrics.jsonl")
    assert torn is None
    result = seals.read_json(trainer.files.path / "result.json")
    tensors = state.load(state.saved(trainer.files.path / "state")[0]).tensors
    weights = [tensor_files.load_weights(trainer.files.path / n) for n in (BEST, LAST)]
    return {
        "lines": [{k: v for k, v in line.items() if "seconds" not in k} for line in lines],
        "result": {k: v for k, v in result.items() if "seconds" not in k and k != "environment"},
        "state": tensors_digest(tensors, {}),
        "weights": [tensors_digest(w, {}) for w in weights],
    }


Where = tuple[str, int, int]  # place, epoch, rollbacks
PLACES: list[Where] = [
    ("step", 1, 0),
    ("step", 2, 0),
    ("epoch's end", 1, 0),
    ("epoch's end", 2, 0),
    ("evaluation", 1, 0),
    ("evaluation", 2, 0),
    ("attack", 2, 0),
    ("attack", 1, 0),
    ("rollback", 2, 0),
    ("rollback's save", 2, 1),
    ("step", 2, 1),
    ("evaluation", 2, 1),
    ("step", 3, 1),
    ("rollback", 3, 1),
]


def interrupt(trainer: Trainer, where: Where, act: Callable[[], None]) -> None:
    """Call `act` at that place."""
    place, *when = where
    steps = 0

    def before(work: Any, *, nth: int = 1) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            p = trainer.progress
            if [p.epoch, p.rollbacks] == when:
                steps += 1
                if steps == nth:
                    act()
            return work(*args, **kwargs)

        return wrapped

    if place == "step":
        trainer._step = before(trainer._step, nth=3)  # type: ignore[method-assign]
    elif place == "epoch's end":
        trainer.epoch_end.finish = before(trainer.epoch_end.finish)  # type: ignore[method-assign]
    elif place == "evaluation":
        trainer.epoch_end.evaluate = before(trainer.epoch_end.evaluate)  # type: ignore[method-assign]
    elif place == "attack":  # in the middle of it, as Ctrl-C finds it
        trainer.epoch_end.tell = before(trainer.epoch_end.tell, nth=2)
    elif place == "rollback":
        trainer.keeper.recover = before(trainer.keeper.recover)  # type: ignore[method-assign]
    else:
        trainer.keeper.save = before(trainer.keeper.save)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("signal", "often"), [("SIGINT", False), ("SIGKILL", True)])
@pytest.mark.parametrize("run", RUNS)
def test_an_interrupted_run_that_collapses_is_the_uninterrupted_one(
    run: str, signal: str, often: bool, tmp_path: Path, references: dict[str, Any]
) -> None:
    """A signal saves where the run had not; a kill goes back to a save that it need not have."""
    if run not in references:
        whole = built(tmp_path / "whole", RUNS[run], often=False)
        whole.run()
        assert whole.progress.rollbacks == 2
        references[run] = outcome(whole)
        assert [line["epoch"] for line in references[run]["lines"]] == [1, 2, 3, 3, 4, 4]
    every = [*RUNS].index(run)  # all places with one, half of them with each of the others
    for number, where in enumerate(PLACES[every // 2 :: 2] if every else PLACES):
        out = tmp_path / str(number)
        attacked = where[1:] if where[0] == "attack" else None
        trainer = built(out, RUNS[run], often, attacked)

        def act(trainer: Trainer = trainer) -> None:
            if signal == "SIGKILL":
                raise Killed
            trainer.stop = True

        interrupt(trainer, where, act)
        with pytest.raises(Killed if signal == "SIGKILL" else StopRequested):
            trainer.run()
        trainer = built(out, RUNS[run], not often)
        assert trainer.resume()
        trainer.run()
        assert outcome(trainer) == references[run], where


def test_a_broken_loss_ends_an_epoch_at_the_same_step_resumed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation the looks at the loss do not fall on multiples of their distance."""
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 7)

    def run(out: Path, stop_at: int) -> dict[str, Any]:
        trainer = tiny_trainer(out, {"optimizer": {"accumulate": 3}, "epochs": 2}, train=300)
        real, resumed = trainer._step, False

        def step(x: Tensor, y: Tensor, number: int) -> yopo.Step:
            found: yopo.Step = real(x, y, number)
            p = trainer.progress
            if (p.epoch, p.rollbacks) == (1, 0):
                trainer.stop = number == stop_at and not resumed
                if number == 5:
                    found.loss.fill_(float("nan"))
            return found

        trainer._step = step  # type: ignore[method-assign]
        try:
            trainer.run()
        except StopRequested:
            resumed, watcher = True, Silent()
            trainer = tiny_trainer(out, {"optimizer": {"accumulate": 3}, "epochs": 2}, watcher, 300)
            assert trainer.resume()
            real, trainer._step = trainer._step, step  # type: ignore[method-assign]
            trainer.run()
        assert trainer.progress.rollbacks == 1
        return outcome(trainer)

    whole = run(tmp_path / "whole", -1)
    for stop_at in (2, 5, 8):
        assert run(tmp_path / str(stop_at), stop_at) == whole


def test_a_collapse_goes_back_one_epoch_at_the_default_settings(tmp_path: Path) -> None:
    """Short epochs write no checkpoint; no good epoch is thrown away for that."""
    watcher = Silent()
    trainer = built(tmp_path, {}, often=False)
    trainer.files.watch = watcher
    before: list[Tensor] = []
    real = trainer.epoch_end.finish

    def finish(reason: str | None) -> None:
        real(reason)
        p = trainer.progress
        weight = torch.cat([w.flatten() for w in trainer.learner.model.parameters()])
        if (p.epoch, p.lines) in ((2, 2), (2, 3)):
            before.append(weight.clone())

    trainer.epoch_end.finish = finish  # type: ignore[method-assign]
    trainer.run()
    assert torch.equal(*before)
    assert "Back to the end of epoch 2" in next(s for s in watcher.said if "collapse" in s)
