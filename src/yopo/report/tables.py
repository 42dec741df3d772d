"""HTML tables."""

from collections.abc import Collection, Sequence
from html import escape

Cell = str | tuple[str, str]  # words, or words with smaller ones under them


def table(
    name: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], text: Collection[int] = ()
) -> str:
    """A table that scrolls in a box of its own; columns in `text` hold sentences."""

    def row(cells: Sequence[Cell], tag: str) -> str:
        kinds = (' class="text"' if i in text else "" for i in range(len(cells)))
        pairs = zip(cells, kinds, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{_inner(c)}</{tag}>' for c, kind in pairs)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">'
        f'<table class="{escape(name)}"><thead>{row(heads, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def share(accuracy: float, interval: Sequence[float]) -> Cell:
    """A share in percent, its interval under it."""
    return f"{100 * accuracy:.2f}%", f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}"


def _inner(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    return f"{escape(cell[0])}<small>{escape(cell[1])}</small>"
