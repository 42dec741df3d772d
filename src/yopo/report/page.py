"""The page: headline, curves, tables, cards, pictures and settings in one HTML file."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import yaml

from yopo import __version__
from yopo.evaluation.card import duration
from yopo.report import curves
from yopo.report.headline import headline
from yopo.report.paper import paper_html
from yopo.report.pictures import Strip, strip_html
from yopo.report.records import Run, called, seeds
from yopo.report.tables import Cell, share, table

# The policy lets nothing be fetched, whatever stands in the records.
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:;
 style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title><style>
{css}</style></head><body>
<h1>{title}</h1>
{body}
<script>
{js}</script></body></html>
"""


def page(runs: Sequence[Run], strips: Sequence[Strip] = (), paper: str | None = None) -> str:
    """The report on these runs."""
    title = f"Adversarial training: {len(runs)} runs" if len(runs) > 1 else "Adversarial training"
    first, *others = (_code(escape(sentence)) for sentence in headline(runs))
    listed = f"<ul>{''.join(f'<li>{s}</li>' for s in others)}</ul>" if others else ""
    colour = curves.numbers(runs)
    body = [
        f'<div class="headline"><p>{first}</p>{listed}</div>',
        _charts(runs),
        "<h2>Runs</h2>",
        runs_table(runs),
        attacks_table(runs),
        paper_html(runs, paper) if paper else "",
        "<h2>Each run</h2>",
        *(_run(run, colour[run], strips) for run in runs),
        f'<p class="small">Made by yopo {__version__} from the records in the run folders.</p>',
    ]
    here = files("yopo.report")
    css, js = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return PAGE.format(title=title, css=css, js=js, body="\n".join(body))


def _code(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", text)


def runs_table(runs: Sequence[Run]) -> str:
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
    table_heads = [*heads, *(f"{attack}, {which}" for attack, which in pairs)]
    return table("runs", table_heads, rows) + f'<p class="small">{text}</p>'


def attacks_table(runs: Sequence[Run]) -> str:
    """What `yopo eval` found, attack by attack."""
    found = [(run, e) for run in runs for e in run.evaluations.values()]
    if not found:
        none = "None of these runs has been evaluated with <code>yopo eval</code> yet."
        return f'<p class="small">{none}</p>'
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
    return "<h3>Under attack</h3>" + table("attacks", heads, rows) + f'<p class="small">{text}</p>'


def _share(found: Mapping[str, Any] | None) -> Cell:
    return "–" if found is None else share(found["accuracy"], found["interval"])


def _charts(runs: Sequence[Run]) -> str:
    buttons = [
        f'<button type="button" aria-pressed="true" data-run="{i}">{_swatch(i)}'
        f"{escape(called(group))}</button>"
        for i, group in enumerate(seeds(runs))
        if any(run.points for run in group)
    ]
    if not buttons:
        return ""
    for measure, dash in zip(curves.MEASURES, ("", ' stroke-dasharray="5 4"'), strict=True):
        line = f'<svg width="26" height="4" aria-hidden="true"><path d="M0 2H26"{dash}/></svg>'
        buttons.append(
            f'<button type="button" aria-pressed="true" data-measure="{measure}">{line}'
            f"{measure}</button>"
        )
    drawn = "".join(
        f'<figure class="chart">{curves.svg(runs, axis)}<output class="tip"></output></figure>'
        for axis in curves.AXES
        if any(curves.points(run, axis) for run in runs)
    )
    steps = sorted({run.config["evaluate"]["steps"] for run in runs if run.points})
    tasks = dict.fromkeys(f"{run.data}, {run.threat}" for run in runs if run.points)
    text = (
        "Held-out images at each full evaluation, clean and under "
        f"{' or '.join(f'pgd-{s}' for s in steps)} ({'; '.join(tasks)}). Point at a curve, or move "
        "to a chart with Tab and use the arrow keys, to see the epoch; the buttons show and hide "
        "curves."
    )
    if any(run.shared for run in runs):
        text += " Runs that shared a GPU are not drawn against time."
    return (
        "<h2>Accuracy against time and propagations</h2>"
        f'<div class="legend" role="group" aria-label="curves">{"".join(buttons)}</div>'
        f'<div class="charts">{drawn}</div><p class="small">{text}</p>'
    )


def _swatch(i: int) -> str:
    return f'<span class="swatch" style="--c: var(--c{i % len(curves.PALETTE)})"></span>'


def _run(run: Run, i: int, strips: Sequence[Strip]) -> str:
    parts = [f"<h3>{_swatch(i)}{escape(run.label)}</h3>"]
    parts += [f'<p class="note">{escape(note)}</p>' for note in run.notes]
    parts += [card_html(e) for e in run.evaluations.values()]
    parts += [strip_html(strip) for strip in strips if strip.run is run]
    settings = escape(yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True))
    parts.append(f"<details><summary>Settings</summary><pre>{settings}</pre></details>")
    known = {k: v for k, v in run.environment.items() if v}
    facts = [f"commit {v}" if k == "commit" else str(v) for k, v in known.items()]
    where = ", ".join(facts) or "where is not recorded"
    parts.append(f'<p class="small">Trained: {escape(where)}.</p>')
    return f"<section>{''.join(parts)}</section>"


def card_html(e: Mapping[str, Any]) -> str:
    """An evaluation's card; the same values as in eval.md."""
    about = e["about"]
    rows: list[list[Cell]] = []
    for name, a in e["attacks"].items():
        stages = ", ".join(f"{s} {100 * share:.2f}%" for s, share in a.get("after", {}).items())
        settings = f"{a['settings']} (after {stages})" if stages else a["settings"]
        rows.append([name, _share(a), settings, f"{a['propagations']:.1f}", duration(a["seconds"])])
    rows.append(["worst case", _share(e["worst"]), "", "", ""])
    heads = ["attack", "accuracy, 95% interval", "settings", "propagations", "time"]
    warnings = "".join(
        f'<p class="warning"><b>Warning ({escape(w["code"])}).</b> {escape(w["text"])}</p>'
        for w in e["warnings"]
    )
    what = f"{about['images']:,} images: {about['data']}. {about['threat']}. {about['model']}."
    how = (
        f"Evaluated: weights {about['weights']} "
        f"(sha256 of its tensors {about['weights_sha256'][:16]}…), "
        f"{about['precision']}, seed {about['seed']}, batches of {about['batch']}. "
        f"{about['packages']}, commit {about['commit'] or 'unknown'}. {about['hardware']}. "
        f"{about['finished']}."
    )
    return (
        f'<p class="small">{escape(what)}</p>{warnings}'
        f"{table('card', heads, rows, text=(2,))}"
        f"{'' if warnings else '<p class=small>No warnings from the automatic checks.</p>'}"
        f'<p class="small">{escape(how)}</p>'
    )
