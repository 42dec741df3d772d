"""Large folders of pictures: memory, the first batch, and pictures a second beside a plain loader.

Usage: python -m benchmarks.data [--json records/data-cpu/results.json]
       python -m benchmarks.data --counts 2000 40000 320000 1281167 [--json ...counts.json]
Folders of few and of many pictures (hard links to a few files) are read by a process of their own
each, without a network, for the same number of batches and for an epoch. Its memory is the
proportional set size (Pss) of it and its workers together, looked at all the time. Then ours and a
plain DataLoader of the same pictures take turns in one process, pair by pair. With --counts it is
memory and the first batch alone, of folders of so many pictures in --classes.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from yopo.data import Feed, Sources
from yopo.data.pictures import Folder, Part, read_or_list
from yopo.data.streamed import Streamed
from yopo.runs.images import split
from yopo.runs.settings import validate

SIDES = (320, 256)  # of the pictures on disk, width and height
CLASSES, FILES = 10, 80
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is read, and how."""

    size: int = 224
    batch: int = 64
    workers: int = 2
    area: float = 0.25
    jitter: float = 0.0


def make_folder(
    root: Path, many: int, sides: tuple[int, int] = SIDES, classes: int = CLASSES
) -> Path:
    """So many pictures to train on, and a few to test on, as hard links to a few JPEGs."""
    rng = np.random.default_rng(0)
    for part, pictures in (("train", many), ("test", 10 * classes)):
        folders = [root / part / f"class-{label}" for label in range(classes)]
        for folder in folders:
            folder.mkdir(parents=True)
        for i in range(pictures):
            name, first = (folders[k % classes] / f"{k:06d}.jpg" for k in (i, i % FILES))
            if first == name:
                noise = rng.integers(0, 256, (*sides[::-1], 3), np.uint8)
                Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2)).save(name)
            else:
                os.link(first, name)
    return root


def opened(root: Path, setting: Setting) -> Streamed:
    """The training batches of a run on a folder."""
    s = setting
    data = read_or_list(root, s.size, skip_broken=False, resident=False, area=s.area)
    config = validate({"data": {"held_out": 100}, "batch": s.batch})
    made = split(data, config).batches(Feed(s.batch, 0, CPU, workers=s.workers))
    assert isinstance(made, Streamed)
    return made


def read(root: Path, setting: Setting, batches: int) -> dict[str, float]:
    """In a process of its own: seconds to the first batch, and how many pictures were read."""
    began = time.perf_counter()
    used = processor(os.getpid())
    made, seen, first, spent = opened(root, setting), 0, 0.0, 0.0
    for x, _ in made.epoch(0):
        if not seen:
            first, spent = time.perf_counter() - began, processor(os.getpid()) - used
        seen += len(x)
        if seen >= batches * setting.batch > 0:
            break
    seconds = time.perf_counter() - began
    told = {"first batch, s": first, "of processors, s": spent, "pictures": seen, "s": seconds}
    return {name: round(value, 2) for name, value in told.items()}


def pss(pid: int) -> int:
    """Bytes of a process and its children, what they share counted once."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = 1024 * int(line.split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total + sum(pss(int(child)) for child in children)


def processor(pid: int) -> float:
    """Seconds that a process and its children have computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    mine = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return mine + sum(processor(int(child)) for child in children)


def measured(root: Path, setting: Setting, batches: int = 0) -> dict[str, float]:
    """The same with the peak of its memory; all batches of an epoch, or so many."""
    words = [json.dumps(asdict(setting)), str(root), str(batches)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.data", "--one", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, pss(process.pid))
        time.sleep(0.02)
    assert process.stdout is not None
    told: dict[str, float] = json.loads(process.stdout.read())
    return told | {"peak, MB": round(peak / 1e6, 1)}


class Plain(Dataset[tuple[Tensor, int]]):
    """What one writes without a library: open, cut a part out, bring it to the size."""

    def __init__(self, folder: Folder, setting: Setting) -> None:
        self.files = [str(folder.path(row)) for row in range(len(folder))]
        self.labels, self.setting = folder.labels.tolist(), setting

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        s = self.setting
        with Image.open(self.files[row]) as picture:
            image = picture.convert("RGB")
        box = Part(s.area, random.getrandbits(32))(*image.size)
        image = image.resize((s.size, s.size), Image.Resampling.BILINEAR, box=box)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), self.labels[row]


