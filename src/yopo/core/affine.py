"""Whether a value in the autograd graph is an affine function of the input."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from yopo.core.propagation import OtherWayError, Prefix

Edge = tuple[Node, int]  # a value in the autograd graph: the node and which of its outputs

# Autograd nodes of operations that are linear in each single input.
_LINEAR = frozenset(
    "Addmm Alias AvgPool2D AvgPool3D Bmm Clone ConstantPadNd Convolution Div Expand Flip Im2Col "
    "Mean Mm Mul Mv Neg Permute PixelUnshuffle ReflectionPad1D ReflectionPad2D "
    "Repeat ReplicationPad1D ReplicationPad2D ReshapeAlias Roll Rsub Select Slice Squeeze Sum T "
    "ToCopy Transpose Unfold UnsafeView Unsqueeze UpsampleBilinear2D UpsampleNearest2D View "
    # Of FSDP2, which returns what it gets, and of DTensors, which change hands.
    "RegisterPostBackwardFunction _FromTorchTensor _ToTorchTensor Redistribute".split()
)
# Those that stay linear when several of their inputs depend on x.
_ADDITIVE = frozenset("Add Cat Stack Sub".split())


def walk(start: Edge, without: Edge | None = None) -> Iterator[Node]:
    """Every node between `start` and the input, not going through the value `without`."""
    todo, seen = [start], {start}
    while todo:
        edge = todo.pop()
        if edge == without:
            continue
        yield edge[0]
        following = {(n, i) for n, i in edge[0].next_functions if n is not None}
        todo += following - seen
        seen |= following


def reaches(start: Edge, x: Tensor, without: Edge | None = None) -> bool:
    """Whether a way leads from this value to the input x, not going through the value `without`."""
    return any(getattr(node, "variable", None) is x for node in walk(start, without))


def is_linear(edge: Edge, x: Tensor) -> bool:
    """Whether every operation between the input x and this value is linear in the input.

    An operation not known to be linear only costs speed: the inner loop is then run in full.
    """
    there = _behind(edge, x)
    for node in there:
        name = node.name()
        if name.endswith("AccumulateGrad"):
            continue
        operation = name.rstrip("0123456789").removesuffix("Backward")
        inputs = [i for i, (following, _) in enumerate(node.next_functions) if following in there]
        if operation in _ADDITIVE:
            continue
        if operation not in _LINEAR or len(inputs) != 1:
            return False
        if operation == "Div" and inputs != [0]:
            return False
    return True


def _behind(edge: Edge, x: Tensor) -> set[Node]:
    """The nodes between a value and x; parameters that ask for gradients have others."""
    nodes = list(walk(edge))
    above: dict[Node, list[Node]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None:
                above.setdefault(following, []).append(node)
    between = {node for node in nodes if getattr(node, "variable", None) is x}
    todo = list(between)
    while todo:
        more = [node for node in above.get(todo.pop(), []) if node not in between]
        between |= {*more}
        todo += more
    return between


def gradient_is_constant(f0: Prefix, x: Tensor) -> bool:
    """Whether ∇ p·f0 agrees at x, at a random point and at a random corner, for one random p.

    Catches what the graph hides, such as division by a detached statistic of the input.
    """
    with torch.no_grad():
        p = torch.randn_like(f0(x))
    point = torch.rand_like(x)
    try:
        at_x, *others = (f0.pull_back(p, at) for at in (x, point, (point > 0.5).to(x)))
    except OtherWayError:
        return False
    allowed = 1e-4 * at_x.abs() + 1e-6 * at_x.abs().max()
    return all(bool(((at_x - other).abs() <= allowed).all()) for other in others)
