"""Tables, as values that the page's template writes."""

from collections.abc import Sequence
from typing import NamedTuple

Cell = str | tuple[str, str]  # words, or words with smaller ones under them


class Table(NamedTuple):
    """A table that scrolls in a box of its own; the column `text` holds sentences."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""  # what to know when reading it
    text: int | None = None


def share(accuracy: float, interval: Sequence[float]) -> Cell:
    """A share in percent, its interval under it."""
    return f"{100 * accuracy:.2f}%", f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}"
