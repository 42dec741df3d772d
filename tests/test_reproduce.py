"""`yopo reproduce`: rows are trained once, attacked as in the paper, and shown beside it."""

import json
import sys
from pathlib import Path

import pytest
import torch

from yopo import cli
from yopo.cli import reproducing
from yopo.config import overlay, validate
from yopo.paper import paper_table
from yopo.recipes import RECIPES


def yopo(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["yopo", *words])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_every_row_of_the_paper_has_a_recipe() -> None:
    for name, what in reproducing.TABLES.items():
        rows = {row for row in what.recipes if not row.endswith("before")}
        assert rows == set(paper_table(name))
        for row in what.recipes:
            assert what.recipes[row] in RECIPES
            config = validate(what.tree(row))
            assert config.data.name == ("mnist" if name == "table1" else "cifar10")
            assert getattr(config.method, "grad_at", "after") == (
                "before" if row.endswith("before") else "after"
            )
        assert what.against in what.recipes
        assert set(what.attacks) < set(paper_table(name)[what.against])


def test_a_row_end_to_end_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    tiny = {
        "epochs": 1,
        "model": {"options": {"width": 2, "hidden": 8}},
        "data": {"held_out": 5300},
    }
    monkeypatch.setattr(reproducing, "QUICK", overlay(reproducing.QUICK, tiny))
    words = ["reproduce", "table1", "--quick", "--rows", "PGD-5", "--samples", "50"]
    assert yopo(monkeypatch, *words, "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "table1.json").read_text())
    evaluation = json.loads((tmp_path / "pgd-5" / "eval.json").read_text())
    assert found["rows"]["PGD-5"]["accuracy"] == evaluation["accuracy"]
    assert set(evaluation["accuracy"]) == {"clean", "pgd-40", "cw"}
    assert found["paper"]["PGD-5"] == {"clean": 99.43, "pgd-40": 42.39, "cw": 77.04}
    assert "/ 42.39" in shown
    weights = (tmp_path / "pgd-5" / "model-last.safetensors").stat().st_mtime_ns
    assert yopo(monkeypatch, *words, "--out", str(tmp_path)) == 0
    assert (tmp_path / "pgd-5" / "model-last.safetensors").stat().st_mtime_ns == weights


def test_unknown_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "table4", "--rows", "YOPO-5-3", "--out", str(tmp_path)]
    assert yopo(monkeypatch, *words) == 2
    assert "no row 'YOPO-5-3' in table4; it has TRADES-10" in capsys.readouterr().err
