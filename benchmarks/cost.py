"""What the methods cost, as ratios within one run. Usage: python -m benchmarks.cost [--json FILE]

Processor time, so that other programs count less; medians over interleaved rounds, so that a slow
moment of the machine hits all alike.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import yopo

Run = Callable[[], object]


def medians(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median seconds of each run over interleaved rounds, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if round_:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def peak_bytes(run: Run) -> int:
    """The most memory that tensors made during the run held at one time."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def natural_steps(model: nn.Module, x: Tensor, y: Tensor, count: int) -> Run:
    """`count` plain forward and backward passes, from empty gradients."""

    def run() -> None:
        model.zero_grad()
        for _ in range(count):
            F.cross_entropy(model(x), y).backward()

    return run


def step(method: yopo.Method, x: Tensor, y: Tensor) -> Run:
    """One `backward` of a method, from empty gradients."""

    def run() -> None:
        method.model.zero_grad()
        method.backward(x, y)

    return run


class Block(nn.Module):
    """Five small tensors of parameters and three buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A residual block."""
        out: Tensor = x + self.conv2(F.relu(self.bn(self.conv1(x))))
        return out


def many_tensors(width: int = 8, blocks: int = 100) -> nn.Sequential:
    """A network of 504 small tensors, where all that is done for each of them would show."""
    first, last = nn.Conv2d(3, width, 3, stride=2, padding=1), nn.Linear(width, 10)
    inner = [Block(width) for _ in range(blocks)]
    return nn.Sequential(first, *inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last)


def bare(model: nn.Module, threat: yopo.Linf, x: Tensor, y: Tensor, steps: int, n: int) -> Run:
    """`steps` attack passes and one for the weights, written out in plain PyTorch."""

    def run() -> None:
        model.zero_grad()
        eta = threat.start(x)
        for _ in range(steps):
            at = (x + eta).requires_grad_()
            (grad,) = torch.autograd.grad(F.cross_entropy(model(at), y), at)
            eta = threat.ascend(eta, grad, x, n=n)
        F.cross_entropy(model(x + eta), y).backward()

    return run


def options(rounds: int) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the ratios and the environment here")
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser.parse_args()


def tell(ratios: dict[str, tuple[float, float | None]], rounds: int, file: Path | None) -> None:
    """Print each ratio beside what it may be at most, and write them if asked."""
    for name, (ratio, most) in ratios.items():
        verdict = f"at most {most:.2f}: {'ok' if ratio <= most else 'MISSED'}" if most else ""
        print(f"{name:<{max(map(len, ratios))}} {ratio:5.3f}  {verdict}".rstrip())
    if file is not None:
        environment = {
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "rounds": rounds,
        }
        rounded = {name: round(ratio, 4) for name, (ratio, _) in ratios.items()}
        file.write_text(
            json.dumps({"environment": environment, "ratios": rounded}, indent=1) + "\n"
        )


def main() -> None:
    """Measure, print, and write if asked."""
    args = options(rounds=15)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # several would wait for each other, beside other programs

    x, y = torch.rand(64, 3, 32, 32), torch.randint(10, (64,))
    net = yopo.models.preactresnet18(width=16)
    threat = yopo.Linf(8 / 255)

    def yopo_5(n: int, grad_at: Literal["after", "before"]) -> Run:
        return step(yopo.YOPO(net, threat, m=5, n=n, grad_at=grad_at), x, y)

    runs = {
        "natural": natural_steps(net, x, y, 5),
        "n=1": yopo_5(1, "before"),
        "n=10": yopo_5(10, "before"),
        "after": yopo_5(10, "after"),
    }
    resnet = medians(runs, args.rounds)
    peaks = {name: peak_bytes(runs[name]) for name in ("natural", "n=10", "after")}

    x, y = torch.rand(128, 1, 28, 28), torch.randint(10, (128,))
    small, threat = yopo.models.SmallCNN(), yopo.Linf(0.3, 0.01)
    smallcnn = medians(
        {
            "yopo": step(yopo.YOPO(small, threat, m=5, n=10, first_layer="relu1"), x, y),
            "pgd": step(yopo.PGD(small, threat, steps=40), x, y),
        },
        max(3, args.rounds // 3),
    )
    x, y = torch.rand(16, 3, 16, 16), torch.randint(10, (16,))
    many, threat = many_tensors(), yopo.Linf(8 / 255)
    tensors = len(list(many.parameters()))
    last = yopo.YOPO(many, threat, m=3, n=3, grad_at="last")
    pgd = yopo.PGD(many, threat, steps=10, attack_mode="train")
    small_ones = medians(
        {
            "bare 3": bare(many, threat, x, y, steps=3, n=3),
            "YOPO-3-3": step(last, x, y),
            "bare 10": bare(many, threat, x, y, steps=10, n=1),
            "PGD-10": step(pgd, x, y),
        },
        2 * args.rounds,
    )
    ratios = {  # name: (measured, at most)
        "PreAct-ResNet18/16: YOPO-5-1 before / 5 natural passes": (
            resnet["n=1"] / resnet["natural"],
            1.10,
        ),
        "PreAct-ResNet18/16: YOPO-5-10 before / 5 natural passes": (
            resnet["n=10"] / resnet["natural"],
            1.10,
        ),
        "PreAct-ResNet18/16: YOPO-5-10 / YOPO-5-1, both before": (
            resnet["n=10"] / resnet["n=1"],
            1.05,
        ),
        "PreAct-ResNet18/16: YOPO-5-10 after / 5 natural passes": (
            resnet["after"] / resnet["natural"],
            None,
        ),
        "SmallCNN conv1+ReLU: YOPO-5-10 / PGD-40": (smallcnn["yopo"] / smallcnn["pgd"], 0.5),
        f"{tensors} small tensors: YOPO-3-3 last / the same passes bare": (
            small_ones["YOPO-3-3"] / small_ones["bare 3"],
            1.05,
        ),
        f"{tensors} small tensors: PGD-10 / the same passes bare": (
            small_ones["PGD-10"] / small_ones["bare 10"],
            1.05,
        ),
        "peak memory: YOPO-5-10 before / natural": (peaks["n=10"] / peaks["natural"], 1.15),
        "peak memory: YOPO-5-10 after / natural": (peaks["after"] / peaks["natural"], 1.15),
    }
    tell(ratios, args.rounds, args.json)


if __name__ == "__main__":
    main()
