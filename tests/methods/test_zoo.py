"""The check on other people's networks, on networks of our own: its oracle and what it reports."""

import pytest
import torch
from torch import nn

from benchmarks import zoo
from tests.conftest import Build, TwoTowers
from yopo import Linf
from yopo.models import preactresnet18


def overwriting() -> nn.Module:
    """f0's output is written over by the module after it."""
    head = [nn.Flatten(), nn.Linear(4 * 6 * 6, 4)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), *head)


class Block(nn.Sequential):
    """Two convolutions side by side, so that f0 is the block, which is not affine."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self[0](x) + self[1](x)).tanh()  # type: ignore[no-any-return]


NETWORKS: list[tuple[Build, str, bool]] = [
    (lambda: preactresnet18(4, width=4, blocks=(1, 1)), "conv1", True),
    (overwriting, "0", True),
    (lambda: nn.Sequential(Block(), nn.Flatten(), nn.Linear(144, 4)), "0", False),
    (lambda: TwoTowers(192), "", True),
]


@pytest.mark.parametrize(("build", "f0", "affine"), NETWORKS)
def test_perturbations_are_those_of_the_loop_written_out(
    build: Build, f0: str, affine: bool
) -> None:
    row = zoo.study(build(), 8)
    expected = {"f0": f0, "affine": affine, "agree": 1.0, "untouched": True, "trains": True}
    assert row == expected


def test_the_loop_written_out_tells_one_f0_from_another() -> None:
    model, threat = overwriting().eval(), Linf(0.3, step=0.1)
    x, y = torch.rand(2, 3, 8, 8), torch.tensor([1, 2])
    affine, relu = (zoo.literal(model, f0, x, y, torch.zeros_like(x), threat) for f0 in ("0", "1"))
    assert not torch.equal(affine, relu)
