"""Draw docs/code.svg: the rooms, from their table in docs/code.md, with the steps of its lists.

Usage: python tools/code_picture.py
A step stands in each room of which its text names a file. tests/test_code_page.py does the same
and compares.
"""

import re
from html import escape
from pathlib import Path

from tests.test_rooms import ROOMS

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "code.md", ROOT / "docs" / "code.svg"
WAYS = {  # a heading's beginning, the way's name in the picture, its colour
    "`yopo train": ("yopo train", "#2f6db5"),
    "`yopo eval": ("yopo eval", "#b3521f"),
    "A batch through `method.backward": ("backward", "#2f7d3f"),
}
WIDTH, LEFT, TOP, HEIGHT, GAP = 880, 44, 54, 52, 10
PUBLIC = {"yopo": "the public names: yopo.YOPO, yopo.Engine, yopo.evaluate, …"}  # in no room


def files(text: str) -> list[str]:
    """The files of the package that a text names, as room/file.py."""
    return re.findall(r"`([a-z]+/[a-z_]+\.py)`", text)


def rooms(page: str) -> dict[str, str]:
    """The table: what is done in each room."""
    return dict(re.findall(r"^\| `([a-z]+)` \| (.*?) \|", page, re.MULTILINE))


def steps(page: str, way: str) -> dict[str, list[int]]:
    """In each room, the numbers of the steps that pass through it."""
    (section,) = (s for s in page.split("\n## ") if s.startswith(way))
    passed: dict[str, list[int]] = {}
    for number, text in re.findall(r"^(\d)\. ((?:.+\n?)+?)(?=^\d\. |\Z)", section, re.MULTILINE):
        for room in sorted({file.split("/")[0] for file in files(text)}):
            passed.setdefault(room, []).append(int(number))
    return passed


def picture(page: str) -> str:
    """The picture, as SVG."""
    words = PUBLIC | rooms(page)
    rows = [[room for room in words if room in row] for row in ROOMS]
    height = TOP + len(rows) * (HEIGHT + GAP) + 6
    ways = [(name, colour, steps(page, start)) for start, (name, colour) in WAYS.items()]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui, sans-serif" role="img">',
        "<title>The rooms of src/yopo: each imports from those under it</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(WIDTH - 10, 33, 15, "#666", "a room imports from its own row and below", "end"),
        f'<path d="M22 {TOP} V{height - 18} M15 {height - 26} l7 12 l7 -12" fill="none" '
        'stroke="#888" stroke-width="2"/>',
    ]
    for i, (name, colour, _) in enumerate(ways):
        at = LEFT + 9 + 130 * i
        lines += [_dot(at, 28, colour), _text(at + 16, 33, 15, "#222", name)]
    for i, row in enumerate(rows):
        width = (WIDTH - LEFT - 10 - (len(row) - 1) * GAP) / len(row)
        for j, room in enumerate(row):
            x, y = LEFT + j * (width + GAP), TOP + i * (HEIGHT + GAP)
            look = 'fill="#ffffff" stroke-dasharray="5 4"' if room in PUBLIC else 'fill="#f2f4f7"'
            lines += [
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{HEIGHT}" rx="6" '
                f'stroke="#aab2bd" {look}/>',
                _text(x + 14, y + 22, 16, "#111", room, weight="bold"),
                _text(x + 14, y + 41, 13, "#555", words[room].replace("`", "")),
            ]
            x += width - 18
            for _, colour, passed in reversed(ways):
                for number in reversed(passed.get(room, [])):
                    lines += [_dot(x, y + 17, colour)]
                    lines += [_text(x, y + 21, 12, "#fff", str(number), "middle")]
                    x -= 21
                x -= 6 * (room in passed)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="9" fill="{colour}"/>'


def _text(
    x: float, y: float, size: int, colour: str, words: str, anchor: str = "start", weight: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}"{bold}>{escape(words, quote=False)}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(PAGE.read_text()))
