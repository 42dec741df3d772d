"""What n buys with a deeper f0, at equal training time: YOPO-3-n with f0 ending at several places.

Usage: python -m benchmarks.depth mnist-subset --seconds 60 --json FILE
       python -m benchmarks.depth cifar10 --seconds 20 --json FILE     (a GPU: about 3 minutes)
       python -m benchmarks.depth --table FILE...                      (the tables of docs/depth.md)

All networks are trained in turn, a slice of time each, so that a slow moment of the machine hits
all alike. On a CPU the clock is the process's own (give OMP_NUM_THREADS=1), on a GPU the wall's.
Rate and eps follow the part of the time that is spent, not the steps.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import yopo
from yopo.data import Augment, Loader, load

M = 3
INNER = (1, 3, 10)


@dataclass(frozen=True)
class Setting:
    """A data set with its threat and the places where f0 may end (name in the table: module)."""

    eps: float
    batch: int
    rate: float
    splits: dict[str, str]
    augment: Augment
    test: int  # test images that are attacked


SETTINGS = {
    "mnist-subset": Setting(
        0.2,
        100,
        4e-3,
        {"conv1": "conv1", "conv1+ReLU": "relu1", "first stage": "pool1"},
        Augment(),
        1000,
    ),
    "cifar10": Setting(
        8 / 255,
        256,
        0.2,
        {"conv1": "net.conv1", "conv1+block": "net.layer1.0", "first stage": "net.layer1"},
        Augment(crop=4, flip=True),
        2000,
    ),
}


@dataclass
class Result:
    """One network, after its time."""

    f0: str
    n: int
    seed: int
    seconds: float = 0.0
    steps: int = 0
    propagations: float = 0.0  # per step
    clean: float = 0.0
    pgd20: float = 0.0


class Contestant:
    """One network in training."""

    def __init__(self, result: Result, name: str, width: int, loader: Loader, time: float) -> None:
        setting, device = SETTINGS[name], loader.device
        self.result, self.loader, self.seconds, self.setting = result, loader, time, setting
        torch.manual_seed(result.seed)  # the same first weights for all
        self.model = network(name, width).to(device)
        if device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        threat = yopo.Linf(setting.eps)
        split = setting.splits[result.f0]
        method = yopo.YOPO(self.model, threat, m=M, n=result.n, first_layer=split)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, setting.rate, weight_decay=5e-4)
            if name == "mnist-subset"
            else torch.optim.SGD(
                parameters, setting.rate, momentum=0.9, nesterov=True, weight_decay=5e-4
            )
        )
        # Captured on a GPU but not compiled: a split inside a network cannot be, and all run alike.
        self.engine = yopo.Engine(
            method,
            self.optimizer,
            precision="bf16" if device.type == "cuda" else "float32",
            compile=False,
        )
        self.batches = self._forever()

    def _forever(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            yield from self.loader.epoch(epoch)
            epoch += 1

    def train(self, budget: float) -> None:
        """Go on for `budget` seconds."""
        r, device = self.result, self.loader.device
        torch.manual_seed(r.seed + r.steps)
        started, before = clock(device), r.seconds
        while r.seconds < min(before + budget, self.seconds):
            x, y = next(self.batches)
            part = r.seconds / self.seconds
            for group in self.optimizer.param_groups:
                group["lr"] = self.setting.rate * min(part / 0.3, (1 - part) / 0.7)
            out = self.engine.step(x, y, part=max(0.02, min(1.0, part / 0.4)))
            r.steps += 1
            r.propagations = out.propagations
            if r.steps % 5 == 0 or device.type == "cpu":  # a look at the clock waits for a GPU
                r.seconds = before + clock(device) - started
        r.seconds = before + clock(device) - started

    def attack(self, x: Tensor, y: Tensor) -> None:
        """Clean and PGD-20 accuracy, in percent."""
        self.model.eval()
        generator = torch.Generator(x.device).manual_seed(0)
        clean = robust = 0
        for a, b in zip(x.split(250), y.split(250), strict=True):
            images, eps = a / 255, self.setting.eps
            adversarial = yopo.attacks.pgd(
                self.model, images, b, yopo.Linf(eps, eps / 8), steps=20, generator=generator
            )
            with torch.no_grad():
                clean += int((self.model(images).argmax(1) == b).sum())
                robust += int((self.model(adversarial).argmax(1) == b).sum())
        self.result.clean, self.result.pgd20 = 100 * clean / len(x), 100 * robust / len(x)


def network(name: str, width: int) -> nn.Module:
    """A fresh network for a data set."""
    if name == "mnist-subset":
        return yopo.models.SmallCNN(width=width or 16, hidden=100)
    net = nn.Sequential()
    net.add_module("normalize", yopo.Normalize((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)))
    net.add_module("net", yopo.models.preactresnet18(width=width or 64))
    return net


def clock(device: torch.device) -> float:
    """Seconds that count."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def compete(args: argparse.Namespace) -> list[Result]:
    """Train all settings of all seeds in turn, then attack them."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    setting, data = SETTINGS[args.data], load(args.data, root=args.root)
    loaders = [
        Loader(
            data.x_train,
            data.y_train,
            batch=setting.batch,
            seed=seed,
            device=device,
            augment=setting.augment,
        )
        for seed in range(args.seeds)
    ]
    # With n = 1 the first step needs no pass through f0: it is PGD, wherever f0 ends.
    kinds = [("conv1", 1), *((f0, n) for f0 in setting.splits for n in INNER if n > 1)]
    running = [
        Contestant(Result(f0, n, seed), args.data, args.width, loaders[seed], args.seconds)
        for seed in range(args.seeds)
        for f0, n in kinds
    ]
    for c in running:  # kernels are chosen and the split is studied outside the clock
        c.train(1e-9)
        c.result.seconds, c.result.steps = 0.0, 0
    while any(c.result.seconds < args.seconds for c in running):
        for c in running:
            c.train(args.seconds / 10)
        print(f"{running[-1].result.seconds:6.1f} of {args.seconds} s each", flush=True)
    count = args.images or setting.test
    x, y = data.x_test[:count].to(device), data.y_test[:count].to(device)
    for c in running:
        c.attack(x, y)
    return [c.result for c in running]


def table(record: dict[str, Any]) -> str:
    """The results as Markdown, means over the seeds; steps relative to n = 1."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for r in record["results"]:
        found.setdefault((r["f0"], r["n"]), []).append(r)
    base = statistics.mean(r["steps"] for r in found["conv1", 1])
    lines = ["| f0 | n | steps, of n = 1 | clean | PGD-20 | |", "|---|---|---|---|---|---|"]
    for (f0, n), rs in found.items():
        steps = statistics.mean(r["steps"] for r in rs) / base
        clean, pgd = (statistics.mean(r[key] for r in rs) for key in ("clean", "pgd20"))
        each = " ".join(f"{r['pgd20']:.1f}" for r in rs)
        name = "any" if n == 1 else f0
        lines.append(f"| {name} | {n} | {steps:.2f} | {clean:.1f} | {pgd:.1f} | {each} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", choices=SETTINGS, default="mnist-subset")
    parser.add_argument("--seconds", type=float, default=60, help="training time of each network")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--width", type=int, default=0, help="of the network; 0: the usual one")
    parser.add_argument("--images", type=int, default=0, help="test images; 0: the usual number")
    parser.add_argument("--root", type=Path, help="folder with the data (cifar10)")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, help="write results and environment here")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tables of such files")
    args = parser.parse_args()
    if args.table:
        for path in args.table:
            print(table(json.loads(path.read_text())), end="\n\n")
        return
    results = compete(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    record = {
        "settings": {
            "data": args.data,
            "seconds": args.seconds,
            "seeds": args.seeds,
            "width": args.width,
            "m": M,
            "step": "eps/4",
        },
        "environment": {
            "torch": torch.__version__,
            "machine": machine,
            "threads": torch.get_num_threads(),
        },
        "results": [asdict(r) for r in results],
    }
    print(table(record))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
