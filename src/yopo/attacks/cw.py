"""Carlini and Wagner's attack, as the paper uses it."""

import torch
from torch import Tensor, nn

from yopo.attacks.strongest import Strongest
from yopo.core.checks import check_at_least, check_attack, check_positive, check_threat
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.losses import margin
from yopo.core.parallel import own_passes
from yopo.core.propagation import NO_WAY_BACK
from yopo.core.threat import Threat
from yopo.core.undo import surely


@surely
@own_passes()
def cw(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    c: float = 500.0,
    lr: float = 1e-2,
    steps: int = 100,
) -> Tensor:
    """Attack images x (B, ...) with labels y (B,); return adversarial images.

    `steps` of Adam with rate `lr` minimise ‖eta‖² + c·max(true logit − largest wrong logit, 0); eta
    is projected on the threat's ball and the box after every one. model: run in eval mode. Every
    iterate and the clean image are candidates.
    """
    check_at_least("steps", steps, 1)
    check_positive("lr", lr)
    check_positive("c", c)
    check_threat(threat)
    check_attack(model, x, y)
    with torch.inference_mode(False), eval_mode(model):
        x, y = x.detach().clone(), y.clone()  # clones of inference tensors are ordinary ones
        best = Strongest(Frozen(model), x, y, margin)
        descend(best, threat, c=c, lr=lr, steps=steps)
    return best.images


def descend(
    best: Strongest,
    threat: Threat,
    *,
    c: float = 500.0,
    lr: float = 1e-2,
    steps: int = 100,
    until_broken: bool = False,
) -> None:
    """Take `steps` Adam steps from the clean image; offer every iterate, the last one too.

    until_broken: an image that is misclassified is left alone from then on.
    """
    x, y, rows = best.x, best.y, None
    eta = torch.zeros_like(x).requires_grad_()
    adam = torch.optim.Adam([eta], lr=lr)
    for _ in range(steps):
        with torch.enable_grad():
            logits = best.f(best.at(eta, rows))
            if not logits.requires_grad:
                raise ValueError(NO_WAY_BACK)
            hinge = (-margin(logits, y)).clamp(min=0)
            objective = eta.square().sum() + c * hinge.sum()
            (grad,) = torch.autograd.grad(objective, eta)
        best.offer(eta.detach(), logits.detach(), rows)
        eta.grad = grad.nan_to_num(0, 0, 0)
        adam.step()
        with torch.no_grad():
            eta.copy_(threat.project(eta, x))
        keep = best.standing(rows) if until_broken else None
        if keep is not None:
            if not len(keep):
                return
            x, y = x[keep], y[keep]
            rows = keep if rows is None else rows[keep]
            eta = _shrunk(adam, eta, keep)
    best.offer(eta.detach(), rows=rows)


def _shrunk(adam: torch.optim.Adam, eta: Tensor, keep: Tensor) -> Tensor:
    """Rows `keep` of eta, with their moments; Adam acts on each coordinate by itself."""
    rest = eta.detach()[keep].requires_grad_()
    moments = adam.state.pop(eta)
    adam.state[rest] = {k: v[keep] if v.dim() else v for k, v in moments.items()}
    adam.param_groups[0]["params"] = [rest]
    return rest
