"""A step in two CPU processes: flat against DDP and FSDP2, and the engine against plain steps.

Usage: python -m benchmarks.parallel [--out records/parallel-cpu] [--rounds 15]

One thread each, gloo. All ways take turns in the same two processes, so that what else the machine
does meets all of them. CPU seconds of all threads of a process, in parts of what the first way took
in the same round: their median. What a slow connection makes a process wait for is not in it.
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
LARGER = 64  # images of a process, where the engine runs


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
    """A step of YOPO-3-3 on a small PreAct-ResNet, flat."""
    torch.manual_seed(0)
    net = yopo.models.preactresnet18(10, width=8, blocks=(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.001, momentum=0.9)
    yopo.exchange_gradients(optimizer)
    method = yopo.YOPO(net, yopo.Linf(4 / 255), m=3, n=3)
    engine = yopo.Engine(method, optimizer, compile=compile)
    torch.manual_seed(1 + rank)
    x, y = torch.rand(LARGER, 3, 32, 32), torch.arange(LARGER) % 10
    engine.prepare(x, y)

    def step() -> None:
        engine.step(x, y)

    return step, engine


def taken_in_turns(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """What each takes, in parts of the first."""
    for step in steps.values():
        step()
        step()
    first, *_ = steps
    parts: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        took = dict[str, float]()
        for way, step in steps.items():
            dist.barrier()
            began = time.process_time()
            step()
            took[way] = time.process_time() - began
        for way in steps:
            parts[way].append(took[way] / took[first])
    return {way: round(median(found), 2) for way, found in parts.items()}


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
    lines = ["| network | way | CPU time |", "|---|---|---|"]
    rows = [(f"{k}, {v['parameters']:,} weights", v["ways"]) for k, v in found["ways"].items()]
    for name, ways in [*rows, ("small PreAct-ResNet, flat", found["engine"])]:
        lines += [f"| {name} | {way} | {part} |" for way, part in ways.items()]
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
