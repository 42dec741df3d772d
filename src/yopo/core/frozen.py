"""Run the user's model without leaving a trace: no weight gradients, no moved statistics."""

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from yopo.core.parallel import Exchanges, Gradients, fsdp, is_spread, may_be_spread, parallel
from yopo.core.undo import Undo, surely

Forward = Callable[[Tensor], Tensor]
RngState = tuple[Tensor, Tensor | None]  # CPU, CUDA
T = TypeVar("T")


Buffers = dict[str, Tensor | None]  # of one module, by name
Memo = dict[Hashable, Tensor]  # copies, by the tensor's id and by where its memory is


class Frozen:
    """The model with parameters that get no gradient and buffers that stay as they are.

    While it runs, the parameters do not ask for gradients, so that passes keep nothing for them (a
    transformer's would keep twice as much: docs/design.md), and in the place of each buffer is a
    copy, so that BatchNorm in training mode writes its running statistics there. Both are put back
    afterwards, whatever happens. Nothing else is touched, but in a compiled network: there views
    stand in the parameters' places, too, because torch before 2.13 does not see that a flag
    changed, and would give the next pass, for the weights, code without their gradients. Parameters
    that are spread over processes keep their flag: FSDP2 takes it over when it first gathers. Not
    through DistributedDataParallel, around the model or inside, which has nothing to exchange and
    would count the pass as a step.
    """

    def __init__(self, model: nn.Module) -> None:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self._model = model
        spread = is_spread(model)
        self.modules = list(model.modules())
        slots = (p for m in self.modules if not spread for p in m._parameters.values())
        self._parameters = list({id(p): p for p in slots if p is not None}.values())
        if any(p.is_inference() for p in self._parameters):
            raise ValueError(
                "the network was made under torch.inference_mode(), so nothing can be "
                "differentiated through it; make it, or load it, outside"
            )
        self._exchanges = Exchanges(self.modules)
        self._compiled = any(map(_is_compiled, self.modules)) and not spread
        moved = _moved(self.modules)
        self._moves = [any(id(b) in moved for b in m._buffers.values()) for m in self.modules]
        self._copies = _copies(self.modules)

    def anew(self) -> "Frozen":
        """The same model with its buffers as they are now.

        Without looking at all of it again: while the model keeps its modules and their modes. Of
        BatchNorm's statistics no pass reads what another has moved, so those copies stay, unless
        a module's own code names them.
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
            memo: Memo = {}
            pairs = zip(copies, self._moves, strict=True)
            copies = [_cloned(c, memo) if moves else c for c, moves in pairs]
        views = _views(self.modules) if self._compiled else nullcontext()
        frozen, alone = _no_gradients(self._parameters), self._exchanges.off()
        free = Undo(self._exchanges.free)
        past = self._exchanges.gone_round()
        with uncached(), alone, past, frozen, views, _exchanged(self.modules, copies), free:
            return work(self._model)


def _copies(
    modules: list[nn.Module], kept: list[Buffers] | None = None, anew: list[bool] | None = None
) -> list[Buffers]:
    """Each module's buffers as copies; one that several modules share stays one."""
    memo: Memo = {}
    if kept is None or anew is None:
        return [_cloned(m._buffers, memo) for m in modules]
    each = zip(modules, kept, anew, strict=True)
    return [_cloned(m._buffers, memo) if new else old for m, old, new in each]


def _cloned(buffers: Mapping[str, Tensor | None], memo: Memo) -> Buffers:
    copies: Buffers = {}
    for name, buffer in buffers.items():
        if buffer is not None and id(buffer) not in memo:
            memo[id(buffer)] = _clone(buffer, memo)
        copies[name] = None if buffer is None else memo[id(buffer)]
    return copies


def _clone(buffer: Tensor, memo: Memo) -> Tensor:
    """A copy; where others see the same memory, the copies do too."""
    plain = type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta
    if not plain or not buffer.numel():
        return buffer.detach().clone()
    storage = buffer.untyped_storage()
    if (place := (buffer.device, storage.data_ptr())) not in memo:
        memo[place] = copied = buffer.detach().clone()
        alone = copied.untyped_storage().nbytes() == storage.nbytes()
        if alone and copied.stride() == buffer.stride():
            return copied
        memo[place] = buffer.new_empty(0).set_(storage.clone())
    kept = memo[place].untyped_storage()
    empty = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    return empty.set_(kept, buffer.storage_offset(), buffer.shape, buffer.stride())


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

    Not those of torch's BatchNorm, unless a module around it reads them: while it writes its
    statistics it does not.
    """
    moved = _moved(model.modules())
    return {name: b for name, b in model.named_buffers() if id(b) in moved}  # a shared one once


def _moved(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of such buffers: all, where a module reads the statistics of a BatchNorm inside."""
    modules = list(modules)
    others = [m for m in modules if not _is_batchnorm(m)]
    read = any(_reads_statistics(kind) for kind in {type(m) for m in others})  # type: ignore[arg-type]
    there = modules if read else others
    return {id(b) for m in there for b in m._buffers.values() if b is not None}


