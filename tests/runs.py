"""A tiny run for the tests of the training loop, startable in a process of its own."""

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import yopo.train
from yopo.config import Config, Tree, overlay, validate
from yopo.data.sources import Arrays

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
}


def tiny_config(over: Tree | None = None) -> Config:
    return validate(overlay(BASE, over or {}))


def tiny_data(train: int = 120) -> Arrays:
    """Four noisy patterns, 16x16."""
    g = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 200, (4, 1, 16, 16), generator=g)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(count) % 4
        noise = torch.randint(0, 56, (count, 1, 16, 16), generator=g)
        return (patterns[y] + noise).to(torch.uint8), y

    return Arrays(*draw(train), *draw(40), names=("a", "b", "c", "d"))


class Silent:
    """A watcher that only remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.lines: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        pass

    def epoch(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


def tiny_trainer(
    out: Path, over: Tree | None = None, watcher: Silent | None = None, train: int = 120
) -> yopo.train.Trainer:
    watcher = watcher or Silent()
    config = tiny_config(over)
    return yopo.train.Trainer(config, tiny_data(train), out, watcher, torch.device("cpu"))


def run_until_killed(out: str, over: Tree) -> None:
    """Resume and run on; a checkpoint at every step, so that kills hit the writing too."""
    torch.set_num_threads(1)
    yopo.train.CHECK_EVERY = 1
    trainer = tiny_trainer(Path(out), over)
    trainer.resume()
    trainer.run()


def dawdle(low: float, high: float, rng: random.Random) -> None:
    time.sleep(rng.uniform(low, high))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}
