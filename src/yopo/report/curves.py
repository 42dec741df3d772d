"""Accuracy against time, propagations and eps; loss and rate: for the page, and some as files."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from yopo.core import files
from yopo.evaluation.card import duration
from yopo.methods.registry import ENTRIES
from yopo.report.clock import busy
from yopo.report.groups import called, seeds
from yopo.report.plot import FEW, Axis, Curve, Dot, plot, ticks
from yopo.report.records import Run

MEASURES = ("robust", "clean")
LONGEST = 40  # letters of a name in a figure's legend
AXES = {"train_seconds": "training time", "propagations": "propagations per image"}
HISTORY = {"loss": "loss", "rate": "learning rate"}  # of each epoch, by the metrics' names
# A method has one colour on every page, on figures and in the README: the registry says which.
# page.css has the same as --c0 to --c11, and lighter ones for dark screens.
PALETTE = (
    "#2f6db5 #c8552f #3a8a4d #8a5bb5 #b3862b #2b8f96 "
    "#b84a7a #6b6b6b #7a4a2a #1d3f8f #7c9a1e #a02020"
).split()

Spots = list[tuple[float, float]]  # where a point lies, and its value


class Says(NamedTuple):
    """What pointing at a dot says: where it is, and how its value is written."""

    at: Callable[[float], str]
    how: str


def points(run: Run, axis: str) -> list[dict[str, Any]]:
    """The epochs to draw; a run that shared its GPU has no time that counts."""
    return [] if axis == "train_seconds" and run.shared else run.points


def colours(groups: Sequence[Sequence[Run]]) -> list[int]:
    """Each group's colour: its method's, or, where another has that one, the next that is free."""
    declared = (ENTRIES.get(group[0].config["method"]["name"]) for group in groups)
    wanted = [entry.hue if entry else None for entry in declared]
    first = [hue is not None and hue not in wanted[:i] for i, hue in enumerate(wanted)]
    free = [i for i in range(len(PALETTE)) if i not in wanted] or list(range(len(PALETTE)))
    others = iter(free * len(groups))
    return [
        hue if hue is not None and own else next(others)
        for hue, own in zip(wanted, first, strict=True)
    ]


def places(runs: Sequence[Run]) -> dict[Run, tuple[int, int]]:
    """Which button and which colour each run has: seeds of one setting share theirs."""
    groups = seeds(runs)
    pairs = enumerate(zip(groups, colours(groups), strict=True))
    return {run: (i, hue) for i, (group, hue) in pairs for run in group}


def drawn(runs: Sequence[Run], axis: str) -> bool:
    """Whether any run has points against the axis."""
    return any(points(run, axis) for run in runs)


def chart(runs: Sequence[Run], axis: str) -> dict[str, Any]:
    """Accuracy on held-out images against an axis; points carry the words that hovering shows."""
    scale, unit = _unit(runs, axis)
    longest = max((p[axis] for r in runs for p in points(r, axis)), default=1.0) / scale
    bottom = _bottom(runs, axis)
    step = next(s for s in (2, 5, 10, 20) if (100 - bottom) / s <= 6)
    low = 100 - step * math.ceil((100 - bottom) / step)
    groups = seeds(runs)
    curves = [
        Curve(i, hue, measure, dots)
        for i, (group, hue) in enumerate(zip(groups, colours(groups), strict=True))
        for measure in reversed(MEASURES)  # robust on top
        for dots in _lines(group, measure, axis, scale)
    ]
    across = Axis(f"{AXES[axis]}{unit}", ticks(longest))
    up = Axis("", range(low, 101, step), "%")
    return plot(f"Held-out accuracy against {AXES[axis]}", across, up, curves)


def _lines(group: Sequence[Run], measure: str, axis: str, scale: float) -> list[list[Dot]]:
    """One curve for seeds of one setting, their mean in a band; else one for each run."""
    group = [run for run in group if points(run, axis)]
    drawn = [points(run, axis) for run in group]
    epochs = {tuple(p["epoch"] for p in some) for some in drawn}
    if len(group) < 2 or len(epochs) > 1:
        return [[_dot(run, p, measure, axis, scale) for p in points(run, axis)] for run in group]
    dots = []
    for same in zip(*drawn, strict=True):
        shares = [100 * p[measure] for p in same]
        tip = (
            f"{called(group)}, epoch {same[0]['epoch']}: {_attack(group[0], measure)} "
            f"{mean(shares):.2f}% in the mean, {min(shares):.2f}% to {max(shares):.2f}%"
        )
        x = mean(p[axis] for p in same) / scale
        dots.append(Dot(x, mean(shares), tip, min(shares), max(shares)))
    return [dots]


def _attack(run: Run, measure: str) -> str:
    return f"pgd-{run.config['evaluate']['steps']}" if measure == "robust" else "clean"


def _dot(run: Run, p: dict[str, Any], measure: str, axis: str, scale: float) -> Dot:
    spent = f"{duration(p['train_seconds'])}, {p['propagations']:.0f} propagations"
    share = f"{100 * p[measure]:.2f}% of {p['images']} images"
    attack = _attack(run, measure)
    tip = f"{run.label}, epoch {p['epoch']}: {attack} {share} ({run.threat}) after {spent}"
    return Dot(p[axis] / scale, 100 * p[measure], tip)


def against_eps(runs: Sequence[Run]) -> tuple[dict[str, Any], str] | None:
    """Accuracy at other radii, and under what; None, if no evaluation looked there."""
    curves, how = [], []
    for (button, hue), group in _placed(runs):
        kinds: dict[str, dict[Run, Spots]] = {}
        for run in group:
            e = next((e for e in run.ranked if e.get("radii") and run.weights(e)), None)
            if e is None or "clean" not in e["attacks"]:
                continue
            radii, n = e["radii"], e["about"]["images"]
            norm = e["about"]["threat"].partition(",")[0]
            pairs = sorted(zip(radii["eps"], radii["accuracy"], strict=True))
            pairs.insert(0, (0.0, e["attacks"]["clean"]["accuracy"]))
            kind = kinds.setdefault(f"{radii['attack']} on {n:,} test images, {norm}", {})
            kind[run] = [(eps, 100 * share) for eps, share in pairs]
        for words, each in kinds.items():
            says = Says(partial(_radius, words.partition(" ")[0]), "{:.2f}%")
            curves += [Curve(button, hue, "", dots) for dots in _together(each, says)]
            how.append(words)
    if not curves:
        return None
    longest = max(dot.x for curve in curves for dot in curve.dots)
    across, up = Axis("eps", ticks(longest)), Axis("", range(0, 101, 20), "%")
    return plot("Accuracy against eps", across, up, curves), "; ".join(dict.fromkeys(how))


def _radius(attack: str, eps: float) -> str:
    return f"{attack} at eps {eps:.3g}:" if eps else "clean:"


def history(runs: Sequence[Run], what: str) -> dict[str, Any] | None:
    """The loss or the rate of each epoch; None, where no run has one."""
    says = Says(lambda x: f"epoch {x:g}: {HISTORY[what]}", "{:.4g}")
    curves = []
    for (button, hue), group in _placed(runs):
        each: dict[Run, Spots] = {}
        for run in group:
            values = [(line["epoch"], _number(line.get(what))) for line in run.lines]
            each[run] = [(x, y) for x, y in values if y is not None]
        curves += [Curve(button, hue, "", dots) for dots in _together(each, says)]
    dots = [dot for curve in curves for dot in curve.dots]
    if not dots:
        return None
    across = Axis("epoch", ticks(max(dot.x for dot in dots)))
    up = Axis("", ticks(max(dot.y for dot in dots)))
    return plot(f"{HISTORY[what].capitalize()} by epoch", across, up, curves)


def key(runs: Sequence[Run], chart: dict[str, Any]) -> list[dict[str, Any]]:
    """The colours in a chart, and whose they are."""
    there = {curve["button"] for curve in chart["curves"]}
    placed = ((i, hue, group) for (i, hue), group in _placed(runs))
    return [{"colour": hue, "name": called(group)} for i, hue, group in placed if i in there]


def _placed(runs: Sequence[Run]) -> Iterator[tuple[tuple[int, int], list[Run]]]:
    """Seeds of one setting, with their button and their colour."""
    place = places(runs)
    for group in seeds(runs):
        yield place[group[0]], group


def _together(each: Mapping[Run, Spots], says: Says) -> list[list[Dot]]:
    """One curve for runs with points at the same places, their mean in a band; else for each."""
    group, places = list(each), {tuple(x for x, _ in pairs) for pairs in each.values()}
    if len(group) < 2 or len(places) > 1:
        return [
            [Dot(x, y, f"{run.label}, {says.at(x)} {says.how.format(y)}") for x, y in pairs]
            for run, pairs in each.items()
        ]
    dots = []
    for same in zip(*each.values(), strict=True):
        x, values = same[0][0], [y for _, y in same]
        middle, low, high = (says.how.format(f(values)) for f in (mean, min, max))
        tip = f"{called(group)}, {says.at(x)} {middle} in the mean, {low} to {high}"
        dots.append(Dot(x, mean(values), tip, min(values), max(values)))
    return [dots]


def _number(value: object) -> float | None:
    """A value of the metrics, where it is one that can be drawn."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < 1e9 else None  # type: ignore[operator,arg-type]


