"""The page: headline, curves, tables, cards, pictures and settings in one HTML file."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from yopo import __version__
from yopo.evaluation.card import duration
from yopo.report import curves
from yopo.report.headline import headline
from yopo.report.paper import beside
from yopo.report.pictures import Strip, shown
from yopo.report.records import Run, called, seeds
from yopo.report.tables import Cell, Table, share


def page(runs: Sequence[Run], strips: Sequence[Strip] = (), paper: str | None = None) -> str:
    """The report on these runs. Whatever stands in their files is words in it, never markup."""
    colour = {run: i % len(curves.PALETTE) for run, i in curves.numbers(runs).items()}
    buttons = [
        {"run": i, "colour": colour[group[0]], "name": called(group)}
        for i, group in enumerate(seeds(runs))
        if any(run.points for run in group)
    ]
    return _template().render(
        title=f"Adversarial training: {len(runs)} runs" if runs[1:] else "Adversarial training",
        css=Markup(_file("page.css")),
        js=Markup(_file("page.js")),
        headline=headline(runs),
        buttons=buttons,
        charts=[curves.chart(runs, axis) for axis in curves.AXES if curves.drawn(runs, axis)],
        charts_note=_charts_note(runs),
        runs=runs_table(runs),
        attacks=attacks_table(runs),
        paper=beside(runs, paper) if paper else None,
        sections=[_section(run, colour[run], strips) for run in runs],
        version=__version__,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"sha256": _sha256, "code": _code}
    return environment.from_string(_file("page.html"))


def _file(name: str) -> str:
    return (files("yopo.report") / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    """By which the policy knows what is ours."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _code(text: str) -> Markup:
    """A sentence with our command in the letters of commands."""
    return escape(text).replace("`yopo eval`", Markup("<code>yopo eval</code>"))


def runs_table(runs: Sequence[Run]) -> Table:
    """What training cost and what the run itself found on the test set."""
    results = [run.result or {} for run in runs]
    names = dict.fromkeys(a for r in results for w in ("best", "last") for a in r.get(w, {}))
    pairs = [(attack, which) for attack in names for which in ("best", "last")]
    heads = ["run", "training", "propagations", "epochs", "best epoch"]
    tasks = [f"{run.data}, {run.threat}" for run in runs]
    differ = len({*tasks}) > 1
    rows: list[list[Cell]] = []
    for run, result, task in zip(runs, results, tasks, strict=True):
        seconds, cost = run.spent("train_seconds"), run.spent("propagations")
        done = run.lines[-1]["epoch"] if run.lines else 0
        cells: list[Cell] = [(run.name, f"{run.method}, {task}" if differ else run.method)]
        spent = "–" if seconds is None else duration(seconds)
        cells += [(spent, "shared a GPU") if run.shared else spent]
        cells += ["–" if cost is None else f"{cost:.0f}"]
        cells += [f"{done}" if run.result else f"{done} of {run.config['epochs']}"]
        best = result.get("best_epoch", -1)  # -1 where every epoch collapsed
        cells += ["–" if best < 0 else str(best)]
        shares = [result.get(which, {}).get(attack) for attack, which in pairs]
        rows.append([*cells, *("–" if s is None else f"{100 * s:.2f}%" for s in shares)])
    text = (
        "Training: time spent processing batches, nothing else. Propagations: full forward and "
        "backward passes per training image; a pass without weight gradients counts ⅔. Accuracies: "
        f"test set{'' if differ else f' ({tasks[0]})'}, "
        "with the weights of the best held-out robust accuracy (the last evaluated ones "
        "with evaluate.keep last) and with the last ones; "
        "PGD's steps are 2.5·eps/r, where an evaluation below may take others."
    )
    return Table("runs", [*heads, *(f"{a}, {which}" for a, which in pairs)], rows, text)


def attacks_table(runs: Sequence[Run]) -> Table | None:
    """What `yopo eval` found, attack by attack; None if it was not asked."""
    found = [(run, e) for run in runs for e in run.evaluations.values()]
    if not found:
        return None
    attacks = list(dict.fromkeys(a for _, e in found for a in e["attacks"]))
    heads = ["run", "weights", "images", "threat", *attacks, "worst case"]
    rows = []
    for run, e in found:
        about = e["about"]
        cells: list[Cell] = [(run.name, run.method), run.said_weights(e), f"{about['images']:,}"]
        cells += [about["threat"], *(_share(e["attacks"].get(attack)) for attack in attacks)]
        rows.append([*cells, _share(e["worst"]) if {*e["attacks"]} - {"clean"} else "–"])
    text = (
        "Test accuracy under each attack by itself, with its 95% interval. Worst case: no attack "
        "broke the image. Every robust accuracy is an upper bound."
    )
    return Table("attacks", heads, rows, text)


def _share(found: Mapping[str, Any] | None) -> Cell:
    return "–" if found is None else share(found["accuracy"], found["interval"])


def _charts_note(runs: Sequence[Run]) -> str:
    steps = sorted({run.config["evaluate"]["steps"] for run in runs if run.points})
    tasks = dict.fromkeys(f"{run.data}, {run.threat}" for run in runs if run.points)
    text = (
        "Held-out images at each full evaluation, clean and under "
        f"{' or '.join(f'pgd-{s}' for s in steps)} ({'; '.join(tasks)}). Point at a curve, or move "
        "to a chart with Tab and use the arrow keys, to see the epoch; the buttons show and hide "
        "curves."
    )
    shared = " Runs that shared a GPU are not drawn against time."
    return text + shared if any(run.shared for run in runs) else text


def _section(run: Run, colour: int, strips: Sequence[Strip]) -> dict[str, Any]:
    """All about one run."""
    known = {k: v for k, v in run.environment.items() if v}
    facts = [f"commit {v}" if k == "commit" else str(v) for k, v in known.items()]
    return {
        "colour": colour,
        "label": run.label,
        "notes": run.notes,
        "cards": [_card(e) for e in run.evaluations.values()],
        "strips": [shown(strip) for strip in strips if strip.run is run],
        "settings": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "where": ", ".join(facts) or "where is not recorded",
    }


def _card(e: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's card; the same values as in eval.md."""
    about = e["about"]
    rows: list[list[Cell]] = []
    for name, a in e["attacks"].items():
        stages = ", ".join(f"{s} {100 * share:.2f}%" for s, share in a.get("after", {}).items())
        settings = f"{a['settings']} (after {stages})" if stages else a["settings"]
        rows.append([name, _share(a), settings, f"{a['propagations']:.1f}", duration(a["seconds"])])
    rows.append(["worst case", _share(e["worst"]), "", "", ""])
    heads = ["attack", "accuracy, 95% interval", "settings", "propagations", "time"]
    return {
        "what": f"{about['images']:,} images: {about['data']}. {about['threat']}. "
        f"{about['model']}.",
        "warnings": e["warnings"],
        "table": Table("card", heads, rows, text=2),
        "how": f"Evaluated: weights {about['weights']} "
        f"(sha256 of its tensors {about['weights_sha256'][:16]}…), "
        f"{about['precision']}, seed {about['seed']}, batches of {about['batch']}. "
        f"{about['packages']}, commit {about.get('commit') or 'unknown'}. {about['hardware']}. "
        f"{about['finished']}.",
    }
