"""Write what README, docs/results.md and docs/reproduction.md say of the runs in records/.

Usage: python tools/keep_runs.py runs/table2 records/reproduction
       yopo reproduce figures --show --out records/reproduction
       python -m tools.reproduction_page
Whatever stands between <!-- table1 --> and <!-- /table1 --> is replaced, tableN.json is written
beside the runs, and the README's picture is drawn. tests/test_records.py does the same, and
compares.
"""

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from tools import front_page
from tools.front_page import COMPUTED, FAST, FAST_RUN, ROWS, Point
from yopo.evaluation.card import duration
from yopo.paper.reproduced import WORST, Summary, summary
from yopo.paper.reproduction import TABLES
from yopo.paper.tables import paper
from yopo.paper.words import cells, heads, legend, notes, plain_ratios, subsets
from yopo.report.groups import timed
from yopo.report.records import Run, read_runs
from yopo.report.tables import Cell

ROOT = Path(__file__).parents[1]
NOT_RUN = "Not run yet."
HEADLINE = {
    "table1": ("PGD-40", "YOPO-5-10"),
    "table2": ("PGD-10", "PGD-10 40 epochs", "YOPO-3-5", "YOPO-5-3", "YOPO-5-3 36 epochs"),
    "table4": ("TRADES-10", "TRADES-YOPO-3-4"),
}
FIGURES = {
    "MNIST": "records/repeats-h200/figure3a/accuracy-time.png",
    "CIFAR-10": "records/reproduction/figure3b/accuracy-time.png",
}
RECIPES = {  # the runs of each, one a seed
    "mnist-fast": "records/mnist-h200/fast/seed-*",
    FAST: FAST_RUN,
}
PARTS = tuple(f"{p}_seconds" for p in ("train", "evaluate", "test", "prepare", "warmup"))


def texts(root: Path = ROOT) -> dict[Path, str]:
    """What each file should hold."""
    docs, readme = root / "docs", root / "README.md"
    page, results = docs / "reproduction.md", docs / "results.md"
    text, found = page.read_text(), {}
    for name in TABLES:
        table = _summary(root, name)
        text = put(text, name, _table(table))
        if any(table["rows"].values()):
            file = root / "records" / "reproduction" / name / f"{name}.json"
            found[file] = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    points = list(front_page.points(root))
    short = put(results.read_text(), "headline", _headline(root))
    return {
        readme: put(readme.read_text(), "front", _front(points)),
        docs / "accuracy-time.svg": front_page.picture(points),
        results: put(short, "recipes", _recipes(root)),
        page: text,
        **found,
    }


def _front(found: Sequence[Point]) -> str:
    """The README's four rows."""
    rows = [p for p in found if p.name in ROWS]
    if not rows:
        return NOT_RUN
    names = ["CIFAR-10", "clean", "PGD-20", "AutoAttack", "training, one H200"]
    told = [] if all(p.alone for p in rows) else ["", f"\\* {COMPUTED}"]
    return "\n".join([*_markdown(names, [front_page.cells(p) for p in rows]), *told])


def _summary(root: Path, name: str, rows: Sequence[str] | None = None) -> Summary:
    model = paper()["tables"][name]["model"]
    file = root / "records" / "speed-h200" / f"bench-{model}.json"
    bench = json.loads(file.read_text()) if file.is_file() else None
    return summary(name, root / "records" / "reproduction" / name, bench, rows)


def put(text: str, name: str, block: str) -> str:
    """The text with what is between the marks replaced."""
    marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    if len(re.findall(marks, text, re.DOTALL)) != 1:
        raise ValueError(f"expected <!-- {name} --> and <!-- /{name} --> once")
    return re.sub(marks, lambda found: f"{found[1]}{block}\n{found[2]}", text, flags=re.DOTALL)


def _table(table: Summary) -> str:
    if not any(table["rows"].values()):
        return NOT_RUN
    rows = [cells(table, row) for row in table["rows"]]
    lines = [*_markdown(heads(table), rows), "", *_list(legend(table) + notes(table))]
    return "\n".join(lines)


