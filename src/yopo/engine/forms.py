"""The forms of a method that the engine runs: the method's own code, other parts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from yopo.core.children import in_a_row
from yopo.core.frozen import uncompiled
from yopo.core.threat import L2, Linf
from yopo.engine.inner import InnerLoop, KnownCut
from yopo.engine.network import Compiled, OneStream
from yopo.methods.base import Method
from yopo.models.normalize import Normalize


def plain_form(method: Method, ball: Linf | L2 | None) -> Method:
    """With the threat's numbers on the device; it may meet batches of any shape."""
    threat = method.threat if ball is None else ball
    return method.on(method.model, threat=threat, loss=method.loss, split=method.split)


def compiled_form(
    method: Method,
    ball: Linf | L2 | None,
    x: Tensor,
    *,
    streams: OneStream,
    cast: bool,
    also: Sequence[Tensor],
) -> Method:
    """On the compiled network; where f0 is a function of its own, on two parts."""
    model = uncompiled(method.model)
    if method.layer_by_layer:
        raise ValueError(f"{type(method).__name__} runs the network layer by layer, not as a whole")
    cut = method.cut(x)
    if cut is None or cut.affine:
        network = Compiled(model, streams=streams, cast=cast, also=also)
    else:
        parts = cut_in_two(model, cut.name)
        if parts is None:
            raise ValueError(
                f"f0, up to {cut.name!r}, is not affine, and the network no plain sequence of "
                "modules; an affine first_layer can be compiled, such as an nn.Identity() before "
                "the network"
            )
        for part in parts:
            part.training = model.training
        inner = None
        if not cut.random and not _has_state(parts[0]):
            inner = InnerLoop(parts[0], type(method.threat).ascend)  # type: ignore[union-attr]
        network = Compiled(*parts, streams=streams, cast=cast, also=also, inner=inner)
        cut = replace(cut, name="0", module=network.parts[0])
    return method.on(
        network,
        threat=method.threat if ball is None else _with_compiled_ascent(ball),
        loss=torch.compile(method.loss, dynamic=False),
        split=None if cut is None else KnownCut(network, cut),
    )


def cut_in_two(model: nn.Module, name: str) -> tuple[nn.Sequential, nn.Sequential] | None:
    """(f0, g) if the model is a sequence of modules, perhaps nested, and f0 ends after `name`."""
    flat = in_a_row(model)
    inside = [i for i, (path, _) in enumerate(flat) if f"{path}.".startswith(f"{name}.")]
    if not inside:
        return None
    modules = [module for _, module in flat]
    return nn.Sequential(*modules[: inside[-1] + 1]), nn.Sequential(*modules[inside[-1] + 1 :])


def _has_state(module: nn.Module) -> bool:
    """Whether a pass may change buffers, as BatchNorm and spectral_norm do; Normalize's stay."""
    others = (m for m in module.modules() if not isinstance(m, Normalize))
    return any(next(m.buffers(recurse=False), None) is not None for m in others)


def _with_compiled_ascent(ball: Linf | L2) -> Linf | L2:
    """The ball, its ascent in one kernel."""
    kind: Any = type(ball)
    other: Linf | L2 = _compiled_kind(kind)(1.0)
    return other.resized(ball.eps, ball.step)


@cache
def _compiled_kind(kind: Any) -> Any:  # noqa: ANN401
    ascend = torch.compile(kind.ascend, dynamic=False)
    return type(f"Compiled{kind.__name__}", (kind,), {"__slots__": (), "ascend": ascend})
