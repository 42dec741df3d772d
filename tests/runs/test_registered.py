"""A method of one's own in a run: asked for what `Method` says, whatever it is made from."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import yopo
from tests.conftest import assert_same
from tests.tiny import tiny_trainer
from yopo.core.losses import Loss
from yopo.core.propagation import FULL, backpropagate
from yopo.methods import registry
from yopo.runs import state
from yopo.runs.overlay import Tree
from yopo.runs.snapshot import CARRIED

pytestmark = pytest.mark.usefixtures("float32")
MINE: Tree = {"method": {"name": "mine"}}


class Model(yopo.Method):
    """Has a threat, but none of `AdversarialMethod`; its name is that of a run's other tensors."""

    def __init__(self, model: nn.Module, threat: yopo.Linf, *, loss: Loss | None = None) -> None:
        super().__init__(model, loss=loss)
        self.threat = threat
        self.drift: Tensor | None = None
        self.met: list[float] = []

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> yopo.Step:
        assert self.threat is not None
        self.met.append(self.threat.eps)
        if self.drift is None or len(self.drift) != len(x):
            self.drift = torch.zeros_like(x)
        self.drift = (0.5 * self.drift + 0.1 * torch.randn_like(x)).clamp(-0.1, 0.1)
        eta = self.threat.project(self.drift, x)
        loss, logits = backpropagate(self.model, x + eta, self._objective(y), weights=1.0)
        return yopo.Step(loss, logits, eta, FULL)

    def state_dict(self) -> dict[str, Tensor]:
        name = next(k for k in self.model.state_dict() if k.endswith("bias"))
        return {} if self.drift is None else {name: self.drift}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.drift = next(iter(state.values()), None)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = dict(registry.ENTRIES)
    registry.register(registry.Entry("mine", Model))
    yield
    registry.ENTRIES.clear()
    registry.ENTRIES.update(before)


def test_its_threat_grows_and_chooses_its_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer(
        tmp_path, MINE | {"epochs": 4, "eps_warmup": 2, "guard": {"action": "ignore"}}
    )
    scores = iter([(0.9, 0.2), (0.9, 0.1), (0.8, 0.4), (0.9, 0.3)])  # clean, robust
    monkeypatch.setattr(trainer.epoch_end, "evaluate", lambda _: next(scores))
    result = trainer.run()
    method = trainer.learner.method
    assert isinstance(method, Model)
    eps, steps = trainer.config.train_eps * trainer.config.threat.eps, len(trainer.loader)
    grown = [min(1.0, (i + 1) / (2 * steps)) * eps for i in range(4 * steps)]
    assert method.met[-4 * steps :] == pytest.approx(grown)
    assert result["best_epoch"] == 3  # by robust accuracy, where clean would say the first


def test_what_it_carries_is_told_from_the_rest(tmp_path: Path) -> None:
    """Under the class's name it would have been written over a weight of the model's."""
    whole = tiny_trainer(tmp_path / "whole", MINE)
    whole.run()
    snapshot = tiny_trainer(tmp_path / "other", MINE).learner.snapshot
    taken = whole.learner.snapshot.take()
    (name,) = (key for key in taken if key.startswith(CARRIED))
    model = {k.removeprefix("model."): v for k, v in taken.items() if k.startswith("model.")}
    assert_same(model, whole.learner.model.state_dict(), tol=0)
    assert f"{Model.__name__.lower()}.{name.removeprefix(CARRIED)}" in taken
    snapshot.put_back(snapshot.own(taken, 0, 1))
    assert_same(snapshot.take(), taken, tol=0)


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """With Free, the one method of ours that carries something."""
    over: Tree = {"method": {"name": "free", "m": 2}, "epochs": 2}
    trainer = tiny_trainer(tmp_path, over)
    trainer.run()
    saved = state.load(state.saved(tmp_path / "state")[0])
    old = {k.replace(f"{CARRIED}eta", "free.eta"): v for k, v in saved.tensors.items()}
    assert old.keys() - saved.tensors.keys() == {"free.eta"}
    snapshot = tiny_trainer(tmp_path / "other", over).learner.snapshot
    snapshot.put_back(snapshot.own(old, 0, 1))
    assert_same(snapshot.take(), trainer.learner.snapshot.take(), tol=0)
