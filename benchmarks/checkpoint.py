"""How long training waits for a checkpoint: written at once, or beside the training.

Usage: python -m benchmarks.checkpoint [--rounds 5] [--width 136] [--out FOLDER]

One run of one process, a PreAct-ResNet18 of 50 million parameters with momentum, saves in turn at
once (as small runs do) and beside its training (as large ones do). `waits` is what the call of
`save` takes; `slower` what the steps take longer until the checkpoint is there, for the processor
and the disk are shared. Ratios are within one run, medians over rounds.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from yopo.data.sources import Arrays
from yopo.runs import writing
from yopo.runs.distributed import pick_device
from yopo.runs.progress import Logged
from yopo.runs.settings import validate
from yopo.runs.trainer import Trainer

NEVER = 10**12  # parameters


def trainer(out: Path, width: int, device: torch.device) -> Trainer:
    """A run that is long enough."""
    config = validate(
        {
            "method": {"name": "natural"},
            "model": {"name": "preactresnet18", "options": {"width": width}},
            "data": {"held_out": 8},
            "batch": 8,
            "engine": "plain",
        }
    )
    x = torch.randint(0, 256, (8 * 1000, 3, 16, 16), dtype=torch.uint8)
    y = torch.arange(len(x)) % 10
    data = Arrays(x, y, x[:8], y[:8], names=tuple("abcdefghij"))
    return Trainer(config, data, out, Logged(), device)


def measure(run: Trainer, rounds: int) -> list[dict[str, float]]:
    """Seconds, by round."""
    batches = run.loader.epoch(0)
    run.learner.warm_up(*next(batches))
    run.keeper.keep_good()

    def step() -> float:
        began = time.perf_counter()
        run._step(*next(batches), run.progress.step)
        run.learner.wait()
        run.progress.step += 1
        return time.perf_counter() - began

    def save(large: int) -> float:
        writing.LARGE = large
        vars(run.keeper.writing).pop("is_beside", None)  # it is looked at once a run
        began = time.perf_counter()
        assert run.keeper.save()
        return time.perf_counter() - began

    found = []
    for number in range(rounds + 1):
        idle = median(step() for _ in range(5))
        at_once = save(NEVER)
        waits, slower, written = save(0), 0.0, time.perf_counter()
        begun = run.keeper.writing._begun
        assert begun is not None
        while not begun[0].done():
            slower += step() - idle
        written = time.perf_counter() - written
        assert run.keeper.settle()
        if number:
            row = {"at once": at_once, "waits": waits, "slower": slower}
            found.append(row | {"written after": written, "step": idle})
            print(*(f"{k} {v:.3f} s" for k, v in found[-1].items()), sep="  ", flush=True)
    return found


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=136)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="folder for checkpoint.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = pick_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(Path(folder) / "run", args.width, device)
        parameters = sum(p.numel() for p in run.learner.model.parameters())
        print(f"{parameters:,} parameters, {device}, {torch.get_num_threads()} threads")
        rows = measure(run, args.rounds)
        size = sum(f.stat().st_size for f in (run.files.path / "state").rglob("save-*/*")) // 2
    middle = {key: median(row[key] for row in rows) for key in rows[0]}
    ratios = {
        "waits / at once": median(row["waits"] / row["at once"] for row in rows),
        "waits and slower / at once": median(
            (row["waits"] + row["slower"]) / row["at once"] for row in rows
        ),
    }
    for name, ratio in ratios.items():
        print(f"{name:28} {ratio:.3f}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {
            "parameters": parameters,
            "bytes": size,
            "ratios": ratios,
            "seconds": middle,
            "rounds": rows,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {device}, {torch.get_num_threads()} threads",
        }
        (args.out / "checkpoint.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
