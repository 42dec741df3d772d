"""`yopo reproduce`: rows are trained once a seed, attacked as in the paper, and shown beside it."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.reports import evaluation, write_run
from tests.test_readme import check_typed
from tests.tiny import PATIENCE
from tools.keep_runs import MACHINE, keep
from yopo import cli
from yopo.core import seals
from yopo.paper import reproduction
from yopo.paper.reproduced import summary
from yopo.paper.reproduction import TABLES
from yopo.paper.running import How, reproduce
from yopo.paper.tables import paper_table
from yopo.paper.words import cells, heads, notes
from yopo.runs.api import train_run
from yopo.runs.learner import Learner
from yopo.runs.overlay import overlay
from yopo.runs.progress import StopRequested
from yopo.runs.recipes import RECIPES
from yopo.runs.settings import validate
from yopo.runs.trainer import Trainer

ROOT = Path(__file__).parents[2]


def yopo(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["yopo", *map(str, words)])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_every_row_of_the_paper_has_a_recipe() -> None:
    controls = {"PGD-10 40 epochs", "YOPO-3-5 last", "YOPO-5-3 before", "YOPO-5-3 36 epochs"}
    ours = {"table2": controls | {"Free-8"}, "table3": {"PGD-10 40 epochs"}}
    for name, what in TABLES.items():
        assert set(what.recipes) - ours.get(name, set()) == set(paper_table(name))
        for row in what.recipes:
            assert what.recipes[row] in RECIPES
            config = what.config(row)
            assert config.data.name == ("mnist" if name == "table1" else "cifar10")
            at = row.rpartition(" ")[2]
            want = at if at in ("before", "last") else "after"
            assert getattr(config.method, "grad_at", "after") == want
        if "PGD-10 40 epochs" in what.recipes:  # YOPO's schedule, and nothing else of it
            yopo, pgd, control = map(what.config, ("YOPO-5-3", "PGD-10", "PGD-10 40 epochs"))
            assert (control.epochs, control.schedule) == (yopo.epochs, yopo.schedule)
            assert (control.method, control.optimizer) == (pgd.method, pgd.optimizer)
        assert what.against in what.recipes
        assert set(what.attacks) < set(paper_table(name)[what.against])


def test_quick_runs_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain SGD stayed at chance. In float64 the same network is trained on every machine."""
    monkeypatch.setattr(Learner, "_laid_out", lambda _, x: x.double())
    recipe = TABLES["table3"].config("Natural", seed=1, quick=True).tree()
    config = validate(overlay(recipe, {"evaluate": {"steps": 1}}))  # the attack teaches nothing
    result = train_run(config, tmp_path / "run", device="cpu")
    assert result["last"]["clean"] > result["chance"] + 0.2


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick setting, quicker."""
    torch.set_default_dtype(torch.float32)
    over = {"epochs": 2, "model": {"options": {"width": 2, "hidden": 8}}}
    over |= {"data": {"held_out": 5300}}
    monkeypatch.setattr(reproduction, "QUICK", overlay(reproduction.QUICK, over))
    monkeypatch.setattr("yopo.paper.running.QUICK_SAMPLES", 50)


@pytest.mark.usefixtures("tiny")
def test_a_row_end_to_end_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "table1", "--quick", "--rows", "PGD-5", "--out", str(tmp_path)]
    more = ["--attacks", "pgd-3", "--samples", "40"]
    assert yopo(monkeypatch, *words, "--seeds", "0,1", *more) == 0
    shown = capsys.readouterr().out
    folders = [tmp_path / f"pgd-5-seed-{seed}" for seed in (0, 1)]
    found = json.loads((tmp_path / "table1.json").read_text())["rows"]["PGD-5"]
    assert found["seeds"] == [0, 1]
    how = How(seeds=(0, 1), quick=True, attacks=["pgd-3"], samples=40)
    never = lambda *_, **__: pytest.fail("all of it was done")  # noqa: E731
    assert reproduce("table1", tmp_path, ["PGD-5"], how, evaluate=never)["rows"]["PGD-5"] == found
    for file, attack, images in (("eval", "pgd-40", 50), ("model-last.eval", "pgd-3", 40)):
        both = [json.loads((f / f"{file}.json").read_text()) for f in folders]
        values = [e["accuracy"][attack] for e in both]
        assert found["accuracy"][attack]["mean"] == pytest.approx(sum(values) / 2)
        assert found["accuracy"][attack]["images"] == images == both[0]["about"]["images"]
    assert set(both[0]["accuracy"]) == {"clean", "pgd-3"}
    assert "not run" in shown  # the other rows
    assert "Not the table's setting" in shown
    # The best weights' figures, by a user's own `yopo eval`, do not count as the table's.
    other = seals.read_json(folders[0] / "eval.json")
    other["about"] |= {"weights": "model.safetensors", "weights_sha256": "ab" * 32}
    seals.write_json(folders[0] / "eval.json", other)
    result = seals.read_json(folders[0] / "result.json")
    result["weights_sha256"]["best"] = "ab" * 32
    seals.write_json(folders[0] / "result.json", result)
    assert yopo(monkeypatch, *words, *more) == 0
    again = json.loads((folders[0] / "eval.json").read_text())
    assert again["about"]["weights"] == "model-last.safetensors"
    weights = [f / "model-last.safetensors" for f in folders]
    before = [w.stat().st_mtime_ns for w in weights]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    assert yopo(monkeypatch, *words, "--seeds", "0,1", *more) == 0
    assert [w.stat().st_mtime_ns for w in weights] == before
    # What the paper's attacks cover is not attacked again on fewer images.
    (folders[0] / "model-last.eval.json").unlink()
    assert yopo(monkeypatch, *words, "--attacks", "cw", "--samples", "40") == 0
    assert not (folders[0] / "model-last.eval.json").exists()
    # Nor does an attack of other steps count, and what was attacked is not lost by the next.
    (folders[0] / "eval.json").unlink()
    step = ["--weights", "last", "--attacks", "clean,pgd-40,cw", "--samples", "50"]
    assert yopo(monkeypatch, "eval", folders[0], *step, "--step", "0.001") == 0
    weak = json.loads((folders[0] / "eval.json").read_text())
    assert yopo(monkeypatch, *words, "--attacks", "pgd-40, pgd-2") == 0
    strong = json.loads((folders[0] / "eval.json").read_text())
    assert strong["attacks"]["pgd-40"]["settings"] != weak["attacks"]["pgd-40"]["settings"]
    assert yopo(monkeypatch, *words, "--attacks", "pgd-3") == 0
    all_ = json.loads((folders[0] / "eval.json").read_text())
    assert set(all_["attacks"]) == {"clean", "pgd-40", "cw", "pgd-2", "pgd-3"}
    assert all_["accuracy"]["pgd-2"] == strong["accuracy"]["pgd-2"]
    found = json.loads((tmp_path / "table1.json").read_text())["rows"]["PGD-5"]["accuracy"]
    assert found["worst case"]["seeds"] == 1  # seed 1's is over other attacks
    capsys.readouterr()
    assert yopo(monkeypatch, *words, "--epochs", "1") == 2
    assert "was trained for 2 epochs, not 1; give another --out" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_fewer_epochs_are_for_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "table4", "--quick", "--rows", "TRADES-YOPO-2-5", "--out", str(tmp_path)]
    assert yopo(monkeypatch, *words, "--epochs", "1") == 0
    found = json.loads((tmp_path / "table4.json").read_text())["rows"]["TRADES-YOPO-2-5"]
    assert found["recipe_seconds"] == pytest.approx(2 * found["train_seconds"])
    assert "1 of 2 epochs" in capsys.readouterr().out
    path = tmp_path / "trades-yopo-2-5-seed-0"
    assert not (path / "eval.json").exists()
    assert set(json.loads((path / "result.json").read_text())["last"]) == {"clean", "pgd-1"}
    assert yopo(monkeypatch, *words, "--epochs", "3") == 2
    assert "expected --epochs under TRADES-YOPO-2-5's 2, got 3" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny")
def test_figures_train_what_is_missing_and_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for table, row in (("table1", "PGD-40"), ("table1", "YOPO-5-10"), ("table2", "PGD-10")):
        path = write_run(tmp_path / table / f"{row.lower()}-seed-0")
        config = TABLES[table].config(row, quick=True)
        (path / "config.yaml").write_text(yaml.safe_dump(config.tree()))
    assert yopo(monkeypatch, "reproduce", "figures", "--out", tmp_path, "--show") == 0
    shown = capsys.readouterr().out
    assert "figure3b: not drawn, because table2 has no run of YOPO-5-3" in shown
    assert (tmp_path / "figure3a" / "accuracy-time.svg").is_file()
    assert not (tmp_path / "figure3b").exists()
    assert yopo(monkeypatch, "reproduce", "figures", "--quick", "--out", tmp_path) == 0
    assert (tmp_path / "table2" / "yopo-5-3-seed-0" / "result.json").is_file()
    drawn = (tmp_path / "figure3b" / "accuracy-propagations.svg").read_text()
    for label in ("PGD-10, robust", "YOPO-5-3, clean"):
        assert label in drawn


def test_wrong_words_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["table4", "--rows", "YOPO-5-3"], "no row 'YOPO-5-3' in table4; it has TRADES-10"),
        (["table4", "--seeds", "0,x"], "expected numbers for --seeds, as 0,1,2, got '0,x'"),
        (["table4", "--samples", "9"], "--samples is for --attacks"),
        (["table4", "--attacks", "autoatack"], "no attack 'autoatack'; did you mean autoattack"),
        (["table4", "--attacks", "pgd-3", "--samples", "0"], "expected --samples of at least 1"),
        (["table4", "--attacks", "pgd-3", "--epochs", "2"], "--epochs is for times alone"),
        (["table4", "--bench", "nothing.json"], "cannot read --bench nothing.json"),
        (["table4", "--bench", str(ROOT / "records/depth-h200/results.json")], "what `yopo bench"),
        (["figures", "--rows", "PGD-40"], "figures take --out"),
        (["table4", "--show", "--rows", "TRADES-10"], "--show shows all that is in --out"),
        (["table4", "--show", "--out", "nothing"], "no folder nothing to show"),
    ):
        assert yopo(monkeypatch, "reproduce", "--out", tmp_path, *words) == 2
        assert message in capsys.readouterr().err


def test_a_table_that_the_paper_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no table 'table5'; there are table1, table2"):
        reproduce("table5", tmp_path)


# ---------------------------------------------------------------- tables from made-up folders


def met(accuracy: float) -> dict[str, Any]:
    """What an evaluation says of one attack."""
    cost = {"seconds": 1.0, "propagations": 1.0}
    return {"accuracy": accuracy, "interval": [0.0, 1.0], "settings": "", **cost}


def put(out: Path, name: str, row: str, seed: int = 0, **kind: Any) -> dict[str, Any]:
    """A run folder of a row, of `epochs`, attacked as the table is; what its files say."""
    what = TABLES[name]
    config = what.config(row, seed=seed, epochs=kind.pop("epochs", None))
    path = out / f"{reproduction.folder(row)}-seed-{seed}"
    write_run(path, config.tree(), evaluated=False, **kind)
    rng = random.Random(path.name)
    found = evaluation(rng, 0.1)["about"] | {"images": 1000, "eps": config.threat.eps}
    found["weights"] = "model-last.safetensors"
    attacks = {a: met(rng.randrange(1000) / 1000) for a in ("clean", *what.attacks)}
    worst = {"accuracy": min(a["accuracy"] for a in attacks.values()) / 2, "interval": [0.0, 1.0]}
    e = {"attacks": attacks, "worst": worst, "about": found, "warnings": []}
    (path / "eval.json").write_text(json.dumps(e))
    result = json.loads((path / "result.json").read_text()) if kind.get("finished", True) else {}
    return {"path": path, "eval": e, "seconds": result.get("train_seconds")}


def shown(name: str, out: Path, row: str) -> dict[str, str]:
    table = summary(name, out)
    words = [c if isinstance(c, str) else " | ".join(c) for c in cells(table, row)]
    return dict(zip(heads(table), words, strict=True))


def test_means_and_spread_over_seeds(tmp_path: Path) -> None:
    three = [put(tmp_path, "table2", "YOPO-5-3", seed) for seed in (0, 1, 10)]
    base = [put(tmp_path, "table2", "PGD-10", seed) for seed in (0, 1)]
    put(tmp_path, "table2", "YOPO-5-3 before")  # another row
    cell = shown("table2", tmp_path, "YOPO-5-3")
    assert cell["method"] == "YOPO-5-3 | 3 seeds, 40 epochs"
    for attack in ("clean", "pgd-20", "cw"):
        values = sorted(100 * run["eval"]["attacks"][attack]["accuracy"] for run in three)
        theirs = paper_table("table2")["YOPO-5-3"][attack]
        want = f"{sum(values) / 3:.2f} / {theirs:.2f} | {values[0]:.2f}–{values[2]:.2f}"
        assert cell[attack] == want
    values = sorted(100 * run["eval"]["worst"]["accuracy"] for run in three)
    assert cell["worst of cw, pgd-20"] == f"{sum(values) / 3:.2f} | {values[0]:.2f}–{values[2]:.2f}"
    seconds = sum(run["seconds"] for run in three) / 3
    assert f"{cell['training']}" == f"{seconds:.1f} s"
    assert cell["time ratio"] == f"{seconds / (sum(run['seconds'] for run in base) / 2):.2f}"
    one = shown("table2", tmp_path, "YOPO-5-3 before")
    assert one["method"] == "YOPO-5-3 before | 1 seed, 40 epochs"
    assert "|" not in one["clean"]  # no spread


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert shown("table2", tmp_path / "nothing", "PGD-3")["method"] == "PGD-3 | not run"
    put(tmp_path, "table2", "PGD-3", finished=False)
    put(tmp_path, "table2", "PGD-5")
    put(tmp_path, "table2", "PGD-5", 1, finished=False)
    put(tmp_path, "table2", "Free-8")
    assert shown("table2", tmp_path, "PGD-3")["method"] == "PGD-3 | not finished"
    assert shown("table2", tmp_path, "PGD-3")["cw"] == "– / 54.65"
    found = shown("table2", tmp_path, "PGD-5")
    assert found["method"] == "PGD-5 | 1 seed, 1 more not finished, 105 epochs"
    assert found["time ratio"] == "–"  # PGD-10 was not run
    assert shown("table2", tmp_path, "Free-8")["pgd-20"].endswith(" / –")  # not in the paper
    put(tmp_path, "table2", "PGD-10", hardware="another GPU")
    assert shown("table2", tmp_path, "PGD-5")["time ratio"] == "–"
    said = " ".join(notes(summary("table2", tmp_path)))
    assert "PGD-5: on other hardware than PGD-10, so no time ratio" in said


def test_fewer_epochs_are_marked_and_extrapolated(tmp_path: Path) -> None:
    base = put(tmp_path, "table3", "PGD-10", epochs=2)
    full = put(tmp_path, "table3", "YOPO-5-3")
    cell = shown("table3", tmp_path, "PGD-10")
    assert cell["method"] == "PGD-10 | 1 seed, 2 of 105 epochs"
    assert "/" not in cell["clean"]  # not beside the paper's
    assert "/" not in cell["pgd-20"]
    (base["path"] / "eval.json").unlink()  # times alone
    theirs = paper_table("table3")
    cell = shown("table3", tmp_path, "PGD-10")
    assert cell["pgd-20"] == f"– / {theirs['PGD-10']['pgd-20']:.2f}"
    whole = base["seconds"] / 2 * 105
    each, minutes = f"{base['seconds'] / 2:.1f} s an epoch", f"{whole / 60:.1f} min for 105"
    assert cell["training"] == f"{base['seconds']:.1f} s | {each}; {minutes}, extrapolated"
    want = theirs["YOPO-5-3"]["minutes"] / theirs["PGD-10"]["minutes"]
    cell = shown("table3", tmp_path, "YOPO-5-3")
    assert cell["time ratio"] == f"{full['seconds'] / whole:.2f} / {want:.2f} | extrapolated"
    assert cell["pgd-20"].endswith(" / 47.98")
    put(tmp_path, "table3", "YOPO-5-3", 1, epochs=2)
    with pytest.raises(ValueError, match=r"YOPO-5-3: expected seeds of the same number of epochs"):
        summary("table3", tmp_path)


def test_runs_that_shared_a_gpu_count_for_accuracy_alone(tmp_path: Path) -> None:
    runs = [put(tmp_path, "table2", "PGD-10", seed) for seed in (0, 1)]
    runs += [put(tmp_path, "table2", "YOPO-5-3")]
    other = {"timed": False, "environment": {"hardware": "another GPU"}}
    for run in runs[1:]:
        result = json.loads((run["path"] / "result.json").read_text())
        (run["path"] / "result.json").write_text(json.dumps(result | other))
    found = summary("table2", tmp_path)
    assert found["rows"]["PGD-10"]["train_seconds"] == runs[0]["seconds"]
    assert found["rows"]["PGD-10"]["accuracy"]["clean"]["seeds"] == 2
    assert shown("table2", tmp_path, "PGD-10")["time ratio"].startswith("1.00")
    cell = shown("table2", tmp_path, "YOPO-5-3")
    assert (cell["training"], cell["time ratio"]) == ("–", "–")
    assert not cell["clean"].startswith("–")
    said = "pgd-10 (seed 1), yopo-5-3 (seed 0): Shared a GPU with other runs; time does not count."
    assert said in notes(found)


@pytest.mark.usefixtures("tiny")
def test_untimed_runs_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["reproduce", "table1", "--quick", "--rows", "PGD-5", "--out", str(tmp_path)]
    real, afterwards = Trainer._finish, iter((False, True))

    def interrupt(self: Trainer) -> dict[str, Any]:
        """Before or after the result is written."""
        if next(afterwards):
            real(self)
        raise StopRequested(saved=True)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_finish", interrupt)
            assert yopo(monkeypatch, *words, "--untimed") == 130
    assert yopo(monkeypatch, *words) == 0  # resumed: what it had is not timed
    assert not (tmp_path / "pgd-5-seed-0" / "untimed").exists()
    result = json.loads((tmp_path / "pgd-5-seed-0" / "result.json").read_text())
    assert result["timed"] is False
    assert yopo(monkeypatch, *words, "--seeds", "0,1") == 0
    found = json.loads((tmp_path / "table1.json").read_text())["rows"]["PGD-5"]
    assert (found["seeds"], found["timed"]) == ([0, 1], [1])


def test_the_best_weights_are_told_beside_the_last(tmp_path: Path) -> None:
    runs = [put(tmp_path, "table2", "YOPO-5-3", seed) for seed in (0, 1)]
    results = [json.loads((run["path"] / "result.json").read_text()) for run in runs]
    shares = [
        100 * (results[0][which][key] + results[1][which][key]) / 2
        for which in ("best", "last")
        for key in ("clean", "pgd-3")
    ]
    put(tmp_path, "table2", "PGD-10", epochs=2)  # for its time
    (said,) = [n for n in notes(summary("table2", tmp_path)) if "best held-out" in n]
    assert "YOPO-5-3 {:.2f} / {:.2f} (last {:.2f} / {:.2f}).".format(*shares) in said
    assert "PGD-10" not in said


def test_fewer_images_and_other_weights(tmp_path: Path) -> None:
    """Each attack counts over the most images it had; the best weights' figures do not."""
    run = put(tmp_path, "table2", "PGD-10")
    other = json.loads(json.dumps(run["eval"]))
    other["about"]["images"] = 100
    other["attacks"] = {"clean": met(0.001), "autoattack": met(0.25)}
    (run["path"] / "model-last.eval.json").write_text(json.dumps(other))
    other["about"] |= {"weights": "model.safetensors", "images": 5000}
    (run["path"] / "model.eval.json").write_text(json.dumps(other))
    cell = shown("table2", tmp_path, "PGD-10")
    assert cell["autoattack"] == "25.00 | of 100 images"
    assert cell["clean"] == f"{100 * run['eval']['attacks']['clean']['accuracy']:.2f} / 84.82"
    assert not any("test images" in note for note in notes(summary("table2", tmp_path)))
    # Where the last epoch was the best one, both files hold the same weights.
    result = json.loads((run["path"] / "result.json").read_text())
    epochs = TABLES["table2"].config("PGD-10").epochs
    (run["path"] / "result.json").write_text(json.dumps(result | {"best_epoch": epochs}))
    assert shown("table2", tmp_path, "PGD-10")["clean"] == "0.10 / 84.82"
    run["eval"]["about"]["images"] = 500
    for extra in ("model.eval.json", "model-last.eval.json"):
        (run["path"] / extra).unlink()
    (run["path"] / "eval.json").write_text(json.dumps(run["eval"]))
    want = "clean, pgd-20, cw, worst case: on 500 of the 1,000 test images for PGD-10."
    assert want in notes(summary("table2", tmp_path))


