"""What the compiler is told about networks, and that the engine does without it."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

import yopo
from tests.conftest import Batch
from yopo.engine import overlap, ready
from yopo.engine.network import OneStream
from yopo.models import preactresnet18


@pytest.fixture(autouse=True)
def _graphs_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graphs are looked at, not their numbers: no C++ is compiled, kernels do nothing."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    yield
    PyCodeCache.cache_clear()


def uncached(rewrite: Callable[[torch.fx.Graph], None]) -> Any:
    """A pass that the compiler cannot have met before, so that it must compile."""
    rewrite.__name__ = uuid4().hex
    return overlap._pass(rewrite, 0)


class Block(nn.Module):
    """A ReLU after BatchNorm, one after a convolution, one after BatchNorm and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return torch.relu(self.other(out) + x).mean((1, 2, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_relus_after_batchnorm_are_masked_by_their_input(batch: Batch) -> None:
    """Elsewhere the output is kept anyway and the input is not."""
    aten = torch.ops.aten
    looked_at: list[str] = []
    kept: list[int] = []

    def rewrite(graph: torch.fx.Graph) -> None:
        overlap.masks_from_inputs(graph)
        masks = graph.find_nodes(op="call_function", target=aten.le.Scalar)
        looked_at.extend(str(mask.args[0].target) for mask in masks)

    options = {"joint_custom_post_pass": uncached(rewrite)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    sizes = []
    for settings in ({}, options):
        torch._dynamo.reset()
        kept.clear()
        with (
            torch._inductor.config.patch(settings),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            torch.compile(Block(), dynamic=False)(batch[0].clone().requires_grad_()).sum()
        sizes.append(sum(n for n in kept if n >= batch[0].numel()))
    torch._dynamo.reset()
    assert sorted(looked_at) == ["aten.add.Tensor", "aten.relu.default", "aten.relu.default"]
    assert sizes[0] == sizes[1]


def backward_traffic(net: nn.Module, x: torch.Tensor, settings: dict[str, Any]) -> int:
    """Bytes that the compiled backward pass reads and writes, by the compiler's own count."""
    counts = []
    real = GraphLowering.codegen

    def codegen(graph: GraphLowering) -> Any:
        out = real(graph)
        if graph.is_backward:
            counts.append(graph.count_bytes()[0])
        return out

    new = {"joint_custom_pre_pass": uncached(lambda _: None)}
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(settings | new):
        patch.setattr(GraphLowering, "codegen", codegen)
        torch.compile(net, dynamic=False)(x).sum().backward()
    torch._dynamo.reset()
    (count,) = counts
    return count


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_backward_pass_reads_less() -> None:
    net = preactresnet18(width=8, blocks=(1, 1)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(4, 3, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
    plain, ours = (
        backward_traffic(net, x, s) for s in ({}, overlap.inductor_options(overlap=False))
    )
    assert ours < 0.9 * plain


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
def test_the_engine_does_without_it(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of the package names the file; with the other import there is plain compilation."""
    package = Path(yopo.__file__).parent
    lines = [
        line
        for file in package.rglob("*.py")
        for line in file.read_text().splitlines()
        if re.search(r"import.*overlap|engine\.overlap", line)
    ]
    assert lines == ["from yopo.engine.overlap import Streams"]
    monkeypatch.setattr(ready, "Streams", OneStream)
    net, said = preactresnet18(4, width=4, blocks=(1,)), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    one = yopo.Engine(yopo.YOPO(net, yopo.Linf(0.1), m=2), optimizer, say=said.append)
    one.options.overlap = True
    one.prepare(*batch)
    assert said == []
    assert one.compiled


def test_what_it_gains_is_what_was_measured() -> None:
    record = (Path(__file__).parents[2] / "records/speed.md").read_text()
    times = re.findall(r"\d+\.\d\d", overlap.__doc__ or "")
    assert len(times) == 4
    assert all(time in record for time in times)
