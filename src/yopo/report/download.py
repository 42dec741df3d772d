"""The page's numbers as CSV and JSON, inside the page: links that need no script and no network."""

import base64
import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from yopo.report.records import Run

EPOCH = ("epoch", "train_seconds", "propagations", "rate", "loss", "clean", "robust", "images")
COLUMNS = "run method seed from epoch weights attack eps images accuracy low high".split()
COLUMNS += ["train_seconds", "propagations"]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would take for a program


def downloads(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Names, kinds and contents of the files that the page offers."""
    table, values = io.StringIO(), [_values(run) for run in runs]
    writer = csv.DictWriter(table, COLUMNS, restval="")
    writer.writeheader()
    for run in runs:
        for row in _rows(run):
            writer.writerow({k: _cell(v) for k, v in row.items()})
    text = json.dumps({"runs": values}, indent=1)
    return [
        {"name": "report.csv", "label": "CSV", "kind": "text/csv", "data": _in64(table.getvalue())},
        {"name": "report.json", "label": "JSON", "kind": "application/json", "data": _in64(text)},
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
        "evaluations": [
            {k: e.get(k) for k in ("about", "attacks", "worst", "warnings")} for e in run.ranked
        ],
    }


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    """One row for each accuracy: held-out ones by epoch, then those of evaluations."""
    who = {"run": run.name, "method": run.method, "seed": run.config["seed"]}
    for line in run.lines:
        for attack, key in (
            ("clean", "clean"),
            (f"pgd-{run.config['evaluate']['steps']}", "robust"),
        ):
            spent = {k: line.get(k) for k in ("epoch", "images", "train_seconds", "propagations")}
            told = {
                "attack": attack,
                "eps": run.config["threat"]["eps"],
                "accuracy": line.get(key),
            }
            yield who | {"from": "held-out images"} | spent | told
    for e in run.ranked:
        about, weights = e["about"], " = ".join(sorted(run.weights(e)))
        what = {"from": "test images", "weights": weights, "eps": about["eps"]}
        for attack, a in (e["attacks"] | {"worst case": e["worst"]}).items():
            low, high = a["interval"]
            told = {"attack": attack, "accuracy": a["accuracy"], "low": low, "high": high}
            yield who | what | {"images": about["images"]} | told


def _cell(value: object) -> object:
    """A number as it is; words that a spreadsheet would run with a quote before them."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _in64(text: str) -> str:
    return base64.b64encode(text.encode(errors="replace")).decode()
