"""Networks that exchange by themselves: inside DistributedDataParallel, or spread by FSDP2.

Of the m weight passes of a step only the last need exchange gradients, attack passes never
(`unexchanged`); and weights that are spread can stay whole from pass to pass (`gathered`). Networks
that Lightning Fabric wrapped know its own backward passes; ours are let through (`own_passes`).
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from yopo.core.undo import Undo, forward_replaced

F = TypeVar("F", bound=Callable[..., object])


def in_group() -> bool:
    """Whether this process is one of a group, and has to take part in what it exchanges."""
    return dist.is_available() and dist.is_initialized()


def is_several() -> bool:
    """Whether there are others in it."""
    return in_group() and dist.get_world_size() > 1


def parallel(model: nn.Module) -> list[DistributedDataParallel]:
    """Those of its modules that are wrapped in DistributedDataParallel."""
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def surrounding() -> DistributedDataParallel | None:
    """The one whose forward pass this code is in, as Lightning's training_step is."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def fsdp(modules: Iterable[nn.Module]) -> list[Any]:
    """Those that `fully_shard` was given."""
    if not may_be_spread():
        return []
    there = sys.modules["torch.distributed.fsdp"]
    return [m for m in modules if isinstance(m, there.FSDPModule)]


def may_be_spread() -> bool:
    """Whether FSDP2 may be in use: where it was never loaded, it is not."""
    return in_group() and "torch.distributed.fsdp" in sys.modules


def is_shard(t: Tensor) -> bool:
    """Whether it is a DTensor: spread over processes by FSDP2, tensor parallelism or both."""
    return hasattr(t, "full_tensor")


def is_spread(model: nn.Module) -> bool:
    """Whether some of its parameters are, also while FSDP2 has gathered them."""
    if not in_group():
        return False
    return bool(fsdp(model.modules())) or any(is_shard(p) for p in model.parameters())


# ---------------------------------------------------------------- Fabric

FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")  # one package, two names
IN_BACKWARD = "_in_fabric_backward"


@contextmanager
def own_passes() -> Iterator[None]:
    """Backward passes in the block are nobody's training step.

    Where Lightning Fabric's precision or strategy has a backward() of its own, as at bf16-mixed,
    its networks refuse every other; in the block they take them as they take its own.
    """
    there = [sys.modules[name] for name in FABRIC if name in sys.modules]
    before = [getattr(module, IN_BACKWARD, False) for module in there]

    def put_back() -> None:
        for module, flag in zip(there, before, strict=True):
            setattr(module, IN_BACKWARD, flag)

    with Undo(put_back):
        for module in there:
            setattr(module, IN_BACKWARD, True)
        yield


@contextmanager
def training_step(method: str) -> Iterator[None]:
    """The block leaves gradients in .grad: what Fabric says of that in a sentence of ours."""
    try:
        yield
    except RuntimeError as error:
        if "fabric.backward" not in str(error):
            raise
        raise ValueError(
            f"{method}.backward fills .grad, and this network wants fabric.backward, which may "
            "scale; use loss = method(x, y) and fabric.backward(loss)"
        ) from None


# ---------------------------------------------------------------- one exchange for each step


@contextmanager
def unexchanged(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Passes of `model` in the block exchange no gradients; the first weight pass after it does.

    enabled: False leaves all as it is.
    """
    with Exchanges(model.modules()).off(enabled):
        yield


def check_exchanging(model: nn.Module, why: str) -> None:
    """Refuse a model that was told not to exchange its gradients, for this reason."""
    if Exchanges(model.modules()).are_off:
        raise ValueError(
            f"{why}, and without an exchange each process would train a network of its own; leave "
            "no_sync() and set_requires_gradient_sync(False) out"
        )


class Exchanges:
    """What exchanges gradients, or gathers weights, among these modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules) if in_group() else []
        self._wrapped = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._groups = [group for m in fsdp(modules) for group in _groups(m)]

    @property
    def are_off(self) -> bool:
        """Whether a weight pass would now keep its gradients to itself, as under no_sync()."""
        groups = (group.reduce_grads and group.all_reduce_grads for group in self._groups)
        return not all((*groups, *(m.require_backward_grad_sync for m in self._wrapped)))

    @contextmanager
    def gone_round(self) -> Iterator[None]:
        """Passes in the block run in what DistributedDataParallel wraps, not in the wrapper.

        It counts no step for them and sends nothing, so that a process may make them alone.
        """
        with ExitStack() as round_them:
            for wrapper in self._wrapped:
                round_them.enter_context(_gone_round(wrapper))
            yield

    @contextmanager
    def off(self, enabled: bool = True) -> Iterator[None]:
        """No pass in the block exchanges gradients."""
        before = [(group, group.reduce_grads, group.all_reduce_grads) for group in self._groups]
        synced = [(m, m.require_backward_grad_sync) for m in self._wrapped]

        def put_back() -> None:
            for m, flag in synced:
                m.require_backward_grad_sync = flag
            for group, reduce, all_reduce in before:
                group.reduce_grads, group.all_reduce_grads = reduce, all_reduce

        with Undo(put_back):
            for m in self._wrapped if enabled else ():
                # A static graph is learnt in the first pass, which has to exchange.
                if not m.static_graph or m._static_graph_delay_allreduce_enqueued:
                    m.require_backward_grad_sync = False  # as in its no_sync()
            for group in self._groups if enabled else ():
                group.reduce_grads = group.all_reduce_grads = False
            yield

    def spread(self) -> None:
        """Let parameters be this process's parts: gradients are of those, once exchanged."""
        for group in self._groups:
            group.reshard()

    def free(self) -> None:
        """Free whole weights that a pass left, as FSDP2's root keeps its own after a forward."""
        for group in self._groups:
            if group.reshard_after_backward:
                group.reshard()


