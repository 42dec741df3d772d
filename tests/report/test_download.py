"""The page's numbers as files: whole, readable, and no program for a spreadsheet."""

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.reports import Page, write_run
from yopo.report.page import page
from yopo.report.records import read_runs


def files(folder: Path) -> tuple[list[dict[str, str]], Any]:
    """The rows and the values that the page's links hold."""
    links = Page(page(read_runs([folder]))).all("a")
    table, values = (base64.b64decode(a["href"].split("base64,")[1]).decode() for a in links)
    assert [a["download"] for a in links] == ["report.csv", "report.json"]
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


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", '=HYPERLINK("x")'])
def test_no_word_is_a_formula(tmp_path: Path, name: str) -> None:
    rows, values = files(write_run(tmp_path / name))
    assert {row["run"] for row in rows} == {f"'{name}"}
    assert values["runs"][0]["name"] == name
