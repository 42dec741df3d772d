"""Each tracker for real, offline: what it kept is read back with its own means."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.test_api import tree
from tests.runs.test_tracking import Stopping
from tests.tiny import Silent
from yopo.runs.api import configure, evaluate_run, train_run
from yopo.runs.folder import read_lines, read_tracked
from yopo.runs.overlay import Tree
from yopo.runs.progress import StopRequested

pytestmark = [pytest.mark.usefixtures("float32"), pytest.mark.filterwarnings("default")]
__all__ = ["tree"]

Kept = dict[str, list[float]]  # by name, in order


def tracked(kind: str, tree: Tree, out: Path) -> tuple[list[dict[str, Any]], Any]:
    """A run that is stopped and goes on, and its evaluation; the metrics, and what was found."""
    config, watch = configure("demo", tree), Silent()
    with pytest.raises(StopRequested):
        train_run(config, out, device="cpu", watch=Stopping(), track=kind)
    train_run(config, out, device="cpu", resume=True, watch=watch, track=kind)
    said: list[str] = []
    found = evaluate_run(out, "clean,pgd-2", device="cpu", track=kind, say=said.append)
    assert not [line for line in [*watch.said, *said] if "failed" in line]
    lines, _ = read_lines(out)
    return lines, found.result


def compare(kept: Callable[[str], list[float]], lines: list[dict[str, Any]], result: Any) -> None:
    """Each epoch once, the test, the evaluation."""
    for name in ("loss", "robust", "train_seconds"):
        assert kept(name) == pytest.approx([line[name] for line in lines], rel=1e-6)
    assert len(kept("test/last/clean")) == 1
    assert kept("eval/worst") == pytest.approx([result.worst])


def test_tensorboard(tree: Tree, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs yopo-torch[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines, result = tracked("tensorboard", tree, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    compare(lambda name: [e.value for e in events.Scalars(name)], lines, result)
    assert [e.step for e in events.Scalars("loss")] == [1, 2]
    (picture,) = events.Images("eval/adversarial")
    assert (picture.width, picture.height) == (8 * 16, 16)
    *_, card = events.Tensors("card/text_summary")
    assert card.tensor_proto.string_val[0].decode() == result.card()


def records(log: bytes) -> Iterator[bytes]:
    """Those of a LevelDB log: blocks of 32 KiB, parts (checksum, length, kind), after a head."""
    at, parts = 7, b""
    while at + 7 <= len(log):
        if (left := -at % 32768) and left < 7:
            at += left  # no head fits in what is left of a block
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        parts += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs yopo-torch[wandb]")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "run"
    lines, result = tracked("wandb", tree, out)
    wandb.teardown()  # its service may still be writing
    kept: dict[str, list[Any]] = {}
    names, cards = set(), []
    for file in sorted(out.glob("wandb/wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            names |= {record.run.run_id} - {""}
            cards += [i.value_json for i in record.summary.update if i.key == "card"]
            for item in record.history.item:
                name = "/".join(item.nested_key) or item.key
                kept.setdefault(name, []).append(json.loads(item.value_json))
    compare(lambda name: kept[name], lines, result)
    assert names == {read_tracked(out)["wandb"]["id"]}  # the three parts are of one run
    assert kept["eval/adversarial/width"] == [8 * 16]
    assert result.card() in [json.loads(card) for card in cards]


def test_mlflow(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs yopo-torch[mlflow]")
    monkeypatch.chdir(tmp_path)  # where it puts artifacts
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    lines, result = tracked("mlflow", tree, tmp_path / "run")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("yopo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == read_tracked(tmp_path / "run")["mlflow"]["id"]
    assert run.info.status == "FINISHED"
    assert run.data.params["method.m"] == "2"

    def kept(name: str) -> list[float]:
        return [m.value for m in client.get_metric_history(run.info.run_id, name)]

    compare(kept, lines, result)
    folder = Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id))
    assert (folder / "card.md").read_text() == result.card()
    assert (folder / "eval" / "adversarial-2.png").exists()


def test_trackio(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="needs yopo-torch[trackio]")
    lines, result = tracked("trackio", tree, tmp_path / "run")
    (run,) = trackio.Api().runs("yopo")
    assert run.name == read_tracked(tmp_path / "run")["trackio"]["id"]
    rows = trackio.SQLiteStorage.get_logs("yopo", run.name)
    compare(lambda name: [row[name] for row in rows if name in row], lines, result)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    (picture,) = [row["eval/adversarial"] for row in rows if "eval/adversarial" in row]
    assert picture["_type"] == "trackio.image"
    *_, card = [row["card"] for row in rows if "card" in row]
    assert card["_value"] == result.card()
