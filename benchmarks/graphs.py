"""What the engine's compiled step consists of, counted on a CPU. No number here is a time.

Usage: python -m benchmarks.graphs [--only resnet] [--json FILE]

Graphs, kernels and bytes are the compiler's own count of what it made. `step` lists what one step
then runs: the kernels (their number, and a digest of their texts in order) and the operations of
PyTorch around them. Kernels are written and not compiled, so that they can be counted; what they
would compute is not there. Two versions with equal counts put the same work into a captured step.
"""

import argparse
import hashlib
import json
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn
from torch._inductor import metrics
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch.profiler import ProfilerActivity, profile

import yopo
from yopo.models import SmallCNN, preactresnet18
from yopo.models.stem import Stem

THREAT = yopo.Linf(8 / 255)
Make = Callable[[nn.Module, torch.optim.Optimizer], yopo.Method]
METHODS: dict[str, Make] = {
    "natural": lambda net, _: yopo.Natural(net),
    "pgd": lambda net, _: yopo.PGD(net, THREAT, steps=3),
    "free": lambda net, optimizer: yopo.Free(net, THREAT, m=3, optimizer=optimizer),
    "fast": lambda net, _: yopo.Fast(net, THREAT),
    "nfgsm": lambda net, _: yopo.NFGSM(net, THREAT),
    "trades": lambda net, _: yopo.TRADES(net, THREAT, steps=3),
    "yopo after": lambda net, _: yopo.YOPO(net, THREAT, m=3, n=3),
    "yopo before": lambda net, _: yopo.YOPO(net, THREAT, m=3, n=3, grad_at="before"),
    "yopo last": lambda net, _: yopo.YOPO(net, THREAT, m=3, n=3, grad_at="last"),
    "trades-yopo": lambda net, _: yopo.TRADESYOPO(net, THREAT, m=2, n=3),
}
RELU: dict[str, Any] = {"first_layer": "relu1"}  # f0 is not affine then
DEEP: dict[str, Make] = {
    "yopo after, f0 to relu1": lambda net, _: yopo.YOPO(net, THREAT, m=3, n=3, **RELU),
    "yopo before, f0 to relu1": lambda net, _: yopo.YOPO(
        net, THREAT, m=3, n=3, grad_at="before", **RELU
    ),
    "yopo last, f0 to relu1": lambda net, _: yopo.YOPO(
        net, THREAT, m=3, n=3, grad_at="last", **RELU
    ),
    "trades-yopo, f0 to relu1": lambda net, _: yopo.TRADESYOPO(net, THREAT, m=2, n=3, **RELU),
    "yopo in L2, f0 to relu1": lambda net, _: yopo.YOPO(net, yopo.L2(0.5), m=3, n=3, **RELU),
}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Make]]] = {
    "resnet": (lambda: preactresnet18(width=8, blocks=(1, 1)), (4, 3, 16, 16), METHODS),
    "smallcnn": (lambda: SmallCNN(width=8, hidden=16), (4, 1, 28, 28), METHODS | DEEP),
}
SETTINGS: dict[str, tuple[Literal["float32", "bf16"], bool]] = {  # the engine's, on a GPU
    "float32, one stream": ("float32", False),
    "bf16, two streams": ("bf16", True),
}


class Compiler:
    """Torch's own, but its kernels only note that they were called; what it makes is counted."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.graphs = self.bytes = 0
        self._codegen = GraphLowering.codegen

    def kernel(self, _types: object, source: str, **_: object) -> Callable[..., None]:
        """As AsyncCompile.cpp_pybinding."""
        name = hashlib.sha256(source.encode()).hexdigest()
        return lambda *_: self.called.append(name)

    def codegen(self, graph: GraphLowering) -> object:
        """As GraphLowering's own."""
        made = self._codegen(graph)
        self.graphs += 1
        self.bytes += graph.count_bytes()[0]
        return made

    def made(self) -> dict[str, int]:
        """The counts so far."""
        kernels, unfused = metrics.generated_kernel_count, metrics.ir_nodes_pre_fusion
        return {"graphs": self.graphs, "nodes": unfused, "kernels": kernels, "bytes": self.bytes}


@contextmanager
def as_on_a_gpu(compiler: Compiler) -> Iterator[None]:
    """The second stream works at once; the stem is a matrix product; nothing is kept of before."""
    with (
        patch.object(AsyncCompile, "cpp_pybinding", compiler.kernel),
        patch.object(GraphLowering, "codegen", lambda graph: compiler.codegen(graph)),
        patch.object(torch.cuda, "Stream", MagicMock()),
        patch.object(torch.cuda, "current_stream", MagicMock()),
        patch.object(torch.cuda, "stream", lambda *_: nullcontext()),
        patch.object(Stem, "forward", Stem._as_product),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        torch._dynamo.reset()
        metrics.reset()
        yield
        torch._dynamo.reset()


def count(
    net: nn.Module,
    make: Make,
    x: Tensor,
    y: Tensor,
    precision: Literal["float32", "bf16"],
    two_streams: bool,
) -> dict[str, Any]:
    """What the compiler made for a method's step, and what that step runs."""
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
    compiler, said = Compiler(), list[str]()
    with as_on_a_gpu(compiler):
        engine = yopo.Engine(
            make(net, optimizer),
            optimizer,
            ema=yopo.EMA(net, 0.9),
            precision=precision,
            capture=False,
            say=said.append,
        )
        if (options := getattr(engine, "options", None)) is not None:
            options.cast = options.overlap = two_streams
        else:  # an engine before commit 6a03c7b, or that
            setattr(engine, "_cast", two_streams)  # noqa: B010  (checkers know today's alone)
            setattr(engine, "_overlap", two_streams)  # noqa: B010
        engine.step(x, y)  # the first may still go back to one stream, and compile for that
        made = compiler.made()
        compiler.called.clear()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            engine.step(x, y)
        assert compiler.made() == made
        assert engine.compiled, said
        assert said == []
    ran = Counter(e.name for e in seen.events() if e.name.startswith(("aten::", "yopo::")))
    texts = hashlib.sha256("".join(compiler.called).encode()).hexdigest()
    step = {"kernels": len(compiler.called), "texts": texts}
    return made | {"step": step | {"operations": dict(sorted(ran.items()))}}


def main() -> None:
    """Go through networks, settings and methods, a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="how names begin, as resnet")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    for network, (build, shape, methods) in NETWORKS.items():
        for setting, (precision, two_streams) in SETTINGS.items():
            for method, make in methods.items():
                name = f"{network}, {setting}: {method}"
                if not name.startswith(args.only):
                    continue
                torch.manual_seed(0)
                x, y = torch.rand(shape), torch.arange(shape[0])
                rows[name] = count(build(), make, x, y, precision, two_streams)
                shown = {k: v for k, v in rows[name].items() if k != "step"}
                print(f"{name:60}", *(f"{k}={v}" for k, v in shown.items()), flush=True)
    if args.json:
        where = {"torch": torch.__version__, "machine": platform.machine()}
        args.json.write_text(json.dumps(where | {"steps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
