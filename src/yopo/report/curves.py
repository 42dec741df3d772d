"""Accuracy against time and propagations, as the paper's Figure 3: for the page, and as files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yopo.evaluation.card import duration
from yopo.report.groups import called, seeds
from yopo.report.records import Run

WIDTH, HEIGHT = 440, 300  # of the viewBox; near a phone's width, so that text keeps its size
LEFT, RIGHT, TOP, BOTTOM = 40, 18, 10, 40
MEASURES = ("robust", "clean")
LONGEST = 40  # letters of a name in a figure's legend
FEW = 15  # points that are drawn as such; more would hide the line
AXES = {"train_seconds": "training time", "propagations": "propagations per image"}
# page.css has the same as --c0 to --c11, and lighter ones for dark screens.
PALETTE = (
    "#2f6db5 #c8552f #3a8a4d #8a5bb5 #b3862b #2b8f96 "
    "#b84a7a #6b6b6b #7a4a2a #1d3f8f #7c9a1e #a02020"
).split()


def points(run: Run, axis: str) -> list[dict[str, Any]]:
    """The epochs to draw; a run that shared its GPU has no time that counts."""
    return [] if axis == "train_seconds" and run.shared else run.points


def numbers(runs: Sequence[Run]) -> dict[Run, int]:
    """Which colour and which button each run has: seeds of one setting share theirs."""
    return {run: i for i, group in enumerate(seeds(runs)) for run in group}


def drawn(runs: Sequence[Run], axis: str) -> bool:
    """Whether any run has points against the axis."""
    return any(points(run, axis) for run in runs)


def chart(runs: Sequence[Run], axis: str) -> dict[str, Any]:
    """What stands where in one chart; points carry the words that hovering shows."""
    scale, unit = _unit(runs, axis)
    longest = max((p[axis] for r in runs for p in points(r, axis)), default=1.0) / scale
    ticks, bottom = _ticks(longest), _bottom(runs, axis)
    step = next(s for s in (2, 5, 10, 20) if (100 - bottom) / s <= 6)
    heights = {share: _y(share / 100, bottom) for share in range(100, bottom - 1, -step)}
    texts = [_text(LEFT - 6, y + 4, "end", f"{share}%") for share, y in heights.items()]
    texts += [_text(_x(t / ticks[-1]), HEIGHT - 22, "middle", f"{t:g}") for t in ticks]
    middle = (LEFT + WIDTH - RIGHT) / 2
    texts.append(_text(middle, HEIGHT - 4, "middle", f"{AXES[axis]}{unit}"))
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "title": f"Held-out accuracy against {AXES[axis]}",
        "grid": [{"x1": LEFT, "x2": WIDTH - RIGHT, "y": y} for y in heights.values()],
        "texts": texts,
        "curves": [
            _curve(run, i, measure, axis, (scale * ticks[-1], bottom))
            for run, i in numbers(runs).items()
            for measure in reversed(MEASURES)  # robust on top
        ],
    }


def _text(x: float, y: float, anchor: str, words: str) -> dict[str, Any]:
    return {"x": x, "y": y, "anchor": anchor, "words": words}


def _curve(run: Run, i: int, measure: str, axis: str, corner: tuple[float, int]) -> dict[str, Any]:
    end, bottom = corner
    attack = f"pgd-{run.config['evaluate']['steps']}" if measure == "robust" else "clean"
    dots = []
    for p in points(run, axis):
        spent = f"{duration(p['train_seconds'])}, {p['propagations']:.0f} propagations"
        share = f"{100 * p[measure]:.2f}% of {p['images']} images"
        tip = f"{run.label}, epoch {p['epoch']}: {attack} {share} ({run.threat}) after {spent}"
        dots.append({"x": _x(p[axis] / end), "y": _y(p[measure], bottom), "tip": tip})
    return {
        "run": i,
        "colour": i % len(PALETTE),
        "measure": measure,
        "line": " ".join(f"{dot['x']},{dot['y']}" for dot in dots),
        "radius": 2.2 if len(dots) <= FEW else 1.0,
        "dots": dots,
    }


def save_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Both charts as PNG and SVG; none against an axis on which no run has points."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    groups = seeds(runs)
    alone = len({group[0].method for group in groups}) == len(groups)  # each method once
    for axis, name in AXES.items():
        shown = [(i, [r for r in group if points(r, axis)]) for i, group in enumerate(groups)]
        shown = [(i, some) for i, some in shown if some]
        if not shown:
            continue
        figure = Figure(figsize=(7, max(4.2, 0.5 + 0.37 * len(shown))), layout="constrained")
        axes = figure.subplots()
        scale, unit = _unit(runs, axis)
        for i, some in shown:
            whose = some[0].method if alone and len(some) == 1 else called(some)
            whose = whose if len(whose) <= LONGEST else some[0].name
            whose = whose if len(whose) <= LONGEST else f"{whose[: LONGEST - 1]}…"
            look: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "ms": 3.5}
            for measure, style in zip(MEASURES, ("-", "--"), strict=True):
                label = f"{whose}, {measure}".replace("$", r"\$")
                label = f" {label}" if label.startswith("_") else label  # else it is left out
                for run in some:
                    x = [p[axis] / scale for p in points(run, axis)]
                    y = [100 * p[measure] for p in points(run, axis)]
                    dots = "o" if len(x) <= FEW else ""
                    axes.plot(x, y, style, marker=dots, label=label, **look)
                    label = "_"  # once for all seeds
        axes.set(xlabel=name + unit, ylabel="held-out accuracy, %", ylim=(_bottom(runs, axis), 100))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        stem = "accuracy-time" if axis == "train_seconds" else "accuracy-propagations"
        for kind in ("png", "svg"):
            path = folder / f"{stem}.{kind}"
            with mpl.rc_context({"svg.hashsalt": "yopo"}):
                metadata = {"Date": None} if kind == "svg" else None
                figure.savefig(path, dpi=150, metadata=metadata)
            written.append(path)
    return written


def _unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    if axis != "train_seconds":
        return 1.0, ""
    longest = max((p[axis] for r in runs for p in points(r, axis)), default=0.0)
    if longest < 300:
        return 1.0, ", s"
    return (60.0, ", min") if longest < 3 * 3600 else (3600.0, ", h")


def _ticks(longest: float) -> list[float]:
    """Round numbers from 0 to past the longest, about five."""
    longest = longest if longest > 1e-9 else 1.0
    power = 10 ** math.floor(math.log10(longest / 4))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if longest / (s * power) <= 5)
    return [i * step for i in range(math.ceil(longest / step) + 1)]


def _x(part: float) -> float:
    return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)


def _bottom(runs: Sequence[Run], axis: str) -> int:
    """Where the accuracies' axis begins, in %: the tens under the lowest that is drawn."""
    lowest = min((p[m] for r in runs for p in points(r, axis) for m in MEASURES), default=0.0)
    return min(90, 10 * math.floor(10 * lowest))


def _y(share: float, bottom: int) -> float:
    part = (100 * share - bottom) / (100 - bottom)
    return round(TOP + (1 - part) * (HEIGHT - TOP - BOTTOM), 1)
