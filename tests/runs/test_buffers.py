"""Runs of networks that change their own buffers: resumed or rolled back, they stay the same."""

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import yopo
from tests.buffers import WAYS, buffers, network
from tests.conftest import Batch
from tests.runs.test_rollback import _one_look_a_step, built, interrupt, outcome  # noqa: F401
from yopo.runs.overlay import Tree
from yopo.runs.progress import StopRequested
from yopo.runs.snapshot import Snapshot

SOME = ("fills", "adds", "drops_and_adds")


class Loop:
    """A run's parts in memory."""

    def __init__(self, way: str, engine: bool = False) -> None:
        torch.manual_seed(0)
        self.net = network(way, after=2)
        self.method = yopo.Natural(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.ema = yopo.EMA(self.net, 0.5)
        self.snapshot = Snapshot(self.net, self.ema, self.optimizer, self.method)
        self.engine = yopo.Engine(self.method, self.optimizer, ema=self.ema, compile=False)
        self.fast = engine

    def run(self, batch: Batch, begin: int, end: int) -> None:
        for step in range(begin, end):
            if self.fast:
                self.engine.step(*batch, updates=step)
            else:
                self.method.backward(*batch)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.ema.update(step)

    def all(self) -> dict[str, Any]:
        """Everything by its names, empty buffers too; momentum may be zero or not there."""
        taken = saved(self.snapshot.take()).items()
        found: dict[str, Any] = {k: v for k, v in taken if not k.startswith("optimizer.")}
        for kind, model in (("net", self.net), ("average", self.ema.model)):
            found |= {f"{kind} {k}": pair for k, pair in copy.deepcopy(buffers(model)).items()}
        return found


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        mine, wanted = (v if isinstance(v, tuple) else (v, True) for v in (value, other[name]))
        assert (mine[0] is None, mine[1]) == (wanted[0] is None, wanted[1]), name
        assert mine[0] is None or torch.equal(mine[0], wanted[0]), name


def saved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    ("way", "engine"), [*((w, False) for w in WAYS), *((w, True) for w in SOME)]
)
def test_from_any_step_to_any_other(way: str, engine: bool, batch: Batch) -> None:
    """A state put back into a new run, as by --resume, and into one elsewhere, as by a rollback."""
    whole, states = Loop(way, engine), []
    for step in range(6):
        states.append((saved(whole.snapshot.take()), whole.all()))
        whole.run(batch, step, step + 1)
    for at, (state, everything) in enumerate(states):
        for before in (0, 4):
            other = Loop(way, engine)
            other.run(batch, 0, before)
            other.snapshot.put_back(saved(state))
            assert_equal(other.all(), everything)
            other.run(batch, at, 6)
            assert_equal(other.all(), whole.all())


def test_a_state_of_another_network_is_refused() -> None:
    """What a network does not change itself has to be there, and nothing else."""
    state = Loop("fills").snapshot.take()
    for name in ("model.2.running_mean", "model.1.first", "ema.1.last"):
        with pytest.raises(RuntimeError, match="Missing key"):
            Loop("fills").snapshot.put_back({k: v for k, v in state.items() if k != name})
        with pytest.raises(RuntimeError, match="size mismatch"):
            Loop("fills").snapshot.put_back(state | {name: torch.zeros(7)})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            Loop("fills").snapshot.put_back(state | {f"{name}s": state[name]})


def test_what_is_saved_of_an_ordinary_network_is_what_it_was(batch: Batch) -> None:
    """Nothing is marked but what a state_dict does not tell."""
    for way, marked in (("rebinds", False), ("fills", False), ("adds", True), ("drops", True)):
        loop = Loop(way)
        loop.run(batch, 0, 4)
        assert any("slots." in name for name in loop.snapshot.take()) == marked, way


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize("way", SOME)
def test_an_interrupted_run_that_collapses_is_the_uninterrupted_one(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its folder, with what is kept there."""
    monkeypatch.setattr(yopo.runs.trainer, "CHECK_EVERY", 1)
    model: Tree = {"name": "tests.buffers:build_network", "options": {"way": way}}
    over: Tree = {"method": {"name": "fast"}, "model": model}
    whole = built(tmp_path / "whole", over, often=False)
    whole.run()
    assert whole.progress.rollbacks == 2
    for where in (("step", 1, 0), ("step", 2, 1)):
        out = tmp_path / where[0] / str(where[1])
        trainer = built(out, over, often=True)
        interrupt(trainer, where, partial(setattr, trainer, "stop", True))
        with pytest.raises(StopRequested):
            trainer.run()
        trainer = built(out, over, often=False)
        assert trainer.resume()
        trainer.run()
        assert outcome(trainer) == outcome(whole), where
    if way == "fills":  # the network is built empty
        assert "1.empty" in yopo.load(tmp_path / "whole", trust=True).state_dict()
