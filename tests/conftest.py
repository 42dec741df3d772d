"""Networks and batches that the tests share."""

import os
import random
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # a core each; torch reads it when it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis.core
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests import SEED

# A busy machine is no failure.
PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **PATIENT)
settings.register_profile("seeded", database=None, **PATIENT)
settings.load_profile("seeded" if SEED else "repeatable")
if SEED:
    setattr(hypothesis.core, "global_force_seed", SEED)  # noqa: B010  (as --hypothesis-seed does)

Batch = tuple[Tensor, Tensor]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a file draws as it is imported does not depend on the files before it."""
    if isinstance(collector, pytest.Module):
        _seed()


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A shell's background job ignores SIGINT, nohup's SIGHUP, and so does all that it starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _float64_and_seed() -> Iterator[None]:
    """The maths is tested in float64, from a fixed seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    _seed()
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def float32() -> None:
    """As users have it; what sets it to float64 for each test sets it back too."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def group() -> Iterator[None]:
    """This process, as a group of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """This process on its GPU, as a group of one over nccl."""
    from tests.tiny import free_port

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


@pytest.fixture
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """See without_kernels."""
    with without_kernels(monkeypatch):
        yield


@contextmanager
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile as far as its last graphs; they run operator by operator, without C++.

    What our code decides is in the graphs: what is traced, guarded, differentiated, rewritten. The
    kernels are torch's and cost half a second each; what depends on them is tested with them.
    """
    from torch._functorch import config as autograd
    from torch._inductor import compile_fx, config
    from torch._inductor.output_code import MockFXGraphCacheOutput
    from torch._inductor.virtualized import V

    def graph_alone(
        module: torch.fx.GraphModule, inputs: Any, *_: object, is_inference: bool, **__: object
    ) -> Any:
        with torch.no_grad():
            fake = compile_fx.fake_tensor_prop(module, inputs)
        with V.set_fake_mode(fake):
            compile_fx._recursive_post_grad_passes(module, is_inference=is_inference)
        module.graph.eliminate_dead_code()  # parts of what an operator in place does not return
        module.recompile()
        return MockFXGraphCacheOutput(lambda inputs: module(*inputs))

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", graph_alone)
    torch._dynamo.reset()  # here and below: what was compiled the other way must not serve
    with config.patch(fx_graph_cache=False), autograd.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def batch() -> Batch:
    """6 small images in 4 classes; some pixels lie on the box's corners."""
    x = torch.rand(6, 3, 8, 8)
    x[torch.rand_like(x) < 0.2] = 0
    x[torch.rand_like(x) < 0.2] = 1
    return x, torch.arange(6) % 4


def convnet(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """conv, activation, conv, activation, pool, linear; names "0", "1", …"""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        activation(),
        nn.Conv2d(5, 4, 3, stride=2),
        activation(),
        nn.Flatten(),
        nn.Linear(36, 4),
    )


def bn_convnet() -> nn.Sequential:
    """The same with BatchNorm after both convolutions, and ReLU."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 4),
    )


class PatchTransformer(nn.Module):
    """ViT-like: a convolutional patch embedding, positions, a class token, an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 5, 16) * 0.1)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.position
        return self.head(self.encoder(tokens)[:, 0])  # type: ignore[no-any-return]


class NormalisesInForward(nn.Module):
    """Functional style: constants and operations in `forward`, in-place ReLU right after f0."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.head = nn.Linear(5 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - 0.45) / torch.tensor([0.2, 0.25, 0.3]).view(1, 3, 1, 1)
        x = F.relu_(self.stem(x))
        return self.head(F.max_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


class TwoTowers(nn.Module):
    """No single module sees the whole input, and what joins the towers is no module."""

    def __init__(self, size: int = 15) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(size, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.a(x) * self.b(x)  # type: ignore[no-any-return]


class SharesModules(nn.Module):
    """One activation and one block used at several places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.act = nn.Tanh()
        self.block = nn.Conv2d(5, 5, 3, padding=1)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        for _ in range(3):
            x = x + self.act(self.block(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class TwoStems(nn.Module):
    """Two branches from the pixels: no single convolution sees the whole way of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"a": nn.Conv2d(3, 5, 3, padding=1), "b": nn.Conv2d(3, 5, 1)})
        self.body = Branches(self.stem)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().mean((2, 3)))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Sum of two convolutions."""

    def __init__(self, stem: nn.ModuleDict) -> None:
        super().__init__()
        self.a, self.b = stem["a"], stem["b"]

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)  # type: ignore[no-any-return]


def mlp() -> nn.Sequential:
    """On flat inputs."""
    return nn.Sequential(nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 4))


def signal_net() -> nn.Sequential:
    """1-D convolutions on 3-channel signals."""
    return nn.Sequential(
        nn.Conv1d(3, 6, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(24, 4)
    )


def grads(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient there is."""
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], *, tol: float = 1e-12) -> None:
    """Equal keys, and values equal to rounding."""
    assert a.keys() == b.keys()
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


Build = Callable[[], nn.Module]


class Disk:
    """What a power cut leaves: contents of files that were flushed, by names in folders that were.

    Only in what was flushed since it looks; folders above are there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        real = os.fsync

        def fsync(handle: int) -> None:
            real(handle)
            about = os.fstat(handle)
            if stat.S_ISDIR(about.st_mode):
                inside = {entry.name: entry.inode() for entry in os.scandir(handle)}
                self._names[about.st_ino] = inside
            else:
                self._contents[about.st_ino] = os.pread(handle, about.st_size, 0)

        monkeypatch.setattr(os, "fsync", fsync)

    def _find(self, folder: Path, *names: str) -> int | None:
        at: int | None = folder.stat().st_ino
        for name in names:
            at = None if at is None else self._names.get(at, {}).get(name)
        return at

    def has(self, folder: Path, *names: str) -> bool:
        return self._find(folder, *names) is not None

    def read(self, folder: Path, *names: str) -> bytes | None:
        at = self._find(folder, *names)
        return None if at is None else self._contents.get(at)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)
