"""What PGD-20 costs over a data set. Usage: python -m benchmarks.evaluate [--json FILE]

The floor is the plain passes that it cannot do without: for each of the 20 steps, forward and
backward to the input on the images that still stand at that step, in batches of the same size.
Times are CPU seconds of one thread, medians over interleaved rounds.

With --starts it measures random starts alone, on a GPU if there is one (then in seconds): from the
counter, and from a generator for each image (SHA-256 of its pixels, then torch's generator on the
CPU), as all were drawn once, and those of threats of your own are.
"""

import platform
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


def starts_alone(images: int = 32, rounds: int = 15) -> None:
    """Milliseconds for an image of 224 px."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.rand(images, 3, SIDE, SIDE, device=device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    threats = {"a counter": yopo.Linf(EPS), "a generator for each image": ByGenerator(EPS)}
    times: dict[str, list[float]] = {name: [] for name in threats}
    for _ in range(rounds + 1):
        for name, threat in threats.items():
            began = clock()
            draw(threat, x)
            times[name].append(clock() - began)
    found = {name: 1000 * median(each[1:]) / images for name, each in times.items()}
    print(f"torch {torch.__version__}, {platform.machine()}, {device}, one thread, {rounds} rounds")
    for name, each in found.items():
        print(f"random starts of {SIDE} px from {name}: {each:.3f} ms an image")
    first, second = found.values()
    print(f"ratio {first / second:.2f}")


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
    times = medians(
        {
            "run": lambda: attack(model, x, y),
            "floor": lambda: plain_passes(model, x, y, sizes),
        },
        args.rounds,
    )
    name = f"SmallCNN: PGD-{STEPS} with the clean pass / its steps on images still standing"
    tell({name: (times["run"] / times["floor"], 1.10)}, args.rounds, args.json)


if __name__ == "__main__":
    main()
