"""What `method(x, y).backward()` costs beside `method.backward(x, y)`, as ratios within one run.

Usage: python -m benchmarks.handed [--json FILE]
Processor time, medians over interleaved rounds; peak memory of tensors made on the way. Both begin
with gradients there already, as in accumulation. The networks are where it would show: many small
tensors for the time, weights that outweigh activations for the memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import yopo
from benchmarks.cost import Run, many_tensors, medians, options, peak_bytes, tell

MOST = 1.05
THREAT = yopo.Linf(8 / 255)
METHODS: dict[str, Callable[[nn.Module], yopo.Method]] = {
    "natural": yopo.Natural,
    "YOPO-5-3": lambda net: yopo.YOPO(net, THREAT, m=5, n=3),
    "PGD-10": lambda net: yopo.PGD(net, THREAT, steps=10, attack_mode="train"),
}


def pair(
    make: Callable[[nn.Module], yopo.Method], net: nn.Module, x: Tensor, y: Tensor
) -> list[Run]:
    """The loss and the call."""
    method = make(net)
    return [lambda: method(x, y).backward(), lambda: method.backward(x, y)]


def main() -> None:
    """Measure, print, and write if asked."""
    args = options(rounds=15)
    torch.manual_seed(0)
    networks: dict[str, tuple[nn.Module, Tensor]] = {
        "PreAct-ResNet18/16, 64 images": (
            yopo.models.preactresnet18(width=16),
            torch.rand(64, 3, 32, 32),
        ),
        "PreAct-ResNet18, 2 images": (yopo.models.preactresnet18(), torch.rand(2, 3, 32, 32)),
        "504 small tensors, 16 images": (many_tensors(), torch.rand(16, 3, 16, 16)),
    }
    ratios: dict[str, float] = {}
    for title, (net, x) in networks.items():
        y = torch.randint(10, (len(x),))
        for name, make in METHODS.items():
            loss, call = pair(make, net, x, y)
            call()
            seconds = medians({"loss": loss, "call": call}, args.rounds)
            ratios[f"{title}: {name}, time"] = seconds["loss"] / seconds["call"]
            ratios[f"{title}: {name}, memory"] = peak_bytes(loss) / peak_bytes(call)
    tell({name: (ratio, MOST) for name, ratio in ratios.items()}, args.rounds, args.json)


if __name__ == "__main__":
    main()
