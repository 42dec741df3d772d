"""Our docstrings as reStructuredText: plain text for an editor becomes lists, code and links.

A paragraph's "name: what it is" becomes an item of a list if the callable has such a parameter, and
so does the comment beside a dataclass's field; an indented block becomes code; a name in backticks
becomes a link where the site has a page for it.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from itertools import pairwise

import yopo

LINKED = {f"yopo.{name}" for name in yopo.__all__}


def as_rst(lines: Sequence[str], thing: object = None) -> list[str]:
    """The lines of a docstring, for Sphinx."""
    names = _parameters(thing)
    out: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        out += [*_block(block, names), ""]
    return [*out, *_fields(thing), ""]


def _fields(thing: object) -> Iterator[str]:
    """What the comments of a dataclass, or a named tuple, say of its fields."""
    if not (inspect.isclass(thing) and (is_dataclass(thing) or hasattr(thing, "_fields"))):
        return
    lines = inspect.getsource(thing)
    for name, what in re.findall(r"(?m)^    (\w+): .*?  # (?!noqa)(.*)$", lines):
        yield f"- ``{name}``: {_inline(what)}"


def _block(block: str, names: Sequence[str]) -> Iterator[str]:
    first = block.split("\n", 1)[0]
    if first.startswith(">>>"):
        yield from block.split("\n")
    elif first.startswith("    "):
        yield from (".. code-block:: python", "", *block.split("\n"))
    elif first.startswith("- "):
        yield from _inline(block).split("\n")
    else:
        before, *items = _items(block, names)
        yield from _inline(before).split("\n")
        for item in items:
            name, _, what = item.partition(": ")
            words = ", ".join(f"``{n}``" for n in name.split(", "))
            yield from ("", f"- {words}: {_inline(' '.join(what.split()))}")


def _items(block: str, names: Sequence[str]) -> list[str]:
    """What stands before the first "name: ", then each such item up to the next."""
    if not names:
        return [block]
    name = "|".join(names)
    starts = re.finditer(rf"(?:^|(?<=[.;)] )|(?<=\n))(?:{name})(?:, (?:{name}))*: ", block)
    at = [0, *(m.start() for m in starts), len(block)]
    return [block[a:b].strip() for a, b in pairwise(at)]


def _inline(text: str) -> str:
    parts = re.split(r"`([^`]+)`", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f":py:obj:`{part}`" if part in LINKED else f"``{part}``"
        else:
            parts[i] = re.sub(r"([\\*|_])", r"\\\1", part)
    return "".join(parts)


def _parameters(thing: object) -> list[str]:
    try:
        return [*inspect.signature(thing).parameters] if callable(thing) else []
    except (TypeError, ValueError):
        return []