def save_figures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Both charts as PNG and SVG; none against an axis on which no run has points."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    groups = seeds(runs)
    hues = dict(enumerate(colours(groups)))
    for axis, name in AXES.items():
        shown = [(hues[i], some) for i, g in enumerate(groups) if (some := _with(g, axis))]
        if not shown:
            continue
        figure = Figure(figsize=(7, max(4.2, 0.5 + 0.37 * len(shown))), layout="constrained")
        axes = figure.subplots()
        scale, unit = _unit(runs, axis)
        names = _names(groups)
        for hue, some in shown:
            disturbed = axis == "train_seconds" and any(map(busy, some))
            whose = names(some) + " (busy machine)" * disturbed
            _draw(axes, some, whose, PALETTE[hue], axis, scale)
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
                with files.whole(path) as writing:  # a link there may lead anywhere
                    figure.savefig(writing, format=kind, dpi=150, metadata=metadata)
            written.append(path)
    return written


def _with(group: Sequence[Run], axis: str) -> list[Run]:
    return [run for run in group if points(run, axis)]


def _names(groups: Sequence[Sequence[Run]]) -> Callable[[Sequence[Run]], str]:
    """How a legend calls runs: by the method, where each is there once."""
    alone = len({group[0].method for group in groups}) == len(groups)

    def name(some: Sequence[Run]) -> str:
        whose = some[0].method if alone and len(some) == 1 else called(some)
        whose = whose if len(whose) <= LONGEST else some[0].name
        return whose if len(whose) <= LONGEST else f"{whose[: LONGEST - 1]}…"

    return name


