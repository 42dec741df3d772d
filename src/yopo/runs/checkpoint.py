"""A run's state on disk: written whole or not at all, checked when read, never pickled."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yopo.core.files import file_digest, flush, parse_json, read_json, read_text
from yopo.core.tensor_files import Tensors, load_tensors, write_tensors

Values = dict[str, Any]


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
                write_tensors(tensors, writing / f"{name}.safetensors")
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
            name: load_tensors(path / f"{name}.safetensors")
            for name in ("tensors", "good", "best")
            if sound.get(f"{name}.safetensors")
        }
        return Saved(values=values, **parts)
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path.name} is damaged ({error})") from None


def _remove(path: Path) -> None:
    """A folder, or a file that has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
