"""HTML tables."""

from collections.abc import Collection, Sequence
from html import escape


def table(
    name: str, heads: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = ()
) -> str:
    """A table that scrolls in a box of its own; columns in `text` hold sentences."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="text"' if i in text else "" for i in range(len(cells)))
        pairs = zip(cells, kinds, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{escape(c)}</{tag}>' for c, kind in pairs)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">'
        f'<table class="{escape(name)}"><thead>{row(heads, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
