"""What a run measures on images it does not train on: accuracy, and the drift of co-states."""

import hashlib
import random

import numpy as np
import torch
from torch import Tensor, nn

from yopo.build import build_threat
from yopo.config import Config
from yopo.diagnose import brief
from yopo.evaluation.names import parse
from yopo.evaluation.suite import run as attack_all


def mix(*parts: object) -> int:
    """A seed made from any values, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def seed_all(seed: int) -> None:
    """Every global stream that a model may draw from: torch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def commonest(y: Tensor) -> float:
    """The share of the commonest label: the accuracy of always giving one answer."""
    return float(y.unique(return_counts=True)[1].max()) / len(y)


def accuracies(
    model: nn.Module,
    x: Tensor,  # (N, C, H, W) uint8
    y: Tensor,
    config: Config,
    share: int,
) -> tuple[float, float]:
    """Clean and PGD accuracy by float32's verdict, in batches, seeded.

    share: images of a training batch that one process has; it has room for twice as many here.
    """
    threat, attack = build_threat(config.threat), parse(f"pgd-{config.evaluate.steps}")
    outcomes = attack_all(
        model,
        x,
        y,
        threat,
        [attack],
        batch=max(250, 2 * share),  # no weight gradients, so there is room
        seed=mix(config.seed, "evaluate"),
        precision="tf32" if next(model.parameters()).is_cuda else "float32",
    )
    return outcomes["clean"].accuracy, outcomes[attack.name].accuracy


def drift(model: nn.Module, x: Tensor, y: Tensor, config: Config) -> dict[str, float]:
    """Drift of frozen co-states, at the method's own split and n."""
    method, device = config.method.model_dump(), next(model.parameters()).device
    return brief(
        model,
        x.to(device) / 255,
        y.to(device),
        build_threat(config.threat),
        first_layer=method.get("first_layer") or (method.get("layers") or [None])[0],
        n=method.get("n") or 10,
        generator=torch.Generator(device).manual_seed(mix(config.seed, "diagnose")),
    )
