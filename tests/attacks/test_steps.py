"""One rule for the size of an attack's steps, wherever none is named."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import yopo
from yopo import L2, Linf, Threat, evaluate
from yopo.attacks.names import parse
from yopo.core.frozen import Frozen
from yopo.data.source import InMemory
from yopo.evaluation import probe
from yopo.evaluation.card import settings
from yopo.runs import measure
from yopo.runs.settings import validate


@pytest.mark.parametrize(
    ("threat", "steps", "expected"),
    [
        (Linf(8 / 255), 20, 2.5 * 8 / 255 / 20),
        (Linf(0.3), 40, 2.5 * 0.3 / 40),
        (L2(1.0), 5, 0.5),
        (L2(1.0), 20, 0.25),  # 2.5/20 would be an eighth
        (L2(2.0), 100, 0.5),
    ],
)
def test_every_attack_of_unnamed_step_takes_the_same(
    threat: Threat, steps: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own measurements, an evaluation, its card and its probes."""
    used: list[float] = []

    class Watched(type(threat)):  # type: ignore[misc]
        def ascend(self, *args: Any, **kwargs: Any) -> Tensor:
            used.append(kwargs["step"])
            result: Tensor = super().ascend(*args, **kwargs)
            return result

    watched = Watched(threat.eps)
    last = nn.Linear(12, 3)
    net = nn.Sequential(nn.Flatten(), last)
    x, y = torch.rand(4, 3, 2, 2), torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([9.0, 0, 0]))  # always right: no attack ends early
    config = validate({"evaluate": {"steps": steps}})
    monkeypatch.setattr(measure, "build_threat", lambda _: watched)
    measure.accuracies(net, InMemory((255 * x).byte(), y), config, 2)
    monkeypatch.setattr(probe, "STEPS", steps)
    probe.withstands(Frozen(net), x, y, watched, one_step=False)
    evaluate(net, (x, y), watched, [f"pgd-{steps}"], checks=False)
    assert len(used) >= 3 * steps
    assert all(step == pytest.approx(expected, rel=1e-12) for step in used)
    assert f"{steps} steps of {expected:.3g}," in settings(parse(f"pgd-{steps}"), threat, None)


def test_no_other_place_has_a_rule_for_steps() -> None:
    package = Path(yopo.__file__).parent
    mine = [f.name for f in package.rglob("*.py") if re.search(r"2\.5 [*/] ", f.read_text())]
    assert mine == ["steps.py"]
