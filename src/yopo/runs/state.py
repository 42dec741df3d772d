"""Checkpoints: written whole or not at all, checked when read, and never pickled."""

import hashlib
import json
import re
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from yopo.core.files import file_digest, flush, parse_json, read_json, read_text
from yopo.core.tensor_files import Tensors, load_tensors, write_tensors
from yopo.runs.folder import SEAL, VALUES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Values = dict[str, Any]
Layout = Callable[[str, torch.Size], Tensor | None]
WRITING = ".writing"
PARTS = ("tensors", "good", "best")
TENSORS = "tensors.safetensors"  # of a checkpoint that one process wrote
SEEN = 90.0  # seconds after which all machines see what one wrote; NFS may take 60


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint: all that a run needs to go on, in one folder that depends on no other file."""

    tensors: Tensors
    values: Values
    good: Tensors | None = None  # what a collapse goes back to, where that is another state
    # The best weights are copied into each: those in the run's folder may be damaged or deleted,
    # and no later epoch would bring them back. A link would share the damage.
    best: Tensors | None = None


def save(folder: Path, number: int, state: Checkpoint, *, keep: int) -> None:
    """Write checkpoint `number`, the newest; then remove all but the newest `keep`.

    The files are written under another name, flushed to the disk and renamed, so that a process
    killed at any moment leaves either the whole checkpoint or none.
    """
    writing = folder / WRITING
    try:
        _begin(folder, writing)
        for name, tensors in _parts(state).items():
            write_tensors(tensors, writing / f"{name}.safetensors")
            flush(writing / f"{name}.safetensors")
        sums = {file.name: file_digest(file) for file in sorted(writing.iterdir())}
        _finish(folder, writing, number, state.values, sums, keep)
    except OSError:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def save_shards(
    folder: Path, number: int, state: Checkpoint, *, keep: int, group: "ProcessGroup"
) -> None:
    """The same by all processes of `group` together, each of which holds a part of the tensors.

    It may run beside exchanges in other groups. An error in one process is raised in all.
    """
    from yopo.runs import shards

    # Where the last one was written may be cached by another machine.
    writing = folder / f"{WRITING}-{number:06d}"
    parts = _parts(state).items()
    tensors = {f"{part}/{name}": t for part, mine in parts for name, t in mine.items()}
    finish = partial(_finish, folder, writing, number, state.values, keep=keep)
    try:
        shards.write(tensors, writing, partial(_begin, folder, writing), finish, group)
    except OSError:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def _parts(state: Checkpoint) -> dict[str, Tensors]:
    named = ((name, getattr(state, name)) for name in PARTS)
    return {name: tensors for name, tensors in named if tensors is not None}


def _begin(folder: Path, writing: Path) -> None:
    """Make room for the files of a checkpoint."""
    for left in folder.glob(f"{WRITING}*"):  # by one that was killed
        _remove(left)
    if not folder.is_dir():
        folder.mkdir(parents=True)
        flush(folder.parent)
    writing.mkdir()


def _finish(
    folder: Path, writing: Path, number: int, values: Values, sums: dict[str, str], keep: int
) -> None:
    """Seal a checkpoint whose tensors are written and flushed, with these digests; name it."""
    target, told = folder / f"save-{number:06d}", writing / VALUES
    told.write_text(json.dumps(values, sort_keys=True))
    (writing / SEAL).write_text(json.dumps(sums | {VALUES: file_digest(told)}))
    for file in (told, writing / SEAL, writing):
        flush(file)
    _remove(target)  # there only if it was damaged
    writing.rename(target)
    flush(folder)
    there = saved(folder)
    newer = there.index(target)  # were passed over as damaged, and would pass for the newest
    for old in (*there[:newer], *there[newer + keep :]):
        with suppress(OSError):
            _remove(old)


def saved(folder: Path) -> list[Path]:
    """All checkpoints, the newest first; what else lies there is none of ours."""
    named = (path for path in folder.glob("save-*") if re.fullmatch(r"save-[0-9]{6,9}", path.name))
    return sorted(named, key=lambda path: int(path.name.removeprefix("save-")), reverse=True)


@dataclass(frozen=True, slots=True)
class Reading:
    """How one of several processes reads a checkpoint; by default, as the only one."""

    layout: Layout = lambda *_: None  # of the tensors that it holds in part
    rank: int = 0  # whose turn it is to check a file of many
    world: int = 1
    everyone: Callable[[Any], list[Any]] = lambda mine: [mine]  # each one's value for JSON

    def together(self, work: Callable[[], T]) -> T:
        """What work finds, if it succeeds in all processes: they fall back together."""
        result, wrong = None, ""
        try:
            result = work()
        except (OSError, ValueError) as error:
            wrong = str(error)
        if (wrong := next(filter(None, self.everyone(wrong)), "")) or result is None:
            raise ValueError(wrong)
        return result


def load_newest(
    folder: Path,
    warn: Callable[[str], None],
    read: Reading = Reading(),  # noqa: B008
) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over.

    Where none is, one that lacks no more than the way back or the best weights will do. Which there
    are, the first process says: a folder may look otherwise from another machine.
    """
    names: list[str] = read.everyone([path.name for path in saved(folder)])[0]
    checkpoints = [folder / name for name in names]
    seals = read.everyone([_digest_of(path / SEAL) for path in checkpoints])[0]
    _until_all_see(lambda: [_digest_of(path / SEAL) for path in checkpoints] == seals, folder, read)
    for path in checkpoints:
        try:
            return load(path, read=read)
        except ValueError as error:
            warn(f"{error}; going back to the checkpoint before it")
    for path in checkpoints:
        try:
            state = load(path, whole=False, read=read)
        except ValueError:
            continue
        warn(f"no checkpoint is whole; going on with what is sound of {path.name}")
        return state
    if checkpoints:
        raise ValueError(f"no checkpoint in {folder.parent} is sound; give another --out")
    return None


