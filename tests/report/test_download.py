"""The page's numbers as files: whole, readable, and no program for a spreadsheet."""

import base64
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reports import Page, closer, write_run
from yopo.evaluation.card import duration
from yopo.paper.beside import beside
from yopo.report.page import page
from yopo.report.records import read_runs


def files(folder: Path) -> tuple[list[dict[str, str]], Any]:
    """The rows and the values that the page's links hold."""
    return read_links(page(read_runs([folder])))


def read_links(text: str) -> tuple[list[dict[str, str]], Any]:
    links = {a["download"]: a["href"].split("base64,")[1] for a in Page(text).all("a")}
    assert {*links} == {"report.csv", "report.json"}
    table, values = (base64.b64decode(links[f"report.{k}"]).decode() for k in ("csv", "json"))
    return list(csv.DictReader(io.StringIO(table))), json.loads(values)


def test_downloads_hold_the_numbers_of_the_records(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    rows, values = files(folder)
    (run,) = values["runs"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((folder / "eval.json").read_text())
    assert [epoch["robust"] for epoch in run["epochs"]] == [line["robust"] for line in lines]
    assert run["evaluations"][0]["attacks"] == found["attacks"]
    robust = [row for row in rows if row["from"] == "held-out images" and row["attack"] == "pgd-3"]
    assert [float(row["accuracy"]) for row in robust] == [line["robust"] for line in lines]
    shares = {row["attack"]: float(row["accuracy"]) for row in rows if row["from"] == "test images"}
    want = {name: a["accuracy"] for name, a in found["attacks"].items()}
    assert shares == want | {"worst case": found["worst"]["accuracy"]}


def numbers(value: Any) -> Iterator[float | str]:
    """All numbers and words in a JSON value."""
    if isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from numbers(inside)
    elif isinstance(value, int | float | str):
        yield value


def test_every_table_and_chart_is_in_the_json(tmp_path: Path) -> None:
    counts = [[7, 3, 1], [2, 5, 5], [1, 1, 11]]
    folders = [
        closer(write_run(tmp_path / name, {"method": method}), counts)
        for name, method in {"one": {"name": "pgd"}, "two": {}}.items()
    ]
    for folder in folders:
        told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        more = [line | {"loss": 1.2345 / line["epoch"], "rate": 0.0123} for line in told]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more))
    runs = read_runs(folders)
    text = page(runs, paper=beside(runs, "table1"))
    found = Page(text)
    rows, values = read_links(text)
    for folder, run in zip(folders, values["runs"], strict=True):
        evaluation = json.loads((folder / "eval.json").read_text())
        assert evaluation.items() == run["evaluations"][0].items()
    written: set[str] = set()
    words = ""
    for value in numbers(values):
        if isinstance(value, str):
            words += f" {value}"
            continue
        for x in (value, 100 * value):
            written |= {f"{x:.0f}", f"{x:.1f}", f"{x:.2f}", f"{x:.4g}", f"{x:.3g}", f"{x:,}"}
        written.add(duration(value).split()[0])
    known = {"runs", "own", "attacks", "card", "classes", "paper"}
    assert {*found.tables} == known
    rows_of = (row for name in known - {"classes"} for row in found.tables[name][1:])
    shown = [cell for row in rows_of if row[0] != "attack" for cell in row[1:]]
    tips = [
        circle["data-tip"].partition(",")[2]
        for circle in found.all("circle")
        if "data-tip" in circle
    ]
    assert len(tips) == 2 * (4 * 2 * 2 + 3 + 4 * 2)  # two charts of accuracy; eps; loss and rate
    for cell in (*shown, *tips):
        for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", cell.replace("⅔", "")):
            assert number.rstrip(",") in written or number in words, (number, cell)
    shares = {(r["run"], r["class"], r["attack"]): r["accuracy"] for r in rows if r["class"]}
    for name, images, *cells in found.tables["classes"][1:]:
        for run, cell in zip(("one", "two"), cells, strict=True):
            worst = float(shares[run, name, "worst case"])
            clean = float(shares[run, name, "clean"])
            assert cell == f"{100 * worst:.0f}% clean {100 * clean:.0f}%"
            i = int(name.split()[1])
            assert worst == counts[i][i] / int(images)
    by_epoch = [r for r in rows if r["run"] == "one" and r["from"] == "held-out images"]
    assert [float(r["loss"]) for r in by_epoch[::2]] == [1.2345 / epoch for epoch in range(1, 5)]
    assert {float(r["rate"]) for r in by_epoch} == {0.0123}
    radii = [r for r in rows if r["run"] == "one" and r["attack"] == "pgd-10"]
    assert [(float(r["eps"]), float(r["accuracy"])) for r in radii] == [(0.05, 0.8), (0.1, 0.4)]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", '=HYPERLINK("x")'])
def test_no_word_is_a_formula(tmp_path: Path, name: str) -> None:
    rows, values = files(write_run(tmp_path / name))
    assert {row["run"] for row in rows} == {f"'{name}"}
    assert values["runs"][0]["name"] == name
