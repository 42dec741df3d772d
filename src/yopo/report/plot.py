"""Where lines, dots and words of a chart stand: values that the page's template writes as SVG."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTH, HEIGHT = 440, 300  # of the viewBox; near a phone's width, so that text keeps its size
LEFT, RIGHT, TOP, BOTTOM = 46, 18, 10, 40
FEW = 15  # points that are drawn as such; more would hide the line


class Dot(NamedTuple):
    """A point of a curve."""

    x: float
    y: float
    tip: str  # what hovering shows
    low: float | None = None  # of the band around it
    high: float | None = None


class Curve(NamedTuple):
    """A line through dots."""

    button: int  # by which it is shown and hidden
    colour: int
    measure: str  # robust, clean, or nothing
    dots: Sequence[Dot]


class Axis(NamedTuple):
    """What is drawn along a side: a round number at each tick, from the first to the last."""

    words: str
    ticks: Sequence[float]
    unit: str = ""

    def part(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])


def ticks(longest: float) -> list[float]:
    """Round numbers from 0 to past the longest, about five."""
    longest = longest if longest > 1e-9 else 1.0
    power = 10 ** math.floor(math.log10(longest / 4))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if longest / (s * power) <= 5)
    return [i * step for i in range(math.ceil(longest / step) + 1)]


def plot(title: str, across: Axis, up: Axis, curves: Sequence[Curve]) -> dict[str, Any]:
    """What stands where in one chart."""
    heights = {tick: _y(up.part(tick)) for tick in up.ticks}
    texts = [_text(LEFT - 6, y + 4, "end", f"{t:g}{up.unit}") for t, y in heights.items()]
    texts += [_text(_x(across.part(t)), HEIGHT - 22, "middle", f"{t:g}") for t in across.ticks]
    middle = (LEFT + WIDTH - RIGHT) / 2
    texts.append(_text(middle, HEIGHT - 4, "middle", across.words))
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "title": title,
        "grid": [{"x1": LEFT, "x2": WIDTH - RIGHT, "y": y} for y in heights.values()],
        "texts": texts,
        "curves": [_curve(curve, across, up) for curve in curves if curve.dots],
    }


def _curve(curve: Curve, across: Axis, up: Axis) -> dict[str, Any]:
    dots = [{"x": _x(across.part(d.x)), "y": _y(up.part(d.y)), "tip": d.tip} for d in curve.dots]
    around = [(_x(across.part(d.x)), d.low, d.high) for d in curve.dots if d.low is not None]
    edge = [f"{x},{_y(up.part(low))}" for x, low, _ in around if low is not None]
    edge += [f"{x},{_y(up.part(high))}" for x, _, high in reversed(around) if high is not None]
    return {
        "button": curve.button,
        "colour": curve.colour,
        "measure": curve.measure,
        "line": " ".join(f"{dot['x']},{dot['y']}" for dot in dots),
        "band": " ".join(edge),
        "radius": 2.2 if len(dots) <= FEW else 1.0,
        "dots": dots,
    }


def _text(x: float, y: float, anchor: str, words: str) -> dict[str, Any]:
    return {"x": x, "y": y, "anchor": anchor, "words": words}


def _x(part: float) -> float:
    return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)


def _y(part: float) -> float:
    return round(TOP + (1 - part) * (HEIGHT - TOP - BOTTOM), 1)
