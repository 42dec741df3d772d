"""Checksums inside the files of a run, so that a file and its checksum change together.

They are made of the values, not of the text: another layout is no damage. A file without one, of
an earlier version or written by hand, is read as it is. That of a line covers the line before it
too, and so all before it: a line that is missing, or there twice, is seen.

Anyone can make a checksum. What is gone on with because it was made here has a keyed one.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from yopo.core import files

KEY = "sha256"  # in a JSON file
SHORT = "check"  # in a line of metrics.jsonl
SECRET, LENGTH = "~/.cache/yopo/secret", 32  # a file, and its bytes
HEAD = "# sha256 of these settings: "  # a file cut off would lose a last line, and its checksum too


def secret() -> bytes:
    """What this user's programs alone know, made when it is first asked for.

    An OSError where it cannot be kept, as in a home that is read only.
    """
    path = Path(SECRET)
    try:
        path = path.expanduser()
        if not path.exists():
            _make_secret(path)
        kept = files.read_bytes(path, LENGTH)
        if len(kept) != LENGTH:
            raise ValueError("it was cut off; remove it")
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: there is no home
        why = getattr(error, "strerror", None) or error
        raise OSError(f"no secret can be kept in {path} ({why})") from None
    return kept


def _make_secret(path: Path) -> None:
    """Write one whole, or let that of another process stand that was faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(writing, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(LENGTH))
        files.flush(writing)
        with suppress(FileExistsError):
            os.link(writing, path)
        files.flush(path.parent)
    finally:
        writing.unlink(missing_ok=True)


def key_for(*what: str) -> bytes:
    """For checksums of one thing that only this user's programs can make."""
    return hmac.digest(secret(), "\n".join(what).encode(), "sha256")


def keyed(digest: str, key: bytes) -> str:
    """A checksum that nobody makes without the key; without one the digest itself."""
    return hmac.digest(key, digest.encode(), "sha256").hex() if key else digest


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file, with its checksum."""
    files.write_text(path, json.dumps({**value, KEY: json_digest(value)}, indent=1) + "\n")


def read_json(path: Path) -> Any:  # noqa: ANN401
    """The value in a JSON file, if its checksum agrees."""
    return opened(files.read_json(path), path)


def line(value: Mapping[str, Any], before: str = "") -> str:
    """A line of metrics.jsonl, with its checksum; `before`: the line before it, "" if none is."""
    check = open_line(before, "the line before", None)[1] if before else ""
    return json.dumps({**value, SHORT: _follows(value, check)})


def _follows(value: Mapping[str, Any], check: str) -> str:
    """The checksum of a line after one with this checksum."""
    return json_digest([check, value])[:8]


def read_lines(path: Path) -> tuple[list[Any], str | None]:
    """The lines of metrics.jsonl, and what is wrong with a last one that was cut off.

    A process that is killed while it writes leaves half a line; damage elsewhere is refused.
    """
    lines: list[Any] = []
    texts, check = files.read_text(path).split("\n"), ""
    for number, text in enumerate(texts, 1):
        if number == len(texts) and not text:  # after the last line's end
            break
        where = f"line {number} of {path}"
        try:
            value, check = open_line(text, where, check)
            lines.append(value)
        except ValueError as error:
            if number == len(texts):
                return lines, f"{where} is cut off and was left out ({error})"
            raise
    return lines, None


def open_line(text: str, where: str, before: str | None) -> tuple[Any, str]:
    """The value in a line of metrics.jsonl and its checksum, if that agrees.

    before: the checksum of the line before, "" of the first one; None: whatever that was. Lines of
    earlier versions have checksums of their own alone.
    """
    value = files.parse_json(text, where)
    if not isinstance(value, dict) or SHORT not in value:
        return value, json_digest(value)[:8]
    check, rest = value[SHORT], {k: v for k, v in value.items() if k != SHORT}
    if before is not None and check not in (_follows(rest, before), json_digest(rest)[:8]):
        raise ValueError(
            f"{where} was damaged or edited, or it does not follow the line before it: its checksum"
            " does not fit. `train --resume` makes the file anew; if you changed it yourself, take "
            f"every {SHORT!r} in it away"
        )
    return rest, check


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


def opened(value: Any, where: Path | str) -> Any:  # noqa: ANN401
    """A value from a JSON file without its checksum, if that agrees."""
    if not isinstance(value, dict) or KEY not in value:
        return value
    rest = {k: v for k, v in value.items() if k != KEY}
    if value[KEY] != json_digest(rest):
        raise ValueError(
            f"{where} was damaged or edited: its checksum does not fit. Make it anew; if you "
            f"changed it yourself, take its {KEY!r} away"
        )
    return rest


def json_digest(value: object) -> str:
    """Of a JSON value, by content: no layout, no order of keys, NaN as None."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
