"""Processes of a group: what they tell each other, and how they share out work.

All of them come to each of these calls, in the same order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from yopo.core.parallel import in_group, is_shard

T = TypeVar("T")


def summed(values: Tensor) -> Tensor:
    """The sum of a small tensor over all processes."""
    if in_group():
        dist.all_reduce(values)
    return values


def anyone(*flags: bool, device: torch.device) -> tuple[bool, ...]:
    """For each flag, whether any process has it up: all act alike."""
    if not in_group():
        return flags
    up = summed(torch.tensor([float(f) for f in flags], device=device))
    return tuple(value > 0 for value in up.tolist())


def gathered(tensor: Tensor) -> list[Tensor]:
    """The processes' tensors, on the CPU and in their order; they have the same shape."""
    if not in_group():
        return [tensor.cpu()]
    there = tensor.contiguous().to(exchanged_on())
    parts = [torch.empty_like(there) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, there)
    return [part.cpu() for part in parts]


def exchanged_on() -> str:
    """The kind of device whose tensors the group exchanges."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@dataclass(frozen=True, slots=True)
class Crew:
    """Processes among which batches are dealt out; `ALONE` does all of them."""

    rank: int = 0
    world: int = 1

    @classmethod
    def of_group(cls) -> "Crew":
        """All processes of the group, if there is one."""
        return cls(dist.get_rank(), dist.get_world_size()) if in_group() else ALONE

    def share(self, parts: Sequence[T]) -> Sequence[T]:
        """Those that are this process's: they are dealt out like cards."""
        return parts[self.rank :: self.world]

    def rounds(self, many: int, mine: Iterator[int]) -> Iterator[tuple[int, int]]:
        """Go through `mine`, a number for each part of this process's share, part by part.

        After each round, in which every process did one part, come how many of the `many` parts are
        done and the sum of that round's numbers. An error in one process ends it in all.
        """
        for first in range(0, many, self.world):
            number, error = 0, None
            try:
                if first + self.rank < many:
                    number = next(mine)
            except Exception as e:  # the others are told first
                error = e
            yield min(first + self.world, many), self._agreed(error, number)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """An error that one process meets in the block is one in all of them."""
        error = None
        try:
            yield
        except Exception as e:  # the others are told first
            error = e
        self._agreed(error)

    def _agreed(self, error: Exception | None, number: int = 0) -> int:
        """The sum of the numbers, if there is no error anywhere."""
        if self.world > 1:
            failed = [int(error is not None and rank == self.rank) for rank in range(self.world)]
            number, *failed = (int(v) for v in self.sums(number, *failed))
        else:
            failed = [0]
        if error is not None:
            raise error
        if any(failed):
            others = ", ".join(str(rank) for rank, bad in enumerate(failed) if bad)
            raise RuntimeError(
                f"process {others} met an error, so this one stopped, too; what it says of it "
                "tells you more"
            )
        return number

    def sums(self, *numbers: float) -> list[float]:
        """Of each number, the sum over the processes."""
        if self.world == 1:
            return list(numbers)
        told = torch.tensor(numbers, dtype=torch.float64, device=exchanged_on())
        sums: list[float] = summed(told).tolist()
        return sums

    def union(self, mask: Tensor) -> Tensor:
        """Where any process has it set."""
        if self.world == 1:
            return mask
        return summed(mask.to(exchanged_on(), torch.int32)).cpu() > 0

    def check_same(self, digest: str, what: str) -> None:
        """Refuse work that is not the same in every process."""
        if self.world == 1:
            return
        all_of_them = gathered(torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8))
        others = [r for r, d in enumerate(all_of_them) if not torch.equal(d, all_of_them[0])]
        if others:
            raise RuntimeError(
                f"process {', '.join(map(str, others))} has {what} other than those of process 0; "
                "give all of them the same, or leave together=True out"
            )

    def rows(
        self, mine: Sequence[Tensor], rows: Sequence[Tensor], n: int, dtype: torch.dtype
    ) -> Tensor:
        """All n rows of a table, of which each process made some (b, C)."""
        if self.world == 1:
            return torch.cat(list(mine))
        columns = max(map(int, gathered(torch.tensor(mine[0].shape[1] if mine else 0))))
        table = torch.zeros(n, columns, dtype=dtype, device=exchanged_on())
        for part, where in zip(mine, rows, strict=True):
            table[where.to(table.device)] = part.to(table)
        return summed(table)

    def to_first(self, owner: int, tensor: Tensor | None, like: Tensor, many: int) -> Tensor:
        """The owner's tensor (many, ...) in the first process, nothing (0, ...) in the others."""
        nothing = like[:0].cpu()
        if self.rank not in (0, owner) or not many:
            return nothing
        if owner == self.rank == 0:
            assert tensor is not None
            return tensor
        if self.rank == 0:
            room = torch.empty(many, *like.shape[1:], dtype=like.dtype, device=exchanged_on())
            dist.recv(room, owner)
            return room.cpu()
        assert tensor is not None
        dist.send(tensor.contiguous().to(exchanged_on()), 0)
        return nothing


ALONE = Crew()


@dataclass(frozen=True, slots=True)
class Team:
    """Processes that make each pass together, for each holds a part of the weights.

    They are tensor parallelism's; FSDP2's are none while weights are whole (`parallel.gathered`).
    Across several dimensions of one mesh there is a group for each.
    """

    groups: "tuple[dist.ProcessGroup, ...]" = ()
    device: str = "cpu"

    @classmethod
    def of(cls, model: nn.Module) -> "Team":
        """Those that make this model's passes with this process."""
        parts: list[Any] = [p for p in model.parameters() if is_shard(p)] if in_group() else []
        split = {
            (p.device_mesh, dim)
            for p in parts
            for dim, placement in enumerate(p.placements)
            if not placement.is_replicate() and p.device_mesh.size(dim) > 1
        }
        if not split:
            return cls()
        groups = tuple(mesh.get_group(dim) for mesh, dim in sorted(split, key=repr))
        return cls(groups, parts[0].device_mesh.device_type)

    def refuse_dealing(self) -> None:
        """Batches cannot be dealt out among them."""
        if self.groups:
            raise ValueError(
                "together=True gives each process batches of its own, but these hold parts of one "
                "network (tensor parallelism) and make each pass together; leave it out, and give "
                "all of them the same images"
            )

    def check_same(self, digest: str) -> None:
        """Refuse work that is not the same in all of them."""
        numbers = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.int32, device=self.device)
        least = torch.stack([numbers, -numbers])
        for group in self.groups:
            dist.all_reduce(least, dist.ReduceOp.MIN, group)
        if not torch.equal(least[0], -least[1]):
            raise ValueError(
                "processes that hold parts of one network (tensor parallelism) make each pass "
                "together, but have other images, labels or settings; give all of them the same"
            )