@cache
def _reads_statistics(kind: type[nn.Module]) -> bool:
    """Whether its code names a BatchNorm's statistics, as batch renormalisation and QAT's does."""
    own = [c for c in kind.__mro__ if c not in nn.Module.__mro__]
    functions = [getattr(v, "fget", v) for c in own for v in vars(c).values()]
    codes = [f.__code__ for f in functions if isinstance(f, FunctionType)]
    return any(not {"running_mean", "running_var"}.isdisjoint(code.co_names) for code in codes)


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
    memo: Memo = {id(own[name]): value.detach().clone() for name, value in (buffers or {}).items()}
    with uncached(), _exchanged(modules, [_cloned(m._buffers, memo) for m in modules]):
        return work()


@contextmanager
def uncached() -> Iterator[None]:
    """Switch `parametrize.cached()` off in the block: passes here must not share their weights.

    Nor autocast's casts of them, where FSDP2 may be in use: a cast that is kept from an earlier
    pass hands its gradient on after FSDP2 has exchanged those of a later one, so it would be lost.
    """
    enabled, casts = parametrize._cache_enabled, torch.is_autocast_cache_enabled()

    def put_back() -> None:
        parametrize._cache_enabled = enabled
        torch.set_autocast_cache_enabled(casts)

    with Undo(put_back):
        parametrize._cache_enabled = 0
        if may_be_spread():
            torch.set_autocast_cache_enabled(False)
        yield


def made_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Tells whether a module was exchanged for another since."""
    return tuple(model.modules())


@contextmanager
def eval_mode(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Put every module into eval mode for the block, then give each its own flag back.

    A network's own train(flag) is called, as model.eval() would: it may switch noise off, or drop
    what it computed from other weights. What it does to parameters on the way (LoRA adds to them,
    others freeze some) is undone, bit for bit.
    """
    before = [(m, m.training) for m in model.modules()] if enabled else []
    asked = [m for m, training in before if training and _has_its_own_train(m)]
    parameters = list(model.parameters()) if asked else []
    asking = [p.requires_grad for p in parameters]
    values = [p.detach().clone() for p in parameters]

    def put_back() -> None:
        try:
            for module in asked:
                module.train(True)
        finally:
            for module, training in before:
                module.training = training
            for p, asks, value in zip(parameters, asking, values, strict=True):
                p.requires_grad_(asks)
                p.data.copy_(value)  # a graph that is alive does not count it as a change

    with Undo(put_back):
        for module in asked:
            module.train(False)
        for p, asks in zip(parameters, asking, strict=True):
            p.requires_grad_(asks)
        for module, _ in before:
            module.training = False
        yield


def _has_its_own_train(module: nn.Module) -> bool:
    """Whether it has a train(flag) of its own, which eval() calls by position, whatever its name.

    Not a train() that is another thing, as train(epochs).
    """
    if type(module).train is nn.Module.train:
        return False
    signature = inspect.signature(module.train)
    try:
        signature.bind(False)
    except TypeError:  # eval() could not call it either
        return False
    first = next(iter(signature.parameters.values()))
    named = first.name in ("mode", "training") or first.kind is first.VAR_POSITIONAL
    return named or isinstance(first.default, bool) or first.annotation in (bool, "bool")


@contextmanager
def all_or_nothing(model: nn.Module, trained: Iterable[nn.Parameter]) -> Iterator[None]:
    """Add the gradients found in the block to .grad if it succeeds; leave .grad alone if not.

    trained: the model's parameters, and those that a loss may have.
    """
    if parallel(model) or fsdp(model.modules()):
        # What was left there without an exchange is exchanged with what is found, so it stays.
        with Gradients(model).kept_unless_done():
            yield
        return
    parameters = [p for p in trained if p.requires_grad]
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
    with Undo(lambda: draw_from(before, x)):
        if state is not None:
            draw_from(state, x)
        yield


def draw_from(state: RngState, x: Tensor) -> None:
    """Let the random streams that a forward pass at x may draw from go on from this state."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], x.device)


def rng_state(x: Tensor) -> RngState:
    """The state of the random streams that a forward pass at x may draw from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether torch.compile was given some of its modules, inside which no hook is heard."""
    return any(map(_is_compiled, model.modules()))


def _is_compiled(module: nn.Module) -> bool:
    own = vars(module)  # to ask a module for what it lacks takes long
    return (
        "_orig_mod" in module._modules
        or own.get("_compiled_call_impl") is not None  # module.compile()
        or hasattr(
            own.get("forward", getattr(type(module), "forward", None)), "_torchdynamo_orig_callable"
        )
    )


def eager(enabled: bool) -> AbstractContextManager[object]:
    """Run compiled modules as they were written."""
    return torch.compiler.set_stance("force_eager") if enabled else nullcontext()


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given, or the model itself."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original