def _draw(
    axes: Any,  # noqa: ANN401  # matplotlib's
    some: Sequence[Run],
    whose: str,
    colour: str,
    axis: str,
    scale: float,
) -> None:
    for measure, style in zip(MEASURES, ("-", "--"), strict=True):
        label = f"{whose}, {measure}".replace("$", r"\$")
        label = f" {label}" if label.startswith("_") else label  # else it is left out
        for dots in _lines(some, measure, axis, scale):
            x, y = [dot.x for dot in dots], [dot.y for dot in dots]
            mark = "o" if len(x) <= FEW else ""
            axes.plot(x, y, style, marker=mark, label=label, color=colour, ms=3.5)
            label = "_"  # once for all seeds
            if dots[0].low is not None:
                low, high = [dot.low for dot in dots], [dot.high for dot in dots]
                axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)


def _unit(runs: Sequence[Run], axis: str) -> tuple[float, str]:
    if axis != "train_seconds":
        return 1.0, ""
    longest = max((p[axis] for r in runs for p in points(r, axis)), default=0.0)
    if longest < 300:
        return 1.0, ", s"
    return (60.0, ", min") if longest < 3 * 3600 else (3600.0, ", h")


def _bottom(runs: Sequence[Run], axis: str) -> int:
    """Where the accuracies' axis begins, in %: the tens under the lowest that is drawn."""
    lowest = min((p[m] for r in runs for p in points(r, axis) for m in MEASURES), default=0.0)
    return min(90, 10 * math.floor(10 * lowest))