def test_a_control_has_nothing_of_the_paper_beside_it(tmp_path: Path) -> None:
    run = put(tmp_path, "table2", "PGD-10 40 epochs")
    found = shown("table2", tmp_path, "PGD-10 40 epochs")
    assert found["clean"] == f"{100 * run['eval']['attacks']['clean']['accuracy']:.2f} / –"
    assert TABLES["table2"].config("PGD-10 40 epochs").schedule == (
        TABLES["table2"].config("YOPO-5-3").schedule
    )


def test_literal_loops_beside_ours(tmp_path: Path) -> None:
    rows = [{"method": "pgd-10", "literal": 100.0}, {"method": "yopo-5-3", "literal": 80.0}]
    rows += [{"method": "yopo-3-5", "literal": None}, {"method": "natural", "literal": 10.0}]
    bench = {"model": "preactresnet18", "device": "a GPU", "batch": 256, "rows": rows}
    want = f"YOPO-5-3 {80 * 40 / (100 * 105):.2f}"
    shorter = f"YOPO-5-3 36 epochs {80 * 36 / (100 * 105):.2f}"
    said = " ".join(notes(summary("table2", tmp_path, bench)))
    assert "milliseconds a step times the recipe's epochs; a GPU, batch 256" in said
    assert f": {want}, {shorter}." in said
    ours = put(tmp_path, "table2", "YOPO-5-3")["seconds"]
    ours /= put(tmp_path, "table2", "PGD-10")["seconds"]
    said = " ".join(notes(summary("table2", tmp_path, bench)))
    assert f": {want} (ours {ours:.2f}), {shorter}." in said
    with pytest.raises(ValueError, match="expected a bench of wideresnet beside table3"):
        summary("table3", tmp_path, bench)


