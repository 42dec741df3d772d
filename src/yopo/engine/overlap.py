"""What gains speed beside compilation, and can be left out: streams and passes over the graphs.

Measured on one H200, PreAct-ResNet18, batch 256, bf16 (`records/speed.md`):

- Weight gradients on a second stream: YOPO-5-3 from 16.73 to 15.78 ms a step (version 10), 6%;
  natural training 5% (version 11). WRN-34-10 gains nothing.
- ReLU's masks from BatchNorm's input: YOPO-5-3 from 16.08 to 15.66 ms (version 14b), 2.6%.

To do without this file, let engine.py import `network.OneStream as Streams`.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from yopo.engine.network import OneStream, Pairs

_aten = torch.ops.aten


class Streams(OneStream):
    """On a GPU, convolutions' weight gradients are computed beside the rest of the backward pass.

    second: whether there is a second stream, `side`, for that.
    """

    def __init__(self, device: torch.device, second: bool) -> None:
        self.side = torch.cuda.Stream(device) if second else None
        self.in_use: list[Any] = []  # what the side reads: must not be freed before `settle`
        self.made_aside: list[Tensor] = []  # weight gradients of the last backward pass

    def options(self) -> dict[str, Any]:
        """The passes over the graphs, and what they need."""
        return inductor_options(overlap=self.side is not None)

    def gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Those of convolutions' weights may not be there before `settle`."""
        self.settle()
        self.made_aside.clear()  # of a pass that was broken off
        with _serving(self):
            return super().gradients(loss, leaves)

    def add(self, *groups: Pairs) -> None:
        """On the second stream too, after what is added."""
        if self.side is None:
            super().add(*groups)
            return
        here = {g.data_ptr() for _, g in groups[0]}
        if any(g.data_ptr() not in here for g in self.made_aside):
            # The compiler laid one out anew, on the first stream, which did not wait for it. This
            # pass is lost (it is a rehearsal); from now on there is one stream.
            self.settle()
            self.side = None
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            super().add(*groups)
        self.in_use.append(groups)

    def settle(self) -> None:
        """Wait for the second stream."""
        if self.side is not None and self.in_use:
            torch.cuda.current_stream().wait_stream(self.side)
            self.in_use.clear()


# ---------------------------------------------------------------- weight gradients on the side

_served: list[Streams | None] = [None]


@contextmanager
def _serving(streams: Streams) -> Iterator[None]:
    """Weight gradients in the block are computed on the second of these streams."""
    _served[0] = streams
    try:
        yield
    finally:
        _served[0] = None


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
        streams = _served[0]
        work = (grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups)
        if streams is None or streams.side is None:
            return _like(_aten.convolution_backward(*work, [False, True, False])[1], weight)
        streams.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams.side):
            made = _like(_aten.convolution_backward(*work, [False, True, False])[1], weight)
        streams.in_use.append((grad, x))
        streams.made_aside.append(made)
        return made

    weight_gradient.register_fake(lambda _grad, _x, weight, *_: torch.empty_like(weight))
    return torch.ops.yopo.weight_gradient.default


def _like(made: Tensor, weight: Tensor) -> Tensor:
    """The same values in the weight's own layout, as the compiler was promised."""
    if made.stride() == weight.stride():
        return made
    return torch.empty_like(weight).copy_(made)


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
