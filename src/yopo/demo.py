"""`make demo`: natural, PGD and YOPO training on embedded digits, under one clock, then attacked.

Usage: python -m yopo.demo [--out runs/demo] [--epochs 6] [--images 500] [--seed 0]
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import yopo
from yopo.data import mnist_subset
from yopo.demo_page import Strip, write_page

EPS = 0.3
BATCH = 100
RATE = 4e-3
RAMP = 2  # epochs in which eps grows to its full size; at full size from the start learning stalls
METHODS: dict[str, Callable[[nn.Module], yopo.Method]] = {
    "natural": yopo.Natural,
    "PGD-15": lambda net: yopo.PGD(net, yopo.Linf(EPS, EPS / 8), steps=15),
    "YOPO-3-5": lambda net: yopo.YOPO(net, yopo.Linf(EPS, EPS / 8), m=3, n=5),
}


@dataclass
class Result:
    """One network: what its training cost and what it withstands. Accuracies in percent."""

    method: str
    seconds: float = 0.0  # training only
    propagations: float = 0.0  # per training image, all epochs together
    clean: float = 0.0
    pgd40: float = 0.0
    cw: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)  # seconds, PGD-10 accuracy


class Screen:
    """Bars on a terminal; elsewhere a line every few seconds."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.bars = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def start(self, what: str, total: int) -> Callable[[str], None]:
        """Open a bar of `total` steps; the function returned moves it on by one, with a note."""
        task = self.bars.add_task(what, total=total, note="")
        done, printed = 0, time.monotonic()

        def advance(note: str) -> None:
            nonlocal done, printed
            done += 1
            self.bars.update(task, advance=1, note=note)
            if self.bars.disable and (done == total or time.monotonic() - printed > 5):
                printed = time.monotonic()
                self.console.print(f"{what:<22} {100 * done // total:>3}%  {note}")

        return advance


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Percent of images classified as y."""
    net.eval()
    with torch.no_grad():
        right = sum(int((net(a).argmax(1) == b).sum()) for a, b in batches(x, y))
    return 100 * right / len(x)


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Consecutive batches of images and labels."""
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def train(
    result: Result,
    data: tuple[Tensor, Tensor],
    watch: tuple[Tensor, Tensor],
    epochs: int,
    seed: int,
    screen: Screen,
) -> nn.Module:
    """Train a SmallCNN; the clock runs only while batches are processed."""
    torch.manual_seed(seed)  # the same initial weights and order of images for every method
    x, y = data
    net = yopo.models.SmallCNN(width=16, hidden=100)
    method = METHODS[result.method](net)
    steps = len(x) // BATCH
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=epochs * steps, pct_start=0.3, cycle_momentum=False
    )
    order = torch.Generator().manual_seed(seed)
    advance = screen.start(f"train {result.method}", epochs * steps)
    robust = ""
    for epoch in range(epochs):
        loss, started = torch.zeros(()), time.perf_counter()
        for i, chosen in enumerate(torch.randperm(len(x), generator=order).split(BATCH)):
            if isinstance(method, yopo.AdversarialMethod):
                part = min(1.0, (epoch * steps + i + 1) / (RAMP * steps))
                method.threat = yopo.Linf(part * EPS, part * EPS / 8)
            out = method.backward(x[chosen], y[chosen])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            result.propagations += out.propagations / steps
            loss = loss + out.loss
            advance(f"epoch {epoch + 1}/{epochs}  loss {float(loss) / (i + 1):.3f}{robust}")
        result.seconds += time.perf_counter() - started
        held = accuracy(net, attack(net, *watch, steps=10, step=EPS / 4), watch[1])
        result.curve.append((result.seconds, held))
        robust = f"  PGD-10 accuracy {held:.1f}%"
        net.train()
    return net


def attack(net: nn.Module, x: Tensor, y: Tensor, steps: int, step: float) -> Tensor:
    """PGD in batches, seeded."""
    generator = torch.Generator().manual_seed(0)
    threat = yopo.Linf(EPS, step)
    return torch.cat(
        [
            yopo.attacks.pgd(net, a, b, threat, steps=steps, generator=generator)
            for a, b in batches(x, y)
        ]
    )


