"""Pages of the docs, and the code that stands in them."""

import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = sorted(DOCS.rglob("*.md"))  # tutorials too
FENCE = re.compile(
    r"(?ms)^(?P<indent>[ \t]*)```(?P<kind>[^`\n]*)\n(?P<code>.*?)^(?P=indent)```[ \t]*$"
)


def fenced(page: str, kind: str = "") -> list[str]:
    """The blocks of one kind, also those that stand within a list."""
    found = list(FENCE.finditer(page))
    assert 2 * len(found) == len(re.findall(r"(?m)^[ \t]*```", page)), "a fence that none closes"
    return [dedent(block["code"]) for block in found if block["kind"] == kind]


def prose(page: str) -> str:
    """What is left without the blocks."""
    return FENCE.sub("", page)


def in_lines(page: str) -> list[str]:
    """Without the rows of tables."""
    return [line for line in page.splitlines() if not line.lstrip().startswith("|")]


def saved(block: str, folder: Path) -> Path:
    """A block that begins with its file's name, as that file."""
    name = re.match(r"# (\w+\.py)\n", block)
    assert name
    file = folder / name[1]
    file.write_text(block, encoding="utf-8")
    return file
