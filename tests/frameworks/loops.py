"""What every framework's test shares: network, images, fixed starts, and the plain loop.

As a program it is one of several processes: `torchrun … -m tests.frameworks.loops MODULE OUT`
calls that module's `several(out)`.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import yopo
from tests.pages import DOCS, ROOT, fenced, saved
from tests.tiny import PATIENCE
from yopo.core import tensor_files

FRAMEWORKS = DOCS / "frameworks"
IMAGES, BATCH, RATE, MOMENTUM, CLIP = 16, 4, 0.1, 0.9, 0.05
State = dict[str, Tensor]


class Fixed(yopo.Linf):
    """Each image starts at a place of its own: loaders draw from torch's stream as well."""

    __slots__ = ()

    def start(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.project(0.1 * torch.sin(1000 * x), x)


THREAT = Fixed(0.1)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    ).to(dtype)
    draw = torch.Generator().manual_seed(0)
    for p in net.parameters():  # the same in every process, whatever its default
        nn.init.normal_(p, 0, 0.2, generator=draw)
    return net


def images(dtype: torch.dtype = torch.float64) -> TensorDataset:
    x = torch.rand(IMAGES, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return TensorDataset(x, torch.arange(IMAGES) % 4)


def loader(size: int = BATCH, dtype: torch.dtype = torch.float64) -> Any:
    """In order; of several processes each has its turn, as in `by_turns`."""
    data, world = images(dtype), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return DataLoader(data, size)
    mine: Any = DistributedSampler(data, world, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(data, size, sampler=mine)


# ---------------------------------------------------------------- steps, as lists of batches


def alone(size: int = BATCH, together: int = 1) -> list[list[range]]:
    """One process, `together` batches for each step."""
    batches = [range(i, i + size) for i in range(0, IMAGES, size)]
    return [batches[i : i + together] for i in range(0, len(batches), together)]


def by_turns(size: int = BATCH, world: int = 2) -> list[list[range]]:
    """Process r has the images r, r + world, …, as torch's DistributedSampler deals them."""
    step = size * world
    return [[range(i + r, i + step, world) for r in range(world)] for i in range(0, IMAGES, step)]


def plain(
    net: nn.Module,
    steps: Iterable[list[range]],
    *,
    clip: float | None = None,
    dtype: torch.dtype = torch.float64,
    autocast: torch.dtype | None = None,
) -> State:
    """YOPO-2-2 by `backward` in a loop as PyTorch's tutorials have it; the weights that it ends at.

    A step of k batches follows the mean of their gradients.
    """
    x, y = images(dtype).tensors
    method = yopo.YOPO(net, THREAT, m=2, n=2)
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=MOMENTUM)
    cast = torch.autocast("cpu", autocast) if autocast else nullcontext()
    for batches in steps:
        for rows in batches:
            before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
            net.zero_grad()
            with cast:
                method.backward(x[list(rows)], y[list(rows)])
            for p, grad in zip(net.parameters(), before, strict=True):
                assert p.grad is not None
                p.grad /= len(batches)
                if grad is not None:
                    p.grad += grad
        if clip is not None:
            clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


def same_bits(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


# ---------------------------------------------------------------- pages


def page(name: str) -> dict[str, Any]:
    """What the one block of docs/frameworks/NAME.md defines."""
    file = FRAMEWORKS / f"{name}.md"
    text = file.read_text()
    assert len(text.splitlines()) <= 40
    (block,) = fenced(text, "python")
    found: dict[str, Any] = {"__name__": name}
    exec(compile(block, str(file), "exec"), found)
    return found


def as_a_file(name: str, folder: Path, *more: str) -> None:
    """Save the block under its name, run it, and as the page's line for a shell does it."""
    text = (FRAMEWORKS / f"{name}.md").read_text()
    (block,) = fenced(text, "python")
    file = saved(block, folder)
    (line,) = fenced(text)
    tool, first, *words = shlex.split(line)
    assert words[-1] == file.name
    for run in ([sys.executable, file.name], [tool, first, *more, *words]):
        done = started(run, folder)
        assert done.returncode == 0, done.stdout + done.stderr


def started(run: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A program with these sources, its tools those beside this Python."""
    path = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    for _ in range(5):
        done = subprocess.run(
            run, env=env, cwd=folder, capture_output=True, text=True, timeout=PATIENCE
        )
        # Threads of gloo's may abort a program of several that is over (pytorch#190489).
        if not (done.returncode and "terminate called without an active" in done.stderr):
            break
    return done


# ---------------------------------------------------------------- processes


def in_several(module: str, out: Path, world: int = 2) -> list[dict[str, State]]:
    """Call module.several(out) in processes that torchrun starts; what each kept there, by name."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += ["--nproc-per-node", str(world), "-m", "tests.frameworks.loops", module, str(out)]
    done = started(run)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        {p.name: tensor_files.load_weights(p) for p in sorted((out / str(rank)).iterdir())}
        for rank in range(world)
    ]


def keeper(out: Path) -> Callable[[str, State], None]:
    """Keeps weights under a name for `in_several`."""
    folder = out / os.environ["RANK"]
    folder.mkdir(parents=True)

    def keep(name: str, state: State) -> None:
        tensor_files.save_weights(folder / name, {k: v.clone() for k, v in state.items()}, {})

    return keep


if __name__ == "__main__":
    import_module(sys.argv[1]).several(Path(sys.argv[2]))