def check_shared(folder: Path, read: Reading) -> None:
    """Refuse, before anything is trained, a folder that not all processes see."""
    if read.world == 1:
        return
    mark: Path = folder / f"{WRITING}-{read.everyone(uuid.uuid4().hex)[0]}"
    there = False
    if read.rank == 0:
        with suppress(OSError):  # as a full disk: then there is nothing to see
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
            there = True
    there = read.everyone(there)[0]
    try:
        _until_all_see(lambda: not there or mark.exists(), folder, read)
    finally:
        if read.rank == 0:
            with suppress(OSError):
                _remove(mark)


def _until_all_see(look: Callable[[], bool], folder: Path, read: Reading) -> None:
    """Wait, for a while, until each process sees what the first one does."""
    end = time.monotonic() + SEEN
    while not (seen := look()) and time.monotonic() < end:
        time.sleep(0.1)
    if others := [str(rank) for rank, sees in enumerate(read.everyone(seen)) if not sees]:
        raise ValueError(
            f"process {', '.join(others)} does not see in {folder} what process 0 does, and all "
            "read it to go on; give an --out that all machines share"
        )


def _digest_of(path: Path) -> str:
    """Of a short file; whatever else is in its place has none."""
    try:
        return hashlib.sha256(read_text(path).encode()).hexdigest()
    except (OSError, ValueError):
        return ""


def load(path: Path, *, whole: bool = True, read: Reading = Reading()) -> Checkpoint:  # noqa: B008
    """One checkpoint, if its checksums agree; not `whole`: those of what a run goes on from."""
    try:
        sound = read.together(lambda: _sound(path, whole, read))
        return read.together(lambda: _load(path, sound, read.layout))
    except ValueError as error:
        raise ValueError(f"checkpoint {path.name} is damaged ({error})") from None


def _sound(path: Path, whole: bool, read: Reading) -> set[str]:
    """The files whose checksums agree, all that are needed among them; none was read so far."""
    sums = _seal(path)
    if TENSORS in sums:
        mine, needed = sums, {*sums} if whole else {TENSORS, VALUES}
    else:  # in shards, of which none can be left out, nor another put among them
        if more := {file.name for file in path.glob("*.safetensors")} - {*sums}:
            raise ValueError(f"{SEAL} has no {min(more)}")
        mine = {name: sums[name] for name in sorted(sums)[read.rank :: read.world]}
        needed = {*sums}
    sound = {*sums} - {*mine}
    for name, sha in mine.items():
        there = (path / name).is_file()
        if there and sha == file_digest(path / name):
            sound.add(name)
        elif name in needed:
            raise ValueError(f"{name} was altered" if there else f"no {name}")
    return sound


def _load(path: Path, sound: set[str], layout: Layout) -> Checkpoint:
    """What is in files that are sound."""
    values = parse_json(read_text(path / VALUES), VALUES, nan=True)
    if not isinstance(values, dict):
        raise ValueError(f"{VALUES} holds no values")
    parts: dict[str, Tensors] = {}
    if TENSORS in sound:
        there = (name for name in PARTS if f"{name}.safetensors" in sound)
        parts |= {name: load_tensors(path / f"{name}.safetensors") for name in there}
    else:
        from yopo.runs import shards

        def inside(full: str, shape: torch.Size) -> Tensor | None:
            return layout(full.partition("/")[2], shape)

        for full, tensor in shards.read(path, inside).items():
            part, _, name = full.partition("/")
            parts.setdefault(part, {})[name] = tensor
    if "tensors" not in parts or not {*parts} <= {*PARTS}:
        raise ValueError("it holds no tensors of a run")
    return Checkpoint(values=values, **parts)


def _seal(path: Path) -> dict[str, str]:
    """The checksums of a checkpoint's files, by their names."""
    seal = read_json(path / SEAL)
    if not isinstance(seal, dict) or not seal:
        raise ValueError(f"{SEAL} holds no checksums")
    # Earlier versions left the endings out.
    old = {"tensors": "tensors.safetensors", "values": VALUES}
    sums = {old.get(str(name), str(name)): sha for name, sha in seal.items()}
    if VALUES not in sums or not any(name.endswith(".safetensors") for name in sums):
        raise ValueError(f"{SEAL} lacks a checksum")
    if odd := [name for name in sums if Path(name).name != name]:
        raise ValueError(f"{SEAL} names {odd[0]!r}")
    return sums


def _remove(path: Path) -> None:
    """A folder, or a file that has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
