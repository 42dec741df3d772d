"""How long a training step takes, and what of the device it uses."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import yopo
from yopo.bench.literal import literal_loop
from yopo.engine.ema import EMA
from yopo.engine.engine import Engine
from yopo.methods import registry
from yopo.runs.build import NETWORKS, build_method
from yopo.runs.overlay import Tree, overlay
from yopo.runs.recipes import method_tree
from yopo.runs.settings import Config, validate

# What goes with a network: input channels and side, settings.
SETTINGS: dict[str, tuple[int, int, Tree]] = {
    "smallcnn": (1, 28, {"threat": {"eps": 0.3, "step": 0.01}}),
    "preactresnet18": (3, 32, {}),
    "wideresnet": (3, 32, {}),
}
WARM_UP = 5  # steps after compiling and capturing, not timed


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured of one method. Times in milliseconds."""

    method: str
    step: float  # median
    low: float  # fastest and slowest
    high: float
    images_per_second: float
    propagations_per_second: float  # of one image
    tflops: float
    share: float  # of a matrix product's rate in the same run
    memory: float | None  # peak, GiB; of a GPU
    warmup_seconds: float  # compiling and capturing
    how: str  # "one CUDA graph", "compiled", "plain"
    natural: float | None  # step over a natural step, if one was measured before
    literal: float | None  # milliseconds of the literal loop


@dataclass(slots=True)
class Bench:
    """The rows, and under what they were measured."""

    model: str
    batch: int
    precision: Literal["float32", "bf16"]
    device: str
    torch: str
    product_tflops: float
    rows: list[Timing] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        return asdict(self)


def bench(
    model: str,
    methods: list[str],
    *,
    batch: int,
    device: torch.device,
    precision: Literal["float32", "bf16"],
    options: Tree,
    say: Callable[[str], None],
    with_literal: bool = True,
    seconds: float = 2.0,
) -> Bench:
    """Time each method on random images; `options` go to the network."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result = Bench(model, batch, precision, where, torch.__version__, product_tflops(device))
    natural: float | None = None
    for spec in methods:
        say(f"{model}, {spec}")
        row = _measure(spec, result, device, with_literal, seconds, options, say)
        natural = natural if registry.read(spec)[0].attacks else row.step
        result.rows.append(replace(row, natural=natural and row.step / natural))
    return result


def _measure(
    spec: str,
    bench: Bench,
    device: torch.device,
    with_literal: bool,
    seconds: float,
    options: Tree,
    say: Callable[[str], None],
) -> Timing:
    model, batch, precision = bench.model, bench.batch, bench.precision
    config, (channels, side) = _config(model, spec)
    x = torch.rand(batch, channels, side, side, device=device)
    y = torch.randint(10, (batch,), device=device)
    build = partial(NETWORKS[model], 10, channels=channels, **options)
    net, optimizer = _fresh(build, device)
    flops, spent = _count(config, net, optimizer, x[:8], y[:8])
    literal = None
    if with_literal:
        loop = literal_loop(
            spec,
            net,
            optimizer,
            config.threat.eps,
            config.threat.step or config.threat.eps / 4,
            getattr(config.method, "first_layer", None),
        )
        if loop is not None:
            literal = statistics.median(_times(lambda: loop(x, y), device, seconds))
    del net, optimizer
    net, optimizer = _fresh(build, device)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.contiguous(memory_format=torch.channels_last)
    fast = device.type == "cuda"
    if fast:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    method = build_method(config, net, optimizer)
    ema = EMA(net, 0.999)
    engine = Engine(method, optimizer, ema=ema, precision=precision, compile=fast, say=say)
    engine.prepare(x, y)
    times = _times(lambda: engine.step(x, y), device, seconds)
    step = statistics.median(times)
    rate = flops * batch / 8 / step / 1e9
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if fast else None
    return Timing(
        method=spec,
        step=step,
        low=min(times),
        high=max(times),
        images_per_second=1000 * batch / step,
        propagations_per_second=1000 * batch * spent / step,
        tflops=rate,
        share=rate / bench.product_tflops,
        memory=memory,
        warmup_seconds=engine.warmup_seconds,
        how="one CUDA graph" if engine.captured else "compiled" if engine.compiled else "plain",
        natural=None,
        literal=literal,
    )


def _fresh(
    build: Callable[[], nn.Module], device: torch.device
) -> tuple[nn.Module, torch.optim.SGD]:
    """The same network and optimizer each time."""
    torch.manual_seed(0)
    net = build().to(device)
    return net, torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)


def _config(model: str, spec: str) -> tuple[Config, tuple[int, int]]:
    channels, side, settings = SETTINGS[model]
    tree = overlay(settings, {"method": method_tree(spec)})
    if model == "smallcnn" and "first_layer" in registry.ENTRIES[tree["method"]["name"]].parameters:
        tree = overlay(tree, {"method": {"first_layer": "relu1"}})  # as in the paper
    return validate(tree), (channels, side)


def _count(
    config: Config,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
) -> tuple[int, float]:
    """Floating-point operations of one plain step on x, and its propagations."""
    method: yopo.Method = build_method(config, net, optimizer)
    method.backward(x, y)  # studies the network
    with FlopCounterMode(display=False) as counter:
        out = method.backward(x, y)
    optimizer.zero_grad()
    return counter.get_total_flops(), out.propagations


def _times(work: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of each call, for about `seconds` and at least 5 calls, after a warm-up."""
    cuda = device.type == "cuda"
    for _ in range(WARM_UP if cuda else 1):
        work()
    if cuda:
        torch.cuda.synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        if cuda:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            work()
            b.record()
            b.synchronize()
            times.append(a.elapsed_time(b))
        else:
            began = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - began))
    return times


def product_tflops(device: torch.device) -> float:
    """The rate of a large matrix product on random numbers: bf16 on a GPU, float32 elsewhere."""
    cuda = device.type == "cuda"
    side = 8192 if cuda else 1024
    kind = torch.bfloat16 if cuda else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    times = _times(lambda: a @ b, device, 0.3)
    return 2 * side**3 / statistics.median(times) / 1e9
