"""The README's four rows and its picture, docs/accuracy-time.svg, from the runs in records/.

`python -m tools.reproduction_page` writes both; tests/test_records.py makes them again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from yopo.methods.registry import ENTRIES
from yopo.paper.reproduced import summary
from yopo.report.curves import PALETTE
from yopo.report.records import read_runs

FAST = "cifar10-fast"
FAST_RUN = "records/cifar10-fast-h200/33-epochs"
ROWS = ("PGD-10", "PGD-10 40 epochs", "YOPO-5-3 36 epochs", FAST)
COMPUTED = "Its run shared a GPU, so this is the time of 40 epochs of the row above."

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 64, 20, 64, 60
COLOURS = {  # on white, as in the report; on dark
    "PGD": (PALETTE[ENTRIES["pgd"].hue or 0], "#6ea8ec"),
    "YOPO": (PALETTE[ENTRIES["yopo"].hue or 0], "#ef8a65"),
    "Free": (PALETTE[ENTRIES["free"].hue or 0], "#6cc282"),
    FAST: (PALETTE[10], "#b9d65c"),  # a YOPO, in a hue that no method has
}
BESIDE = {  # where a label does not stand on the right of its point
    "YOPO-3-5": (-12, 6, "end"),
    "YOPO-5-3 36 epochs": (4, 24, "end"),
    "Free-8": (0, 26, "middle"),
    "PGD-10": (0, -14, "middle"),
}


@dataclass(frozen=True)
class Point:
    """A row: shares of the test images, as the trainer measured its last weights."""

    name: str
    epochs: int
    clean: float
    robust: float  # under PGD-20 with steps of 1/255
    autoattack: float | None  # on the whole test set
    seconds: float
    alone: bool  # on its GPU; else the time is that of PGD-10's epochs

    @property
    def method(self) -> str:
        """The row without its epochs."""
        return self.name.removesuffix(f" {self.epochs} epochs")


def points(root: Path) -> Iterator[Point]:
    """Rows of Table 2, and `cifar10-fast`."""
    rows = summary("table2", root / "records" / "reproduction" / "table2")["rows"]
    rows = {name: r for name, r in rows.items() if r and "trainer" in r}
    for name, r in rows.items():
        strong = r["accuracy"].get("autoattack", {})
        whole = strong["mean"] if strong.get("images") == r["test_images"] else None
        alone = "epoch_seconds" in r
        epoch = rows[name if alone else name.split(" ")[0]].get("epoch_seconds")
        if epoch is not None:
            clean, robust = r["trainer"]["last"]
            yield Point(name, r["epochs"], clean, robust, whole, epoch * r["epochs"], alone)
    for run in read_runs(sorted(root.glob(FAST_RUN))):
        last, whole = (run.result or {})["last"], None
        for e in run.evaluations.values():
            whole = e["attacks"]["autoattack"]["accuracy"]
        seconds = run.spent("train_seconds") or 0.0
        yield Point(FAST, run.config["epochs"], last["clean"], last["pgd-20"], whole, seconds, True)


def cells(point: Point) -> list[str]:
    """A row of the README's table."""
    shares = (point.clean, point.robust, point.autoattack)
    shown = ["–" if share is None else f"{100 * share + 1e-9:.1f}" for share in shares]
    method = point.method.replace(FAST, f"`{FAST}`")
    return [
        f"{method}, {point.epochs} epochs",
        *shown,
        f"{point.seconds / 60:.1f} min" + ("" if point.alone else "*"),
    ]


def picture(found: Sequence[Point]) -> str:
    """Accuracy under attack against training time, as SVG, for light and dark pages."""
    minutes = max((p.seconds / 60 for p in found), default=1.0)
    low = min((int(100 * p.robust) // 5 * 5 for p in found), default=0)
    high = max((int(100 * p.robust) // 5 * 5 + 5 for p in found), default=5)
    across, up = (WIDTH - LEFT - RIGHT) / (int(minutes) + 1), (HEIGHT - TOP - BOTTOM) / (high - low)
    floor = HEIGHT - BOTTOM
    light, dark = ("".join(_paint(name, c[i]) for name, c in COLOURS.items()) for i in (0, 1))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="17" role="img">',
        "<title>CIFAR-10: accuracy under attack against training time</title>",
        f"<style>.page{{fill:#fff}}.ink{{fill:#222}}.soft{{fill:#555}}.grid{{stroke:#ddd}}{light}"
        "@media (prefers-color-scheme: dark){.page{fill:#0d1117}.ink{fill:#e6edf3}"
        f".soft{{fill:#a5b0bb}}.grid{{stroke:#30363d}}{dark}}}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        _text(LEFT, 30, "ink", "CIFAR-10 images answered rightly under PGD-20, in %"),
        _text(
            LEFT, 51, "soft", "each point is one way to train the same network; epochs in brackets"
        ),
        _text(WIDTH - RIGHT, HEIGHT - 14, "soft", "minutes of training on one H200", "end"),
    ]
    for share in range(low, high + 1, 5):
        y = floor - up * (share - low)
        lines.append(f'<path class="grid" d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}"/>')
        lines.append(_text(LEFT - 10, y + 6, "soft", str(share), "end"))
    for minute in range(int(minutes) + 2):
        lines.append(_text(LEFT + across * minute, floor + 24, "soft", str(minute), "middle"))
    for p in found:
        x, y = LEFT + across * p.seconds / 60, floor - up * (100 * p.robust - low)
        kind = p.name if p.name == FAST else p.name.split("-")[0]
        dx, dy, anchor = BESIDE.get(p.name, (12, 6, "start"))
        words = p.method.replace(" before", " as released")
        hollow = "" if p.alone else ' fill-opacity="0.25"'
        lines.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="7"{hollow}/>')
        lines.append(_text(x + dx, y + dy, kind, f"{words} ({p.epochs})", anchor))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _paint(name: str, colour: str) -> str:
    return f".{name}{{fill:{colour};stroke:{colour}}}text.{name}{{stroke:none}}"


def _text(x: float, y: float, kind: str, words: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>'
