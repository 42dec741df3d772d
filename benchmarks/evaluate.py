"""What PGD-20 costs over a data set. Usage: python -m benchmarks.evaluate [--json FILE]

The floor is the plain passes that it cannot do without: for each of the 20 steps, forward and
backward to the input on the images that still stand at that step, in batches of the same size.
Random starts are drawn beside it, from the counter and from a generator for each image (SHA-256 of
its pixels, then torch's generator on the CPU), as up to now and for threats of your own.
Times are CPU seconds of one thread, medians over interleaved rounds; `--starts` measures the starts
alone, on a GPU if there is one, in seconds.
"""

import sys
import time
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import yopo
from benchmarks.cost import medians, options, tell
from yopo.attacks.names import parse
from yopo.data.source import InMemory
from yopo.data.sources import mnist_subset
from yopo.evaluation.images import Data
from yopo.evaluation.network import Network
from yopo.evaluation.suite import run, starts

STEPS, BATCH, EPS = 20, 250, 0.1
SIDE = 224  # of the images whose starts are drawn


def some_robustness(x: Tensor, y: Tensor) -> nn.Module:
    """SmallCNN after one epoch of FGSM-RS on the embedded digits."""
    model = yopo.models.SmallCNN()
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for i, rows in enumerate(torch.randperm(len(x)).split(50)):
        yopo.Fast(model, yopo.Linf(EPS * min(1, (i + 1) / 60))).backward(x[rows], y[rows])
        adam.step()
        adam.zero_grad()
    return model.eval()


def standing_at_each_step(model: nn.Module, x: Tensor, y: Tensor) -> list[list[int]]:
    """For each batch of correctly classified images, how many images each step is taken on."""
    sizes: list[list[int]] = []

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            if not sizes or len(sizes[-1]) == STEPS or len(args[0]) > sizes[-1][-1]:
                sizes.append([])
            sizes[-1].append(len(args[0]))

    hook = model.register_forward_pre_hook(note)
    attack(model, x, y)
    hook.remove()
    return sizes


def attack(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The attack, after a clean pass."""
    net = Network.of(model, "float32", x)
    run(net, Data.of(net, InMemory(x, y)), yopo.Linf(EPS), [parse(f"pgd-{STEPS}")], batch=BATCH)


def plain_passes(model: nn.Module, x: Tensor, y: Tensor, sizes: list[list[int]]) -> None:
    """Forward and backward to the input, nothing else."""
    for batch in sizes:
        for size in batch:
            image = x[:size].requires_grad_()
            torch.autograd.grad(F.cross_entropy(model(image), y[:size]), image)


class ByGenerator(yopo.Linf):
    """Draws in a way of its own, and so from a generator for each image."""

    def start(self, x: Tensor, generator: object = None) -> Tensor:
        """As Linf."""
        assert isinstance(generator, torch.Generator)
        return super().start(x, generator)


def draw(threat: yopo.Linf, x: Tensor) -> None:
    """Starts, until the device has them."""
    starts(threat, x, "0/0")
    if x.is_cuda:
        torch.cuda.synchronize()


def starts_alone(images: int = 64, rounds: int = 5) -> None:
    """Milliseconds for an image of 224 px."""
    x = torch.rand(images, 3, SIDE, SIDE, device="cuda" if torch.cuda.is_available() else "cpu")
    for kind in (yopo.Linf, ByGenerator):
        threat, times = kind(EPS), []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            draw(threat, x)
            times.append(time.perf_counter() - began)
        print(f"{kind.__name__} on {x.device}: {1000 * median(times[1:]) / images:.4f} ms an image")


def main() -> None:
    """Measure, print, and write if asked."""
    if "--starts" in sys.argv:
        starts_alone()
        return
    args = options(rounds=3)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x_train, y_train, x, y = mnist_subset()
    x = x / 255
    model = some_robustness(x_train / 255, y_train).requires_grad_(False)
    sizes = standing_at_each_step(model, x, y)
    started = time.perf_counter()
    result = yopo.evaluate(model, (x, y), yopo.Linf(EPS), [f"pgd-{STEPS}"], batch=BATCH)
    print(
        f"{len(x)} digits: clean {result.accuracy['clean']:.2%}, "
        f"pgd-{STEPS} {result.accuracy[f'pgd-{STEPS}']:.2%}, "
        f"{time.perf_counter() - started:.1f} s with the checks; steps taken on "
        f"{sum(map(sum, sizes))} images in all"
    )
    large = torch.rand(16, 3, SIDE, SIDE)
    times = medians(
        {
            "run": lambda: attack(model, x, y),
            "floor": lambda: plain_passes(model, x, y, sizes),
            "counter": lambda: draw(yopo.Linf(EPS), large),
            "generator": lambda: draw(ByGenerator(EPS), large),
        },
        args.rounds,
    )
    for name in ("counter", "generator"):
        print(f"starts from a {name}, {SIDE} px: {1000 * times[name] / 16:.2f} CPU ms an image")
    passes = f"SmallCNN: PGD-{STEPS} with the clean pass / its steps on images still standing"
    drawn = f"random starts of {SIDE} px: from the counter / from a generator for each image"
    ratios: dict[str, tuple[float, float | None]] = {
        passes: (times["run"] / times["floor"], 1.10),
        drawn: (times["counter"] / times["generator"], 1.0),
    }
    tell(ratios, args.rounds, args.json)


if __name__ == "__main__":
    main()
