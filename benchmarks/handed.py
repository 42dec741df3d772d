"""What `method(x, y).backward()` costs beside `method.backward(x, y)`, as ratios within one run.

Usage: python -m benchmarks.handed [--json FILE]
Processor time, medians over interleaved rounds; peak memory of tensors made on the way. Both begin
with gradients there already, as in accumulation. The networks are where it would show: many small
tensors for the time, weights that outweigh activations for the memory.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import yopo
from benchmarks.cost import Run, many_tensors, medians, peak_bytes

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the ratios and the environment here")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
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
            seconds = medians({"loss": loss, "call": call}, args.rounds, time.process_time)
            ratios[f"{title}: {name}, time"] = seconds["loss"] / seconds["call"]
            ratios[f"{title}: {name}, memory"] = peak_bytes(loss) / peak_bytes(call)
    for name, ratio in ratios.items():
        verdict = "ok" if ratio <= MOST else "MISSED"
        print(f"{name:<56} {ratio:6.3f}  at most {MOST:.2f}: {verdict}")
    if args.json:
        environment = {
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "rounds": args.rounds,
        }
        record = {"environment": environment, "ratios": {k: round(v, 4) for k, v in ratios.items()}}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
