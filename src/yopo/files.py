"""Files: read only if plain and of a bearable size and depth, written whole or not at all.

Whatever was not written in this process is read through here. What is wrong with a file is said in
a ValueError that names it; a file that is not there is an OSError, as everywhere.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = 256 << 10  # bytes of a file of settings
TEXT = 64 << 20  # bytes of any other text
DEPTH = 32  # brackets inside brackets


def read_bytes(path: Path, most: int = TEXT) -> bytes:
    """A whole file, if it is a plain one of at most so many bytes."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would be waited for
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path.name} is no plain file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most:,} bytes, the most that is read of such")
    return content


def read_text(path: Path, most: int = TEXT) -> str:
    """A whole text file in UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no UTF-8 text ({error.reason})") from None


def read_json(path: Path, most: int = TEXT) -> Any:  # noqa: ANN401
    """The value in a JSON file."""
    return parse_json(read_text(path, most), path.name)


def parse_json(text: str, name: str) -> Any:  # noqa: ANN401
    """The value in JSON text; `name` says where it is from. NaN and infinities become None."""
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({error})") from None
    if _depth(value) > DEPTH:
        raise ValueError(f"{name} has more than {DEPTH} brackets inside each other")
    return value


def read_yaml(path: Path) -> Any:  # noqa: ANN401
    """The value in a YAML file of settings. Aliases are refused: few lines can name 10⁹ values."""
    import yaml

    text = read_text(path, SETTINGS)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has an alias (*name); write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                raise ValueError(f"more than {DEPTH} brackets inside each other")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path.name} is no YAML of settings ({error})") from None


def _depth(value: object) -> int:
    """How many lists and dictionaries stand inside each other."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, list | dict)]:
        depth += 1
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v)]
    return depth


def write_text(path: Path, text: str) -> None:
    """Replace a small text file atomically."""
    with whole(path) as writing:
        writing.write_text(text, encoding="utf-8")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write, so that `path` is replaced whole or not at all, and stays so on the disk."""
    writing = path.with_name(f".{path.name}.writing")
    writing.unlink(missing_ok=True)  # a link there would lead the writing elsewhere
    try:
        yield writing
        flush(writing)
        os.replace(writing, path)
        flush(path.parent)
    finally:
        writing.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
