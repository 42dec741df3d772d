"""Checksums inside the files of a run, so that a file and its checksum change together.

They are made of the values, not of the text: another layout is no damage. A file without one, of
an earlier version or written by hand, is read as it is.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yopo.core import files

KEY = "sha256"  # in a JSON file
SHORT = "check"  # in a line of metrics.jsonl
HEAD = "# sha256 of these settings: "  # a file cut off would lose a last line, and its checksum too


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file, with its checksum."""
    files.write_text(path, json.dumps({**value, KEY: json_digest(value)}, indent=1) + "\n")


def read_json(path: Path) -> Any:  # noqa: ANN401
    """The value in a JSON file, if its checksum agrees."""
    return opened(files.read_json(path), path)


def line(value: Mapping[str, Any]) -> str:
    """A line of metrics.jsonl, with its checksum."""
    return json.dumps({**value, SHORT: json_digest(value)[:8]})


def read_lines(path: Path) -> tuple[list[Any], str | None]:
    """The lines of metrics.jsonl, and what is wrong with a last one that was cut off.

    A process that is killed while it writes leaves half a line; damage elsewhere is refused.
    """
    lines: list[Any] = []
    texts = files.read_text(path).split("\n")
    for number, text in enumerate(texts, 1):
        if number == len(texts) and not text:  # after the last line's end
            break
        where = f"line {number} of {path}"
        try:
            lines.append(open_line(text, where))
        except ValueError as error:
            if number == len(texts):
                return lines, f"{where} is cut off and was left out ({error})"
            raise
    return lines, None


def open_line(text: str, where: str) -> Any:  # noqa: ANN401
    """The value in a line of metrics.jsonl, if its checksum agrees."""
    return opened(files.parse_json(text, where), where, SHORT)


def write_yaml(path: Path, tree: Mapping[str, Any]) -> None:
    """Replace a file of settings, with its checksum."""
    import yaml

    text = yaml.safe_dump(dict(tree), sort_keys=False)
    files.write_text(path, f"{HEAD}{json_digest(tree)}\n{text}")


def read_yaml(path: Path) -> Any:  # noqa: ANN401
    """The settings in a run's file, if their checksum agrees."""
    text = files.read_text(path, files.SETTINGS)
    tree, first = files.parse_yaml(text, str(path)), text.partition("\n")[0].rstrip()
    if first.startswith(HEAD) and first.removeprefix(HEAD) != json_digest(tree):
        raise ValueError(
            f"{path} was damaged or edited: its checksum does not fit. `train --resume` makes "
            "it anew; if you changed it yourself, take its first line away"
        )
    return tree


def opened(value: Any, where: Path | str, key: str = KEY) -> Any:  # noqa: ANN401
    """A value from a JSON file without its checksum, if that agrees."""
    if not isinstance(value, dict) or key not in value:
        return value
    rest = {k: v for k, v in value.items() if k != key}
    if value[key] != json_digest(rest)[: 8 if key == SHORT else 64]:
        raise ValueError(
            f"{where} was damaged or edited: its checksum does not fit. Make it anew; if you "
            f"changed it yourself, take its {key!r} away"
        )
    return rest


def json_digest(value: object) -> str:
    """Of a JSON value, by content: no layout, no order of keys, NaN as None."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
