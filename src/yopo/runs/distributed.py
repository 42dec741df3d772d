"""Several processes: who am I, and what they tell each other; gradients are exchange.py's."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yopo.core.crew import Crew, anyone, exchanged_on, gathered, summed
from yopo.core.files import parse_json
from yopo.core.parallel import in_group

__all__ = ["anyone", "from_first", "gathered", "gathered_by_first", "pick_device"]
__all__ += ["same_everywhere", "seen_by_first", "start"]
__all__ += ["summed", "synchronise_batchnorm", "told_to_all", "wait_for_all"]


def start(device: torch.device) -> tuple[int, int]:
    """Join the group that torchrun made, if it did; return (rank, world size)."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    if not dist.is_initialized():
        from yopo.runs import meeting  # not every torch has what it needs

        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        meeting.meet("nccl" if cuda else "gloo", device if cuda else None)
    return dist.get_rank(), dist.get_world_size()


def same_everywhere(tensors: Iterable[Tensor]) -> None:
    """Give every process the values of the first."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)


def gathered_by_first(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """In the first process those of all, on the CPU and by rank; in the others nothing.

    They have the same types and shapes everywhere, and travel in one message.
    """
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    if not flat:
        return [[]] if dist.get_rank() == 0 else []
    message = torch.cat([t.to(exchanged_on()) for t in flat])
    if dist.get_rank():
        dist.gather(message)
        return []
    parts = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.gather(message, parts)
    sizes = [len(t) for t in flat]
    return [
        [
            # A copy of its own: a view into the message may begin where its type cannot.
            piece.clone().view(t.dtype).view(t.shape)
            for piece, t in zip(part.cpu().split(sizes), tensors, strict=True)
        ]
        for part in parts
    ]


def told_to_all(value: Any) -> list[Any]:  # noqa: ANN401
    """Every process's value for JSON, in their order."""
    if not in_group():
        return [value]
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in gathered(torch.tensor([len(text)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = text
    parts = gathered(padded)
    return [
        parse_json(bytes(part[:size].tolist()).decode(), "a state", nan=True)
        for part, size in zip(parts, sizes, strict=True)
    ]


def seen_by_first(look: Callable[[], Any]) -> Any:  # noqa: ANN401
    """What the first process sees, as JSON, in all of them; what it refuses, all refuse.

    From other machines a folder may look otherwise, for a while or for good.
    """
    crew = Crew.of_group()
    with crew.all_or_none():
        seen = look() if crew.rank == 0 else None
    return told_to_all(seen)[0]


def from_first(values: list[float]) -> list[float]:
    """The first process's numbers, in every process."""
    if not in_group():
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.broadcast(tensor, 0)
    return [float(v) for v in tensor]


def wait_for_all() -> None:
    """Until all processes are here."""
    if in_group():
        dist.barrier()


def pick_device(name: str | None) -> torch.device:
    """The device of that name; by default a GPU if there is one, and this process's own."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no GPU here; leave it out, or use cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.zeros(1).to(device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"--device {name}: torch cannot use it here ({why}); leave it out, or use cpu"
        ) from None
    return device


def synchronise_batchnorm(model: nn.Module) -> nn.Module:
    """Let every BatchNorm normalise by the statistics of all processes together.

    On GPUs that is torch's SyncBatchNorm; it does not run on CPUs, so there it is ours. That one
    stays because several processes are compared with one process on CPUs, with every setting.
    """
    if dist.get_backend() == "nccl":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.__class__ = _SyncBatchNorm  # type: ignore[assignment]  # flags and hooks stay
    return model


class _Sum(torch.autograd.Function):
    """The sum over all processes; each one's loss depends on it, so gradients are summed too."""

    @staticmethod
    def forward(_ctx: Any, values: Tensor) -> Tensor:  # noqa: ANN401
        return summed(values.clone())

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        return summed(grad.clone())


def _total(values: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


class _SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over all processes: sums and counts are exchanged, and so are their gradients."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        kind, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
        over = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = x.new_full((x.shape[1],), x.numel() / x.shape[1])
        total, n = _total(torch.stack([x.sum(over), count]))
        mean = total / n
        # A second exchange: the mean of squares less the square of the mean loses all precision.
        centred = x - mean.view(shape)
        var = _total(centred.square().sum(over)) / n
        if self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            counted = 1 / float(self.num_batches_tracked)
            momentum = counted if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(var * n / (n - 1).clamp(min=1), momentum)
        out: Tensor = centred * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(kind)
