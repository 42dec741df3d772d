"""The study of deeper first layers: its script runs, and its page says what its records say."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import depth

ROOT = Path(__file__).parents[2]


def test_the_script_trains_every_setting_for_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    out = tmp_path / "depth.json"
    words = ["mnist-subset", "--seconds", "0.05", "--width", "2", "--images", "4"]
    words += ["--device", "cpu", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["depth", *words])
    depth.main()
    record = json.loads(out.read_text())
    kinds = {(r["f0"], r["n"]) for r in record["results"]}
    assert len(kinds) == 7
    assert all(r["seconds"] >= 0.05 and r["steps"] >= 1 for r in record["results"])
    assert depth.table(record) in capsys.readouterr().out


@pytest.mark.parametrize("record", sorted(ROOT.glob("records/depth-*/results.json")), ids=str)
def test_the_page_has_the_tables_of_its_records(record: Path) -> None:
    assert depth.table(json.loads(record.read_text())) in (ROOT / "docs/depth.md").read_text()
