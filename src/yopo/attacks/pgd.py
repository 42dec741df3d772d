"""Projected gradient ascent on the loss, the standard attack."""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yopo.attacks.strongest import PerSample, Strongest
from yopo.core.checks import check_at_least, check_attack, check_choice, check_step, check_threat
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.losses import margin
from yopo.core.parallel import own_passes
from yopo.core.propagation import propagate
from yopo.core.threat import Threat
from yopo.core.undo import surely

LOSSES: dict[str, PerSample] = {
    "cross-entropy": partial(F.cross_entropy, reduction="none"),
    "margin": margin,
}


@surely
@own_passes()
def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    steps: int = 20,
    step: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    loss: Literal["cross-entropy", "margin"] = "cross-entropy",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Attack images x (B, ...) with labels y (B,); return adversarial images.

    model: run in eval mode. steps: of ascent on `loss`. step: the threat's own unless given.
    restarts: runs from other random starts. random_start: False begins at the images. generator: of
    the starts. The clean image and every iterate are candidates, so the result is misclassified if
    any of them is, and else has the largest loss among them.
    """
    check_at_least("steps", steps, 1)
    check_at_least("restarts", restarts, 1)
    check_choice("loss", loss, tuple(LOSSES))
    if restarts > 1 and not random_start:
        raise ValueError("restarts without random_start repeat the same attack; use restarts=1")
    check_threat(threat)
    step = threat.step if step is None else check_step(step)
    check_attack(model, x, y)
    with torch.inference_mode(False), eval_mode(model):
        x, y = x.detach().clone(), y.clone()  # clones of inference tensors are ordinary ones
        best = Strongest(Frozen(model), x, y, LOSSES[loss])
        for _ in range(restarts):
            eta = threat.start(best.x, generator) if random_start else torch.zeros_like(best.x)
            climb(best, eta, threat, steps=steps, step=step)
    return best.images


def climb(
    best: Strongest,
    eta: Tensor,
    threat: Threat,
    *,
    steps: int,
    step: float,
    until_broken: bool = False,
) -> None:
    """Take `steps` ascent steps from eta (B, ...); offer every iterate, the last one too.

    until_broken: an image that is misclassified is left alone from then on. The same images end
    misclassified, for fewer passes.
    """
    x, y, rows = best.x, best.y, None
    for _ in range(steps):
        here = best.at(eta, rows)
        at = propagate(best.f, here, lambda z: best.loss(z, y).sum(), weights=None)  # noqa: B023
        best.offer(eta, at.logits, rows)
        eta = threat.ascend(eta, at.grad, x, step=step)
        keep = best.standing(rows) if until_broken else None
        if keep is not None:
            if not len(keep):
                return
            x, y, eta = x[keep], y[keep], eta[keep]
            rows = keep if rows is None else rows[keep]
    best.offer(eta, rows=rows)
