"""Gradients between processes: one exchange for each optimizer step, and who takes care of it."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from yopo.core.digest import values_digest
from yopo.core.parallel import (
    fsdp_parameters,
    in_group,
    is_several,
    is_shard,
    is_spread,
    parallel,
    surrounding,
)
from yopo.core.undo import Undo

OURS = f"{Path(__file__).parents[1]}{os.sep}"
WORDS = 500  # bytes of what a process says that it could not do
_exchanging: WeakSet[Optimizer] = WeakSet()  # before each step
_withheld: WeakSet[Optimizer] = WeakSet()  # for now
_compared: WeakSet[Optimizer] = WeakSet()  # whose weights were seen to be the same everywhere
_passes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # backward calls, up to two


def exchange_gradients(optimizer: Optimizer) -> Callable[[], None]:
    """From now on every optimizer.step() first averages the gradients over all processes.

    For loops where neither DistributedDataParallel nor sharding does: call it once in every
    process, with equal weights in all. All gradients travel in one message; where some parameters
    are frozen, a small one goes ahead. m propagations, attack passes and Free's inner steps need no
    care: what is exchanged is what the step will use. With one process it does nothing.

    Returns a function that exchanges at once, in all processes, for what looks at gradients before
    the step: clipping, or a GradScaler, which may skip it.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner  # Lightning and others wrap it
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS tries as many steps as the loss of each process asks for; use SGD")
    if any(is_shard(p) for p in _parameters(optimizer)):
        raise ValueError(
            "the optimizer's parameters are DTensors, whose gradients are exchanged in backward() "
            "or not at all; leave exchange_gradients out, and give replicas of a tensor-parallel "
            "network to fully_shard"
        )
    if optimizer not in _exchanging:
        optimizer.register_step_pre_hook(_before_step)
        _exchanging.add(optimizer)
    return partial(_exchange, optimizer)


def exchanges(optimizer: Optimizer) -> bool:
    """Whether its steps begin with an exchange between processes, be it a group of one."""
    return optimizer in _exchanging and in_group()


@contextmanager
def withheld(optimizer: Optimizer) -> Iterator[None]:
    """Its steps do all that they do but send: in the block no process waits for another."""
    with Undo(lambda: _withheld.discard(optimizer)):
        _withheld.add(optimizer)
        yield


def agreed(wrong: str) -> str:
    """What went wrong in the first process in which something did, in all; "" if nothing did.

    All must ask, and nothing may be exchanged between what may fail and this.
    """
    if not in_group():
        return wrong
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    failed = torch.zeros(dist.get_world_size(), device=device)
    failed[dist.get_rank()] = bool(wrong)
    dist.all_reduce(failed)
    if not failed.any():
        return ""
    first, mine = int(failed.argmax()), wrong.encode()[:WORDS]
    words = torch.tensor([*mine, *bytes(WORDS - len(mine))], dtype=torch.uint8, device=device)
    dist.broadcast(words, first)
    said = bytes(words.tolist()).rstrip(b"\0").decode(errors="ignore")
    return f"process {first}: {said}" if is_several() else said


def is_first_here() -> bool:
    """Whether this is the first process of its machine; where nobody counted them, all are."""
    if many := int(os.environ.get("LOCAL_WORLD_SIZE", "0")):  # LOCAL_RANK may be 0 in all of them
        return dist.get_rank() % many == 0
    return os.environ.get("LOCAL_RANK", "0") == "0"


def watch(model: nn.Module, *, handed: bool = False) -> None:
    """Warn, once, if several processes train a model whose gradients nobody exchanges.

    At its second backward: the first may be a trial, before the optimizer is made.
    handed: a loss is handed over, so that a wrapper around this code sees its backward().
    """
    if not is_several():
        return
    before = _passes.get(model, 0)
    if before < 2:
        _passes[model] = before + 1
    if before != 1 or (handed and surrounding()):
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    if alone := _left_alone(model, trained):
        which = "this model" if alone == len(trained) else f"{alone} of this model's parameters"
        also = "" if alone == len(trained) else ", for each optimizer, or freeze what none trains"
        cure = f"call yopo.exchange_gradients(optimizer) once before the loop{also}, or give the "
        cure += "method the model inside DistributedDataParallel"
        if is_spread(model):
            cure = "give the whole network to fully_shard, on a mesh with tensor parallelism over "
            cure += "the dimension along which the data differ"
        warnings.warn(
            f"there are {dist.get_world_size()} processes, and nothing averages the gradients of "
            f"{which} over them, so each trains a network of its own; {cure}. If your loop "
            "averages them itself, all is well",
            stacklevel=_callers_level(),
        )


