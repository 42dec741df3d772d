"""Write the tables of docs/reproduction.md and of the README from the runs in records/.

Usage: python tools/keep_runs.py runs/table2 records/reproduction
       yopo reproduce figures --show --out records/reproduction
       python tools/reproduction_page.py
Whatever stands between <!-- table1 --> and <!-- /table1 --> is replaced, and tableN.json is written
beside the runs. tests/test_records.py does the same and compares.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from yopo.evaluation.card import duration
from yopo.paper import paper
from yopo.report.records import Run, read_runs
from yopo.report.reproduced import (
    WORST,
    Summary,
    cells,
    heads,
    legend,
    literal,
    notes,
    subsets,
    summary,
)
from yopo.report.tables import Cell
from yopo.reproduction import TABLES
from yopo.run_folder import BEST, LAST

ROOT = Path(__file__).parents[1]
NOT_RUN = "Not run yet."
HEADLINE = {
    "table1": ("PGD-40", "YOPO-5-10"),
    "table2": ("PGD-10", "YOPO-3-5", "YOPO-5-3", "YOPO-5-3 36 epochs"),
    "table4": ("TRADES-10", "TRADES-YOPO-3-4"),
}
FIGURES = {
    "MNIST": "records/reproduction/figure3a/accuracy-time.png",
    "CIFAR-10": "records/reproduction/figure3b/accuracy-time.png",
}
RECIPES = {
    "mnist-fast": "records/mnist-h200/fast",
    "cifar10-fast": "records/cifar10-fast-h200/33-epochs",
}


def texts(root: Path = ROOT) -> dict[Path, str]:
    """What each file should hold."""
    page, readme = root / "docs" / "reproduction.md", root / "README.md"
    text, found = page.read_text(), {}
    for name in TABLES:
        table = _summary(root, name)
        text = _put(text, name, _table(table))
        if any(table["rows"].values()):
            file = root / "records" / "reproduction" / name / f"{name}.json"
            found[file] = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    front = _put(readme.read_text(), "headline", _headline(root))
    return {page: text, readme: _put(front, "recipes", _recipes(root)), **found}


def _summary(root: Path, name: str, rows: Sequence[str] | None = None) -> Summary:
    model = paper()["tables"][name]["model"]
    file = root / "records" / "speed-h200" / f"bench-{model}.json"
    bench = json.loads(file.read_text()) if file.is_file() else None
    return summary(name, root / "records" / "reproduction" / name, bench, rows)


def _put(text: str, name: str, block: str) -> str:
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
            found = dict(zip(heads(table), cells(table, row), strict=True))
            data = paper()["tables"][name]["title"].rpartition(", ")[0]
            columns = ("method", "clean", attack, WORST, "autoattack", "training", "time ratio")
            rows.append([data, *(found.get(column, "–") for column in columns)])
        pairs += literal(table)
        others += [*subsets(table), *table["notes"]]
    names = ["", "method", "clean", "pgd-20, MNIST pgd-40", f"{WORST}, with cw", "autoattack"]
    lines = _markdown([*names, "training", "time ratio"], rows)
    told = [
        "Test accuracy, ours / the paper's, in %; the mean over seeds, and the lowest "
        "and highest. Time: training alone; its ratio is over the row of PGD or TRADES above.",
    ]
    if pairs:
        told.append(f"The same ratio between the loops written plainly: {', '.join(pairs)}.")
    told += dict.fromkeys(others)
    for data, figure in reversed(FIGURES.items()):
        if (root / figure).is_file():
            alt = f"{data}: held-out accuracy against training time"
            lines = [f"![{alt}]({figure})", "", *lines]
    return "\n".join([*lines, "", *_list(told)])


def _recipes(root: Path) -> str:
    """Our own recipes, a run of each."""
    names = [name for name, path in RECIPES.items() if (root / path).is_dir()]
    if not names:
        return NOT_RUN
    runs = dict(zip(names, read_runs([root / RECIPES[name] for name in names]), strict=True))
    rows, told = [], []
    for name, run in runs.items():
        seconds = duration(run.spent("train_seconds") or 0.0)
        for which, file in (("best", BEST), ("last", LAST)):
            clean, (attack, share) = _own(run, which)
            cards = [e for e in run.evaluations.values() if which in run.weights(e)]
            found = {a: f for e in cards for a, f in e["attacks"].items() if a != "clean"}
            strongest = found.pop("autoattack", None)
            last = f"{100 * strongest['accuracy']:.2f}" if strongest else "–"
            robust = f"{100 * share:.2f} ({attack})"
            rows.append([f"`{name}`", f"`{file}`", f"{100 * clean:.2f}", robust, last, seconds])
            told += [
                f"`{name}`, `{file}`: {100 * f['accuracy']:.2f} under {a} ({f['settings']})."
                for a, f in found.items()
            ]
    where = dict.fromkeys(run.environment["hardware"] for run in runs.values())
    told.insert(
        0, f"One seed, {', '.join(where)}; PGD as `yopo train` runs it: steps of 2.5·eps/r."
    )
    lines = _markdown(["recipe", "weights", "clean", "PGD", "autoattack", "training"], rows)
    return "\n".join([*lines, "", *_list(told)])


def _own(run: Run, which: str) -> tuple[float, tuple[str, float]]:
    """Accuracy on clean images and under PGD that the run itself measured."""
    shares = dict((run.result or {})[which])
    return shares.pop("clean"), next(iter(shares.items()))


def _markdown(names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        words = (c if isinstance(c, str) else f"{c[0]} ({c[1]})" for c in row)
        lines.append(f"| {' | '.join(words)} |")
    return lines


def _list(sentences: Sequence[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
