"""Tensors on disk: safetensors files, checked when read, never pickled."""

import json
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from yopo.core import seals
from yopo.core.digest import tensors_digest
from yopo.core.files import RATIO, check_unpacked, open_plain, parse_json, whole

Tensors = dict[str, Tensor]
ENTRY = "yopo"  # of a weights file's metadata
HEADER = 4 << 20  # bytes of what a file says of its tensors
END = 98  # bytes that close an archive of torch.save: three records of where its list is


def save_weights(
    path: Path, state: Tensors, metadata: Mapping[str, str], *, key: bytes = b""
) -> None:
    """Write a model's weights as one safetensors file, atomically and with a checksum."""
    # One entry: safetensors writes several in any order, and equal runs would differ.
    words = {**metadata, seals.KEY: seals.keyed(tensors_digest(state, metadata), key)}
    with whole(path) as writing:
        write_tensors(state, writing, {ENTRY: json.dumps(words, sort_keys=True)})


def load_weights(path: Path, *, key: bytes = b"") -> Tensors:
    """Read a safetensors file, if its checksum agrees; a pickle is refused unread.

    key: what its checksum must have been made with; else a file may be without one.
    """
    words = _metadata(path)
    state = load_tensors(path)
    seal = words.pop(seals.KEY, None)
    if (key or seal is not None) and seal != seals.keyed(tensors_digest(state, words), key):
        raise ValueError(f"{path.name} was damaged: its checksum does not fit")
    return state


def load_metadata(path: Path) -> dict[str, str]:
    """The words that stand beside the weights in a safetensors file."""
    return {name: text for name, text in _metadata(path).items() if name != seals.KEY}


def _metadata(path: Path) -> dict[str, str]:
    """With the checksum. Earlier versions made each word an entry, and had none."""
    check_header(path)
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


def load_tensors(path: Path) -> Tensors:
    """The tensors of a safetensors file, whoever wrote it; a pickle is refused unread."""
    check_header(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error})") from None
    # A byte that is neither 0 nor 1 is no bool, and torch may do anything with it.
    return {k: t.view(torch.uint8) != 0 if t.dtype == torch.bool else t for k, t in tensors.items()}


def load_foreign(path: Path) -> dict[str, Any]:
    """What a file of someone else's holds: safetensors, or what torch.save wrote, tensors alone.

    The user must have named the file: torch reads no code from it, but is less strict than we are.
    """
    with open_plain(path) as file:
        if file.read(9)[8:] == b"{":
            return dict(load_tensors(path))
    try:
        _check_archive(path)
        with open_plain(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, of zip, or torch's own
        # Of torch's words those that say what it met: others tell how to read it all the same.
        lines = [w for w in str(error).splitlines() if w.strip() and "Re-running" not in w]
        why = next((w for w in lines if "GLOBAL" in w), (lines or [type(error).__name__])[0])
        why = " ".join(why.partition(" was not an allowed")[0].split())
        raise ValueError(
            f"{path} was not read: {why[:200]}. Expected tensors alone; where you trust the file, "
            "save them with safetensors.torch.save_file"
        ) from None
    if not isinstance(content, Mapping):
        raise ValueError(
            f"expected a dictionary of tensors in {path}, got {type(content).__name__}"
        )
    return dict(content)


def _check_archive(path: Path) -> None:
    """Refuse an archive that torch.save did not make, or that unpacks to far more than it is.

    Python and torch must see one list of its contents, so it ends as torch.save lets it end.
    """
    with open_plain(path) as file:
        unpacked = size = os.fstat(file.fileno()).st_size
        if file.read(4) == b"PK\3\4":  # else an old one, whose tensors lie in it as they are
            file.seek(max(0, size - END))
            end = file.read()
            ends = tuple(int.from_bytes(end[at : at + 8], "little") for at in (40, 48, 64))
            signs = (end[:4], end[56:60], end[76:80], end[96:])
            whole = ends[2] == ends[0] + ends[1] == size - END
            if signs != (b"PK\6\6", b"PK\6\7", b"PK\5\6", b"\0\0") or not whole:
                raise ValueError("it is an archive, but none that torch.save made")
            with zipfile.ZipFile(file) as archive:
                inside = archive.infolist()
            unpacked = sum(member.file_size for member in inside)
            said = sum(m.file_size for m in inside if m.filename.lower().endswith("data.pkl"))
            if said > HEADER:
                raise ValueError(f"it says {said:,} bytes of its tensors, more than {HEADER:,}")
        check_unpacked(path, unpacked, _filled(file.fileno(), size))


def check_header(path: Path) -> None:
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


def write_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors' file; it needs contiguous tensors on the CPU that share no memory."""
    plain, taken = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if (place := own.untyped_storage().data_ptr()) in taken:
            own = own.clone()
        taken.add(place)
        plain[name] = own
    path.touch()
    mode = path.stat().st_mode  # as the user's other files; save_file lets no one else read it
    try:
        save_file(plain, path, metadata=metadata)
    except SafetensorError as error:  # what the writer makes of a full disk
        raise OSError(str(error)) from None
    path.chmod(mode)