def _headline(root: Path) -> str:
    """The rows that the claim is about, of three tables in one."""
    tables = {name: _summary(root, name, rows) for name, rows in HEADLINE.items()}
    if not any(r for table in tables.values() for r in table["rows"].values()):
        return NOT_RUN
    rows, pairs, others = [], [], []
    for name, table in tables.items():
        attack = TABLES[name].attacks[0]
        for row in table["rows"]:
            head = [WORST if h.startswith("worst") else h for h in heads(table)]
            found = dict(zip(head, cells(table, row), strict=True))
            data = paper()["tables"][name]["title"].rpartition(", ")[0]
            columns = ("method", "clean", attack, WORST, "autoattack", "training", "time ratio")
            rows.append([data, *(found.get(column, "–") for column in columns)])
        pairs += plain_ratios(table)
        others += [*subsets(table), *table["notes"]]
    names = ["", "method", "clean", "pgd-20, MNIST pgd-40", "worst of PGD, CW", "autoattack"]
    lines = _markdown([*names, "training", "time ratio"], rows)
    told = [
        "Test accuracy, ours / the paper's, in %; the mean over seeds, and the lowest "
        "and highest. Time: training alone; its ratio (ours / the paper's, where it gives times) "
        "is over the row of PGD or TRADES above.",
    ]
    if pairs:
        told.append(f"The same ratio between the loops written plainly: {', '.join(pairs)}.")
    told += _merged(others)
    for data, figure in reversed(FIGURES.items()):
        if (root / figure).is_file():
            alt = f"{data}: held-out accuracy against training time"
            lines = [f"![{alt}](../{figure})", "", *lines]
    return "\n".join([*lines, "", *_list(told)])


def _recipes(root: Path) -> str:
    """Our own recipes, with the last weights of their runs."""
    runs = {name: read_runs(sorted(root.glob(where))) for name, where in RECIPES.items()}
    runs = {name: seeds for name, seeds in runs.items() if seeds}
    if not runs:
        return NOT_RUN
    rows, told, whole = [], [], []
    for name, seeds in runs.items():
        alone = timed(seeds)
        own = [dict((run.result or {})["last"]) for run in seeds]
        attack = next(key for key in own[0] if key != "clean")
        found: dict[tuple[str, str], list[float]] = {}
        for run in seeds:
            cards = [e["attacks"] for e in run.evaluations.values() if "last" in run.weights(e)]
            for a, card in ((a, card) for e in cards for a, card in e.items() if a != "clean"):
                found.setdefault((a, card["settings"]), []).append(card["accuracy"])
        strongest = [values for (a, _), values in found.items() if a == "autoattack"]
        rows.append(
            [
                f"`{name}` ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})",
                _share([shares["clean"] for shares in own]),
                f"{_share([shares[attack] for shares in own])}, {attack}",
                _share(strongest[0]) if strongest else "–",
                duration(mean(run.spent("train_seconds") or 0.0 for run in alone)),
            ]
        )
        spent = mean(sum(run.spent(part) or 0.0 for part in PARTS) for run in alone)
        whole.append(f"`{name}` {duration(spent)}")
        told += [
            f"`{name}`: {_share(values)} under {a} ({how}){_of(values, seeds)}."
            for (a, how), values in found.items()
            if a != "autoattack"
        ]
    where = dict.fromkeys(run.environment["hardware"] for seeds in runs.values() for run in seeds)
    told.insert(
        0,
        "Test accuracy with the last weights, in %; the mean over seeds, and the lowest and "
        f"highest. {', '.join(where)}; PGD as `yopo train` runs it: steps of 2.5·eps/r.",
    )
    told.append(
        "Time: training alone. With starting, compiling (most of it cached from earlier runs), "
        f"held-out accuracy after each epoch and the test set: {', '.join(whole)}."
    )
    lines = _markdown(["recipe", "clean", "PGD", "autoattack", "training"], rows)
    return "\n".join([*lines, "", *_list(told)])


def _merged(sentences: Sequence[str]) -> list[str]:
    """Each once; "a: it fell" and "b: it fell" as "a, b: it fell"."""
    about: dict[str, list[str]] = {}
    for sentence in dict.fromkeys(sentences):
        names, colon, what = sentence.partition(": ")
        about.setdefault(what if colon else sentence, []).extend([names] if colon else [])
    return [f"{', '.join(names)}: {what}" if names else what for what, names in about.items()]


def _share(values: Sequence[float]) -> str:
    """The mean in %, and the range if there are several."""
    spread = f" ({100 * min(values):.2f}–{100 * max(values):.2f})" if len(values) > 1 else ""
    return f"{100 * mean(values):.2f}{spread}"


def _of(values: Sequence[float], seeds: Sequence[Run]) -> str:
    return "" if len(values) == len(seeds) else f", {len(values)} of {len(seeds)} seeds"


def _markdown(names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        words = (c if isinstance(c, str) else f"{c[0]} ({c[1]})" for c in row)
        lines.append(f"| {' | '.join(words)} |")
    return lines


def _list(sentences: Sequence[str]) -> list[str]:
    wrap = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
    wrap.subsequent_indent = "  "
    return [line for sentence in sentences for line in wrap.wrap(f"- {sentence}")]


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
