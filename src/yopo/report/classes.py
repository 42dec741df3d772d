"""Accuracy class by class, and which classes are taken for which under attack."""

from collections.abc import Sequence
from typing import Any

from yopo.report.records import Run
from yopo.report.tables import Cell, Table

MOST = 20  # classes in the table
SIDE, NAMES = 34, 60  # of a matrix's cell; the room for the names of its rows
FEW = 10  # images, of which a part says little
LETTERS = 8  # of a class's name in a matrix


def table(runs: Sequence[Run]) -> Table | None:
    """By class, clean and in the worst case, of runs whose evaluations are of the same images."""
    told = [(run, e) for run in runs if (e := _looked(run, "classes"))]
    if not told:
        return None
    what = _images(told[0][1])
    told = [(run, e) for run, e in told if _images(e) == what]
    columns = [e["classes"] for _, e in told]
    rows = [same for same in zip(*columns, strict=True) if same[0]["images"]]
    rows.sort(key=lambda same: sum(c["worst"] for c in same) / same[0]["images"])
    cells: list[list[Cell]] = []
    for same in rows[:MOST]:
        cells.append([same[0]["name"], f"{same[0]['images']:,}", *map(_cell, same)])
    about = told[0][1]["about"]
    many = f" The {MOST} hardest of {len(rows)} classes." if len(rows) > MOST else ""
    few = " Of a class with few test images their number stands here: a part of so few says little."
    text = (
        f"The part of a class's test images that withstands all attacks ({about['threat']}), the "
        f"hardest class first; under it the part that is right without an attack.{many}"
        f"{few if any(same[0]['images'] < FEW for same in rows[:MOST]) else ''}"
    )
    return Table("classes", ["class", "images", *(run.label for run, _ in told)], cells, text)


def matrix(run: Run) -> dict[str, Any] | None:
    """Labels against answers in the worst case, as squares: the darker, the more images."""
    e = _looked(run, "confusion")
    names = [c["name"][:LETTERS] for c in (e or {}).get("classes", [])]
    if e is None or len(e["confusion"]) != len(names):
        return None
    cells = []
    for i, row in enumerate(e["confusion"]):
        total = max(1, sum(row))
        for j, count in enumerate(row):
            tip = f"{count} of {sum(row)} images of {names[i]} are answered {names[j]}"
            place = {"x": NAMES + SIDE * j, "y": SIDE * (i + 1), "right": i == j}
            cells.append(place | {"count": count, "part": round(count / total, 3), "tip": tip})
    return {
        "side": SIDE,
        "names": [
            {"words": name, "x": NAMES + SIDE * i + SIDE / 2, "y": SIDE * (i + 1) + SIDE / 2 + 4}
            for i, name in enumerate(names)
        ],
        "cells": cells,
        "edge": NAMES - 6,
        "width": NAMES + SIDE * len(names) + 2,
        "height": SIDE * (len(names) + 1) + 2,
    }


def _looked(run: Run, what: str) -> dict[str, Any] | None:
    """The strongest evaluation that has something."""
    return next((e for e in run.strongest_first if e.get(what) and run.weights(e)), None)


def _images(e: dict[str, Any]) -> tuple[Any, ...]:
    """What must be equal for two to stand side by side."""
    about = e["about"]
    counts = tuple((c["name"], c["images"]) for c in e["classes"])
    return about["threat"], about["images"], about.get("images_sha256"), counts


def _cell(counts: dict[str, int]) -> Cell:
    worst, clean, n = counts["worst"], counts["clean"], max(1, counts["images"])
    if n < FEW:
        return f"{worst} of {n}", f"clean {clean} of {n}"
    return f"{100 * worst / n:.0f}%", f"clean {100 * clean / n:.0f}%"
