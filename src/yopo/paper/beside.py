"""A table of the paper beside any runs of ours, for `yopo report --paper`."""

from collections.abc import Sequence
from fractions import Fraction
from math import isclose
from statistics import mean
from typing import Any

from yopo.evaluation.result import Interval, wilson
from yopo.paper.reproduction import TABLES
from yopo.paper.tables import paper
from yopo.report.clock import undisturbed
from yopo.report.groups import baseline, same_hardware, seeds, timed
from yopo.report.records import Run, strength
from yopo.report.tables import Beside, Cell, Table


def beside(runs: Sequence[Run], name: str) -> Beside:
    """One table of the paper with our runs' figures beside its own."""
    data = paper()
    theirs = data["tables"][name]
    attacks = [c for c in next(iter(theirs["rows"].values())) if c != "minutes"]
    has_times = "hardware" in theirs
    heads = ["method", "run"]
    for attack in attacks:
        heads += [f"{attack}, paper", f"{attack}, ours"]
    heads += ["time ratio, paper", "time ratio, ours"] if has_times else ["time ratio, ours"]
    rows: list[list[Cell]] = []
    others: dict[str, list[str]] = {}  # runs by how they differ from the table's setting
    whole = [run for run in runs if not run.short]
    for method, row in theirs["rows"].items():
        ours = seeds([r for r in runs if r.method.removesuffix(" before") == method])
        for group in ours or [[]]:
            cells: list[Cell] = [method, _label(group)]
            counted = [run for run in group if not run.short]
            for attack in attacks:
                cells += [f"{row[attack]:.2f}%", _ours(counted, attack)]
            cells += [_paper_ratio(theirs["rows"], method)] if has_times else []
            rows.append([*cells, _ratio(counted, whole)])
            epochs = TABLES[name].config(method).epochs
            for run in group:
                how = [d for d in (differs(run, theirs), _length(run, epochs)) if d]
                if how:
                    others.setdefault("; ".join(how), []).append(run.label)
    notes = [f"Not the table's setting: {', '.join(o)} ({how})." for how, o in others.items()]
    text = (
        f"Paper: {data['source']}. Ours: test accuracy, with its 95% interval; of several seeds "
        "the mean, with the lowest and highest. Time ratio: "
        "training time over that of the PGD run, or for TRADES the TRADES run, of the most steps"
        + (
            f"; the paper's on a {theirs['hardware']}."
            if has_times
            else "; the paper has none here."
        )
    )
    table = Table("paper", heads, rows)
    return Beside(f"Table {name[-1]}", theirs["title"], table, notes, text)


def _length(run: Run, epochs: int) -> str:
    mine = run.config["epochs"]
    if run.short:
        return f"{mine} of {epochs} epochs, for their time alone; `yopo reproduce` reckons with it"
    return "" if mine == epochs else f"{mine} epochs, not {epochs}"


def _label(group: Sequence[Run]) -> Cell:
    if not group:
        return "–"
    epochs = f"{group[0].config['epochs']} epochs"
    return (group[0].name, epochs) if len(group) == 1 else (f"{len(group)} seeds", epochs)


def _ours(group: Sequence[Run], attack: str) -> Cell:
    """The accuracy with its interval; of several seeds the mean, the lowest and the highest.

    Evaluations of one kind, at the radius of the training and of the most seeds before others;
    without any, what the runs measured themselves.
    """
    kinds: dict[tuple[Any, ...], dict[str, tuple[float, Interval]]] = {}  # of each run
    for run in group:
        for e in run.evaluations.values():
            own = strength(run.config, e).own_radius
            for which in run.weights(e) if attack in e["attacks"] else ():
                a, many = e["attacks"][attack], e["about"]["images"]
                kind = own, which, many, f"{e['about']['threat']}, {a['settings']}"
                kinds.setdefault(kind, {})[run.name] = a["accuracy"], tuple(a["interval"])
    if not kinds:
        for run in group:
            which, shown = run.own
            if run.result and attack in shown:
                n = run.result["test_images"]
                interval = wilson(round(shown[attack] * n), n)
                kinds.setdefault((True, which, n, "own"), {})[run.name] = shown[attack], interval
    if not kinds:
        return "–"
    kind = max(kinds, key=lambda kind: (kind[0], len(kinds[kind]), kind[2]))
    (_, weights, images, _), measured = kind, list(kinds[kind].values())
    shares = [share for share, _ in measured]
    spread = measured[0][1] if len(measured) == 1 else (min(shares), max(shares))
    words = [f"{100 * spread[0]:.1f}–{100 * spread[1]:.1f}", f"{weights} weights"]
    words += [f"{len(measured)} of {len(group)} seeds"] if len(measured) < len(group) else []
    if any(run.result and run.result["test_images"] != images for run in group):
        words.append(f"{images:,} images")
    return f"{100 * mean(shares):.2f}%", ", ".join(words)


def _ratio(group: Sequence[Run], runs: Sequence[Run]) -> str:
    group = timed(group)
    rivals = baseline(group[0], runs) if group else []
    if not rivals:
        return "–"
    if not same_hardware([*group, *rivals]):
        return "other hardware"
    ours, theirs = undisturbed(group), undisturbed(rivals)
    if ours is None or theirs is None:
        return "busy machine"
    return f"{ours / theirs:.2f}"


def _paper_ratio(rows: dict[str, dict[str, float]], method: str) -> str:
    rival = "TRADES-" if method.startswith("TRADES") else "PGD-"
    steps = [int(m.removeprefix(rival)) for m in rows if m.removeprefix(rival).isdigit()]
    if method == "Natural" or method.removeprefix(rival).isdigit():
        return "–"
    return f"{rows[method]['minutes'] / rows[f'{rival}{max(steps)}']['minutes']:.2f}"


def differs(run: Run, theirs: dict[str, Any]) -> str:
    """How the run's data, network or radius are not the table's."""
    ways = [
        f"{part} {run.config[part]['name']}, not {theirs[part]}"
        for part in ("data", "model")
        if run.config[part]["name"] != theirs[part]
    ]
    norm, eps = run.config["threat"]["name"], float(run.config["threat"]["eps"])
    radius = Fraction(theirs["eps"])
    if norm != "linf" or not isclose(eps, radius, rel_tol=1e-3):
        ways.append(f"threat {norm} of {eps:.4g}, not linf of {theirs['eps']}")
    for e in run.evaluations.values():
        if not isclose(e["about"]["eps"], radius, rel_tol=1e-3):
            ways.append(f"attacked with {e['about']['threat']}")
    return "; ".join(dict.fromkeys(ways))