def _callers_level() -> int:
    """How far up, from who asks, the first line is that is not ours."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame, level = frame.f_back, level + 1
    return level


def differing(tensors: Iterable[Tensor]) -> list[int]:
    """The processes whose tensors are not, bit for bit, those of the first; all must ask."""
    digest = torch.tensor(list(bytes.fromhex(values_digest(*tensors))), dtype=torch.uint8)
    digest = digest.cuda() if dist.get_backend() == "nccl" else digest
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    return [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Exchange; gradients that a closure is yet to compute, after it."""
    named = "closure" in kwargs
    closure = kwargs["closure"] if named else (*args, None)[1]
    if closure is None:
        _exchange(optimizer)
        return None

    def with_exchange() -> object:
        loss = closure()
        _exchange(optimizer)
        return loss

    if named:
        return args, kwargs | {"closure": with_exchange}
    return (args[0], with_exchange, *args[2:]), kwargs


@torch.no_grad()
def _exchange(optimizer: Optimizer) -> None:
    """Average .grad over all processes; where one has none it counts as zero.

    Which parameters have one may differ, where a branch depends on the data. A gradient that no
    process has stays None, so that the optimizer passes over it as in one process.
    """
    if not in_group():
        return
    sends = optimizer not in _withheld
    if sends and optimizer not in _compared:
        if differing(_parameters(optimizer)):
            raise RuntimeError(
                "the processes begin with different weights, which averaged gradients would not "
                "bring together; call torch.manual_seed with one seed before the model is made, or "
                "load the same weights everywhere"
            )
        _compared.add(optimizer)
    if not (chosen := _with_gradients(_parameters(optimizer), sends)):
        return
    here = [p.grad is not None for p in chosen]
    kind = reduce(torch.promote_types, (p.dtype for p in chosen))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
    flags = torch.ones(len(here), dtype=kind, device=grads[0].device)
    if not all(here):  # else nothing is copied to the device, as a CUDA graph needs it
        flags.copy_(torch.tensor(here))
    flat = torch.cat([flags, *(g.reshape(-1).to(kind) for g in grads)])
    if sends:
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    anywhere, *parts = flat.split([len(chosen), *(g.numel() for g in grads)])
    torch._foreach_copy_(grads, [f.view_as(g) for f, g in zip(parts, grads, strict=True)])
    if not all(here):  # else there is no need to wait for the device
        for p, grad, some in zip(chosen, grads, (anywhere != 0).tolist(), strict=True):
            p.grad = grad if some else None


def _with_gradients(parameters: list[Tensor], asks: bool) -> list[Tensor]:
    """Those that may have a gradient: the same in all processes, if they ask.

    A frozen one may have some from before it was frozen, in one process alone, and the step would
    use it; so where some are frozen a message goes ahead that says which.
    """
    frozen = [p for p in parameters if not p.requires_grad]
    if not frozen or not asks:
        return [p for p in parameters if p.requires_grad or p.grad is not None]
    have = torch.tensor([p.grad is not None for p in frozen], dtype=torch.float32)
    have = have.to(frozen[0].device)
    dist.all_reduce(have)
    used = {id(p) for p, many in zip(frozen, have.tolist(), strict=True) if many}
    return [p for p in parameters if p.requires_grad or id(p) in used]


def _left_alone(model: nn.Module, trained: list[nn.Parameter]) -> int:
    """Of how many parameters no DistributedDataParallel, sharding or exchange averages .grad."""
    old = sys.modules.get("torch.distributed.fsdp")  # where it was never loaded, none is used
    if old and any(isinstance(m, old.FullyShardedDataParallel) for m in model.modules()):
        return 0
    exchanged = {id(p) for optimizer in _exchanging for p in _parameters(optimizer)}
    exchanged |= {id(p) for wrapped in parallel(model) for p in wrapped.parameters()}
    exchanged |= {id(p) for p in fsdp_parameters(model)}
    rest = [p for p in trained if id(p) not in exchanged]
    # Processes that tensor parallelism brings together see the same data; a DTensor says which.
    meshes = (p.device_mesh for p in rest if is_shard(p))  # type: ignore[attr-defined]
    return 0 if any(m.size() == dist.get_world_size() for m in meshes) else len(rest)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
