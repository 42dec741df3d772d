"""A run's state on disk: written whole or not at all, checked when read, never pickled."""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from yopo.files import file_digest, flush, whole

Tensors = dict[str, Tensor]
Values = dict[str, Any]


def save(
    folder: Path, number: int, tensors: Tensors, values: Values, *, keep: Collection[int]
) -> None:
    """Write checkpoint `number`, the newest; then remove those that are not in `keep`.

    The files are written under another name, flushed to the disk and renamed, so that a process
    killed at any moment leaves either the whole checkpoint or none.
    """
    target, writing = folder / f"save-{number:06d}", folder / ".writing"
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    try:
        _write_tensors(tensors, writing / "tensors.safetensors")
        text = json.dumps(values, sort_keys=True)
        seal = {
            "tensors": file_digest(writing / "tensors.safetensors"),
            "values": hashlib.sha256(text.encode()).hexdigest(),
        }
        (writing / "values.json").write_text(text)
        (writing / "seal.json").write_text(json.dumps(seal))
        for file in (*writing.iterdir(), writing):
            flush(file)
        shutil.rmtree(target, ignore_errors=True)  # there only if it was damaged
        writing.rename(target)
        flush(folder)
    except OSError:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    for old in saved(folder)[1:]:
        if _number(old) not in keep:
            shutil.rmtree(old, ignore_errors=True)


def saved(folder: Path) -> list[Path]:
    """All checkpoints, the newest first."""
    return sorted(folder.glob("save-[0-9]*"), key=_number, reverse=True)


def load_newest(folder: Path, warn: Callable[[str], None]) -> tuple[Tensors, Values] | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over."""
    for path in saved(folder):
        try:
            return load(path)
        except ValueError as error:
            warn(f"{error}; going back to the checkpoint before it")
    return None


def load(path: Path) -> tuple[Tensors, Values]:
    """One checkpoint, if its checksums agree."""
    try:
        seal = json.loads((path / "seal.json").read_text())
        text = (path / "values.json").read_text()
        if seal["values"] != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("values.json was altered")
        if seal["tensors"] != file_digest(path / "tensors.safetensors"):
            raise ValueError("tensors.safetensors was altered")
        values: Values = json.loads(text)
        return load_file(path / "tensors.safetensors"), values
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path.name} is damaged ({error})") from None


def save_weights(path: Path, state: Tensors, metadata: dict[str, str]) -> None:
    """Write a model's weights as one safetensors file, atomically."""
    with whole(path) as writing:
        _write_tensors(state, writing, metadata)


def load_weights(path: Path) -> Tensors:
    """Read a safetensors file; anything else, a pickle above all, is refused unread."""
    _refuse_pickles(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is not a safetensors file ({error})") from None


def load_metadata(path: Path) -> dict[str, str]:
    """The words that stand beside the weights in a safetensors file."""
    _refuse_pickles(path)
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path.name} is not a safetensors file ({error})") from None


def _refuse_pickles(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(9)
    # A safetensors file begins with the length of its header, which may look like a pickle's start,
    # and then the header, which is JSON.
    pickles = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    if start[:2] in pickles and start[8:] != b"{":
        raise ValueError(
            f"{path.name} is a pickle, which can run code when read; it was not read. "
            "Convert it where you trust it, with safetensors.torch.save_file"
        )


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


def _number(path: Path) -> int:
    return int(path.name.removeprefix("save-"))
