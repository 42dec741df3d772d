"""A compiled network for the engine: what is done once a step instead of once a propagation."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from yopo.core.first_layer import Cut, Split
from yopo.core.propagation import Objective, Propagation
from yopo.core.threat import Linf, Threat

_aten = torch.ops.aten


class Compiled(nn.Module):
    """The network, or its parts f0 and g, compiled.

    cast: under bf16 autocast, cast the weights of convolutions and linear layers once for each
    optimizer step, not in every pass; `refresh` must come after weights were changed.
    overlap: on a GPU, compute convolutions' weight gradients on a second stream, beside the rest
    of the backward pass; `settle` must come before gradients are read.
    also: what else the loss may train, as parameters of its own.
    """

    def __init__(
        self, *parts: nn.Module, cast: bool, overlap: bool, also: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        compiled: list[Any] = [torch.compile(part, dynamic=False) for part in parts]
        self.parts = nn.Sequential(*compiled)
        self.training = self.parts.training = parts[0].training  # not those of the user's modules
        self._weights: list[Tensor] = [p for p in self.parameters() if p.requires_grad]
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._weights):
            raise ValueError("a parameter has a hook on its gradient")
        self._narrow: dict[str, Tensor] = {}  # cast weights by name, and the weights themselves
        self._wide: list[Tensor] = []
        self.side = torch.cuda.Stream(self._weights[0].device) if overlap else None
        self.in_use: list[Any] = []  # what the side reads: must not be freed before `settle`
        self.found: list[Tensor] = []  # weight gradients of one backward pass, made on the side
        if cast:
            wide = dict(self.parts.named_parameters())
            self._narrow = {
                name: wide[name].detach().bfloat16().requires_grad_()
                for name in _cast_by_autocast(self.parts)
                if wide[name].requires_grad
            }
            self._wide = [wide[name] for name in self._narrow]
        pairs = zip(self._wide, self._narrow.values(), strict=True)
        leaves = {id(wide): narrow for wide, narrow in pairs}
        self._leaves: list[Tensor] = [leaves.get(id(w), w) for w in self._weights]
        self._beside = [*self._wide, *also]  # the loss may reach these without the network

    def forward(self, x: Tensor) -> Tensor:
        """Logits of x."""
        if not self._narrow:
            out: Tensor = self.parts(x)
            return out
        narrow: dict[str, Tensor] = self._narrow
        if not any(p.requires_grad for p in self.parts.parameters()):  # frozen for an attack
            narrow = {name: w.detach() for name, w in narrow.items()}
        out = functional_call(self.parts, narrow, (x,), tie_weights=False)
        return out

    def refresh(self) -> None:
        """Cast the weights anew."""
        if self._narrow:
            with torch.no_grad():
                torch._foreach_copy_(list(self._narrow.values()), self._wide)

    def differentiate(self, loss: Tensor, x: Tensor | None) -> None:
        """As loss.backward(), all additions to .grad at once."""
        self.settle()
        self.found.clear()  # of a pass that was broken off
        leaves = [*self._leaves, *self._beside, *([] if x is None else [x])]
        with _overlapped(self):
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        if x is not None:
            x.grad = grads[-1]
        through, past = grads[: len(self._weights)], grads[len(self._weights) :]
        found = [(w, g) for w, g in zip(self._weights, through, strict=True) if g is not None]
        beside = [(w, g) for w, g in zip(self._beside, past, strict=False) if g is not None]
        if self.side is None:
            _accumulate(found)
            _accumulate(beside)
            return
        here = {g.data_ptr() for _, g in found}
        if any(g.data_ptr() not in here for g in self.found):
            # The compiler laid one out anew, on the first stream, which did not wait for it. This
            # pass is lost (it is a rehearsal); from now on there is one stream.
            self.settle()
            self.side = None
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            _accumulate(found)
            _accumulate(beside)
        self.in_use.append(grads)

    def settle(self) -> None:
        """Wait for the weight gradients."""
        if self.side is not None and self.in_use:
            torch.cuda.current_stream().wait_stream(self.side)
            self.in_use.clear()


def _cast_by_autocast(module: nn.Module) -> list[str]:
    """Names of the weights that every pass under autocast would cast."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    found = [n for n, m in module.named_modules() if isinstance(m, kinds)]
    names = dict(module.named_parameters())
    return [f"{n}.{kind}" for n in found for kind in ("weight", "bias") if f"{n}.{kind}" in names]


