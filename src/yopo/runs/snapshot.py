"""A run's state in memory: all tensors that it needs to go on."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import yopo
from yopo.core.parallel import in_group, is_shard, part, spread_like
from yopo.core.slots import Slots
from yopo.core.tensor_files import Tensors
from yopo.engine.ema import EMA
from yopo.runs import distributed

CARRIED = "method."  # begins the names of what the method carries
NETWORK, AVERAGE = ("model.", "hidden.", "slots."), ("ema.", "ema-hidden.", "ema-slots.")
OWN = (*NETWORK, *AVERAGE, "optimizer.", "rank-")  # those of the rest


class Snapshot:
    """The parts of a run that hold tensors; made before the first step."""

    def __init__(
        self, model: nn.Module, ema: EMA | None, optimizer: Optimizer, method: yopo.Method
    ) -> None:
        self.model, self.ema, self.optimizer, self.method = model, ema, optimizer, method
        self._followed = [(NETWORK, model, Slots(model))]
        if ema:
            self._followed.append((AVERAGE, ema.model, ema.slots))

    def take(self) -> dict[str, Tensor]:
        """This process's tensors as they are now, by name."""
        tensors: dict[str, Tensor] = {}
        for (shown, hidden, marks), model, slots in self._followed:
            tensors |= {shown + k: v for k, v in model.state_dict().items()}
            tensors |= {hidden + k: v for k, v in _hidden(model).items()}
            tensors |= {marks + k: v for k, v in slots.marks().items()}
        for i, p in enumerate(self._parameters()):
            tensors |= {f"optimizer.{i}.{k}": v for k, v in self._state(p).items()}
        return tensors | {f"{CARRIED}{k}": v for k, v in self.method.state_dict().items()}

    def copy(self, room: Tensors | None = None) -> Tensors:
        """The same, in memory of its own: in `room`, where that has it from before.

        To make room takes several times as long as to copy.
        """
        room = {} if room is None else room
        copied = Tensors()
        for name, tensor in self.take().items():
            there = room.get(name)
            if there is None or (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
                there = torch.empty_like(tensor, device="cpu", requires_grad=False)
            copied[name] = room[name] = there
            there.copy_(tensor.detach())
        return copied

    def is_finite(self) -> bool:
        """Whether no weight, average or state of the optimizer is NaN or infinite, in any process.

        Of tensors in parts each process looks at its own.
        """
        mine = {k: t for k, t in self.take().items() if not k.startswith(CARRIED)}
        parts = [part(t) for t in mine.values() if t.is_floating_point()]
        finite = all(bool(t.isfinite().all()) for t in parts)
        if not self.is_sharded:
            return finite
        device = next(self.model.parameters()).device
        return not distributed.anyone(not finite, device=device)[0]

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only a part of some tensors."""
        return any(is_shard(p) for p in self._parameters())

    def layout(self) -> Callable[[str, torch.Size], Tensor | None]:
        """Finds the tensor here that is in parts as one of that name is to be, if it is."""
        alike = self.take() | {f"optimizer.{i}": p for i, p in enumerate(self._parameters())}

        def find(name: str, shape: torch.Size) -> Tensor | None:
            there = alike.get(name, alike.get(name.rpartition(".")[0]))
            if there is None or not is_shard(there) or there.shape != shape:
                return None
            return there

        return find

    def gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """In the first process the tensors of all: its own, and of the others what is their own.

        These are buffers (BatchNorm's statistics, if not synchronised, and their averages) and what
        the method carries.
        They travel in one message; the other processes are left with what all have alike. Nothing
        changes in any process, so a run that is saved goes on as one that is not.
        """
        if not in_group():
            return tensors
        buffers, hidden = set[str](), tuple(names[1] for names, *_ in self._followed)
        for (shown, *_), model, _ in self._followed:
            buffers |= {shown + k for k, _ in model.named_buffers()}
        carried = [k for k in tensors if k.startswith(CARRIED)]
        theirs = [k for k in tensors if k in buffers or k.startswith(hidden)]
        alike = {k: v for k, v in tensors.items() if k not in {*carried, *theirs}}
        each_ones = distributed.gathered_by_first([tensors[k] for k in (*carried, *theirs)])
        if not each_ones:
            return alike
        sets = [dict(zip((*carried, *theirs), each, strict=True)) for each in each_ones]
        for key in carried:
            alike[key] = torch.cat([own[key] for own in sets])
        for key in theirs:
            alike[key] = sets[0][key]
            for rank, own in enumerate(sets[1:], 1):
                if not torch.equal(own[key], alike[key]):
                    alike[f"rank-{rank}.{key}"] = own[key]
        return alike

    def own(self, tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
        """Of the tensors of all processes, this one's; there may be more or fewer now.

        What the method carries for each image starts anew where it cannot be shared out evenly.
        """
        tensors = {self._named(k): v for k, v in tensors.items()}
        shared = {k: v for k, v in tensors.items() if not k.startswith("rank-")}
        mine = {k: tensors.get(f"rank-{rank}.{k}", v) for k, v in shared.items()}
        carried = {k: v for k, v in mine.items() if k.startswith(CARRIED)}
        even = {k: v.chunk(world)[rank] for k, v in carried.items() if len(v) % world == 0}
        return {k: v for k, v in mine.items() if k not in carried} | even

    def put_back(self, tensors: dict[str, Tensor]) -> None:
        """Make all parts what they were when `tensors` were taken in this process."""

        layout = self.layout()
        tensors = {k: spread_like(v, layout(k, v.shape)) for k, v in tensors.items()}

        def named(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        for (shown, hidden, marks), model, slots in self._followed:
            slots.fit(named(shown), named(hidden), named(marks))
            model.load_state_dict(named(shown))
            values, buffers = named(hidden), _hidden(model)
            for name in values.keys() & buffers.keys():
                buffers[name].copy_(values[name])
        for i, p in enumerate(self._parameters()):
            saved, there = named(f"optimizer.{i}."), self._state(p)
            for name, tensor in there.items():  # in place: a captured step knows it by its address
                tensor.copy_(saved.get(name, torch.zeros_like(tensor)))
            for name in saved.keys() - there.keys():
                value = saved[name]  # Adam counts its steps on the CPU
                self.optimizer.state[p][name] = (
                    value.clone() if name == "step" else torch.empty_like(p).copy_(value)
                )
        device = next(self.model.parameters()).device
        carried = {k: v.to(device, copy=True) for k, v in named(CARRIED).items()}
        self.method.load_state_dict(carried)

    def _named(self, key: str) -> str:
        """The name of a tensor now; earlier versions named what Free carries "free.eta"."""
        old = f"{type(self.method).__name__.lower()}."
        taken = key.startswith(OWN) or not key.startswith(old)
        return key if taken else CARRIED + key.removeprefix(old)

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        """The optimizer's tensors for a parameter: momentum, Adam's moments and count."""
        state = self.optimizer.state.get(p, {})
        return {k: v for k, v in state.items() if isinstance(v, Tensor)}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _hidden(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are no part of the state_dict (`persistent=False`)."""
    shown = model.state_dict()
    return {k: b for k, b in model.named_buffers() if k not in shown}
