"""How long training waits for a checkpoint: written at once, or beside the training.

Usage: python -m benchmarks.checkpoint [--rounds 5] [--width 136] [--shards] [--out FOLDER]

One run of one process, a PreAct-ResNet18 of 50 million parameters with momentum, saves in turn at
once (as small runs do) and beside its training (as large ones do). `waits` is what the call of
`save` takes; `slower` what the steps take longer until the checkpoint is there, for the processor
and the disk are shared. Ratios are within one run, medians over rounds. --shards: two processes,
over which FSDP2 spreads the weights, write their parts with DCP; they wait for the slower one.
"""

import argparse
import json
import multiprocessing
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.tiny import as_one_of, free_port
from yopo.data.sources import Arrays
from yopo.runs import distributed, writing
from yopo.runs.distributed import pick_device
from yopo.runs.progress import Logged
from yopo.runs.settings import validate
from yopo.runs.trainer import Trainer

NEVER = 10**12  # parameters


def trainer(out: Path, width: int, device: torch.device, parallel: str = "flat") -> Trainer:
    """A run that is long enough."""
    config = validate(
        {
            "method": {"name": "natural"},
            "model": {"name": "preactresnet18", "options": {"width": width}},
            "data": {"held_out": 8},
            "batch": 8,
            "engine": "plain",
            "parallel": parallel,
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
        distributed.wait_for_all()
        began = time.perf_counter()
        assert run.keeper.save()
        if large == NEVER:  # parts are always written beside the training
            assert run.keeper.writing.settle()
        return slowest(time.perf_counter() - began)

    found = []
    for number in range(rounds + 1):
        idle = median(step() for _ in range(5))
        at_once = save(NEVER)
        waits, slower, written = save(0), 0.0, time.perf_counter()
        begun = run.keeper.writing._begun
        assert begun is not None
        while distributed.anyone(not begun[0].done(), device=run.learner.device)[0]:
            slower += step() - idle
        written = time.perf_counter() - written
        assert run.keeper.settle()
        if number and run.learner.rank == 0:
            row = {"at once": at_once, "waits": waits, "slower": slower}
            found.append(row | {"written after": written, "step": idle})
            print(*(f"{k} {v:.3f} s" for k, v in found[-1].items()), sep="  ", flush=True)
    return found


def slowest(seconds: float) -> float:
    """Those of the process that took longest."""
    return max(float(each) for each in distributed.gathered(torch.tensor(seconds)))


def in_one(out: Path, width: int, device: torch.device, rounds: int, parallel: str = "flat") -> str:
    """The record, as JSON; nothing but in the first process."""
    torch.manual_seed(0)
    run = trainer(out, width, device, parallel)
    parameters = sum(p.numel() for p in run.learner.model.parameters())
    threads = f"{torch.get_num_threads()} threads"
    if run.learner.rank == 0:
        print(f"{parameters:,} parameters, {device}, {run.learner.world} processes, {threads}")
    rows = measure(run, rounds)
    run.keeper.close()
    if run.learner.rank:
        return ""
    (newest, *_) = sorted((run.files.path / "state").glob("save-*"), reverse=True)
    record: dict[str, Any] = {
        "parameters": parameters,
        "processes": run.learner.world,
        "parallel": parallel,
        "bytes": sum(f.stat().st_size for f in newest.rglob("*") if f.is_file()),
        "ratios": {
            "waits / at once": median(row["waits"] / row["at once"] for row in rows),
            "waits and slower / at once": median(
                (row["waits"] + row["slower"]) / row["at once"] for row in rows
            ),
        },
        "seconds": {key: median(row[key] for row in rows) for key in rows[0]},
        "rounds": rows,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {device}, {threads} each",
    }
    return json.dumps(record, indent=1) + "\n"


def in_shards(rank: int, port: int, out: str, width: int, rounds: int) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    as_one_of(2, rank, port)
    text = in_one(Path(out) / "run", width, torch.device("cpu"), rounds, "fsdp")
    if rank == 0:
        (Path(out) / "record").write_text(text)


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=136)
    parser.add_argument("--device")
    parser.add_argument("--shards", action="store_true", help="two processes with FSDP2")
    parser.add_argument("--out", type=Path, help="folder for checkpoint.json, or shards.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.shards:
            context, port = multiprocessing.get_context("spawn"), free_port()
            words = (port, folder, args.width, args.rounds)
            pair = [context.Process(target=in_shards, args=(rank, *words)) for rank in (0, 1)]
            for process in pair:
                process.start()
            for process in pair:
                process.join()
            text = (Path(folder) / "record").read_text()
        else:
            text = in_one(Path(folder) / "run", args.width, pick_device(args.device), args.rounds)
    for name, ratio in json.loads(text)["ratios"].items():
        print(f"{name:28} {ratio:.3f}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / ("shards.json" if args.shards else "checkpoint.json")).write_text(text)


if __name__ == "__main__":
    main()