def test_runs_are_kept_without_weights(tmp_path: Path) -> None:
    """The table of what is kept is the table of the runs."""
    runs, records = tmp_path / "table2", tmp_path / "records"
    paths = [put(runs, "table2", row)["path"] for row in ("PGD-10", "YOPO-5-3")]
    for path in paths:
        (path / "model.safetensors").write_bytes(b"weights")
        (path / "state" / "save-000001").mkdir(parents=True)
        (path / "state" / "save-000001" / "values.json").write_text("{}")
    keep([runs], records)
    kept = {str(f.relative_to(records)) for f in records.rglob("*") if f.is_file()}
    names = ("config.yaml", "metrics.jsonl", "result.json", "eval.json")
    assert kept == {f"table2/{path.name}/{name}" for path in paths for name in names}
    assert summary("table2", records / "table2") == summary("table2", runs)
    (paths[0] / "config.yaml").write_text("data:\n  root: /mnt/data\n")
    with pytest.raises(ValueError, match="expected no path of a machine, got '/mnt'"):
        keep([paths[1], paths[0]], tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match="expected a run folder"):
        keep([tmp_path / "records" / "nothing"], tmp_path / "other")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("root: /data", True),
        ('"file": "/home/me/x"', True),
        ("~/runs", True),
        ("C:\\\\runs", True),
        ("eps = 8/255, ours / theirs", False),
        ("docs/warnings.md, https://example.org/a", False),
        ("../data/x, forward/backward", False),
    ],
)
def test_paths_of_a_machine(text: str, found: bool) -> None:
    assert bool(MACHINE.search(text)) == found


