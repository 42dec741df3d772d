"""How costs grow, in one run; and what training costs on many GPUs, computed from measured parts.

Usage: python -m benchmarks.scale [--out records/scale-cpu] [--rounds 5]
       python -m benchmarks.scale --simulate [--between 50] [--overlap 0.8] [--disk 2] ...

Times are CPU seconds of one thread (of each process), medians over interleaved rounds. They count
as ratios within one run alone. The exponent k of size ** k is fitted to the three largest sizes.
"""

import argparse
import io
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import exchanged, growth, simulation
from tests.tiny import free_port
from yopo.core.tensor_files import Tensors
from yopo.data.formats import decode
from yopo.runs.state import Checkpoint, save

RECORD = Path(__file__).parents[1] / "records/scale-cpu/scale.json"
HEAD = "| cost | against | sizes | at the ends | exponent | growth |\n|---|---|---|---|---|---|"
PICTURE = (500, 375)  # about the middle of ImageNet's sizes
PIXELS = 224


def in_processes(world: int) -> list[dict[str, Any]]:
    """What each of so many processes sends in a step, and what it costs it."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    with tempfile.TemporaryDirectory() as out:
        pair = [
            context.Process(target=exchanged.work, args=(rank, port, out, world))
            for rank in range(world)
        ]
        for process in pair:
            process.start()
        for process in pair:
            process.join()
        return [torch.load(f"{out}/{world}-{rank}.pt") for rank in range(world)]


def ranks() -> list[dict[str, Any]]:
    """A step of one process and of each of two, with the same share of images each."""
    alone, pair = in_processes(1)[0], in_processes(2)
    rows = []
    for way in exchanged.WAYS:
        sent = {k: pair[0][way][k] for k in ("reduced", "gathered", "scattered")}
        seconds = [alone[way]["seconds"], max(each[way]["seconds"] for each in pair)]
        rows.append(
            {
                "way": way,
                "messages": {k: len(v) for k, v in sent.items()},
                "bytes": {k: sum(v) for k, v in sent.items()},
                "ratio": round(seconds[1] / seconds[0], 2),
            }
        )
    return rows


def jpeg() -> bytes:
    """A picture with the file size of a photograph: smooth shapes under a little noise."""
    width, height = PICTURE
    rng = np.random.default_rng(0)
    rough = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(rough.resize(PICTURE, Image.Resampling.BICUBIC), dtype=np.float64)
    noisy = smooth + rng.normal(0, 12, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
    return file.getvalue()


def parts(rounds: int) -> dict[str, Any]:
    """Pictures that a core decodes in a second; bytes a second of a sealed checkpoint."""
    picture = jpeg()
    tensors = Tensors({str(k): torch.rand(2_500_000) for k in range(10)})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    decoding, saving = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            began = time.process_time()
            for _ in range(20):
                decode(io.BytesIO(picture), PIXELS)
            decoding.append((time.process_time() - began) / 20)
            began = time.perf_counter()
            save(Path(folder) / "state", number + 1, Checkpoint(tensors, {}), keep=1)
            saving.append(time.perf_counter() - began)
    return {
        "picture": [*PICTURE, len(picture)],
        "decoded": round(1 / median(decoding), 1),
        "checkpoint bytes": size,
        "checkpoint bytes a second": round(size / median(saving)),
    }


def measure(rounds: int, out: Path | None) -> None:
    """Measure, print, and write if asked."""
    lines = [HEAD]
    print(HEAD)
    found = []
    for grown in growth.measured(rounds):
        found.append(grown.record())
        lines.append(growth.line(found[-1]))
        print(lines[-1], flush=True)
    several = ranks()
    for row in several:
        lines.append(f"{row['way']}: a step of one of two processes {json.dumps(row)}")
        print(lines[-1], flush=True)
    measured = parts(rounds)
    lines.append(json.dumps(measured))
    print(lines[-1])
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "environment": {
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, one thread",
            "rounds": rounds,
        },
        "growth": found,
        "ranks": several,
        "parts": measured,
    }
    (out / "scale.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "log.txt").write_text("\n".join(lines) + "\n")


def simulated(given: simulation.Assumed, decoded: float | None = None) -> str:
    """The tables; pictures that a core decodes are the record's unless given."""
    if decoded is None:
        decoded = float(json.loads(RECORD.read_text())["parts"]["decoded"])
    return simulation.tables(given, decoded)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, or simulate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for scale.json and log.txt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulate", action="store_true", help="print the computed tables")
    parser.add_argument("--decoded", type=float, help="pictures that a core decodes in a second")
    for f in fields(simulation.Assumed):
        parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default)
    args = parser.parse_args(words)
    if args.simulate:
        chosen = {f.name: getattr(args, f.name) for f in fields(simulation.Assumed)}
        print(simulated(simulation.Assumed(**chosen), args.decoded))
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)
    measure(args.rounds, args.out)


if __name__ == "__main__":
    main()
