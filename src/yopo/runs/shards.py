"""Tensors of which each process holds a part, on disk: a safetensors file by each process.

torch's distributed checkpoint plans who writes what, and puts the parts together for another number
of processes. Its own files say in a pickle where the parts lie; these say it in their headers, as
its reader for Hugging Face's files expects, so nothing is pickled and nothing has to be unpickled.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from yopo.core.files import file_digest, flush
from yopo.core.tensor_files import Tensors, check_header, write_tensors
from yopo.runs.state import Layout

NAMED = "shard-*.safetensors"
OFFSETS = "DCP_SHARDING_INFO"  # the entry of a header where torch's reader looks
Sums = dict[str, str]  # digests of files by their names


class _Writer(StorageWriter):
    """One file for each process; the first one hears of all of them, with their digests.

    torch's own writer would do, but it copies the file's content twice and holds Python's lock
    meanwhile, so that training waits (records/checkpoint-cpu).
    """

    def __init__(
        self, folder: Path, begin: Callable[[], None], finish: Callable[[Sums], None]
    ) -> None:
        self.folder, self.begin, self.done = folder, begin, finish

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Whether this could be a folder."""
        return isinstance(checkpoint_id, Path)

    def set_up_storage_writer(self, is_coordinator: bool, *_: object, **__: object) -> None:
        """Before anyone writes."""
        if is_coordinator:
            self.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each process the name of its file."""
        names = (NAMED.replace("*", f"{rank:05d}") for rank in range(len(plans)))
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file; what it answers goes to the first process."""
        written: list[WriteResult] = []
        if plan.items:
            self.folder.mkdir(exist_ok=True)  # another machine may not have heard of it yet
            path = self.folder / plan.storage_data
            parts, offsets = dict[str, Tensor](), dict[str, Any]()
            for item in plan.items:
                part, data = planner.resolve_data(item), item.tensor_data
                assert isinstance(part, Tensor)
                assert data is not None
                parts[item.index.fqn] = part
                offsets[item.index.fqn] = {"saved_offsets": list(data.chunk.offsets)}
            write_tensors(parts, path, {OFFSETS: json.dumps(offsets, sort_keys=True)})
            flush(path)
            told = path.name, file_digest(path)
            written = [WriteResult(plan.items[0].index, path.stat().st_size, told)]
        answer: Future[list[WriteResult]] = Future()
        answer.set_result(written)
        return answer

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """In the first process, when all have written."""
        self.done(dict(one.storage_data for mine in results for one in mine))


def write(
    tensors: Tensors,
    folder: Path,
    begin: Callable[[], None],
    finish: Callable[[Sums], None],
    group: dist.ProcessGroup,
) -> None:
    """All processes write what they hold; `begin` and `finish` are called in the first.

    What several hold is written by one of them. An error anywhere is raised everywhere.
    """
    try:
        save(tensors, storage_writer=_Writer(folder, begin, finish), process_group=group)
    except CheckpointException as error:  # which no `except Exception` would catch
        raise _cause(error) from None


def read(folder: Path, layout: Layout) -> Tensors:
    """This process's part of all tensors; `layout` has the one that is laid out alike, if any.

    Of files whose checksums agree. They may have been made to: what they say is believed no further
    than their size.
    """
    for path in folder.glob("*.safetensors"):
        check_header(path)
    try:
        reader = HuggingFaceStorageReader(str(folder))
        kept = reader.read_metadata().state_dict_metadata
        tensors = {name: _room(name, told, layout) for name, told in kept.items()}
        with warnings.catch_warnings():  # of reading without the others, which nobody needs
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, no_dist=True)
    except (CheckpointException, Exception) as error:
        cause = _cause(error)
        if not isinstance(cause, Exception):  # Ctrl-C
            raise cause from None
        why = " ".join(str(cause).split())[:200]
        raise ValueError(f"its shards cannot be put together: {why}") from None
    return {k: t.view(torch.uint8) != 0 if t.dtype == torch.bool else t for k, t in tensors.items()}


def _room(name: str, told: object, layout: Layout) -> Tensor:
    """Where a tensor is to be read into."""
    assert isinstance(told, TensorStorageMetadata)
    if prod(told.size) != sum(prod(chunk.sizes) for chunk in told.chunks):
        raise ValueError(f"the parts of {name} do not add up to a tensor of shape {(*told.size,)}")
    alike = layout(name, told.size)
    if alike is None:
        return torch.zeros(told.size, dtype=told.properties.dtype)
    return torch.zeros_like(alike, dtype=told.properties.dtype, device="cpu")


def _cause(error: BaseException) -> BaseException:
    """What a process met; one that the disk refused a file comes last, for it is no mistake."""
    if not isinstance(error, CheckpointException):
        return error
    return min(
        (cause for cause, _ in error.failures.values()), key=lambda e: isinstance(e, OSError)
    )
