"""The page: headline, curves, tables, cards, pictures and settings in one HTML file."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from yopo import __version__
from yopo.report import classes, curves
from yopo.report.clock import busy
from yopo.report.download import downloads
from yopo.report.groups import called, seeds
from yopo.report.headline import headline
from yopo.report.pictures import Strip, shown
from yopo.report.records import Run
from yopo.report.score import comparable
from yopo.report.tables import Beside, attacks_table, card, own_table, runs_table
from yopo.report.words import notes

LONGEST = 24  # letters of a name that is kept on one line; a phone has room for 40


def page(runs: Sequence[Run], strips: Sequence[Strip] = (), paper: Beside | None = None) -> str:
    """The report on these runs. Whatever stands in their files is words in it, never markup.

    paper: a table of the paper with these runs, from `yopo.paper.beside`.
    """
    place = curves.places(runs)
    buttons = [
        dict(zip(("run", "colour"), place[group[0]], strict=True), name=called(group))
        for group in seeds(runs)
        if any(run.points for run in group)
    ]
    colour = {run: hue for run, (_, hue) in place.items()}
    radii = curves.against_eps(runs)
    history = [drawn for what in curves.HISTORY if (drawn := curves.history(runs, what))]
    whole = [run for run in runs if not run.short]
    scores = comparable(whole) if whole else {}
    return _template().render(
        title=f"Adversarial training: {len(runs)} runs" if runs[1:] else "Adversarial training",
        css=Markup(_file("page.css")),
        js=Markup(_file("page.js")),
        headline=headline(runs),
        buttons=buttons,
        charts=[curves.chart(runs, axis) for axis in curves.AXES if curves.drawn(runs, axis)],
        charts_note=_charts_note(runs),
        radii=radii,
        history=history,
        radii_key=curves.key(runs, radii[0]) if radii else [],
        history_key=curves.key(runs, history[0]) if history else [],
        same=[_strip(strip, colour) for strip in strips if strip.same],
        classes=classes.table(runs),
        matrices=[
            {"colour": colour[run], "label": run.label, **m}
            for run in runs
            if (m := classes.matrix(run))
        ],
        runs=runs_table(runs, scores),
        own=own_table(runs),
        attacks=attacks_table(runs),
        paper=paper,
        downloads=downloads(runs, paper),
        sections=[_section(run, colour[run], strips) for run in runs],
        version=__version__,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"sha256": _sha256, "code": _code, "whole": _whole}
    return environment.from_string(_file("page.html"))


def _file(name: str) -> str:
    return (files("yopo.report") / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    """By which the policy knows what is ours."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _code(text: str) -> Markup:
    """A sentence with our commands in the letters of commands."""
    ours = r"`(yopo [a-z]+(?: --[a-z-]+)?(?: \d+)?)`"  # nothing in it is markup
    parts = re.split(ours, text)  # words, a command, words, …
    command = Markup("<code>{}</code>")
    return Markup().join(
        command.format(part) if i % 2 else _whole(part) for i, part in enumerate(parts)
    )


def _whole(text: str) -> Markup:
    """With names, intervals and dates, such as PGD-10 and 79.8–87.0, kept on one line."""
    hyphened = r"(?<![\w.-])([\w.%]+(?:[-–][\w.%]+)+)"  # nothing in it is markup
    return Markup(re.sub(hyphened, _kept, str(escape(text))))


def _kept(word: re.Match[str]) -> str:
    return f'<span class="whole">{word[1]}</span>' if len(word[1]) <= LONGEST else word[1]


def _charts_note(runs: Sequence[Run]) -> str:
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
    if disturbed := [run.label for run in runs if run.points and not run.shared and busy(run)]:
        text += (
            f" The machine was busy while {', '.join(disturbed)} trained: against time "
            "they stand too far right; propagations do not change with the machine."
        )
    return text


def _strip(strip: Strip, colour: Mapping[Run, int]) -> dict[str, Any]:
    """Pictures under the name of their run."""
    return {"colour": colour[strip.run], "label": strip.run.label, **shown(strip)}


def _section(run: Run, colour: int, strips: Sequence[Strip]) -> dict[str, Any]:
    """All about one run."""
    known = {k: v for k, v in run.environment.items() if v}
    facts = [f"commit {v}" if k == "commit" else str(v) for k, v in known.items()]
    return {
        "colour": colour,
        "label": run.label,
        "notes": notes(run),
        "cards": [card(e) for e in run.strongest_first],
        "strips": [shown(strip) for strip in strips if strip.run is run and not strip.same],
        "settings": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "where": ", ".join(facts) or "where is not recorded",
    }
