"""`yopo.evaluate`: attacks on a data set, checks, and a result to quote."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yopo.checks import check_at_least, check_choice, check_step
from yopo.evaluation import autoattack
from yopo.evaluation.card import norm, provenance, settings
from yopo.evaluation.journal import Journal, digest, weights_digest
from yopo.evaluation.names import parse_all
from yopo.evaluation.network import Precision
from yopo.evaluation.result import Result
from yopo.evaluation.suite import Progress, run
from yopo.threat import Threat

Batches = Iterable[Sequence[Tensor]]


def evaluate(
    model: nn.Module,
    data: Batches | tuple[Tensor, Tensor],
    threat: Threat,
    attacks: str | Sequence[str] = ("clean", "pgd-20"),
    *,
    samples: int | None = None,
    batch: int = 250,
    seed: int = 0,
    precision: Precision = "float32",
    step: float | None = None,
    examples: bool = False,
    state: Path | str | None = None,
    progress: Progress | None = None,
    about: Mapping[str, str] | None = None,
) -> Result:
    """Attack the model on a data set, in eval mode, and leave it as it was.

    data: batches of images in [0, 1] (or uint8) and labels, as a DataLoader gives, or the pair
    (x, y); all of it is held in memory, the first `samples` images if given.
    step: of PGD and cw-linf, 2.5·eps/steps by default. examples: keep the adversarial images.
    state: a folder for finished batches, from which a second call goes on; `result.forget()`
    removes them. progress: called with an attack's name, the part done and its accuracy so far.
    about: words for the card: "model", "data", "weights".
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    chosen = parse_all(attacks)
    check_at_least("batch", batch, 1)
    check_choice("precision", precision, ("float32", "bf16"))
    step = None if step is None else check_step(step)
    x, y = gather(data, samples)
    if stages := [stage for attack in chosen for stage in attack.stages]:
        autoattack.check(threat, x.shape, stages)
    sha = weights_digest(model)
    journal = None
    if state is not None:
        identity = digest(sha, x, y, threat, seed, precision, batch, step)
        journal = Journal(Path(state), identity, examples)
    outcomes = run(
        model,
        x,
        y,
        threat,
        chosen,
        batch=batch,
        seed=seed,
        precision=precision,
        step=step,
        examples=examples,
        memory=journal,
        progress=progress,
    )
    device = next(model.parameters(), x).device
    facts: dict[str, Any] = {
        "data": "images given by the caller",
        "images": len(x),
        "threat": norm(threat),
        "eps": threat.eps,
        "settings": {attack.name: settings(attack, threat, step) for attack in chosen},
        "weights": "as given by the caller",
        "weights_sha256": sha,
        "precision": precision,
        "seed": seed,
        "batch": batch,
        **provenance(model, device, chosen),
        **(about or {}),
    }
    forget = journal.clear if journal else lambda: None
    return Result(tuple(chosen), outcomes, facts, (), forget)


def gather(data: Batches | tuple[Tensor, Tensor], samples: int | None) -> tuple[Tensor, Tensor]:
    """The first `samples` images (N, ...) and labels (N,), or all."""
    if samples is not None:
        check_at_least("samples", samples, 1)
    pair = isinstance(data, tuple | list) and len(data) == 2
    batches: Any = [data] if pair and all(isinstance(t, Tensor) for t in data) else data
    xs, ys, n = [], [], 0
    for item in batches:
        if not (isinstance(item, tuple | list) and len(item) == 2 and _fits(*item)):
            raise ValueError(
                "expected batches of images (B, ...) and labels (B,) of one length, got "
                f"{_shown(item)}; each batch should be a pair of tensors"
            )
        xs.append(item[0])
        ys.append(item[1])
        n += len(item[1])
        if samples is not None and n >= samples:
            break
    if n == 0:
        raise ValueError("expected at least one image, got none; check the data set")
    if samples is not None and n < samples:
        raise ValueError(f"expected at most {n} samples, the images there are, got {samples}")
    shapes = {tuple(x.shape[1:]) for x in xs}
    if len(shapes) > 1:
        raise ValueError(f"expected images of one shape, got {' and '.join(map(str, shapes))}")
    return torch.cat(xs)[:samples], torch.cat(ys)[:samples]


def _fits(x: object, y: object) -> bool:
    return isinstance(x, Tensor) and isinstance(y, Tensor) and y.dim() == 1 and len(x) == len(y)


def _shown(item: object) -> str:
    parts = item if isinstance(item, tuple | list) else [item]
    shown = (tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in parts)
    return " and ".join(map(str, shown))
