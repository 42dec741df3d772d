"""Run the user's model without leaving a trace: no weight gradients, no moved statistics."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

Network = Callable[[Tensor], Tensor]
RngState = tuple[Tensor, Tensor | None]  # CPU, CUDA
T = TypeVar("T")


class Frozen:
    """The model with parameters that get no gradient and buffers that stay as they are.

    Parameters are detached, so backward passes skip the weight gradients; buffers are copied once,
    so BatchNorm in training mode writes its running statistics into the copies. Not through
    DistributedDataParallel, which has nothing to exchange and would count the pass as a step.
    """

    def __init__(self, model: nn.Module) -> None:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self._around = _Around(model)
        self._state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
        self._state |= _copies(dict(model.named_buffers()))

    def __call__(self, x: Tensor) -> Tensor:
        """Forward alone."""
        out: Tensor = self.run(lambda model: model(x))
        return out

    def run(self, work: Callable[[nn.Module], T], *, afresh: bool = False) -> T:
        """Do `work`, forward and backward: checkpointed layers run again on the way back.

        afresh: with the buffers as they were at first, not as earlier work left them.
        """
        state = self._state
        if afresh:
            state = state | {name: state[name].clone() for name in self._moving}
        with uncached():
            result: T = functional_call(self._around, state, (work,))
        return result

    @cached_property
    def _moving(self) -> list[str]:
        return [f"model.{name}" for name in moving(self._around.model)]


def moving(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a pass may change for the next, such as spectral_norm's.

    Not those of torch's BatchNorm: while it writes its statistics it does not read them.
    """
    names: set[str] = set()
    for path, module in model.named_modules():
        if not (isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")):
            prefix = f"{path}." if path else ""
            names |= {prefix + name for name, _ in module.named_buffers(recurse=False)}
    return {name: b for name, b in model.named_buffers() if name in names}  # a shared one once


def untouched(
    model: nn.Module, work: Callable[[], T], buffers: Mapping[str, Tensor] | None = None
) -> T:
    """Do `work` with copies of the model's buffers, so that BatchNorm's statistics stay.

    buffers: what to copy instead of the model's own of these names.
    """
    state = _copies(dict(model.named_buffers()) | dict(buffers or {}))
    with uncached():
        result: T = functional_call(_Around(model), state, (lambda _: work(),))
    return result


def _copies(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": b.clone() for name, b in buffers.items()}


class _Around(nn.Module):
    """Holds the model so that functional_call keeps it frozen while `work` is done on it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[nn.Module], T]) -> T:
        return work(self.model)


@contextmanager
def uncached() -> Iterator[None]:
    """Switch `parametrize.cached()` off in the block: passes here must not share their weights."""
    enabled = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = enabled


def made_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Tells whether a module was exchanged for another since."""
    return tuple(model.modules())


@contextmanager
def eval_mode(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Put every module into eval mode for the block, then give each its own flag back."""
    before = [(m, m.training) for m in model.modules()] if enabled else []
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        try:
            for module, training in before:
                if training and _drops_things(module):
                    module.train(True)
        finally:
            for module, training in before:
                module.training = training


def _drops_things(module: nn.Module) -> bool:
    """Whether its own train(True) may drop what it computed, in eval mode, from other weights."""
    train = type(module).train
    return train is not nn.Module.train and "mode" in inspect.signature(train).parameters


def parallel(model: nn.Module) -> list[DistributedDataParallel]:
    """Those of its modules that exchange gradients between processes."""
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Add the gradients found in the block to .grad if it succeeds; leave .grad alone if not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    exchanged = bool(parallel(model))
    if exchanged:  # what no_sync() left in .grad is exchanged with what is found, so it stays there
        before = [None if grad is None else grad.clone() for grad in before]
    else:
        for p in parameters:
            p.grad = None
    try:
        yield
    except BaseException:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        raise
    for p, grad in zip(parameters, before, strict=True):
        if grad is not None and not exchanged:
            p.grad = grad if p.grad is None else grad.add_(p.grad)


@contextmanager
def forked_rng(x: Tensor, state: RngState | None = None) -> Iterator[None]:
    """Random numbers drawn in the block (from `state` if given) leave the global stream alone."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        if state is not None:
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1], x.device)
        yield


def rng_state(x: Tensor) -> RngState:
    """The state of the random streams that a forward pass at x may draw from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether torch.compile was given some of its modules, inside which no hook is heard."""
    return any(
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None  # module.compile()
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def eager(enabled: bool) -> AbstractContextManager[object]:
    """Run compiled modules as they were written."""
    return torch.compiler.set_stance("force_eager") if enabled else nullcontext()


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given, or the model itself."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original
