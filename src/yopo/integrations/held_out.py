"""What a callback measures, and which processes take part."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from yopo.core.checks import check_at_least, check_threat
from yopo.core.parallel import is_spread
from yopo.core.threat import Threat
from yopo.evaluation.evaluate import evaluate
from yopo.evaluation.images import gather

PREFIX = "accuracy_"  # of an attack's name


class HeldOut:
    """Held-out images and the attacks on them, for every `every`-th evaluation."""

    def __init__(
        self,
        images: Iterable[Sequence[Tensor]] | tuple[Tensor, Tensor],
        threat: Threat,
        attacks: str | Sequence[str],
        every: int,
        options: dict[str, Any],
    ) -> None:
        check_threat(threat)
        check_at_least("every", every, 1)
        self.images, self.threat = gather(images, None), threat
        self.attacks, self.every, self.options = attacks, every, {"checks": False} | options

    def measure(
        self, network: nn.Module, *, first: bool, send: Callable[[Any], Any]
    ) -> dict[str, float]:
        """Accuracy by attack, as "accuracy_pgd-20", in all processes.

        The first one measures and `send`s it to the others; where weights are spread over
        processes, all measure.
        """
        shares: dict[str, float] = {}
        if first or _is_shared(network):
            with torch.inference_mode(False):
                done = evaluate(network, self.images, self.threat, self.attacks, **self.options)
            shares = {PREFIX + name: share for name, share in done.accuracy.items()}
        sent: dict[str, float] = send(shares)
        return sent


def _is_shared(network: nn.Module) -> bool:
    """Whether no process can run it alone: FSDP, the first or the second."""
    there = sys.modules.get("torch.distributed.fsdp")
    kinds = (there.FullyShardedDataParallel,) if there else ()
    return is_spread(network) or any(isinstance(m, kinds) for m in network.modules())
