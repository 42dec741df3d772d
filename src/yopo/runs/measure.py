"""What a run measures on images it does not train on: accuracy, and the drift of co-states."""

import math

import torch
from torch import Tensor, nn

from yopo.attacks.names import parse
from yopo.core.crew import Crew
from yopo.core.parallel import gathered
from yopo.core.random import mix
from yopo.data.source import Pictures
from yopo.evaluation.images import Data
from yopo.evaluation.network import Network
from yopo.evaluation.suite import Tell
from yopo.evaluation.suite import run as attack_all
from yopo.pmp.diagnose import brief
from yopo.runs import distributed
from yopo.runs.build import build_threat
from yopo.runs.settings import Config


def commonest(y: Tensor) -> float:
    """The share of the commonest label: the accuracy of always giving one answer."""
    return float(y.unique(return_counts=True)[1].max()) / len(y)


def accuracies(
    model: nn.Module,
    pictures: Pictures,
    config: Config,
    share: int,
    tell: Tell | None = None,
    workers: int = 0,
) -> tuple[float, float]:
    """Clean and PGD accuracy by float32's verdict, in batches, seeded.

    All processes of a run call this together, and share out the batches. share: images of a
    training batch that one process has; it has room for twice as many here.
    """
    threat, attack = build_threat(config.threat), parse(f"pgd-{config.evaluate.steps}")
    crew, batch = Crew.of_group(), max(250, 2 * share)  # no weight gradients, so there is room
    if crew.world > 1:
        batch = min(batch, math.ceil(len(pictures) / crew.world))  # so that each has some
        distributed.same_everywhere(model.buffers())  # they evaluate one network
    net = Network.of(
        model, "tf32" if next(model.parameters()).is_cuda else "float32", torch.empty(0)
    )
    with gathered(model):
        outcomes = attack_all(
            net,
            Data.of(net, pictures, workers),
            threat,
            [attack],
            batch=batch,
            seed=mix(config.seed, "evaluate"),
            progress=tell,
            crew=crew,
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
