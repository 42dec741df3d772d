"""`yopo.evaluate`: attacks on a data set, checks, and a result to quote."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yopo.attacks import autoattack
from yopo.attacks.names import Attack, Own, parse_all
from yopo.attacks.steps import step_size
from yopo.core.checks import (
    check_at_least,
    check_choice,
    check_images,
    check_module,
    check_step,
    check_targets,
    check_threat,
)
from yopo.core.crew import ALONE, Crew, Team
from yopo.core.digest import values_digest, weights_digest
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.parallel import on_gathered, own_passes
from yopo.core.propagation import no_logits
from yopo.core.threat import Threat
from yopo.core.undo import surely
from yopo.evaluation.card import norm, provenance, settings
from yopo.evaluation.images import Data, Labelled, gather
from yopo.evaluation.journal import Journal, told
from yopo.evaluation.network import Network, Precision, products
from yopo.evaluation.probe import answers
from yopo.evaluation.result import Result
from yopo.evaluation.suite import Outcome, Tell, run
from yopo.evaluation.warnings import SAMPLE, Suspicion, after, before

if TYPE_CHECKING:
    from yopo.data.source import Pictures

SAME = "a network, images or settings"  # in which processes must not differ
STARTS = "starts 2"  # how random starts are drawn; 1 was a generator for each image


@surely
@on_gathered
@own_passes()
def evaluate(
    model: nn.Module,
    data: "Labelled | tuple[Tensor, Tensor] | Pictures",
    threat: Threat,
    attacks: str | Sequence[str | Own] = ("clean", "pgd-20"),
    *,
    samples: int | None = None,
    batch: int = 250,
    seed: int = 0,
    precision: Precision = "float32",
    step: float | None = None,
    compile: bool = False,
    examples: bool = False,
    checks: bool = True,
    state: Path | str | None = None,
    progress: Tell | None = None,
    about: Mapping[str, str] | None = None,
    workers: int = 0,
    together: bool = False,
) -> Result:
    """Attack the model on a data set, in eval mode, and leave it as it was.

    data: batches of images in [0, 1] (or uint8) and labels, as a DataLoader gives, the pair (x, y),
    or what has labels, shape and read(rows) (docs/data.md); of these the first `samples` images, if
    given. Batches of more than a GiB of images are gone over anew for each attack, in which they
    must come in the same order.
    attacks: names, and functions `attack(model, x, y, threat, generator)` of your own that return
    images (docs/extending.md); what leaves ball or box is refused.
    batch: images at a time. seed: of random starts.
    step: of PGD and cw-linf; 2.5·eps/steps (in L2 at least eps/4) unless given.
    precision: "tf32" lets attacks multiply in TF32, as PyTorch does by default on GPUs; where
    float32 does not agree that an image is broken, it is attacked anew in float32. "bf16"
    evaluates the network under autocast, which is another network.
    compile: pays for long attacks on a GPU. examples: keep the adversarial images.
    checks: look for signs that the numbers mislead (docs/warnings.md), for some 90 passes.
    state: a folder for finished batches, from which a second call goes on, but not for attacks of
    your own; `result.forget()` removes them. progress: called with an attack's name ("autoattack:
    apgd-ce" in a stage of it), the part done and its accuracy so far.
    about: words for the card: "model", "data", "weights".
    workers: processes that read images ahead, if `data` has read(rows).
    together: all processes of the group make this call with the same arguments, deal the batches
    out among them and get the same result, but the adversarial images, which the first one gets.
    """
    crew = Crew.of_group() if together else ALONE
    with crew.all_or_none():
        step = _checked(model, threat, batch, precision, step)
        team = Team.of(model)
        if together:
            team.refuse_dealing()
        chosen = parse_all(attacks)
        pictures = gather(data, samples)
        if stages := [stage for attack in chosen for stage in attack.stages]:
            autoattack.check(threat, (len(pictures), *pictures.shape), stages)
        net = Network.of(model, precision, pictures.read(torch.arange(1)))
        images = Data.of(net, pictures, workers)
        classes = check_data(net, images)
        chosen = [autoattack.for_classes(attack, classes) for attack in chosen]
        weights_sha256, settings = weights_digest(model), (seed, precision, batch, step, STARTS)
        same = values_digest(weights_sha256, images.looks(), *settings, [a.name for a in chosen])
    crew.check_same(same, SAME)
    images_sha256 = images.digest(batch, crew)
    crew.check_same(images_sha256, SAME)
    digests = {"weights_sha256": weights_sha256, "images_sha256": images_sha256}
    with crew.all_or_none():
        team.check_same(values_digest(images_sha256, seed, batch, step, [a.name for a in chosen]))
        warnings = suspicious(net, images, threat, chosen, step) if checks else []
    journal = None
    if state is not None:
        with crew.all_or_none():  # and no process keeps a batch before all have looked
            identity = values_digest(*digests.values(), *settings, told(threat))
            journal = Journal(Path(state), identity, examples, first=crew.rank == 0)
            journal.meet(_answers(net, images))
    if compile:
        net.speed_up()
    attack = partial(run, net, images, threat, chosen, batch=batch, seed=seed, step=step, crew=crew)
    outcomes = attack(examples=examples, memory=journal, progress=progress)
    if checks:
        warnings += after(_separate(outcomes), images.y.cpu(), classes, threat)
    facts = {"images": len(images), "seed": seed, "batch": batch, "precision": precision} | digests
    facts |= _facts(model, net.device, threat, chosen, step) | dict(about or {})
    return Result(outcomes, facts, tuple(warnings), journal.clear if journal else lambda: None)


def _checked(
    model: nn.Module, threat: Threat, batch: int, precision: str, step: float | None
) -> float | None:
    """The step, if all of it will do."""
    check_module(model)
    check_threat(threat)
    check_at_least("batch", batch, 1)
    check_choice("precision", precision, ("float32", "tf32", "bf16"))
    return None if step is None else check_step(step)


def _facts(
    model: nn.Module,
    device: torch.device,
    threat: Threat,
    attacks: Sequence[Attack],
    step: float | None,
) -> dict[str, Any]:
    """What the card says, unless the caller knows better."""
    return {
        "data": "given by the caller",
        "threat": norm(threat),
        "eps": threat.eps,
        "settings": {a.name: settings(a, threat, step) for a in attacks},
        "weights": "as given by the caller",
        **provenance(model, device, attacks),
    }


def check_data(net: Network, data: Data) -> int:
    """Refuse images and labels that cannot be evaluated; the number of classes if they can."""
    x, y = data.pictures.read(torch.arange(1)), data.y
    if x.dtype != torch.uint8:
        check_images(x, nn.Identity())
    if y.dtype != torch.long:
        raise ValueError(f"expected labels of type int64, got {y.dtype}; use y.long()")
    with torch.no_grad(), products("float32"), eval_mode(net):
        logits = Frozen(net)(data.images(torch.arange(1)))
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise ValueError(no_logits(logits))
    classes = logits.shape[1]
    check_targets(y, y, classes)
    return classes


def suspicious(
    net: Network, data: Data, threat: Threat, attacks: Sequence[Attack], step: float | None
) -> list[Suspicion]:
    """Probe the model on images taken evenly, in the precision of the evaluation."""
    n = min(len(data), SAMPLE)
    rows = torch.arange(n) * len(data) // n
    fewest = min((a for a in attacks if a.kind == "pgd"), key=lambda a: a.steps, default=None)
    steps = fewest.steps if fewest else 20
    step = step_size(threat, steps) if step is None or fewest is None else step
    probed = net if net.precision == "bf16" else net.model
    with products("float32"), torch.autocast(net.device.type, enabled=False):
        return before(probed, data.images(rows), data.labels(rows), threat, step=step, steps=steps)


def _answers(net: Network, data: Data) -> Tensor:
    """By which to know the network again."""
    rows = torch.arange(min(len(data), 8))
    with products("float32"):
        return answers(net, data.images(rows), data.labels(rows))


def _separate(outcomes: Mapping[str, Outcome]) -> dict[str, Tensor]:
    """What each attack left, with AutoAttack's stages under their own names."""
    stages = {k: v for outcome in outcomes.values() for k, v in outcome.after.items()}
    return stages | {name: outcome.correct for name, outcome in outcomes.items()}
