"""A run's state on disk: written whole or not at all, checked when read, never pickled."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from yopo import seals
from yopo.files import (
    RATIO,
    check_unpacked,
    file_digest,
    flush,
    open_plain,
    parse_json,
    read_json,
    read_text,
    whole,
)

Tensors = dict[str, Tensor]
Values = dict[str, Any]
ENTRY = "yopo"  # of a weights file's metadata
HEADER = 4 << 20  # bytes of what a safetensors file says of its tensors


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint: all that a run needs to go on, in one folder that depends on no other file."""

    tensors: Tensors
    values: Values
    good: Tensors | None = None  # what a collapse goes back to, where that is another state
    # The best weights are copied into each: those in the run's folder may be damaged or deleted,
    # and no later epoch would bring them back. A link would share the damage.
    best: Tensors | None = None


def save(folder: Path, number: int, state: Saved, *, keep: int) -> None:
    """Write checkpoint `number`, the newest; then remove all but the newest `keep`.

    The files are written under another name, flushed to the disk and renamed, so that a process
    killed at any moment leaves either the whole checkpoint or none.
    """
    target, writing = folder / f"save-{number:06d}", folder / ".writing"
    _remove(writing)
    if not folder.is_dir():
        folder.mkdir(parents=True)
        flush(folder.parent)
    writing.mkdir()
    parts = {"tensors": state.tensors, "good": state.good, "best": state.best}
    try:
        for name, tensors in parts.items():
            if tensors is not None:
                _write_tensors(tensors, writing / f"{name}.safetensors")
        (writing / "values.json").write_text(json.dumps(state.values, sort_keys=True))
        seal = {file.name: file_digest(file) for file in sorted(writing.iterdir())}
        (writing / "seal.json").write_text(json.dumps(seal))
        for file in (*writing.iterdir(), writing):
            flush(file)
        _remove(target)  # there only if it was damaged
        writing.rename(target)
        flush(folder)
    except OSError:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    there = saved(folder)
    newer = there.index(target)  # were passed over as damaged, and would pass for the newest
    for old in (*there[:newer], *there[newer + keep :]):
        with suppress(OSError):
            _remove(old)


def saved(folder: Path) -> list[Path]:
    """All checkpoints, the newest first; what else lies there is none of ours."""
    named = (path for path in folder.glob("save-*") if re.fullmatch(r"save-[0-9]{6,9}", path.name))
    return sorted(named, key=lambda path: int(path.name.removeprefix("save-")), reverse=True)


