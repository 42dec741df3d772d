"""How costs grow: what is measured against what, and the exponent that fits; `scale` runs it."""

import math
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import yopo
from benchmarks.cost import Run, many_tensors, medians, peak_bytes, step
from tests.reports import write_run
from yopo.attacks.names import parse
from yopo.core.threat import Linf
from yopo.data import Augment, Feed, Loader, Streamed
from yopo.data.listing import list_pictures
from yopo.data.pictures import Folder
from yopo.data.source import InMemory
from yopo.data.sources import Arrays
from yopo.evaluation.images import Data
from yopo.evaluation.network import Network
from yopo.evaluation.suite import run as attack_all
from yopo.report.page import page
from yopo.report.records import read_runs
from yopo.runs.folder import RunFolder
from yopo.runs.images import split
from yopo.runs.progress import Logged
from yopo.runs.settings import validate
from yopo.runs.snapshot import Snapshot
from yopo.runs.state import Checkpoint, save

FLAT, LINEAR = 0.15, 1.15  # exponents up to which growth has that name; n² would have 2
UPPER = 3  # sizes at the upper end that the exponent is fitted to
THREAT = Linf(8 / 255)


@dataclass(frozen=True, slots=True)
class Axis:
    """One cost against one size. `make` gives what is timed, `count` a cost that is exact."""

    cost: str
    against: str
    sizes: tuple[int, ...]
    make: Callable[[int], Run] | None = None
    count: Callable[[int], float] | None = None
    unit: str = "CPU ms"

    def measure(self, rounds: int) -> "Grown":
        """The cost at every size, in one run."""
        if self.count is not None:
            return Grown(self, [self.count(size) for size in self.sizes])
        assert self.make is not None
        runs = {str(size): self.make(size) for size in self.sizes}
        found = medians(runs, rounds)
        return Grown(self, [1000 * found[str(size)] for size in self.sizes])


@dataclass(frozen=True, slots=True)
class Grown:
    """What was measured."""

    axis: Axis
    costs: list[float]

    @property
    def exponent(self) -> float:
        """k of size ** k, by least squares at the upper end, where fixed costs count least."""
        return exponent(self.axis.sizes[-UPPER:], self.costs[-UPPER:])

    @property
    def verdict(self) -> str:
        """In a word."""
        return verdict(self.exponent)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        a = self.axis
        return {
            "cost": a.cost,
            "unit": a.unit,
            "against": a.against,
            "sizes": list(a.sizes),
            "costs": [float(f"{c:.4g}") for c in self.costs],
            "exponent": round(self.exponent, 2),
            "growth": self.verdict,
        }


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost over log size."""
    x, y = ([math.log(v) for v in values] for values in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return over / sum((a - mean_x) ** 2 for a in x)


def verdict(k: float) -> str:
    """What growth of that exponent is called."""
    return "flat" if k <= FLAT else "linear" if k <= LINEAR else "worse"


def line(record: dict[str, Any]) -> str:
    """A row of the table."""
    r = record
    costs = ", ".join(f"{c:.3g}" for c in (r["costs"][0], r["costs"][-1]))
    sizes = f"{r['sizes'][0]:,} to {r['sizes'][-1]:,}"
    return (
        f"| {r['cost']} | {r['against']} | {sizes} | {costs} {r['unit']} | {r['exponent']:.2f} | "
        f"{r['growth']} |"
    )


# ---------------------------------------------------------------- a step


@dataclass(slots=True)
class Steps:
    """Networks and batches of the steps that are measured."""

    net: nn.Module = field(default_factory=lambda: yopo.models.preactresnet18(width=8))
    small: nn.Module = field(default_factory=lambda: yopo.models.SmallCNN(width=8))
    x: Tensor = field(default_factory=lambda: torch.rand(128, 3, 32, 32))
    y: Tensor = field(default_factory=lambda: torch.arange(128) % 10)

    def yopo(self, m: int = 3, n: int = 3, images: int = 16) -> Run:
        """A step of YOPO-m-n, whose f0 is affine."""
        return step(yopo.YOPO(self.net, THREAT, m=m, n=n), self.x[:images], self.y[:images])

    def deeper(self, n: int) -> Run:
        """A step of YOPO-3-n, whose f0 is a convolution and a ReLU."""
        method = yopo.YOPO(self.small, THREAT, m=3, n=n, first_layer="relu1")
        return step(method, self.x[:16, :1, :28, :28].contiguous(), self.y[:16])

    def propagations(self, m: int) -> float:
        """That a step of YOPO-m-3 counts."""
        x, y = self.x[:2], self.y[:2]
        return yopo.YOPO(self.net, THREAT, m=m, n=3).backward(x, y).propagations


def blocks(tensors: int) -> nn.Sequential:
    """A network of about so many small parameter tensors."""
    return many_tensors(width=4, blocks=tensors // 5)


def tensors_step(tensors: int) -> Run:
    """A step of YOPO-3-3."""
    method = yopo.YOPO(blocks(tensors), THREAT, m=3, n=3)
    return step(method, torch.rand(2, 3, 8, 8), torch.arange(2))


def tensors_study(tensors: int) -> Run:
    """What a method does once: where f0 ends, and whether it is affine."""
    net, x, y = blocks(tensors), torch.rand(2, 3, 8, 8), torch.arange(2)
    return lambda: yopo.YOPO(net, THREAT, m=3, n=3).prepare(x, y)


def tensors_kept(tensors: int) -> Run:
    """The state as an epoch's end keeps it: a copy, and a look for NaN; and a move of EMA."""
    net = blocks(tensors)
    ema, sgd = yopo.EMA(net, 0.99), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net(torch.rand(2, 3, 8, 8)).sum().backward()
    sgd.step()
    snapshot = Snapshot(net, ema, sgd, yopo.Natural(net))

    def run() -> None:
        snapshot.copy()
        snapshot.is_finite()
        ema.update(10)

    return run


