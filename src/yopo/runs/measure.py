"""What a run measures on images it does not train on: accuracy, and the drift of co-states."""

import torch
from torch import Tensor, nn

from yopo.attacks.names import parse
from yopo.core.random import mix
from yopo.data.source import InMemory
from yopo.evaluation.images import Data
from yopo.evaluation.network import Network
from yopo.evaluation.suite import Tell
from yopo.evaluation.suite import run as attack_all
from yopo.pmp.diagnose import brief
from yopo.runs.build import build_threat
from yopo.runs.settings import Config


def commonest(y: Tensor) -> float:
    """The share of the commonest label: the accuracy of always giving one answer."""
    return float(y.unique(return_counts=True)[1].max()) / len(y)


def accuracies(
    model: nn.Module,
    x: Tensor,  # (N, C, H, W) uint8
    y: Tensor,
    config: Config,
    share: int,
    tell: Tell | None = None,
) -> tuple[float, float]:
    """Clean and PGD accuracy by float32's verdict, in batches, seeded.

    share: images of a training batch that one process has; it has room for twice as many here.
    """
    threat, attack = build_threat(config.threat), parse(f"pgd-{config.evaluate.steps}")
    net = Network.of(model, "tf32" if next(model.parameters()).is_cuda else "float32", x)
    outcomes = attack_all(
        net,
        Data.of(net, InMemory(x, y)),
        threat,
        [attack],
        batch=max(250, 2 * share),  # no weight gradients, so there is room
        seed=mix(config.seed, "evaluate"),
        progress=tell,
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