def plainly(root: Path, setting: Setting) -> Callable[[], Iterator[Any]]:
    """Epochs of a plain loader, which ends as ours with float32 in [0, 1]."""
    data = read_or_list(root, setting.size, skip_broken=False, resident=False, area=setting.area)
    assert isinstance(data, Sources)
    assert isinstance(data.train, Folder)
    loader = DataLoader(
        Plain(data.train, setting),
        setting.batch,
        shuffle=True,
        drop_last=True,
        num_workers=setting.workers,
        persistent_workers=setting.workers > 0,
    )
    return lambda: ((x.float().div_(255), y) for x, y in loader)


def rates(root: Path, setting: Setting, rounds: int, batches: int) -> dict[str, Any]:
    """Pictures a second of both, turn by turn; the ratio is the median of the pairs'."""
    ours = opened(root, setting)
    plain = plainly(root, setting)
    epochs: dict[str, Callable[[], Iterator[Any]]] = {"ours": lambda: ours.epoch(0), "plain": plain}
    for begin in epochs.values():
        next(begin())  # the workers begin
    times: dict[str, list[float]] = {name: [] for name in epochs}
    spent: dict[str, list[float]] = {name: [] for name in epochs}
    for turn in range(rounds):
        names = list(epochs) if turn % 2 else list(epochs)[::-1]
        for name in names:
            epoch = epochs[name]()
            next(epoch)  # what is ready ahead is the same for both, before and after
            began, used = time.perf_counter(), processor(os.getpid())
            for _ in range(batches):
                next(epoch)
            times[name].append(time.perf_counter() - began)
            spent[name].append(processor(os.getpid()) - used)
            del epoch
    made = batches * setting.batch
    pairs = [p / o for o, p in zip(times["ours"], times["plain"], strict=True)]
    tick = 1 / os.sysconf("SC_CLK_TCK")
    work = [p / max(o, tick) for o, p in zip(spent["ours"], spent["plain"], strict=True)]
    return {
        **{name: round(made / statistics.median(all_), 1) for name, all_ in times.items()},
        "ratio": round(statistics.median(pairs), 3),
        "of processor time": round(statistics.median(work), 3),
        "pairs": [round(pair, 3) for pair in sorted(pairs)],
    }


def grown(counts: list[int], classes: int, setting: Setting, batches: int) -> dict[str, Any]:
    """Memory and the first batch of folders of so many pictures, and bytes a picture in memory."""
    found: dict[str, Any] = {}
    for many in counts:
        with tempfile.TemporaryDirectory() as room:
            folder = make_folder(Path(room), many, classes=classes)
            found[str(many)] = told = measured(folder, setting, batches)
        print(f"{many:,} pictures: {told}", flush=True)
    few, most = (found[str(count)]["peak, MB"] for count in (min(counts), max(counts)))
    found["bytes a picture"] = round(1e6 * (most - few) / (max(counts) - min(counts)), 1)
    return found


def compared(few: int, many: int, setting: Setting, rounds: int) -> dict[str, Any]:
    """A small and a large folder, for the same batches and an epoch; and beside a plain loader."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as room:
        for count in (few, many):
            root = make_folder(Path(room, str(count)), count)
            for name, batches in (
                ("the same batches", few // setting.batch - 2),
                ("epoch", 0),
            ):
                told = measured(root, setting, batches)
                result.setdefault(name, {})[str(count)] = told
                print(f"{count:,} pictures, {name}: {told}", flush=True)
        root = Path(room, str(few))
        result["pictures a second"] = rates(root, setting, rounds, batches=8)
        print(result["pictures a second"])
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--few", type=int, default=2000)
    parser.add_argument("--many", type=int, default=40_000)
    parser.add_argument("--counts", type=int, nargs="+", help="sizes of folders")
    parser.add_argument("--classes", type=int, default=1000, help="of these folders")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        setting, root, batches = args.one
        print(json.dumps(read(Path(root), Setting(**json.loads(setting)), int(batches))))
        return
    torch.set_num_threads(1)
    setting = Setting()
    result: dict[str, Any] = {"setting": asdict(setting), "torch": torch.__version__}
    same = args.few // setting.batch - 2
    if args.counts:
        result["classes"] = args.classes
        result["the same batches"] = grown(args.counts, args.classes, setting, same)
        print(result["the same batches"]["bytes a picture"], "bytes a picture")
    else:
        result |= compared(args.few, args.many, setting, args.rounds)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
