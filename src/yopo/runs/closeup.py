"""A closer look at what an evaluation did: by class, by answer, at other radii, and in pictures."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import yopo
from yopo.attacks import pgd
from yopo.attacks.steps import step_size
from yopo.core import tensor_files
from yopo.core.crew import ALONE, Crew
from yopo.core.threat import L2, Linf, Threat
from yopo.data.source import Pictures, Rows
from yopo.data.streamed import read_ahead
from yopo.evaluation.network import Network, products
from yopo.evaluation.result import Result
from yopo.runs.folder import SHOWN, EvaluationFiles
from yopo.runs.shown import SAME, choose

CLASSES = 1000  # more are not told apart
CONFUSED = 20  # classes of a matrix that can be read
RADII = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # in parts of eps
AT_RADII = "pgd-10"
SAME_STEPS = 40  # of PGD, for the images that all networks are shown


@dataclass(frozen=True, slots=True)
class Seen:
    """What was evaluated, and with what."""

    model: nn.Module
    pictures: Pictures
    names: Sequence[str]  # of the classes
    threat: Linf | L2
    result: Result
    batch: int
    workers: int  # processes that read pictures
    crew: Crew = ALONE  # processes that look together

    @property
    def y(self) -> Tensor:
        """The labels (N,)."""
        return self.pictures.labels

    def answers(self, parts: Iterable[Tensor]) -> Tensor:  # (B, C, H, W), uint8 or in [0, 1]
        """The classes (N,) that the network answers with, in the precision of the evaluation."""
        net = Network.of(self.model, self.result.about["precision"], torch.empty(0))
        classes = [torch.empty(0, dtype=torch.long)]
        with torch.no_grad(), products("float32"):
            for part in parts:
                x = part.float() / 255 if part.dtype == torch.uint8 else part
                classes.append(net(x.to(net.device)).argmax(1).cpu())
        return torch.cat(classes)


def look(seen: Seen, written: EvaluationFiles, examples: bool, radii: bool) -> dict[str, Any]:
    """What an evaluation's file says beside the result, and the pictures if they are asked for.

    Of several processes the first writes them, which alone has them.
    """
    more: dict[str, Any] = {"classes": by_class(seen)}
    with seen.crew.all_or_none():
        mine = examples and seen.crew.rank == 0
        if mine and (counts := save_examples(written.examples, seen)) is not None:
            more["confusion"] = counts
    return more | ({"radii": at_radii(seen)} if radii else {})


def by_class(seen: Seen) -> list[dict[str, Any]]:
    """How many images of each class there are, are right, and withstand all attacks."""
    n = len(seen.names)
    if n > CLASSES:
        return []
    clean, standing = seen.result.outcomes["clean"].correct, seen.result.standing
    counts = (seen.y[rows].bincount(minlength=n).tolist() for rows in (..., clean, standing))
    keys = ("name", "images", "clean", "worst")
    return [dict(zip(keys, row, strict=True)) for row in zip(seen.names, *counts, strict=True)]


def confusion(seen: Seen, clean: Tensor, broken: dict[str, Tensor]) -> list[list[int]] | None:
    """How often each label (a row) was given each answer (a column), in the worst case.

    clean (N,): answers without an attack; broken: by attack, those to the images that it broke. Of
    several attacks that broke an image, the first counts.
    """
    n = len(seen.names)
    worst = clean.clone()
    for name in reversed(broken):
        worst[seen.result.outcomes[name].index] = broken[name]
    if n > CONFUSED or int(worst.max()) >= n:
        return None
    return (seen.y * n + worst).bincount(minlength=n * n).view(n, n).tolist()


def at_radii(seen: Seen) -> dict[str, Any]:
    """Accuracy under a short PGD at smaller and larger radii, those of the box and below.

    Balls of growing radius hold each other, so what is broken in one counts as broken in all that
    follow, and is not attacked again.
    """
    about, n = seen.result.about, len(seen.pictures)
    rows = seen.result.outcomes["clean"].correct.nonzero()[:, 0]
    radii = [part * seen.threat.eps for part in RADII]
    if isinstance(seen.threat, Linf):
        radii = [eps for eps in radii if eps <= 1]
    shares = []
    for eps in radii:
        if len(rows):
            result = yopo.evaluate(
                seen.model,
                Rows(seen.pictures, rows),
                type(seen.threat)(eps),
                AT_RADII,
                batch=seen.batch,
                seed=about["seed"],
                precision=about["precision"],
                checks=False,
                workers=seen.workers,
                together=seen.crew.world > 1,
            )
            rows = rows[result.correct[AT_RADII]]
        shares.append(len(rows) / n)
    return {"attack": AT_RADII, "eps": radii, "accuracy": shares}


def save_examples(path: Path, seen: Seen) -> list[list[int]] | None:
    """For each attack the adversarial images, their places among those evaluated, their labels.

    The clean images and what the network answers to both are there too: a reader of the file needs
    neither the data nor the network. So are a few images that do not depend on the network, under
    PGD whether it breaks them or not. Returned is the confusion.
    """
    tensors: dict[str, Tensor] = {}
    parts = torch.arange(len(seen.pictures)).split(seen.batch)
    clean = seen.answers(read_ahead(seen.pictures, parts, seen.workers))
    broken: dict[str, Tensor] = {}
    for name, outcome in seen.result.outcomes.items():
        if outcome.images is not None:
            broken[name] = seen.answers(outcome.images.split(seen.batch))
            tensors |= _pictures(name, outcome.images, broken[name], outcome.index, seen, clean)
    rows = choose(seen.y)
    adversarial = _same(seen, rows)
    tensors |= _pictures(SAME, adversarial, seen.answers([adversarial]), rows, seen, clean)
    facts = {key: str(seen.result.about[key]) for key in SHOWN}
    facts |= {"names": json.dumps(list(seen.names)), SAME: f"pgd-{SAME_STEPS}"}
    tensor_files.save_weights(path, tensors, facts)
    return confusion(seen, clean, broken)


def _pictures(
    name: str, images: Tensor, answers: Tensor, rows: Tensor, seen: Seen, clean: Tensor
) -> dict[str, Tensor]:
    held = {"images": images, "answers": answers, "index": rows, "labels": seen.y[rows]}
    held |= {"clean": seen.pictures.read(rows), "clean_answers": clean[rows]}
    return {f"{name}.{key}": value for key, value in held.items()}


def _same(seen: Seen, rows: Tensor) -> Tensor:
    seed = seen.result.about["seed"]
    return attacked(seen.model, seen.pictures.read(rows), seen.y[rows], seen.threat, seed)


def attacked(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, seed: int) -> Tensor:
    """Adversarial images of a few, x (B, C, H, W) uint8."""
    device = next(model.parameters(), x).device
    x, y = (x.float() / 255).to(device), y.to(device)
    step = step_size(threat, SAME_STEPS)
    generator = torch.Generator(device).manual_seed(seed)
    with products("float32"):
        images = pgd(model, x, y, threat, steps=SAME_STEPS, step=step, generator=generator)
    return images.cpu()
