"""Files: read only if plain and of a bearable size and depth, written whole or not at all.

Whatever was not written in this process is read through here. What is wrong with a file is said in
a ValueError that names it; a file that is not there is an OSError, as everywhere.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

SETTINGS = 64 << 10  # bytes of a file of settings
TEXT = 16 << 20  # bytes of any other text
WORDS = 64 << 10  # letters of one text in it
DEPTH = 32  # brackets inside brackets
BRACKETS = 1_000_000  # in all; each takes up to 250 bytes in memory
LARGEST = 2**64  # whole numbers lie below, as seeds do
# What no page, file name or terminal should get: control characters, halves of letters.
ODD = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
FLAT, RATIO = 64 << 20, 200  # bytes; and how far data sets that are larger shrink in a file


def open_plain(path: Path) -> BufferedReader:
    """A file to read from, if it is a plain one: pipes are waited for, devices may not end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no plain file; put one there, or remove it")
    # Whoever puts a pipe there meanwhile does not make us wait.
    return open(path, "rb", opener=lambda p, how: os.open(p, how | getattr(os, "O_NONBLOCK", 0)))


def read_bytes(path: Path, most: int = TEXT) -> bytes:
    """A whole file, if it is a plain one of at most so many bytes."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, the most that is read of such")
    return content


def read_text(path: Path, most: int = TEXT) -> str:
    """A whole text file in UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}); make it anew") from None


def read_json(path: Path) -> Any:  # noqa: ANN401
    """The value in a JSON file."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, name: str, *, nan: bool = False) -> Any:  # noqa: ANN401
    """The value in JSON text; `name` says where it is from. Without `nan`, NaN becomes None."""
    try:
        if text.count("[") + text.count("{") > BRACKETS:
            raise ValueError(f"it has more than {BRACKETS:,} brackets")
        value = json.loads(text, parse_constant=float if nan else lambda _: None)
        _check(value, nan=nan)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON as we write it: {error}; make it anew") from None
    return value


def read_yaml(path: Path) -> Any:  # noqa: ANN401
    """The value in a YAML file of settings."""
    return parse_yaml(read_text(path, SETTINGS), str(path))


def parse_yaml(text: str, name: str) -> Any:  # noqa: ANN401
    """The value in YAML text. Aliases are refused: with them few lines can name 10⁹ values."""
    import yaml

    fast = cast("type[yaml.SafeLoader]", getattr(yaml, "CSafeLoader", yaml.SafeLoader))

    class OnlyOnce(fast):  # type: ignore[misc, valid-type]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:  # noqa: ANN401
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
                raise ValueError(f"it says {twice[0][:40]!r} twice")
            return super().construct_mapping(node, deep=deep)

    try:
        depth = 0
        for event in yaml.parse(text, Loader=fast):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has an alias (*name); write the value out")
            if getattr(event, "tag", None):
                raise ValueError(f"it has the tag {event.tag[:40]}; leave it out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:  # before it is built, which goes as deep
                raise ValueError(f"it has more than {DEPTH} brackets inside each other")
        value = yaml.load(text, Loader=OnlyOnce)
        _check(value)
    # A date may be one that no calendar has; a number may be one of too many digits.
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        why = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise ValueError(f"{name} is not YAML of settings: {why}") from None
    return value


def _check(value: object, depth: int = 0, *, nan: bool = False) -> None:
    """Refuse values that no code after this expects."""
    if isinstance(value, dict | list):
        if depth == DEPTH:
            raise ValueError(f"it has more than {DEPTH} brackets inside each other")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise ValueError(f"expected words for names, got {str(key)[:40]}; quote it")
                _check(key)
        for inner in value.values() if isinstance(value, dict) else value:
            _check(inner, depth + 1, nan=nan)
    elif isinstance(value, str):
        if len(value) > WORDS:
            raise ValueError(f"it has a text of more than {WORDS:,} letters")
        if odd := ODD.search(value):
            raise ValueError(f"it has the character {odd[0]!r} in a text")
    elif isinstance(value, int):
        if abs(value) >= LARGEST:
            raise ValueError("it has a whole number of more than 64 bits")
    elif isinstance(value, float):
        if not (nan or math.isfinite(value)):
            raise ValueError(f"it has {value} for a number")
    elif value is not None:
        raise ValueError(f"expected numbers and words, got a {type(value).__name__}; quote it")


def check_unpacked(path: Path, unpacked: int, packed: int) -> None:
    """Refuse data that take far more room in memory than on the disk, as only a trap does."""
    if unpacked > max(FLAT, RATIO * packed):
        raise ValueError(
            f"{path} has {packed:,} bytes and would unpack to {unpacked:,}; if that is true, save "
            "it without compression"
        )


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
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
