"""A tiny run for the tests of the training loop, startable in a process of its own."""

import itertools
import multiprocessing
import multiprocessing.context
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import yopo.runs.trainer
from tests import SEED
from yopo.__main__ import main
from yopo.data.sources import Arrays
from yopo.runs import state, writing
from yopo.runs.overlay import Tree, overlay
from yopo.runs.settings import Config, validate

BASE: Tree = {
    "method": {"name": "yopo", "m": 2, "n": 2, "first_layer": "relu1"},
    "threat": {"eps": 0.1},
    "data": {"held_out": 20},
    "model": {"name": "smallcnn", "options": {"width": 4, "size": 16, "hidden": 8}},
    "optimizer": {"lr": 0.05},
    "schedule": {"name": "cosine", "warmup": 1},
    "evaluate": {"steps": 3, "images": 20},
    "checkpoint": {"minutes": 0, "pause": 0},
    "epochs": 3,
    "batch": 20,
    "ema": 0.9,
    "seed": SEED,
}


def tiny_config(over: Tree | None = None) -> Config:
    return validate(overlay(BASE, over or {}))


def tiny_data(train: int = 120) -> Arrays:
    """Four noisy patterns, 16x16."""
    g = torch.Generator().manual_seed(SEED)
    patterns = torch.randint(0, 200, (4, 1, 16, 16), generator=g)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(count) % 4
        noise = torch.randint(0, 56, (count, 1, 16, 16), generator=g)
        return (patterns[y] + noise).to(torch.uint8), y

    return Arrays(*draw(train), *draw(40), names=("a", "b", "c", "d"))


class Silent:
    """A watcher that only remembers."""

    def __init__(self) -> None:
        self.epochs = 0
        self.said: list[str] = []
        self.lines: list[dict[str, Any]] = []

    def begin(self, epochs: int) -> None:
        self.epochs = epochs

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        pass

    def attack(self, name: str, part: float, accuracy: float) -> None:
        pass

    def epoch(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


def tiny_trainer(
    out: Path, over: Tree | None = None, watcher: Silent | None = None, train: int = 120
) -> yopo.runs.trainer.Trainer:
    watcher = watcher or Silent()
    config = tiny_config(over)
    return yopo.runs.trainer.Trainer(config, tiny_data(train), out, watcher, torch.device("cpu"))


def run_until_killed(
    out: str, over: Tree, steps: int = 0, flushes: int = 0, large: bool = False
) -> None:
    """Resume and run on, a checkpoint at every step; or wait to be killed.

    After so many steps, or in the writing of checkpoints after so many of its flushes: then the
    file `held` says so. large: checkpoints are written while training goes on.
    """
    torch.set_num_threads(1)
    yopo.runs.trainer.CHECK_EVERY = 1
    if large:
        writing.LARGE = 0
    watcher = Silent()

    def counted(work: Any, most: int) -> Any:
        calls = itertools.count(1)

        def call(*args: Any) -> None:
            work(*args)
            if next(calls) == most:
                (Path(out) / "held").touch()
                time.sleep(PATIENCE)

        return call

    watcher.step = counted(watcher.step, steps)  # type: ignore[method-assign]
    state.flush = counted(state.flush, flushes)  # type: ignore[attr-defined]
    trainer = tiny_trainer(Path(out), over, watcher)
    trainer.resume()
    trainer.run()


PATIENCE = 600  # seconds after which a process hangs; a busy machine may need many


def wait_until(done: Callable[[], object]) -> None:
    """Another process does it, sooner or later."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def free_port() -> int:
    """A port of this process's own: below those that the system gives to connections."""
    for _ in range(1000):
        port = 10_000 + (os.getpid() * 31 + next(_asked)) % 20_000
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


_asked = itertools.count()


def command_line(words: list[str], said: str) -> None:
    """The command line in a process of forkserver's; what it says goes into that file."""
    with Path(said).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = ["yopo", *words]
    main()


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Processes of their own that have torch, and what the tests need, from the start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.core.test_ddp", "tests.core.test_exchange"])
    return context


def as_one_of(world: int, rank: int, port: int) -> None:
    """What torchrun tells a process of itself and of the others."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def in_two(work: Callable[[int, int, str], None], out: Path) -> list[dict[str, Any]]:
    """Do work(rank, port, out) in two processes; what each left in out/RANK.pt."""
    context, port = forkserver(), free_port()
    pair = [context.Process(target=work, args=(rank, port, str(out))) for rank in (0, 1)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return [torch.load(out / f"{rank}.pt") for rank in (0, 1)]


def dawdle(low: float, high: float, rng: random.Random) -> None:
    time.sleep(rng.uniform(low, high))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}