def test_attacks_at_another_radius_are_left_out(tmp_path: Path) -> None:
    one, other = (put(tmp_path, "table2", "YOPO-5-3", seed) for seed in (0, 1))
    e = other["eval"]
    e["about"]["eps"] = 4 / 255
    (other["path"] / "eval.json").write_text(json.dumps(e))
    found = summary("table2", tmp_path)["rows"]["YOPO-5-3"]["accuracy"]["pgd-20"]
    assert found["seeds"] == 1
    assert found["mean"] == one["eval"]["attacks"]["pgd-20"]["accuracy"]


def test_what_a_gpu_is_wanted_for_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of benchmarks/missing.sh and of the two scripts that it calls."""
    stub, heard = tmp_path / "bin" / "python3", tmp_path / "heard"
    stub.parent.mkdir()
    # In one piece: some run side by side.
    stub.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$(printf '%s\\t' \"$@\")\" >>{heard}\n")
    stub.chmod(0o755)
    (stub.parent / "nvidia-cuda-mps-control").symlink_to("/bin/true")  # starts nothing
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")
    for name in ("QUICK", "MORE", "BENCH"):
        monkeypatch.delenv(name, raising=False)
    script = ["bash", str(ROOT / "benchmarks" / "missing.sh"), str(tmp_path / "out")]
    subprocess.run([*script, *PARTS], check=True, capture_output=True, timeout=PATIENCE)
    said = [line.split("\t")[:-1] for line in heard.read_text().splitlines()]
    typed = [words[2:] for words in said if words[:2] == ["-m", "yopo"]]
    others = [words[:2] for words in said if words[:2] != ["-m", "yopo"]]
    assert others == [["-m", "benchmarks.plain_steps"]]
    for words in typed:
        check_typed(words, monkeypatch)
        if words[0] == "reproduce":
            given = dict(zip(words[2::2], words[3::2], strict=False))
            assert given["--rows"] in TABLES[words[1]].recipes
    commands = Counter(words[0] for words in typed)
    assert commands == {"train": 5, "eval": 5, "reproduce": 7, "bench": 3}
    wrong = subprocess.run([*script, "everything"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "no part everything; there are: tests fast tables wide bench" in wrong.stderr


PARTS = ("fast", "tables", "wide", "bench")  # `tests` is pytest's own
