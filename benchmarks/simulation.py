"""What training costs on many GPUs, computed from measured parts; see docs/scale.md.

Bytes are counted from the networks' shapes, and a test finds the same in the record of what two
real processes sent. A step's time on one GPU comes from two networks that were measured on an H200:
seconds = a · FLOP + b · bytes kept for the way back, a and b from those two. What links and disks
carry is assumed: `Assumed` has it; each is an option of `python -m benchmarks.scale --simulate`.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import yopo
from yopo.models.resnet50 import Bottleneck

ROOT = Path(__file__).parents[1]
FLOAT = 4  # bytes; what is exchanged and saved is float32
GB = 1e9
GPUS = (1, 8, 64)
MACHINE = 8  # GPUs of one machine
STATISTICS = ("running_mean", "running_var")  # of each process's own, without sync_batchnorm

Shapes = list[torch.Size]


@dataclass(frozen=True, slots=True)
class Assumed:
    """What was not measured. GB a second are one GPU's, in one direction."""

    inside: float = 200.0  # between the GPUs of a machine
    between: float = 25.0  # between machines
    overlap: float = 0.5  # the part of a weight pass beside which DDP and FSDP2 exchange
    disk: float = 1.0  # that all processes write to
    full: int = 4  # weight passes and attack passes of a step, m + 1 of YOPO-3-3
    weights: int = 3  # of them for the weights


@dataclass(frozen=True, slots=True)
class Case:
    """A network, and how it is trained."""

    name: str
    make: Callable[[], nn.Module]
    side: int
    classes: int
    batch: int  # images of a GPU
    images: int  # of an epoch
    decoded: bool  # pictures come from JPEGs


CASES = (
    Case("ResNet-50, 224 px", yopo.models.resnet50, 224, 1000, 128, 1_281_167, True),
    Case("WRN-34-10, 32 px", yopo.models.wideresnet, 32, 10, 256, 50_000, False),
)


# ---------------------------------------------------------------- counted from the shapes


def shapes(net: nn.Module) -> Shapes:
    """Of the parameters."""
    return [p.shape for p in net.parameters()]


def numbers(sizes: Sequence[torch.Size]) -> int:
    """How many they hold."""
    return sum(size.numel() for size in sizes)


def flat_message(net: nn.Module) -> int:
    """Bytes of the trainer's one message a step: all gradients, and a flag for each tensor."""
    return FLOAT * (numbers(shapes(net)) + len(shapes(net)))


def ddp_messages(net: nn.Module) -> int:
    """Bytes of DistributedDataParallel's messages in a step, all buckets together."""
    return FLOAT * numbers(shapes(net))


