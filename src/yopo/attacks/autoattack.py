"""AutoAttack's stages, run by the package `pyautoattack` (extra `[autoattack]`).

The protocol is version "standard" of pyautoattack 0.2.0: apgd-ce (100 steps, 1 restart), apgd-t
(100 steps, 9 targets, 1 restart), fab-t (100 steps, 9 targets, 1 restart), square (5000 queries).
With fewer than 10 classes there are fewer targets: all wrong classes. With fewer than 4 there is no
apgd-t, whose loss compares four logits; `autoattack` is then the other three stages.

The package seeds the global random stream at the start of every batch and draws for the batch as a
whole, so apgd and square depend on where an image stands. For the same batches and seed the
results are the package's own, image by image; fab-t is not random.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from yopo.attacks.names import Attack
from yopo.core.frozen import Frozen, forked_rng
from yopo.core.threat import L2, Linf, Threat
from yopo.core.undo import Undo

# images, labels and clean logits of a batch -> adversarial images, which are wrong (B,)
Phase = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
LEAST_CLASSES = {"apgd-ce": 2, "apgd-t": 4, "fab-t": 2, "square": 2}


def check(threat: Threat, shape: Sequence[int], stages: Sequence[str]) -> None:
    """Refuse what the package cannot attack, before anything runs."""
    if not isinstance(threat, Linf | L2):
        raise ValueError(f"AutoAttack knows yopo.Linf and yopo.L2, got {type(threat).__name__}")
    if len(shape) != 4 and "square" in stages:
        raise ValueError(f"square expects images (N, C, H, W), got {tuple(shape)}; leave it out")
    _package()


def for_classes(attack: Attack, classes: int) -> Attack:
    """The attack with the stages that exist for so many classes; a stage by itself must."""
    short = [stage for stage in attack.stages if classes < LEAST_CLASSES[stage]]
    if not short:
        return attack
    there = tuple(stage for stage in attack.stages if stage not in short)
    if not there or len(attack.stages) == 1:
        others = ",".join(s for s, least in LEAST_CLASSES.items() if classes >= least)
        raise ValueError(
            f"{short[0]} needs at least {LEAST_CLASSES[short[0]]} classes, got {classes}; "
            f"the other stages are --attacks {others}"
        )
    return replace(attack, stages=there)


class Stages:
    """The package's four attacks on f, in the settings of its standard version."""

    def __init__(
        self, f: Frozen, threat: Threat, seed: int, classes: int, device: torch.device
    ) -> None:
        self.f, self.classes, self.seed = f, classes, seed
        norm = "L2" if isinstance(threat, L2) else "Linf"
        with quiet():
            self.package: Any = _package().AutoAttack(
                self._logits,
                norm=norm,
                eps=threat.eps,
                seed=seed,
                version="standard",
                device=device,
            )
        targets = min(self.package.apgd_targeted.n_target_classes, classes - 1)
        self.package.apgd_targeted.n_target_classes = targets
        self.package.fab.n_target_classes = targets
        self.package.fab.targeted = True

    def phases(self, names: Sequence[str]) -> list[Phase]:
        """One phase for each stage."""
        attacks = {
            "apgd-ce": self.package.apgd,
            "apgd-t": self.package.apgd_targeted,
            "fab-t": self.package.fab,
            "square": self.package.square,
        }
        return [self._stage(attacks[name]) for name in names]

    def _stage(self, attack: Any) -> Phase:  # noqa: ANN401
        def stage(x: Tensor, y: Tensor, _clean: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad(), forked_rng(x), float32_by_default(), quiet():
                attack.seed = self.seed
                images: Tensor = attack.perturb(x.float(), y)
                logits = self._logits(images)
                wrong = (logits.argmax(1) != y) & ~logits.isnan().any(1)
            return images.to(x.dtype), wrong

        return stage

    def _logits(self, x: Tensor) -> Tensor:
        # A copy: the model may write into its input. The package computes in float32 only.
        return self.f(x.clone()).float()


def _package() -> Any:  # noqa: ANN401
    try:
        import pyautoattack
    except ImportError:
        raise ImportError(
            "AutoAttack and its stages need the package pyautoattack: "
            "pip install pyautoattack==0.2.0"
        ) from None
    return pyautoattack


@contextmanager
def float32_by_default() -> Iterator[None]:
    """The package makes tensors of torch's default type and mixes them with float32."""
    before = torch.get_default_dtype()
    with Undo(lambda: torch.set_default_dtype(before)):
        torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back the package's log; the evaluation has checks of its own."""
    logger = logging.getLogger("auto-attack")
    before = logger.disabled
    with Undo(lambda: setattr(logger, "disabled", before)):
        logger.disabled = True
        yield