def of_steps(s: Steps) -> Iterator[Axis]:
    """Time and memory of a step."""
    many = (125, 250, 500, 1000, 2000)
    yield Axis("step, YOPO-m-3", "m", (1, 2, 4, 8, 16), lambda m: s.yopo(m=m))
    yield Axis("step, YOPO-m-3", "m", (1, 2, 4, 8, 16), count=s.propagations, unit="propagations")
    yield Axis("step, YOPO-3-n, f0 affine", "n", (1, 4, 16, 64), lambda n: s.yopo(n=n))
    yield Axis("step, YOPO-3-n, f0 with a ReLU", "n", (1, 4, 16, 64), s.deeper)
    yield Axis("step, YOPO-3-3", "batch", (8, 16, 32, 64, 128), lambda b: s.yopo(images=b))
    yield Axis("step, YOPO-3-3", "parameter tensors", many, tensors_step)
    yield Axis("study of the network, once", "parameter tensors", many, tensors_study)
    yield Axis("state kept in memory, and EMA", "parameter tensors", many, tensors_kept)

    def peak(make: Callable[[int], Run]) -> Callable[[int], float]:
        return lambda size: peak_bytes(make(size)) / 1e6

    yield Axis(
        "memory of a step, YOPO-m-3", "m", (1, 4, 16), count=peak(lambda m: s.yopo(m=m)), unit="MB"
    )
    yield Axis(
        "memory of a step, YOPO-3-n", "n", (1, 4, 16), count=peak(lambda n: s.yopo(n=n)), unit="MB"
    )
    yield Axis(
        "memory of a step, YOPO-3-3",
        "batch",
        (32, 64, 128),
        count=peak(lambda b: s.yopo(images=b)),
        unit="MB",
    )


# ---------------------------------------------------------------- images


def pixels(images: int, side: int = 28) -> Arrays:
    """A data set in memory."""
    x, y = torch.zeros(images, 1, side, side, dtype=torch.uint8), torch.arange(images) % 10
    return Arrays(x, y, x[:10], y[:10], tuple("abcdefghij"))


def loader(images: int) -> Loader:
    """Batches of 16 small ones."""
    data, cpu = pixels(images, side=8), torch.device("cpu")
    augment = Augment(crop=1, flip=True)
    return Loader(data.x_train, data.y_train, batch=16, seed=0, device=cpu, augment=augment)


def epoch_begins(images: int) -> Run:
    """The order of an epoch, and its random numbers."""
    batches = loader(images)
    return lambda: next(batches.epoch(0))


def batches_read(images: int) -> Run:
    """Twenty batches in the middle of an epoch."""
    batches = loader(images).epoch(0)

    def run() -> None:
        for _ in range(20):
            next(batches)

    return run


def split_up(images: int) -> Run:
    """Images held out, and the digest of all, when a run begins."""
    data, config = pixels(images), validate({"data": {"held_out": 0.1}})
    return lambda: split(data, config)


def attacked(images: int) -> Run:
    """Clean accuracy and one step of PGD on a network that costs next to nothing."""
    net = Network.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 10)), "float32", torch.rand(1, 1))
    x, y = torch.rand(images, 1, 2, 2), torch.arange(images) % 10
    return lambda: attack_all(net, Data.of(net, InMemory(x, y)), THREAT, [parse("pgd-1")], batch=50)


class Drawn:
    """Pictures that are made when they are read."""

    shape = (3, 32, 32)

    def __init__(self, images: int) -> None:
        self.labels = torch.arange(images) % 10

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: Tensor) -> Tensor:
        """All of one shade."""
        shades = (rows % 256).byte().view(-1, 1, 1, 1)
        return shades.expand(len(rows), *self.shape).contiguous()