def groups(net: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[Shapes]:
    """What FSDP2 gathers in one message: each block of these kinds, then what is left."""
    blocks = [m for m in net.modules() if isinstance(m, kinds)]
    inside = {id(p) for m in blocks for p in m.parameters()}
    rest = [p.shape for p in net.parameters() if id(p) not in inside]
    return [*([p.shape for p in m.parameters()] for m in blocks), rest]


def padded(sizes: Shapes, world: int) -> int:
    """Numbers of whole tensors as FSDP2 sends them: the first dimension a multiple of `world`."""
    return sum(math.ceil(s[0] / world) * world * s[1:].numel() for s in sizes)


def fsdp_messages(parts: list[Shapes], world: int, passes: int, gathered: bool) -> tuple[int, int]:
    """Bytes that all-gathers of a step bring together, and that reduce-scatters sum.

    A block is gathered for the way forward and again for the way back, the root once a pass; inside
    `yopo.gathered` each once a step. Gradients are reduced once a step whatever m is.
    """
    *blocks, rest = [FLOAT * padded(sizes, world) for sizes in parts]
    once = sum(blocks) + rest
    return once if gathered else passes * (2 * sum(blocks) + rest), once


def ring(reduced: float, gathered: float, world: int) -> float:
    """Bytes that a process sends for what is all-reduced, and gathered or scattered, in a ring."""
    return (2 * reduced + gathered) * (world - 1) / world


def statistics(net: nn.Module) -> int:
    """Bytes of BatchNorm's statistics, of which a checkpoint has each process's own."""
    named = net.named_buffers()
    return FLOAT * sum(b.numel() for name, b in named if name.endswith(STATISTICS))


def checkpoint(net: nn.Module, world: int) -> int:
    """Bytes of a run's newest checkpoint at an epoch's end: SGD with momentum, EMA, best weights.

    The processes' own statistics come on top: of the network and nothing else.
    """
    state = FLOAT * numbers(shapes(net)) + statistics(net)
    momentum = FLOAT * numbers(shapes(net))
    return 3 * state + momentum + (world - 1) * statistics(net)


# ---------------------------------------------------------------- a step on one GPU


@cache
def work(make: Callable[[], nn.Module], side: int) -> tuple[float, float]:
    """FLOP of a natural pass for an image, and the bytes that it keeps for the way back."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # else another would get its place

    def keep(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter):
            alive.append(t)
            kept[t.untyped_storage()._cdata] = t.numel() * t.element_size()
        return t

    with torch.device("meta"):
        net, x, y = make(), torch.empty(2, 3, side, side), torch.zeros(2, dtype=torch.long)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with FlopCounterMode(display=False) as counter, hooks:
        F.cross_entropy(net(x), y).backward()
    return counter.get_total_flops() / 2, sum(kept.values()) / 2


@cache
def pace() -> tuple[float, float]:
    """Seconds for a FLOP, and for a byte that is kept: those of two networks on an H200."""
    bench = json.loads((ROOT / "records/speed-h200/rooms-bench.json").read_text())
    (small,) = [r for r in bench["rows"] if r["method"] == "natural"]
    table = json.loads((ROOT / "records/reproduction/table3/table3.json").read_text())
    large = table["rows"]["Natural"]["epoch_seconds"] / (49_000 // 256 * 256)
    measured = [small["step"] / 1000 / bench["batch"], large]
    both = work(yopo.models.preactresnet18, 32), work(yopo.models.wideresnet, 32)
    found = torch.linalg.solve(
        torch.tensor(both, dtype=torch.float64), torch.tensor(measured, dtype=torch.float64)
    )
    return float(found[0]), float(found[1])


# ---------------------------------------------------------------- one row


@dataclass(frozen=True, slots=True)
class Row:
    """What a step, an epoch and a checkpoint take; bytes and seconds."""

    gpus: int
    compute: float  # of a step, on one GPU
    sent: dict[str, float]  # bytes of a step that one GPU sends, by the way of exchange
    step: dict[str, float]  # seconds
    images: float  # a second, by the trainer's own way
    epoch: float
    cores: float  # that decode for one GPU; 0 where nothing is decoded
    state: dict[str, float]  # bytes of weights, gradients, momentum and average in one GPU
    activations: float  # bytes in one GPU, in bf16
    saved: float  # bytes of a checkpoint
    save: float  # seconds until it is on the disk


def row(case: Case, world: int, assumed: Assumed, decoded_a_second: float) -> Row:
    """Compute it."""
    with torch.device("meta"):
        net = case.make()
    flop, kept = work(case.make, case.side)
    a, b = pace()
    cost = assumed.weights + (assumed.full - assumed.weights) * 2 / 3
    full = case.batch * (a * flop + b * kept)
    compute = cost * full
    parts = groups(net, (Bottleneck, yopo.models.resnet.PreActBlock))
    weights = FLOAT * numbers(shapes(net))
    sent = {
        "flat": ring(flat_message(net), 0, world),
        "ddp": ring(ddp_messages(net), 0, world),
    }
    for way, whole in (("fsdp", False), ("fsdp gathered", True)):
        gathers, reduced = fsdp_messages(parts, world, assumed.full, whole)
        sent[way] = ring(0, gathers + reduced, world)
    link = GB * (assumed.inside if world <= MACHINE else assumed.between)
    hidden = {"flat": 0.0, "ddp": full * 2 / 3, "fsdp": compute, "fsdp gathered": full * 2 / 3}
    step = {
        way: compute + max(0.0, many / link - assumed.overlap * hidden[way])
        for way, many in sent.items()
    }
    images = world * case.batch / step["flat"]
    saved = checkpoint(net, world)
    return Row(
        gpus=world,
        compute=compute,
        sent=sent,
        step=step,
        images=images,
        epoch=case.images / images,
        cores=images / world / decoded_a_second if case.decoded else 0.0,
        state={"ddp": 4 * weights, "fsdp": 4 * weights / world},
        activations=case.batch * kept / 2,
        saved=saved,
        save=saved / (GB * assumed.disk),
    )


# ---------------------------------------------------------------- words


def tables(assumed: Assumed, decoded_a_second: float) -> str:
    """Two tables a network, in Markdown."""
    text = []
    for case in CASES:
        rows = [row(case, world, assumed, decoded_a_second) for world in GPUS]
        text += [f"{case.name}, {case.batch} images a GPU:", "", *_steps(rows), "", *_rest(rows)]
        text.append("")
    return "\n".join(text[:-1])


def _steps(rows: Sequence[Row]) -> list[str]:
    ways = list(rows[0].sent)
    head = "".join(f" {way} MB | {way} ms |" for way in ways)
    lines = [f"| GPUs | computing ms |{head}", "|---|---|" + "---|---|" * len(ways)]
    for r in rows:
        cells = "".join(f" {r.sent[w] / 1e6:,.0f} | {1000 * r.step[w]:,.0f} |" for w in ways)
        lines.append(f"| {r.gpus} | {1000 * r.compute:,.0f} |{cells}")
    return lines


def _rest(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| GPUs | images/s | epoch s | cores a GPU | state GB (DDP, FSDP2) | activations GB "
        "| checkpoint GB | s to write |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cores = f"{r.cores:.0f}" if r.cores else "–"
        held = f"{r.state['ddp'] / 1e9:.2f}, {r.state['fsdp'] / 1e9:.3f}"
        lines.append(
            f"| {r.gpus} | {r.images:,.0f} | {r.epoch:,.1f} | {cores} | {held} | "
            f"{r.activations / 1e9:.1f} | {r.saved / 1e9:.2f} | {r.save:.1f} |"
        )
    return lines