def _accumulate(found: list[tuple[Tensor, Tensor]]) -> None:
    """Add gradients of any precision to .grad."""
    first = [(p, g) for p, g in found if p.grad is None]
    again = [(p.grad, g) for p, g in found if p.grad is not None]
    for p, _ in first:
        p.grad = torch.empty_like(p)  # laid out as the optimizer wants it
    copy, add = _compiled_sums()
    if first:
        copy([p.grad for p, _ in first], [g for _, g in first])
    if again:
        add([total for total, _ in again], [g for _, g in again])


@cache
def _compiled_sums() -> tuple[Callable[..., None], Callable[..., None]]:
    """Copies and sums of many tensors in few kernels."""

    def copy(totals: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_copy_(totals, grads)

    def add(totals: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_add_(totals, [g.to(t.dtype) for t, g in zip(totals, grads, strict=True)])

    return torch.compile(copy, dynamic=False), torch.compile(add, dynamic=False)


# ---------------------------------------------------------------- weight gradients on the side

_running: list[Compiled | None] = [None]


@contextmanager
def _overlapped(network: Compiled) -> Iterator[None]:
    """Weight gradients found in the block are computed on the network's second stream."""
    _running[0] = network
    try:
        yield
    finally:
        _running[0] = None


@cache
def _weight_gradient() -> Any:  # noqa: ANN401
    """The operator that the compiled backward pass calls."""

    @torch.library.custom_op("yopo::weight_gradient", mutates_args=())
    def weight_gradient(
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> Tensor:
        network = _running[0]
        work = (grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups)
        if network is None or network.side is None:
            return _like(_aten.convolution_backward(*work, [False, True, False])[1], weight)
        network.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(network.side):
            found = _like(_aten.convolution_backward(*work, [False, True, False])[1], weight)
        network.in_use.append((grad, x))
        network.found.append(found)
        return found

    weight_gradient.register_fake(lambda _grad, _x, weight, *_: torch.empty_like(weight))
    return torch.ops.yopo.weight_gradient.default


def _like(found: Tensor, weight: Tensor) -> Tensor:
    """The same values in the weight's own layout, as the compiler was promised."""
    if found.stride() == weight.stride():
        return found
    return torch.empty_like(weight).copy_(found)


def split_backward(graph: torch.fx.Graph) -> None:
    """Let convolutions' weight gradients be computed apart from their input gradients."""
    if any(_may_become_in_place(node) and not _on_its_own(node) for node in graph.nodes):
        return  # it would write over what the second stream still reads
    for node in list(graph.nodes):
        if node.target is not _aten.convolution_backward.default:
            continue
        args, parts = node.args, {user.args[1]: user for user in node.users}
        outputs = list(parts[1].users) if 1 in parts else []
        if args[7] or args[10] != [True, True, False] or 0 not in parts:
            continue
        if not outputs or any(user.op != "output" for user in outputs):
            continue  # something on the first stream would read it
        with graph.inserting_before(node):
            weight = graph.call_function(
                _weight_gradient(), (*args[:3], args[4], args[5], args[6], args[9])
            )
            pair = graph.call_function(node.target, (*args[:10], [True, False, False]))
            grad = graph.call_function(operator.getitem, (pair, 0))
        weight.meta, grad.meta = dict(parts[1].meta), dict(parts[0].meta)
        pair.meta = dict(node.meta) | {"val": (node.meta["val"][0], None, None)}
        parts[1].replace_all_uses_with(weight)
        parts[0].replace_all_uses_with(grad)
        for user in parts.values():
            graph.erase_node(user)
        graph.erase_node(node)


def _may_become_in_place(node: torch.fx.Node) -> bool:
    """Whether the compiler, later, may let this operator write into its input."""
    words = ("scatter", "index_put", "auto_functionalized", "triton_kernel_wrapper", "c10d")
    return any(word in str(node.target) for word in words)


def _on_its_own(node: torch.fx.Node) -> bool:
    """Whether what it writes into was made for that alone, as in the backward pass of a slice."""
    base = node.args[0] if node.args else None
    if not str(node.target).startswith("aten.") or not isinstance(base, torch.fx.Node):
        return False
    made = str(base.target).startswith(("aten.full", "aten.zeros", "aten.new_zeros", "aten.empty"))
    return made and all(_may_become_in_place(user) for user in base.users)


# ---------------------------------------------------------------- what the backward pass reads


def masks_from_inputs(graph: torch.fx.Graph) -> None:
    """Let a ReLU's backward pass look at its input, where that is normalised by the batch.

    BatchNorm's own backward pass reads what it is computed from, so the ReLU's output, one tensor
    more, is not read; the mask is the same.
    """
    aten = torch.ops.aten
    for relu in graph.find_nodes(op="call_function", target=aten.relu.default):
        if _is_normalised(relu.args[0]):
            for user in list(relu.users):
                if user.target is aten.le.Scalar and user.args[1] == 0:
                    user.replace_input_with(relu, relu.args[0])


def _is_normalised(node: Any) -> bool:  # noqa: ANN401
    """Whether it is (x - mean) / deviation * weight + bias, as the compiler writes BatchNorm."""
    aten, passed = torch.ops.aten, []
    cast = torch.ops.prims.convert_element_type.default
    while node.target in (cast, aten.mul.Tensor, aten.add.Tensor):
        passed.append(node.target)
        node = node.args[0]
    if node.target is not aten.sub.Tensor or passed.count(aten.add.Tensor) > 1:
        return False
    mean = node.args[1]
    while isinstance(mean, torch.fx.Node) and mean.target in (
        aten.unsqueeze.default,
        operator.getitem,
    ):
        mean = mean.args[0]
    return isinstance(mean, torch.fx.Node) and mean.target is aten.var_mean.correction


def inductor_options(overlap: bool) -> dict[str, Any]:
    """Settings of the compiler under which the networks are compiled."""
    # combo_kernels gains 1%, for a longer warm-up: not kept (records/speed.md).
    options: dict[str, Any] = {
        "joint_custom_post_pass": _pass(masks_from_inputs, 1),
        # Such a mask reads six tensors; above four the compiler would write its result down.
        "realize_reads_threshold": 7,
    }
    if overlap:
        _weight_gradient()  # what the compiler kept from another process calls it at once
        options |= {
            "post_grad_custom_post_pass": _pass(split_backward, 3),
            # The second stream still reads buffers that the first has no more use for.
            "allow_buffer_reuse": False,
            "inplace_buffers": False,
        }
    return options


def _pass(rewrite: Callable[[torch.fx.Graph], None], version: int) -> Any:  # noqa: ANN401
    """As the compiler takes it; a new version is not served what it kept of an old one."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            rewrite(graph)

        def uuid(self) -> str:
            return f"yopo {rewrite.__name__} {version}"

    return Pass()


# ---------------------------------------------------------------- f0 as a function of its own


class CompiledSplit(Split):
    """The n inner steps as one compiled function, where f0 is a module of its own."""

    def __init__(
        self, model: nn.Module, f0: nn.Sequential, *, known: Cut, ascend: Callable[..., Tensor]
    ) -> None:
        super().__init__(model, known=known)
        self._module, self._ascend = f0, ascend

    def propagate(self, x: Tensor, objective: Objective, *, weights: float | None) -> Propagation:
        """One full propagation that also leaves the inner loop."""
        at = super().propagate(x, objective, weights=weights)

        def climb(threat: Threat, x: Tensor, eta: Tensor, n: int) -> Tensor:
            with torch.no_grad():
                own = _kernel(self._module, x) if self._ascend is Linf.ascend and n > 1 else None
                if own is None:
                    f0, ascend = self._module, self._ascend
                    return _climb()(f0, ascend, threat, at.p, x, eta, at.grad, n)
                return own(self._module[0], at.p, x, eta, at.grad, threat.eps, threat.step, n)

        return replace(at, climb=climb)


def _kernel(f0: nn.Module, x: Tensor) -> Callable[..., Tensor] | None:
    """Our own kernel, if Triton is here and it is made for f0."""
    try:
        from yopo.engine import kernel as kernels
    except ImportError:
        return None
    return kernels.climb if kernels.fits(f0, x) else None


@cache
def _climb() -> Callable[..., Tensor]:
    """As `hamiltonian.ascend`."""

    def climb(
        f0: nn.Module,
        ascend: Callable[..., Tensor],
        threat: Threat,
        p: Tensor,
        x: Tensor,
        eta: Tensor,
        grad: Tensor,
        n: int,
    ) -> Tensor:
        for s in range(n):
            if s > 0:
                pulled: Any = torch.func.vjp(f0, x + eta)[1](p)
                grad = pulled[0]
            eta = ascend(threat, eta, grad, x)
        return eta

    compiled: Any = torch.compile(climb, dynamic=False)
    return compiled  # type: ignore[no-any-return]
