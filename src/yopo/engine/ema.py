"""An exponential average of the weights, with an average of the BatchNorm statistics."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from yopo.core.parallel import fsdp, part
from yopo.core.slots import Slots

Follows = tuple[Tensor, Tensor]  # of the average and the network


class EMA:
    """`model` is a copy of the network that follows it slowly.

    The decay grows to its full value over the first steps, so that the initial weights are soon
    forgotten. BatchNorm's statistics are averaged too; other buffers are those of the network. For
    a network that `fully_shard` is to spread, make this first, and spread `model` in the same way.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if fsdp(model.modules()):
            raise ValueError(
                "fully_shard has spread the network, and what it spread cannot be copied; make the "
                "EMA before it, and give its .model to fully_shard in the same way"
            )
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._of = model
        self.slots = Slots(self.model)
        self.pair()

    def __repr__(self) -> str:
        """As EMA(ResNet, decay=0.998)."""
        return f"EMA({type(self.model).__name__}, decay={self.decay:g})"

    def update(self, step: int) -> None:
        """Move towards the network after its step number `step` (from 0)."""
        self.pair()
        self.move(self.weight(step))

    def state_dict(self) -> dict[str, Any]:
        """The average, as the network's own state_dict: a network like it can load it."""
        return dict(self.model.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this average."""
        self.slots.fit(state, {}, self.slots.marks())
        self.model.load_state_dict(state)

    def pair(self) -> None:
        """Look for the network's tensors anew, by name: model.to(...) gives it others.

        A forward pass may put others in the place of its buffers, too, fill empty ones or drop
        some; then so does the average.
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for module in fsdp([*modules.values(), *self._of.modules()]):
            module.reshard()  # a forward pass may have left weights of the one whole
        pairs = [(modules.get(path), module) for path, module in self._of.named_modules()]
        self._averaged, self._copied = list[Follows](), list[Follows]()
        followers = _Followers()
        for own, module in pairs:
            if own is None or own._parameters.keys() != module._parameters.keys():
                raise ValueError(
                    "the network has other modules or parameters than when its EMA was made; make "
                    "the EMA when it has all of them, as after a first pass"
                )
            for name, value in module._parameters.items():
                mine = own._parameters[name]
                if value is not None and mine is not None and followers.of(value) is None:
                    followers.add(mine, value)
                    if value.is_floating_point() or value.is_complex():
                        self._averaged.append((part(mine.detach()), part(value.detach())))
        for own, module in pairs:
            assert own is not None
            self._pair_buffers(own, module, followers)

    def _pair_buffers(self, own: nn.Module, module: nn.Module, followers: "_Followers") -> None:
        """Of one module; statistics of a BatchNorm have an average."""
        for name in [name for name in own._buffers if name not in module._buffers]:
            del own._buffers[name]
        for name, value in module._buffers.items():
            if value is not None and followers.of(value) is None:
                mine = followers.free(own._buffers.get(name), value)
                averages = isinstance(module, _NormBase) and value.is_floating_point()
                (self._averaged if averages else self._copied).append((mine, value))
                followers.add(mine, value)
            own._buffers[name] = None if value is None else followers.of(value)
        if own._non_persistent_buffers_set != module._non_persistent_buffers_set:
            own._non_persistent_buffers_set = {*module._non_persistent_buffers_set}

    def weight(self, step: int) -> float:
        """How far the average moves: 1 - decay."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def move(self, weight: float | Tensor) -> None:
        """Go this part of the way to the network."""
        averages, values = zip(*self._averaged, strict=True)
        if isinstance(weight, Tensor):  # which lerp does not take
            way = torch._foreach_sub(values, averages)
            torch._foreach_mul_(way, weight)
            torch._foreach_add_(averages, way)
        else:
            torch._foreach_lerp_(averages, values, weight)
        if self._copied:
            copies, others = zip(*self._copied, strict=True)
            torch._foreach_copy_(copies, others)


class _Followers:
    """Which tensor of the average follows which of the network: one each, shared as there."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def of(self, value: Tensor) -> Tensor | None:
        """The one that follows this, if there is one."""
        return self._of.get(id(value))

    def add(self, mine: Tensor, value: Tensor) -> None:
        """The one follows the other."""
        self._of[id(value)] = mine
        self._taken.add(id(mine))

    def free(self, mine: Tensor | None, value: Tensor) -> Tensor:
        """This one if it can follow, else a new one."""
        if mine is None or id(mine) in self._taken:
            return value.detach().clone()
        alike = (mine.shape, mine.dtype) == (value.shape, value.dtype)
        return mine if alike else value.detach().clone()
