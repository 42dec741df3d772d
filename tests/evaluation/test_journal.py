"""Finished batches: an interrupted evaluation goes on with its own, and with nobody else's."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import convnet
from yopo.core import seals, tensor_files
from yopo.core.threat import Linf
from yopo.evaluation.evaluate import evaluate
from yopo.evaluation.result import Result
from yopo.evaluation.suite import _Suite

BATCH = 8
Given = tuple[nn.Module, tuple[Tensor, Tensor], Linf, list[str]]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """A network, of which an attack breaks some of its images, and a home of one's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    torch.manual_seed(0)
    model, x = convnet(), torch.rand(24, 3, 8, 8)
    return model, (x, model(x).argmax(1)), Linf(0.05), ["pgd-2", "pgd-3"]


def interrupted(given: Given, state: Path) -> None:
    """Finish all batches, and forget none."""
    evaluate(*given, batch=BATCH, state=state)


def pieces(state: Path) -> list[Path]:
    return sorted(state.rglob("*.safetensors"))


@pytest.fixture
def attacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The rows that were attacked, batch by batch."""
    rows: list[Tensor] = []
    real = _Suite._piece

    def piece(self: _Suite, phase: Any, mine: Tensor, batches: Any) -> Any:
        rows.append(mine)
        return real(self, phase, mine, batches)

    monkeypatch.setattr(_Suite, "_piece", piece)
    return rows  # type: ignore[return-value]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "yopo.evaluation.journal"]


def again(given: Given, state: Path) -> Result:
    return evaluate(*given, batch=BATCH, state=state)


def test_ones_own_batches_are_gone_on_with(
    given: Given, attacked: list[Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(given, tmp_path / "state")
    many = len(attacked)
    assert many == len(pieces(tmp_path / "state")) - 1 >= 4
    expected = evaluate(*given, batch=BATCH)
    del attacked[:]
    result = again(given, tmp_path / "state")
    assert attacked == []
    assert result.accuracy == expected.accuracy
    assert said(caplog) == []
    shutil.move(tmp_path / "state", tmp_path / "moved")  # as a run's folder may be
    again(given, tmp_path / "moved")
    assert attacked == []


def forged(state: Path, how: str) -> None:
    """As a stranger may write them who knows all of the code: no image falls."""
    for file in pieces(state):
        tensors = tensor_files.load_tensors(file)
        if "wrong" in tensors:
            tensors["wrong"][:] = False
        if how == "without a checksum":
            tensor_files.write_tensors(tensors, file, {})
        else:
            key = b"" if how == "with anyone's" else seals.key_for("evaluation", "x", file.stem)
            tensor_files.save_weights(file, tensors, {}, key=key)


@pytest.mark.parametrize("how", ["without a checksum", "with anyone's", "with another's secret"])
def test_a_strangers_batches_are_computed_again(
    how: str,
    given: Given,
    attacked: list[Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, state = evaluate(*given, batch=BATCH), tmp_path / "state"
    assert 0 < honest.worst < 1
    monkeypatch.setenv("HOME", str(tmp_path / "stranger"))
    interrupted(given, state)
    forged(state, how)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    del attacked[:]
    assert again(given, state).accuracy == honest.accuracy
    assert len(attacked) >= 4
    assert len(said(caplog)) == 1  # of all batches one line
    assert "batches that are damaged, or not yours, are computed again" in said(caplog)[0]


def test_ones_own_batches_count_only_where_they_were_kept(
    given: Given, attacked: list[Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger who has some of them cannot let one stand for another."""
    state, weaker = tmp_path / "state", tmp_path / "weaker"
    honest = evaluate(*given, batch=BATCH)
    interrupted((*given[:2], Linf(1e-6), given[3]), weaker)
    interrupted(given, state)
    mine, others = ([f for f in pieces(at) if f.stem != "network"] for at in (state, weaker))
    kept = {file: file.read_bytes() for file in mine}
    for source in (others, mine[1:]):
        for target, content in kept.items():
            target.write_bytes(content)
        for file, other in zip(mine, source, strict=False):
            file.write_bytes(kept.get(other, other.read_bytes()))
        del attacked[:]
        caplog.clear()
        assert again(given, state).accuracy == honest.accuracy
        assert len(attacked) == min(len(source), len(mine))
        assert len(said(caplog)) == 1


def test_a_home_that_is_read_only_costs_going_on_alone(
    given: Given, attacked: list[Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("no folder")
    honest = evaluate(*given, batch=BATCH)
    del attacked[:]
    for _ in range(2):
        caplog.clear()
        result = again(given, tmp_path / "state")
        assert result.accuracy == honest.accuracy
        assert len(attacked) >= 4
        assert pieces(tmp_path / "state") == []
        assert len(said(caplog)) == 1
        assert "could not keep a finished batch; going on (no secret can be kept" in said(caplog)[0]
        del attacked[:]
    result.forget()
    assert caplog.records[0].levelno == logging.WARNING