def read_and_attacked(images: int) -> float:
    """Peak memory of an evaluation of pictures that are not in memory, in MB."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    attack = partial(yopo.evaluate, net, Drawn(images), THREAT, "pgd-1", checks=False)
    return peak_bytes(lambda: attack(batch=50)) / 1e6


def streamed(images: int) -> Run:
    """An epoch of pictures that are read when their turn comes, in this process."""
    feed = Feed(50, 0, torch.device("cpu"), augment=Augment(flip=True))
    batches = Streamed(Drawn(images), feed)

    def run() -> None:
        for _ in batches.epoch(0):
            pass

    return run


def of_images() -> Iterator[Axis]:
    """Of a data set in memory, and of one that is read."""
    many = (4096, 16384, 65536)
    yield Axis("beginning of an epoch", "training images", (*many, 262144), epoch_begins)
    yield Axis("20 batches of an epoch", "training images", many, batches_read)
    yield Axis("held-out images and digest", "training images", many, split_up)
    yield Axis(
        "memory of the same",
        "training images",
        many,
        count=lambda n: peak_bytes(split_up(n)) / 1e6,
        unit="MB",
    )
    yield Axis("evaluation, PGD-1", "test images", (1000, 4000, 16000), attacked)
    yield Axis(
        "memory of an evaluation of pictures that are read",
        "test images",
        (500, 2000, 8000),
        count=read_and_attacked,
        unit="MB",
    )
    few = (500, 2000, 8000)
    yield Axis("an epoch of pictures that are read", "training images", few, streamed)
    yield Axis(
        "memory of the same",
        "training images",
        few,
        count=lambda n: peak_bytes(streamed(n)) / 1e6,
        unit="MB",
    )


# ---------------------------------------------------------------- files of a run


def run_folder(path: Path, lines: int) -> RunFolder:
    """A run that has trained for so many epochs."""
    files = RunFolder(path / str(lines), Logged(), writes=True)
    files.begin(validate({}).tree(), 0)
    for epoch in range(lines):
        files.add({"epoch": epoch, "train_seconds": 1.5 * epoch, "loss": 0.5, "clean": 0.25})
    return files


def one_more(path: Path) -> Callable[[int], Run]:
    """A line of the metrics."""

    def make(lines: int) -> Run:
        files = run_folder(path, lines)

        def run() -> None:
            for _ in range(20):
                files.add({"epoch": 1, "loss": 0.5})

        return run

    return make


def listed(path: Path) -> Callable[[int], Run]:
    """A folder of so many empty files that are named as pictures, in ten classes."""

    def make(pictures: int) -> Run:
        root, names = path / f"listed-{pictures}", tuple(map(str, range(10)))
        if not root.exists():
            for name in names:
                (root / name).mkdir(parents=True)
            for i in range(pictures):
                (root / names[i % 10] / f"{i:07d}.jpg").touch()
        return lambda: Folder(list_pictures(root, names), (224, 224), 224)

    return make


def objects_bytes(run: Run) -> int:
    """The most memory that objects of Python's and NumPy's held at one time."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def checkpoint(path: Path) -> Callable[[int], Run]:
    """A checkpoint of next to no weights after so many epochs."""

    def make(lines: int) -> Run:
        files = run_folder(path / "saved", lines)
        state = Checkpoint({"w": torch.zeros(1)}, {"metrics": files.lines})
        return lambda: save(files.path / "state", 1, state, keep=1)

    return make


def reported(path: Path) -> Callable[[int], Run]:
    """The page of so many runs."""

    def make(runs: int) -> Run:
        folders = [write_run(path / f"{runs}" / f"run-{k}", epochs=30) for k in range(runs)]
        return lambda: page(read_runs(folders))

    return make


def of_files(path: Path) -> Iterator[Axis]:
    """What is listed, written and shown."""
    many, make = (2000, 8000, 32000), listed(path)
    yield Axis("list of a folder of pictures", "pictures", many, make)
    yield Axis(
        "memory of the same",
        "pictures",
        many,
        count=lambda n: objects_bytes(make(n)) / 1e6,
        unit="MB",
    )
    yield Axis("20 lines of the metrics", "epochs before", (100, 400, 1600, 6400), one_more(path))
    yield Axis(
        "a checkpoint without weights", "epochs before", (100, 400, 1600, 6400), checkpoint(path)
    )
    yield Axis("the report", "runs", (4, 8, 16, 32), reported(path))


def measured(rounds: int) -> Iterator[Grown]:
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        for axes in (of_steps(Steps()), of_images(), of_files(Path(folder))):
            for axis in axes:
                yield axis.measure(rounds)
