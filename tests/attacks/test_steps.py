"""One rule for the size of an attack's steps, wherever none is named."""

import ast
from collections.abc import Iterator
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


def names(node: ast.AST) -> set[str]:
    """Of variables and attributes in an expression."""
    inside = ast.walk(node)
    return {getattr(n, "id", getattr(n, "attr", "")) for n in inside} - {""}


def rules(text: str) -> Iterator[str]:
    """Expressions in which 2.5 is a factor, or in which a radius is shared out over steps."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.Div):
            continue
        factors = (node.left, node.right)
        if any(isinstance(f, ast.Constant) and f.value in (2.5, 0.4) for f in factors):
            yield ast.unparse(node)
        shared = isinstance(node.op, ast.Div) and any("step" in n for n in names(node.right))
        if shared and {"eps", "radius", "epsilon"} & names(node.left):
            yield ast.unparse(node)


def test_no_other_place_has_a_rule_for_steps() -> None:
    package = Path(yopo.__file__).parent
    where = {
        f.relative_to(package).as_posix(): [*rules(f.read_text())] for f in package.rglob("*.py")
    }
    assert {file: found for file, found in where.items() if found} == {
        "attacks/steps.py": ["2.5 / max(steps, 1)"],
        # Advice: the least step that crosses the ball, or that reaches its surface.
        "evaluation/warnings.py": ["2 * threat.eps / steps"],
        "runs/build.py": ["threat.eps / steps"],
    }


@pytest.mark.parametrize(
    "text",
    [
        "step = 2.5 * threat.eps / steps",
        "step = threat.eps*2.5/steps",
        "step = 2.5*eps/max(1, attack.steps)",
        "step = threat.eps / steps * 2.5",
        "share = 2.5 / steps",
        "step = eps / (0.4 * steps)",
        "step = 2 * eps / n_steps",
        "step = threat.eps * FACTOR / config.evaluate.steps",
    ],
)
def test_another_rule_would_be_seen(text: str) -> None:
    assert [*rules(text)]
    assert not [*rules("left = steps / every\nunit = (1, 2, 2.5)\nx = eps / 4")]