@contextmanager
def _gone_round(wrapper: DistributedDataParallel) -> Iterator[None]:
    with forward_replaced(wrapper, lambda *args, **kwargs: wrapper.module(*args, **kwargs)):
        yield


# ---------------------------------------------------------------- weights


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Weights that `fully_shard` spread over processes are whole in each, within the block.

        with yopo.gathered(model):
            method.backward(x, y)
        optimizer.step()

    They are gathered once, not in every pass, at the price of memory for all of them. All
    processes enter together; then each may make as many attack passes as it likes. Once gradients
    were exchanged, or the optimizer made a step, weights are spread again, so that clipping and
    zero_grad() find what they look for, and the next pass gathers anew. Other models stay as they
    are.
    """
    modules = fsdp(model.modules())
    if not modules:
        yield
        return
    for root in _roots(modules):
        root._get_fsdp_state()._lazy_init()  # decides what the root does after a forward pass
    mine = [group for module in modules for group in _groups(module)]
    before = [(group, group.post_forward_mesh_info, group.reshard_after_backward) for group in mine]
    parts = {id(p.sharded_param): p.sharded_param for group in mine for p in group.fsdp_params}
    spread = Exchanges(modules).spread

    def stepped(optimizer: Optimizer, *_: object) -> None:
        if any(id(p) in parts for group in optimizer.param_groups for p in group["params"]):
            spread()

    def reduced(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(spread)  # the pass may come by here again

    hooks: list[RemovableHandle] = []

    def put_back() -> None:
        for handle in hooks:
            handle.remove()
        for group, forward, backward in before:
            group.post_forward_mesh_info, group.reshard_after_backward = forward, backward
        Exchanges(modules).free()

    with Undo(put_back):
        hooks.append(register_optimizer_step_post_hook(stepped))
        for p in parts.values():
            if p.requires_grad:
                hooks.append(p.register_post_accumulate_grad_hook(reduced))
        for group in mine:
            group.post_forward_mesh_info, group.reshard_after_backward = None, False
        for waiting in [module.unshard(async_op=True) for module in modules]:
            waiting.wait()
        yield


def on_gathered(work: F) -> F:
    """A function whose first argument is a model, run while that model's weights are whole."""

    @wraps(work)
    def run(model: nn.Module, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        with gathered(model) if isinstance(model, nn.Module) else nullcontext():
            return work(model, *args, **kwargs)

    return cast(F, run)


def whole(t: Tensor) -> Tensor:
    """All of a tensor that may be spread over processes; all of them must ask."""
    return t.full_tensor() if is_shard(t) else t  # type: ignore[attr-defined]


def part(t: Tensor) -> Tensor:
    """What this process holds of a tensor that may be spread; writing into it writes into t."""
    return t.to_local() if is_shard(t) else t  # type: ignore[attr-defined]


def spread_like(t: Tensor, other: Any) -> Tensor:  # noqa: ANN401
    """This process's part of a whole tensor, spread as the other one is; nothing is sent."""
    if not is_shard(other) or is_shard(t):
        return t
    from torch.distributed.tensor import distribute_tensor

    there = t.to(other.device_mesh.device_type)
    return distribute_tensor(there, other.device_mesh, other.placements, src_data_rank=None)


# ---------------------------------------------------------------- gradients


class Gradients:
    """A copy of all that a model's .grad holds, to be put back after an error.

    Passes without an exchange leave theirs in .grad, or in places of FSDP2's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._roots = _roots(fsdp(model.modules()))
        self._shards = _shards(model)
        holders = {id(p): p for p in (*model.parameters(), *fsdp_parameters(model))}
        self._model = model
        self._grads = [(p, _copy(p.grad)) for p in holders.values()]
        self._left = [(p, _copy(p.unsharded_accumulated_grad)) for p in self._shards]

    def put_back(self) -> None:
        """Into .grad, and FSDP2's modules into the state between two passes."""
        for root in self._roots:
            if hasattr(root, "reset_iter_state"):  # torch 2.11 and later
                root.reset_iter_state()
        for p in fsdp_parameters(self._model):
            p.grad = None
        for p, grad in self._grads:
            p.grad = grad
        for shard, grad in self._left:
            shard.unsharded_accumulated_grad = grad

    @contextmanager
    def kept_unless_done(self) -> Iterator[None]:
        """Put it back if the block does not come to its end."""
        done = False
        with Undo(lambda: None if done else self.put_back()):
            yield
            done = True


def fsdp_parameters(model: nn.Module) -> list[Tensor]:
    """FSDP2's two forms of each of its parameters; the whole one is there after the first pass."""
    both = ((p.sharded_param, getattr(p, "_unsharded_param", None)) for p in _shards(model))
    return [p for pair in both for p in pair if p is not None]


def _shards(model: nn.Module) -> list[Any]:
    return [p for m in fsdp(model.modules()) for group in _groups(m) for p in group.fsdp_params]


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.clone()


def _groups(module: Any) -> list[Any]:  # noqa: ANN401
    """What FSDP2 gathers and reduces in one message each; torch has setters for it, no getters."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # older torch: one at most
    return [state._fsdp_param_group] * bool(state._fsdp_param_group) if several is None else several


def _roots(modules: list[Any]) -> list[Any]:
    """Those that are inside no other."""
    inside = {id(m) for module in modules for m in module.modules() if m is not module}
    return [m for m in modules if id(m) not in inside]
