"""Run the user's model without leaving a trace: no weight gradients, no moved statistics."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from yopo.core.parallel import Exchanges, Gradients, fsdp, is_spread, parallel
from yopo.core.undo import Undo, surely

Forward = Callable[[Tensor], Tensor]
RngState = tuple[Tensor, Tensor | None]  # CPU, CUDA
T = TypeVar("T")


Buffers = dict[str, Tensor | None]  # of one module, by name


class Frozen:
    """The model with parameters that get no gradient and buffers that stay as they are.

    While it runs, the parameters do not ask for gradients, so that passes keep nothing for them (a
    transformer's would keep twice as much: docs/design.md), and in the place of each buffer is a
    copy, so that BatchNorm in training mode writes its running statistics there. Both are put back
    afterwards, whatever happens. Nothing else is touched, but in a compiled network: there views
    stand in the parameters' places, too, because torch before 2.13 does not see that a flag
    changed, and would give the next pass, for the weights, code without their gradients. Parameters
    that are spread over processes keep their flag: FSDP2 takes it over when it first gathers. Not
    through DistributedDataParallel around the model, which has nothing to exchange and would count
    the pass as a step; nothing inside the model exchanges anything.
    """

    def __init__(self, model: nn.Module) -> None:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self._model = model
        spread = is_spread(model)
        self._parameters = [] if spread else list(model.parameters())
        self.modules = list(model.modules())
        self._exchanges = Exchanges(self.modules)
        self._compiled = has_compiled_parts(model) and not spread
        moved = _moved(self.modules)
        self._moves = [any(id(b) in moved for b in m._buffers.values()) for m in self.modules]
        self._copies = _copies(self.modules)

    def anew(self) -> "Frozen":
        """The same model with its buffers as they are now.

        Without looking at all of it again: while the model keeps its modules and their modes. Of
        BatchNorm's statistics no pass reads what another has moved, so those copies stay.
        """
        again = copy.copy(self)
        again._copies = _copies(self.modules, self._copies, self._moves)
        return again

    def __call__(self, x: Tensor) -> Tensor:
        """Forward alone."""
        out: Tensor = self.run(lambda model: model(x))
        return out

    @surely
    def run(self, work: Callable[[nn.Module], T], *, afresh: bool = False) -> T:
        """Do `work`, forward and backward: checkpointed layers run again on the way back.

        afresh: with the buffers as they were at first, not as earlier work left them.
        """
        copies = self._copies
        if afresh:
            memo: dict[int, Tensor] = {}
            pairs = zip(copies, self._moves, strict=True)
            copies = [_cloned(c, memo) if moves else c for c, moves in pairs]
        views = _views(self.modules) if self._compiled else nullcontext()
        frozen, alone = _no_gradients(self._parameters), self._exchanges.off()
        free = Undo(self._exchanges.free)
        with uncached(), alone, frozen, views, _exchanged(self.modules, copies), free:
            return work(self._model)


def _copies(
    modules: list[nn.Module], kept: list[Buffers] | None = None, anew: list[bool] | None = None
) -> list[Buffers]:
    """Each module's buffers as copies; one that several modules share stays one."""
    memo: dict[int, Tensor] = {}
    if kept is None or anew is None:
        return [_cloned(m._buffers, memo) for m in modules]
    each = zip(modules, kept, anew, strict=True)
    return [_cloned(m._buffers, memo) if new else old for m, old, new in each]


def _cloned(buffers: Mapping[str, Tensor | None], memo: dict[int, Tensor]) -> Buffers:
    copies: Buffers = {}
    for name, buffer in buffers.items():
        if buffer is not None and id(buffer) not in memo:
            memo[id(buffer)] = buffer.detach().clone()
        copies[name] = None if buffer is None else memo[id(buffer)]
    return copies


@contextmanager
def _exchanged(modules: list[nn.Module], copies: list[Buffers]) -> Iterator[None]:
    """Put copies in the place of the modules' own buffers; keep in `copies` what became of them."""
    own: list[Buffers] = [dict(m._buffers.items()) for m in modules]

    def put_back() -> None:
        for module, mine in zip(modules, own, strict=True):
            if module._buffers or mine:
                fill(module._buffers, mine)

    with Undo(put_back):
        for module, theirs in zip(modules, copies, strict=True):
            if theirs:
                fill(module._buffers, theirs)
        yield
        for i, module in enumerate(modules):
            if module._buffers:
                copies[i] = dict(module._buffers.items())


def fill(buffers: Buffers, values: Buffers) -> None:
    """Let a module have these buffers and no others.

    As many steps as there are names: TorchScript has a mapping of its own here.
    """
    for name, value in values.items():
        buffers[name] = value
    if len(buffers) > len(values):  # registered during the pass
        for name in [n for n in buffers if n not in values]:
            del buffers[name]


@contextmanager
def _no_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let the parameters ask for no gradient in the block."""
    asking = [p for p in parameters if p.requires_grad and p.is_leaf]

    def put_back() -> None:
        for p in asking:
            p.requires_grad_()

    with Undo(put_back):
        for p in asking:
            p.requires_grad_(False)
        yield


@contextmanager
def _views(modules: list[nn.Module]) -> Iterator[None]:
    """Put a view of each parameter in its place, a tensor that asks for no gradient."""
    own = [(m, dict(m._parameters)) for m in modules if type(m._parameters) is dict]
    memo = {id(p): p.detach() for _, mine in own for p in mine.values() if p is not None}

    def put_back() -> None:
        for module, mine in own:
            module._parameters.update(mine)

    with Undo(put_back):
        for module, mine in own:
            slots: dict[str, Any] = module._parameters
            slots.update({name: memo[id(p)] for name, p in mine.items() if p is not None})
        yield


def moving(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a pass may change for the next, such as spectral_norm's.

    Not those of torch's BatchNorm: while it writes its statistics it does not read them.
    """
    moved = _moved(model.modules())
    return {name: b for name, b in model.named_buffers() if id(b) in moved}  # a shared one once


def _moved(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of such buffers."""
    others = (m for m in modules if not _is_batchnorm(m))
    return {id(b) for m in others for b in m._buffers.values() if b is not None}


def _is_batchnorm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")


@surely
def untouched(
    model: nn.Module, work: Callable[[], T], buffers: Mapping[str, Tensor] | None = None
) -> T:
    """Do `work` with copies of the model's buffers, so that BatchNorm's statistics stay.

    buffers: what to copy instead of the model's own of these names.
    """
    modules, own = list(model.modules()), dict(model.named_buffers())
    memo = {id(own[name]): value.detach().clone() for name, value in (buffers or {}).items()}
    with uncached(), _exchanged(modules, [_cloned(m._buffers, memo) for m in modules]):
        return work()


@contextmanager
def uncached() -> Iterator[None]:
    """Switch `parametrize.cached()` off in the block: passes here must not share their weights."""
    enabled = parametrize._cache_enabled
    with Undo(lambda: setattr(parametrize, "_cache_enabled", enabled)):
        parametrize._cache_enabled = 0
        yield


def made_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Tells whether a module was exchanged for another since."""
    return tuple(model.modules())


@contextmanager
def eval_mode(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Put every module into eval mode for the block, then give each its own flag back."""
    before = [(m, m.training) for m in model.modules()] if enabled else []

    def put_back() -> None:
        try:
            for module, training in before:
                if training and _drops_things(module):
                    module.train(True)
        finally:
            for module, training in before:
                module.training = training

    with Undo(put_back):
        for module, _ in before:
            module.training = False
        yield


def _drops_things(module: nn.Module) -> bool:
    """Whether its own train(True) may drop what it computed, in eval mode, from other weights."""
    train = type(module).train
    return train is not nn.Module.train and "mode" in inspect.signature(train).parameters


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Add the gradients found in the block to .grad if it succeeds; leave .grad alone if not."""
    if parallel(model) or fsdp(model.modules()):
        # What was left there without an exchange is exchanged with what is found, so it stays.
        with Gradients(model).kept_unless_done():
            yield
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    succeeded = False

    def settle() -> None:
        for p, grad in zip(parameters, before, strict=True):
            more = p.grad
            if not succeeded:
                p.grad = grad
            elif grad is not None and more is not grad:  # else done already
                p.grad = grad
                if more is not None:
                    grad.add_(more)  # no interrupt comes between these two lines

    with Undo(settle):
        for p in parameters:
            p.grad = None
        yield
        succeeded = True


@contextmanager
def forked_rng(x: Tensor, state: RngState | None = None) -> Iterator[None]:
    """Random numbers drawn in the block (from `state` if given) leave the global stream alone."""
    before = rng_state(x)
    with Undo(lambda: _draw_from(before, x)):
        if state is not None:
            _draw_from(state, x)
        yield


def _draw_from(state: RngState, x: Tensor) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], x.device)


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