def load_newest(folder: Path, warn: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over.

    Where none is, one that lacks no more than the way back or the best weights will do.
    """
    found = saved(folder)
    for path in found:
        try:
            return load(path)
        except ValueError as error:
            warn(f"{error}; going back to the checkpoint before it")
    for path in found:
        try:
            state = load(path, whole=False)
        except ValueError:
            continue
        warn(f"no checkpoint is whole; going on with what is sound of {path.name}")
        return state
    return None


def load(path: Path, *, whole: bool = True) -> Saved:
    """One checkpoint, if its checksums agree; not `whole`: those of what a run goes on from."""
    try:
        seal = read_json(path / "seal.json")
        if not isinstance(seal, dict) or not seal:
            raise ValueError("seal.json holds no checksums")
        # Earlier versions left the endings out.
        old = {"tensors": "tensors.safetensors", "values": "values.json"}
        sums = {old.get(str(name), str(name)): found for name, found in seal.items()}
        if not {*old.values()} <= {*sums}:
            raise ValueError("seal.json lacks a checksum")
        sound = {}
        for name, found in sums.items():
            if Path(name).name != name:
                raise ValueError(f"seal.json names {name!r}")
            sound[name] = (path / name).is_file() and found == file_digest(path / name)
            if not sound[name] and (whole or name in old.values()):
                there = (path / name).is_file()
                raise ValueError(f"{name} was altered" if there else f"no {name}")
        values = parse_json(read_text(path / "values.json"), "values.json", nan=True)
        if not isinstance(values, dict):
            raise ValueError("values.json holds no values")
        parts = {
            name: _load_tensors(path / f"{name}.safetensors")
            for name in ("tensors", "good", "best")
            if sound.get(f"{name}.safetensors")
        }
        return Saved(values=values, **parts)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path.name} is damaged ({error})") from None


def save_weights(path: Path, state: Tensors, metadata: Mapping[str, str]) -> None:
    """Write a model's weights as one safetensors file, atomically and with a checksum."""
    # One entry: safetensors writes several in any order, and equal runs would differ.
    words = {**metadata, seals.KEY: seals.tensors_digest(state, metadata)}
    with whole(path) as writing:
        _write_tensors(state, writing, {ENTRY: json.dumps(words, sort_keys=True)})


def load_weights(path: Path) -> Tensors:
    """Read a safetensors file, if its checksum agrees; a pickle is refused unread."""
    words = _metadata(path)
    state = _load_tensors(path)
    found = words.pop(seals.KEY, None)
    if found is not None and found != seals.tensors_digest(state, words):
        raise ValueError(f"{path.name} was damaged: its checksum does not fit")
    return state


def load_metadata(path: Path) -> dict[str, str]:
    """The words that stand beside the weights in a safetensors file."""
    return {name: text for name, text in _metadata(path).items() if name != seals.KEY}


def _metadata(path: Path) -> dict[str, str]:
    """With the checksum. Earlier versions made each word an entry, and had none."""
    _check_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            entries: dict[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error})") from None
    if ENTRY not in entries:
        return entries
    words = parse_json(entries[ENTRY], f"the metadata of {path}")
    if not isinstance(words, dict) or not all(isinstance(w, str) for w in words.values()):
        raise ValueError(f"{path.name} was damaged: its metadata cannot be read")
    return words


def _load_tensors(path: Path) -> Tensors:
    _check_header(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error})") from None
    # A byte that is neither 0 nor 1 is no bool, and torch may do anything with it.
    return {k: t.view(torch.uint8) != 0 if t.dtype == torch.bool else t for k, t in tensors.items()}


def _check_header(path: Path) -> None:
    """Refuse a pickle, and a file that says more of its tensors than anyone can bear."""
    with open_plain(path) as file:
        start, size = file.read(9), os.fstat(file.fileno()).st_size
        filled = _filled(file.fileno(), size)
    # A safetensors file begins with the length of its header, which may look like a pickle's start,
    # and then the header, which is JSON.
    pickles = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    if start[:2] in pickles and start[8:] != b"{":
        raise ValueError(
            f"{path.name} is a pickle, which can run code when read; it was not read. "
            "Convert it where you trust it, with safetensors.torch.save_file"
        )
    if (length := int.from_bytes(start[:8], "little")) > HEADER or start[8:] != b"{":
        raise ValueError(f"{path} is not a safetensors file (a header of {length:,} bytes?)")
    # A file that is all holes takes no room on the disk, and all there is in memory.
    check_unpacked(path, size, filled)


def _filled(handle: int, size: int) -> int:
    """How much of a file is no hole, counted until that is plainly enough.

    Not by its blocks on the disk: some file systems count none of what they have not written yet.
    """
    if not hasattr(os, "SEEK_DATA"):
        return size
    filled = end = 0
    with suppress(OSError):  # nothing but a hole is left
        while end < size and RATIO * filled < size:
            start = os.lseek(handle, end, os.SEEK_DATA)
            end = os.lseek(handle, start, os.SEEK_HOLE)
            filled += end - start
    return filled


def _write_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors' file; it needs contiguous tensors on the CPU that share no memory."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    path.touch()
    mode = path.stat().st_mode  # as the user's other files; save_file lets no one else read it
    try:
        save_file(plain, path, metadata=metadata)
    except SafetensorError as error:  # what the writer makes of a full disk
        raise OSError(str(error)) from None
    path.chmod(mode)


def _remove(path: Path) -> None:
    """A folder, or a file that has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
