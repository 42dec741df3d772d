"""The page's numbers as CSV and JSON, inside the page: links that need no script and no network."""

import base64
import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from yopo.report.records import Run
from yopo.report.tables import Beside

WORST = "worst case"
EVALUATED = ("about", "attacks", "worst", "warnings", "classes", "confusion", "radii")
EPOCH = "epoch train_seconds processor_seconds propagations rate loss clean robust images".split()
COLUMNS = "run method seed from epoch weights attack class eps images accuracy low high".split()
COLUMNS += ["train_seconds", "propagations", "loss", "rate"]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would take for a program


def downloads(runs: Sequence[Run], paper: Beside | None = None) -> list[dict[str, str]]:
    """Names, kinds and contents of the files that the page offers."""
    table, values = io.StringIO(), [_values(run) for run in runs]
    writer = csv.DictWriter(table, COLUMNS, restval="")
    writer.writeheader()
    for run in runs:
        for row in _rows(run):
            writer.writerow({k: _cell(v) for k, v in row.items()})
    theirs = paper and {"heads": paper.table.heads, "rows": paper.table.rows}
    text = json.dumps({"runs": values, "beside the paper": theirs}, indent=1)
    return [
        {
            **{"name": "report.json", "label": "JSON", "kind": "application/json"},
            "what": "all numbers of this page, and each run's settings",
            "data": _in64(text),
        },
        {
            **{"name": "report.csv", "label": "CSV", "kind": "text/csv"},
            "what": "accuracies, losses and rates, a row for each",
            "data": _in64(table.getvalue()),
        },
    ]


def _values(run: Run) -> dict[str, Any]:
    """What the page shows of a run, under the names of its files."""
    result = run.result or {}
    own = {k: result.get(k) for k in ("best", "last", "best_epoch", "test_images")}
    return {
        **{"name": run.name, "method": run.method, "seed": run.config["seed"]},
        **{"threat": run.threat, "data": run.data},
        "train_seconds": run.spent("train_seconds"),
        "propagations": run.spent("propagations"),
        "own": own,
        "epochs": [{k: line.get(k) for k in EPOCH} for line in run.lines],
        "evaluations": [{k: e[k] for k in EVALUATED if k in e} for e in run.strongest_first],
        **{"settings": run.config, "environment": run.environment},
    }


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    """One row for each accuracy: held-out ones by epoch, then those of evaluations."""
    who = {"run": run.name, "method": run.method, "seed": run.config["seed"]}
    spent = ("epoch", "images", "train_seconds", "propagations", "loss", "rate")
    for line in run.lines:
        for attack, key in (
            ("clean", "clean"),
            (f"pgd-{run.config['evaluate']['steps']}", "robust"),
        ):
            told = {
                "attack": attack,
                "eps": run.config["threat"]["eps"],
                "accuracy": line.get(key),
            }
            yield who | {"from": "held-out images"} | {k: line.get(k) for k in spent} | told
    for e in run.strongest_first:
        about, weights = e["about"], " = ".join(sorted(run.weights(e)))
        what = {"from": "test images", "weights": weights, "eps": about["eps"]}
        what |= {"images": about["images"]}
        for attack, a in (e["attacks"] | {WORST: e["worst"]}).items():
            low, high = a["interval"]
            told = {"attack": attack, "accuracy": a["accuracy"], "low": low, "high": high}
            yield who | what | told
        radii = e.get("radii") or {"attack": "", "eps": [], "accuracy": []}
        for eps, share in zip(radii["eps"], radii["accuracy"], strict=True):
            yield who | what | {"attack": radii["attack"], "eps": eps, "accuracy": share}
        for counts in e.get("classes") or []:
            n = counts["images"]
            for attack, key in (("clean", "clean"), (WORST, "worst")):
                told = {"attack": attack, "class": counts["name"], "images": n}
                yield who | what | told | {"accuracy": counts[key] / n if n else ""}


def _cell(value: object) -> object:
    """A number as it is; words that a spreadsheet would run with a quote before them."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _in64(text: str) -> str:
    return base64.b64encode(text.encode(errors="replace")).decode()
