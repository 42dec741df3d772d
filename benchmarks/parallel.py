"""A step in two CPU processes: flat against DDP and FSDP2, and the engine against plain steps.

Usage: python -m benchmarks.parallel [--out records/parallel-cpu] [--rounds 15]

One thread each, gloo. All ways take turns in the same two processes, so that what else the machine
does meets all of them; medians, in parts of the first way of each table. `elapsed` counts what a
process waits for, `worked` the CPU seconds of all its threads.
"""

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import yopo
from benchmarks import exchanged
from tests.tiny import free_port
from yopo.runs import exchanging

Step = Callable[[], None]
Networks = dict[str, Callable[[], nn.Module]]
SHARE = 8  # images of a process


def perceptron() -> nn.Module:
    """Many weights for little work."""
    torch.manual_seed(0)
    wide = (nn.Linear(3 * 48 * 48, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *wide, nn.Linear(512, 10))


NETWORKS: Networks = {"small ResNet-50": exchanged.network, "perceptron": perceptron}


def in_its_way(way: str, net: nn.Module, rank: int) -> Step:
    """A step of YOPO-3-3, exchanged in that way."""
    trained = net
    if way == "ddp":
        trained = DistributedDataParallel(net)
    elif way.startswith("fsdp"):
        exchanging.spread(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9)
    if way == "flat":
        yopo.exchange_gradients(optimizer)
    method = yopo.YOPO(trained, yopo.Linf(4 / 255), m=3, n=3)
    x, y = exchanged.batch(rank)

    def step() -> None:
        with yopo.gathered(net) if way == "fsdp gathered" else nullcontext():
            method.backward(x, y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_the_engine(compile: bool, rank: int) -> tuple[Step, yopo.Engine]:
    """A step of YOPO-3-3 on the paper's MNIST network, flat."""
    torch.manual_seed(0)
    net = yopo.models.SmallCNN(width=8, hidden=32, dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9)
    yopo.exchange_gradients(optimizer)
    engine = yopo.Engine(yopo.YOPO(net, yopo.Linf(0.3), m=3, n=3), optimizer, compile=compile)
    torch.manual_seed(1 + rank)
    x, y = torch.rand(SHARE, 1, 28, 28), torch.arange(SHARE)
    engine.prepare(x, y)

    def step() -> None:
        engine.step(x, y)

    return step, engine


def taken_in_turns(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of each, in parts of the first."""
    for step in steps.values():
        step()
        step()
    elapsed: dict[str, list[float]] = {way: [] for way in steps}
    worked: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            step()
            elapsed[way].append(time.perf_counter() - began)
            worked[way].append(time.process_time() - used)
    first = next(iter(steps))
    return {
        way: {
            "elapsed": round(median(elapsed[way]) / median(elapsed[first]), 2),
            "worked": round(median(worked[way]) / median(worked[first]), 2),
        }
        for way in steps
    }


def work(rank: int, port: int, out: str, rounds: int) -> None:
    """Be one of the two."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"ways": {}}
    for name, network in NETWORKS.items():
        nets = {way: network() for way in exchanged.WAYS}
        steps = {way: in_its_way(way, net, rank) for way, net in nets.items()}
        parameters = sum(p.numel() for p in network().parameters())
        found["ways"][name] = {
            "parameters": parameters,
            "ways": taken_in_turns(steps, rounds),
        }
    plain, _ = on_the_engine(compile=False, rank=rank)
    compiled, engine = on_the_engine(compile=True, rank=rank)
    assert engine.compiled
    found["engine"] = taken_in_turns({"plain": plain, "compiled": compiled}, rounds)
    Path(f"{out}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(rounds: int) -> dict[str, Any]:
    """What the first of two processes found."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    with tempfile.TemporaryDirectory() as out:
        pair = [context.Process(target=work, args=(rank, port, out, rounds)) for rank in range(2)]
        for process in pair:
            process.start()
        for process in pair:
            process.join()
        found: dict[str, Any] = json.loads(Path(out, "0.json").read_text())
    return found


def table(found: dict[str, Any]) -> str:
    """The record in words."""
    lines = ["| network | way | elapsed | worked |", "|---|---|---|---|"]
    rows = [(f"{k}, {v['parameters']:,} weights", v["ways"]) for k, v in found["ways"].items()]
    for name, ways in [*rows, ("SmallCNN, flat", found["engine"])]:
        lines += [f"| {name} | {w} | {r['elapsed']} | {r['worked']} |" for w, r in ways.items()]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for parallel.json")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(words)
    found = measured(args.rounds)
    print(table(found))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        about = {
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread a process",
            "rounds": args.rounds,
            "load": [round(load, 1) for load in os.getloadavg()],
        }
        record = {"environment": about} | found
        (args.out / "parallel.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