def evaluate(
    result: Result, net: nn.Module, test: tuple[Tensor, Tensor], images: int, screen: Screen
) -> Strip:
    """Attack the trained network; fill in its accuracies and return a strip of pictures."""
    result.clean = accuracy(net, *test)
    x, y = (t[:: max(1, len(t) // images)][:images] for t in test)
    advance = screen.start(f"attack {result.method}", len(batches(x, y)))
    pgd, cw = torch.empty_like(x), torch.empty_like(x)
    for a, b, pgd_part, cw_part in zip(*(t.split(BATCH) for t in (x, y, pgd, cw)), strict=True):
        pgd_part.copy_(attack(net, a, b, steps=40, step=EPS / 30))
        cw_part.copy_(yopo.attacks.cw(net, a, b, yopo.Linf(EPS)))
        advance("PGD-40 and CW")
    result.pgd40, result.cw = accuracy(net, pgd, y), accuracy(net, cw, y)
    shown = [int((y == digit).nonzero()[0]) for digit in range(10) if (y == digit).any()]
    with torch.no_grad():
        guesses = net(pgd[shown]).argmax(1)
    return Strip(result.method, x[shown, 0], pgd[shown, 0], y[shown].tolist(), guesses.tolist())


def table(results: list[Result], images: int) -> Table:
    """The results side by side."""
    found = Table(
        title=f"SmallCNN on 6,000 digits, L∞ eps = {EPS}; attacks on {images} test images"
    )
    for column in ("method", "training", "vs PGD", "propagations", "clean", "PGD-40", "CW"):
        found.add_column(column, justify="left" if column == "method" else "right")
    pgd = next((r.seconds for r in results if r.method.startswith("PGD")), None)
    for r in results:
        ratio = f"{r.seconds / pgd:.2f}" if pgd else "-"
        numbers = (f"{r.propagations:.0f}", f"{r.clean:.1f}%", f"{r.pgd40:.1f}%", f"{r.cw:.1f}%")
        found.add_row(r.method, f"{r.seconds:.1f} s", ratio, *numbers)
    return found


def main() -> None:
    """Run the demo; on Ctrl-C, report the networks that are finished."""
    parser = argparse.ArgumentParser(prog="python -m yopo.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the report")
    parser.add_argument("--epochs", type=int, default=6, help="training epochs of each method")
    parser.add_argument("--images", type=int, default=500, help="test images to attack (1 to 2000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.epochs < 1 or not 1 <= args.images <= 2000:
        parser.error("expected --epochs of at least 1 and --images from 1 to 2000")
    screen = Screen()
    x_train, y_train, x_test, y_test = mnist_subset()
    data, test = (x_train / 255, y_train), (x_test / 255, y_test)
    watch = test[0][::8], test[1][::8]
    results: list[Result] = []
    strips: list[Strip] = []
    began = time.monotonic()
    try:
        with screen.bars:
            for name in METHODS:
                result = Result(name)
                net = train(result, data, watch, args.epochs, args.seed, screen)
                strips.append(evaluate(result, net, test, args.images, screen))
                results.append(result)
    except KeyboardInterrupt:
        screen.console.print("stopped; here is what was finished")
    if not results:
        return
    screen.console.print(table(results, args.images))
    screen.console.print(
        "training: time spent processing batches, nothing else\n"
        "propagations: full passes per training image; an attack-only pass counts 2/3\n"
        f"whole demo: {time.monotonic() - began:.0f} s"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {
        "torch": torch.__version__,
        "yopo": yopo.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    settings = {
        "eps": EPS,
        "epochs": args.epochs,
        "batch": BATCH,
        "rate": RATE,
        "seed": args.seed,
        "images": args.images,
    }
    record = {
        "settings": settings,
        "environment": environment,
        "results": [asdict(r) for r in results],
    }
    (args.out / "results.json").write_text(json.dumps(record, indent=1))
    page = write_page(args.out, record, strips)
    screen.console.print(f"report: {page}")


if __name__ == "__main__":
    main()
