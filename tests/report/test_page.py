"""The report says what the records say, and nothing leaves it or breaks it."""

import base64
import hashlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.cli.test_commands import yopo
from tests.cli.test_eval import run
from tests.reports import Page, closer, write_run
from tests.robust import trained
from yopo.cli.report import summary
from yopo.core import tensor_files
from yopo.evaluation.card import duration
from yopo.methods.registry import ENTRIES
from yopo.paper.beside import beside
from yopo.paper.tables import paper_table
from yopo.report import curves
from yopo.report.headline import headline
from yopo.report.page import page
from yopo.report.pictures import Strip
from yopo.report.records import TIMED, Run, read_runs
from yopo.report.words import notes
from yopo.runs.folder import BEST, LAST

__all__ = ["run"]
PGD, YOPO, NATURAL = ({"method": m} for m in ({"name": "pgd", "steps": 5}, {}, {"name": "natural"}))


pytestmark = pytest.mark.usefixtures("float32")


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Natural, PGD-5 and YOPO-2-2."""
    overs = {"natural": NATURAL, "pgd-5": PGD, "mine": YOPO}
    return [write_run(tmp_path / name, over) for name, over in overs.items()]


def with_paper(runs: list[Run], name: str) -> str:
    return page(runs, paper=beside(runs, name))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def test_tables_and_cards_hold_every_number_of_the_records(three: list[Path]) -> None:
    found = Page(page(read_runs(three)))
    for i, folder in enumerate(three):
        result, evaluated = read(folder, "result.json"), read(folder, "eval.json")
        cells = dict(zip(found.tables["runs"][0], found.tables["runs"][i + 1], strict=True))
        assert cells["run"].startswith(folder.name)
        low, high = (f"{100 * v:.1f}" for v in evaluated["worst"]["interval"])
        assert cells["clean"] == percent(evaluated["attacks"]["clean"]["accuracy"])
        assert cells["under attack"] == f"{percent(evaluated['worst']['accuracy'])} {low}–{high}"
        own = dict(zip(found.tables["own"][0], found.tables["own"][i + 1], strict=True))
        for which in ("best", "last"):
            for attack, share in result[which].items():
                assert own[f"{attack}, {which}"] == percent(share)
        assert cells["training"] == f"{result['train_seconds']:.1f} s"
        assert cells["propagations"] == f"{result['propagations']:.0f}"
        cells = dict(zip(found.tables["attacks"][0], found.tables["attacks"][i + 1], strict=True))
        for attack, a in (evaluated["attacks"] | {"worst case": evaluated["worst"]}).items():
            low, high = (f"{100 * v:.1f}" for v in a["interval"])
            shown = f"{percent(a['accuracy'])} {low}–{high}"
            assert cells[attack] == shown
            assert shown in [r[1] for r in found.tables["card"] if r[0] == attack]
        assert yaml.safe_load(found.text.split("Settings")[i + 1].split("Trained:")[0]) == (
            yaml.safe_load((folder / "config.yaml").read_text())
        )


def test_curves_are_the_epochs_drawn_to_scale(three: list[Path]) -> None:
    """One linear map takes all points and all ticks of a chart to their places."""
    text = page(read_runs(three))
    charts = re.findall(r"(?s)<svg viewBox.*?</svg>", text)[:2]
    for chart, axis in zip(charts, ("train_seconds", "propagations"), strict=True):
        tree = ElementTree.fromstring(chart)
        x, y = [], []
        for i, folder in enumerate(three):
            for measure in ("clean", "robust"):
                (curve,) = tree.findall(f"g[@data-run='{i}'][@data-measure='{measure}']")
                dots = curve.findall("circle")
                places = [(d.attrib["cx"], d.attrib["cy"]) for d in dots]
                line = curve.find("polyline")
                assert line is not None
                assert [tuple(p.split(",")) for p in line.attrib["points"].split()] == places
                for dot, epoch in zip(dots, lines(folder), strict=True):
                    assert f"epoch {epoch['epoch']}: " in dot.attrib["data-tip"]
                    assert percent(epoch[measure]) in dot.attrib["data-tip"]
                    x.append((epoch[axis], float(dot.attrib["cx"])))
                    y.append((epoch[measure], float(dot.attrib["cy"])))
        for label in tree.findall("text"):
            words = label.text or ""
            if words.endswith("%"):
                y.append((float(words[:-1]) / 100, float(label.attrib["y"]) - 4))  # mid-letter
            elif re.fullmatch(r"[\d.]+", words):
                x.append((float(words), float(label.attrib["x"])))
        for pairs in (x, y):
            value, place = np.array(pairs).T
            slope, start = np.polyfit(value, place, 1)
            assert abs(slope) > 0
            assert np.abs(slope * value + start - place).max() < 0.15  # of 300 and more


def test_nothing_is_fetched_and_hostile_words_stay_words(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\"'&"
    folder = write_run(
        tmp_path / evil.replace("/", ""),
        YOPO | {"notes": f"</pre><script>{evil}"},
        hardware=evil,
        warnings=[{"code": "masked", "text": f"</p>{evil}"}],
    )
    text = with_paper(read_runs([folder]), "table1")
    found = Page(text)
    assert not found.all("img")
    assert len(found.all("script")) == 1
    assert found.text.count(evil) >= 4
    assert f"</p>{evil}" in found.text
    for _, attrs in found.elements:
        assert not {"src", "srcset", "onerror"} & attrs.keys()
        assert re.match(
            "data:(text/csv|application/json);base64,", attrs.get("href", "data:text/csv;base64,")
        )
    assert not re.search(r"https?://|@import|url\(", text)


def test_headline_says_who_is_most_robust_and_what_it_cost(tmp_path: Path) -> None:
    pgd, fast = write_run(tmp_path / "a", PGD, robust=0.5), write_run(tmp_path / "b", robust=0.7)
    said = " ".join(headline(read_runs([pgd, fast])))
    assert "b (YOPO-2-2) is the most robust of 2 runs: 70.00%" in said
    ours, theirs = (read(f, "result.json") for f in (fast, pgd))
    for what, words in (("train_seconds", "PGD-5's time"), ("propagations", "its propagations")):
        assert f"{ours[what] / theirs[what]:.2f} of {words}" in said
    close = write_run(tmp_path / "c", NATURAL, robust=0.72)
    said = " ".join(headline(read_runs([pgd, fast, close])))
    assert "c (Natural) has the highest" in said
    assert "its lead over b (YOPO-2-2) with 70.00% may be chance." in said
    equal = write_run(tmp_path / "g", PGD, robust=0.7)
    said = headline(read_runs([pgd, equal, fast]))[0]
    assert "g (PGD-5) and b (YOPO-2-2) have the same robust accuracy, the highest of 3 runs" in said
    # ± 3 points each, so the difference of two is ± 4.2.
    near = write_run(tmp_path / "e", PGD, robust=0.66)
    assert "may be chance" in headline(read_runs([near, fast]))[0]
    far = write_run(tmp_path / "f", PGD, robust=0.65)  # their own intervals overlap
    assert "b (YOPO-2-2) is the most robust of 2 runs" in headline(read_runs([far, fast]))[0]
    other = write_run(tmp_path / "d", hardware="another GPU", robust=0.1)
    assert "different hardware: no time ratio" in " ".join(headline(read_runs([pgd, other])))


def test_headline_compares_like_with_like(tmp_path: Path) -> None:
    small, large = ({"threat": {"eps": eps}} for eps in (0.1, 0.2))
    first, other = write_run(tmp_path / "a", small), write_run(tmp_path / "b", large)
    tree = read(other, "eval.json")
    tree["about"]["threat"] = "L∞, eps = 0.2"
    (other / "eval.json").write_text(json.dumps(tree))
    assert "do not compare" in headline(read_runs([first, other]))[0]
    # Where one is not evaluated, what both runs measured on the test set counts.
    third = write_run(tmp_path / "c", small, evaluated=False, robust=0.999)
    assert "99.90%" in headline(read_runs([first, third]))[0]
    assert "1,000 test images withstand pgd-3" in headline(read_runs([first, third]))[0]


def test_headline_takes_the_strongest_evaluation_that_all_have(tmp_path: Path) -> None:
    shares = {"a": (0.5, 0.4), "b": (0.6, 0.3)}
    folders = [write_run(tmp_path / name, robust=first) for name, (first, _) in shares.items()]
    for folder, (_, second) in zip(folders, shares.values(), strict=True):
        one = headline(read_runs(folders))
        assert "b (YOPO-2-2) is the most robust of 2 runs: 60.00%" in one[0]
        found = read(folder, "eval.json")
        found["attacks"] = {"autoattack": found["attacks"]["cw"] | {"accuracy": second}}
        found["worst"] = {"accuracy": second, "interval": [second - 0.01, second + 0.01]}
        found["warnings"] = [{"code": "masked", "text": ""}]
        (folder / "model-last.eval.json").write_text(json.dumps(found))
    how = "1,000 images, L∞, eps = 0.1, best weights"
    assert f"AutoAttack leaves a (YOPO-2-2) 40.00% ({how})." in one
    assert not any("Warnings" in sentence for sentence in one)
    both = headline(read_runs(folders))
    assert "a (YOPO-2-2) is the most robust of 2 runs: 40.00%" in both[0]
    assert "withstand autoattack (L∞, eps = 0.1, best weights)" in both[0]
    assert "Warnings of these evaluations: masked; see the cards." in both
    assert not any("AutoAttack leaves" in sentence for sentence in both)
    # Weights that are both the best and the last compare with either.
    result = read(folders[0], "result.json")
    (folders[0] / "result.json").write_text(json.dumps(result | {"best_epoch": 3}))
    for file in (BEST, LAST):
        for folder in folders:
            found = read(folder, "eval.json")
            found["about"]["weights"] = file if folder is folders[1] else BEST
            (folder / "eval.json").write_text(json.dumps(found))
            (folder / "model-last.eval.json").unlink(missing_ok=True)
        which = "best" if file == BEST else "last"
        assert f"eps = 0.1, {which} weights)" in headline(read_runs(folders))[0]
    (folders[0] / "result.json").write_text(json.dumps(result))
    # Other weights, or other steps of the same attack, do not compare.
    (folders[1] / "eval.json").write_text(
        (folders[1] / "eval.json").read_text().replace(LAST, BEST)
    )
    for part in ("weights", "settings"):
        found = read(folders[0], "eval.json")
        found["about"]["weights"] = "model-last.safetensors" if part == "weights" else BEST
        found["attacks"]["cw"]["settings"] = "20 steps" if part == "weights" else "9 steps"
        (folders[0] / "eval.json").write_text(json.dumps(found))
        assert "withstand pgd-3 (L∞, eps = 0.1, best" in headline(read_runs(folders))[0]


def test_a_shared_gpu_takes_a_runs_times_and_not_its_accuracy(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"y{seed}", {"seed": seed}, robust=0.4) for seed in (0, 1)]
    folders.append(write_run(tmp_path / "pgd", PGD, robust=0.3))
    for folder, share in zip(folders[:2], (0.4, 0.6), strict=True):
        evaluated = read(folder, "eval.json")
        evaluated["worst"]["accuracy"] = share
        (folder / "eval.json").write_text(json.dumps(evaluated))
    alone = read(folders[0], "result.json")["train_seconds"]
    shared = read(folders[1], "result.json") | {"timed": False}
    (folders[1] / "result.json").write_text(json.dumps(shared))
    runs = read_runs(folders)
    (said,) = [s for s in headline(runs) if " trained in " in s]
    theirs = read(folders[2], "result.json")["train_seconds"]
    assert f"in {alone / theirs:.2f} of PGD-5's time ({duration(alone)} for 3 epochs" in said
    assert said.startswith("YOPO-2-2 (mean of 2 seeds) trained in ")
    assert said.endswith("its robust accuracy is 50.00%, PGD-5's 30.00%.")
    again = write_run(tmp_path / "again", PGD | {"seed": 1}, robust=0.3)
    (more,) = [s for s in headline(read_runs([*folders, again])) if " trained in " in s]
    assert more.endswith("PGD-5's 30.00% (mean of 2 seeds).")
    found = Page(page(runs))
    heads, *rows = found.tables["runs"]
    training = [row[heads.index("training")] for row in rows]
    assert [cell.endswith("shared a GPU") for cell in training] == [0, 1, 0]
    assert "Runs that shared a GPU are not drawn against time." in found.text
    time, passes = (json.dumps(curves.chart(runs, axis)) for axis in curves.AXES)
    assert "y0 (YOPO-2-2), epoch" in time
    assert "in the mean" not in time
    assert "YOPO-2-2 (2 seeds), epoch 1: pgd-3" in passes


def test_times_are_compared_with_the_same_network_on_the_same_data(tmp_path: Path) -> None:
    pgd = write_run(tmp_path / "pgd", PGD)
    other = {"method": {"name": "pgd", "steps": 9}, "data": {"name": "mnist"}}
    more = write_run(tmp_path / "more", other)
    fast = write_run(tmp_path / "fast")
    longer = write_run(tmp_path / "longer", {"epochs": 7})
    said = [s for s in headline(read_runs([pgd, more, fast, longer])) if " trained in " in s]
    theirs = read(pgd, "result.json")["train_seconds"]
    for sentence, folder in zip(said, (fast, longer), strict=True):  # not their mean
        ours = read(folder, "result.json")["train_seconds"]
        start = f"{folder.name} (YOPO-2-2) trained in {ours / theirs:.2f} of PGD-5's time"
        assert sentence.startswith(start)
    for folder, left in ((longer, ["fast"]), (pgd, [])):  # shared a GPU with others
        (folder / "result.json").write_text(
            json.dumps(read(folder, "result.json") | {"timed": False})
        )
        said = [s for s in headline(read_runs([pgd, fast, longer])) if " trained in " in s]
        assert [s.split(" trained")[0] for s in said] == ["YOPO-2-2"] * len(left)


def test_unfinished_runs_are_shown_as_such(tmp_path: Path, three: list[Path]) -> None:
    empty = write_run(tmp_path / "empty", epochs=0, finished=False)
    (empty / "metrics.jsonl").unlink()
    going = write_run(tmp_path / "going", epochs=2, finished=False)
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "train_sec')  # killed while it wrote
    found = Page(page(read_runs([*three, empty, going])))
    assert "No epoch is finished yet." in found.text
    assert "Not finished: 2 of 3 epochs" in found.text
    assert "not counted here: empty (YOPO-2-2), going (YOPO-2-2)" in found.text
    heads, *rows = found.tables["runs"]
    assert [row[heads.index("epochs")] for row in rows[-2:]] == ["0 of 3", "2 of 3"]
    assert not found.all("button", **{"data-run": "3"})
    Page(page(read_runs([empty])))


def test_a_collapse_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    line = {"epoch": 5, "train_seconds": 99.0, "propagations": 30.0, "collapse": "the loss is NaN"}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | {"action": "rollback"}) + "\n")
    found = Page(page(read_runs([folder])))
    assert "Collapse in epoch 5: the loss is NaN (rollback)." in found.text


def test_a_run_without_best_weights_has_no_best_epoch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    result = read(folder, "result.json") | {"best_epoch": -1}
    del result["best"]
    (folder / "result.json").write_text(json.dumps(result))
    heads, row = Page(page(read_runs([folder]))).tables["runs"]
    assert row[heads.index("best epoch")] == "–"


def test_paper_beside_ours(tmp_path: Path) -> None:
    over = {"method": {"m": 5, "n": 10}, "threat": {"eps": 0.3}, "data": {"name": "mnist"}}
    pgd = over | {"method": {"name": "pgd", "steps": 40}, "threat": {"eps": 0.2}}
    folders = [write_run(tmp_path / "y", over), write_run(tmp_path / "p", pgd)]
    found = Page(with_paper(read_runs(folders), "table1"))
    heads, *rows = found.tables["paper"]
    assert [row[0] for row in rows] == list(paper_table("table1"))
    for row in rows:
        for attack, value in paper_table("table1")[row[0]].items():
            assert row[heads.index(f"{attack}, paper")] == f"{value:.2f}%"
    ours, share = rows[-1], read(folders[0], "eval.json")["attacks"]["pgd-40"]["accuracy"]
    assert ours[heads.index("pgd-40, ours")].startswith(percent(share))
    seconds = [read(f, "result.json")["train_seconds"] for f in folders]
    assert ours[-1] == f"{seconds[0] / seconds[1]:.2f}"
    assert "Not the table's setting: p (PGD-40) (threat linf of 0.2, not linf" in found.text
    assert "y (YOPO-5-10) (attacked with L∞, eps = 0.1; 3 epochs, not 55)" in found.text
    timed = Page(with_paper(read_runs(folders), "table3")).tables["paper"]
    assert timed[-1][0] == "YOPO-5-3"
    assert timed[-1][timed[0].index("time ratio, paper")] == f"{476 / 2713:.2f}"


@pytest.mark.parametrize("asides", [False, True])
def test_beside_the_paper_stands_what_withstands_the_radius_of_the_training(
    asides: bool, tmp_path: Path
) -> None:
    """Also if another radius was attacked later, with more images."""
    over = {"method": {"m": 5, "n": 10}, "threat": {"eps": 0.3}, "data": {"name": "mnist"}}
    folder = write_run(tmp_path / "y", over)
    weak = read(folder, "eval.json")
    own = json.loads(json.dumps(weak))
    own["about"] |= {"eps": 0.3, "threat": "L∞, eps = 0.3", "images": 500}
    own["attacks"]["pgd-40"]["accuracy"] = 0.125
    both = [weak, own] if asides else [own, weak]
    for name, values in zip(("eval.json", "eval-20260102-030405.json"), both, strict=True):
        (folder / name).write_text(json.dumps(values))
    heads, *rows = Page(with_paper(read_runs([folder]), "table1")).tables["paper"]
    assert rows[-1][heads.index("pgd-40, ours")].startswith("12.50%")


def test_seeds_of_one_setting_are_one_row_with_their_mean(tmp_path: Path) -> None:
    over: Any = {"method": {"m": 5, "n": 10}}
    shares = {"a": 0.5, "b": 0.6, "c": 0.7}
    folders = [
        write_run(tmp_path / name, over | {"seed": seed}, robust=share)
        for seed, (name, share) in enumerate(shares.items())
    ]
    tree = yaml.safe_load((folders[0] / "config.yaml").read_text())
    tree["evaluate"]["every"] = 7  # trains no other network
    tree.pop("label_smoothing")  # an older file, without it
    (folders[0] / "config.yaml").write_text(yaml.safe_dump(tree))
    pgd = write_run(tmp_path / "pgd-40", {"method": {"name": "pgd", "steps": 40}}, robust=0.2)
    other = write_run(tmp_path / "longer", over | {"seed": 3, "epochs": 9}, robust=0.1)
    runs = read_runs([*folders, pgd, other])
    said = headline(runs)[0]
    assert "YOPO-5-10 (mean of 3 seeds) is the most robust of 5 runs: 60.00% (47.0–73.0)" in said
    heads, *rows = Page(with_paper(runs, "table1")).tables["paper"]
    ours = [row for row in rows if row[0] == "YOPO-5-10"]
    assert [row[1] for row in ours] == ["3 seeds 3 epochs", "longer 9 epochs"]
    values = [read(f, "eval.json")["attacks"]["cw"]["accuracy"] for f in folders]
    want = f"{percent(sum(values) / 3)} {100 * min(values):.1f}–{100 * max(values):.1f}"
    want += ", best weights"
    assert ours[0][heads.index("cw, ours")] == want
    seconds = [read(f, "result.json")["train_seconds"] for f in (*folders, pgd)]
    assert ours[0][-1] == f"{sum(seconds[:3]) / 3 / seconds[3]:.2f}"
    # A second evaluation of one seed does not make it count twice.
    again = read(folders[0], "eval.json")
    (folders[0] / "model.eval.json").write_text(json.dumps(again))
    _, *rows = Page(with_paper(read_runs([*folders, pgd]), "table1")).tables["paper"]
    (row,) = [row for row in rows if row[0] == "YOPO-5-10"]
    assert row[heads.index("cw, ours")] == want
    (folders[2] / "eval.json").unlink()  # its own PGD does not fill the gap
    heads, *rows = Page(with_paper(read_runs([*folders, pgd]), "table1")).tables["paper"]
    cell = rows[-1][heads.index("cw, ours")]
    assert cell.startswith(percent(sum(values[:2]) / 2))
    assert cell.endswith("best weights, 2 of 3 seeds")


def test_runs_for_their_time_alone_are_not_put_beside_the_paper(tmp_path: Path) -> None:
    over: Any = {"method": {"m": 5, "n": 10}, "notes": f"{TIMED}."}
    pgd: Any = over | {"method": {"name": "pgd", "steps": 40}}
    folders = [write_run(tmp_path / "y", over), write_run(tmp_path / "p", pgd)]
    found = Page(with_paper(read_runs(folders), "table1"))
    heads, *rows = found.tables["paper"]
    (row,) = [row for row in rows if row[0] == "YOPO-5-10"]
    assert row[1] == "y 3 epochs"
    assert row[heads.index("pgd-40, ours")] == row[heads.index("time ratio, ours")] == "–"
    assert "3 of 55 epochs, for their time alone" in found.text
    said = " ".join(headline(read_runs(folders)))
    ours, theirs = (read(f, "result.json")["train_seconds"] for f in folders)
    assert f"An epoch of YOPO-5-10 takes {ours / theirs:.2f} of one of PGD-40" in said
    assert "Trained for their time alone, the first epochs of their recipes: y (YOPO-5-10)" in said
    assert "robust" not in said
    whole = write_run(tmp_path / "whole", {"method": {"name": "pgd", "steps": 40}})
    assert not any("of PGD-40's time" in s for s in headline(read_runs([folders[0], whole])))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.yaml", "method: {name: pgd}", "found no threat, data, model, evaluate, epochs"),
        ("config.yaml", "method: nameless", "found no method"),
        ("eval.json", "{}", "expected about, attacks, warnings, worst in"),
        ("result.json", "[]", "expected last in"),
        ("metrics.jsonl", "null\n", "expected an epoch in line 1 of"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_runs([folder])
    assert file in str(caught.value)
    (folder / file).write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=f"{file} is not UTF-8"):
        read_runs([folder])


def test_weights_that_are_both_best_and_last_share_a_caption(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    epochs = yaml.safe_load((folders[0] / "config.yaml").read_text())["epochs"]
    for folder, best in zip(folders, (epochs - 1, epochs), strict=True):
        result = read(folder, "result.json") | {"best_epoch": best}
        (folder / "result.json").write_text(json.dumps(result))
    table = summary(read_runs(folders))
    assert "best weights" in str(table.caption)
    assert "measured with" not in [column.header for column in table.columns]


def test_an_evaluation_of_weights_that_are_gone_does_not_count(tmp_path: Path) -> None:
    """As of a run that was evaluated, and then went on."""
    folder = write_run(tmp_path / "a", robust=0.999)
    digests = {"best": read(folder, "eval.json")["about"]["weights_sha256"], "last": "cd" * 32}
    for best, counts in ((digests["best"], True), ("ef" * 32, False)):
        result = read(folder, "result.json") | {"weights_sha256": digests | {"best": best}}
        result["best"]["pgd-3"] = 0.111
        (folder / "result.json").write_text(json.dumps(result))
        runs = read_runs([folder])
        (said,) = [s for s in headline(runs) if "withstand" in s]
        assert ("99.90%" in said, "11.10%" in said) == (counts, not counts)
        assert (
            any("of other weights than the run has now" in n for n in notes(runs[0])) is not counts
        )
        assert "replaced weights" not in str(summary(runs).caption) or not counts


def test_times_of_unlike_runs_are_not_averaged(tmp_path: Path) -> None:
    """The rival is the longest training's; compiled and plain runs stand apart."""
    pgd = [write_run(tmp_path / f"pgd-{n}", PGD | {"epochs": n}) for n in (3, 9)]
    fast = [
        write_run(tmp_path / engine, {"engine": engine, "seed": seed})
        for seed, engine in enumerate(("compiled", "plain"))
    ]
    said = [s for s in headline(read_runs([*pgd, *fast])) if " trained in " in s]
    theirs = read(pgd[1], "result.json")["train_seconds"]
    assert len(said) == 2
    for sentence, folder in zip(said, fast, strict=True):
        assert f"{read(folder, 'result.json')['train_seconds'] / theirs:.2f} of PGD-5's" in sentence
        assert "for 9 epochs" in sentence


def test_figures_without_points_are_not_drawn(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("_hidden", "b")]
    for folder in folders:
        result = read(folder, "result.json") | {"timed": False}
        (folder / "result.json").write_text(json.dumps(result))
    runs = read_runs(folders)
    assert [p.name for p in curves.save_figures(runs, tmp_path / "f")] == [
        "accuracy-propagations.png",
        "accuracy-propagations.svg",
    ]
    assert "_hidden" in (tmp_path / "f" / "accuracy-propagations.svg").read_text()
    text = page(runs)
    assert text.count("Held-out accuracy against propagations per image") == 1
    assert "Held-out accuracy against training time" not in text


def test_seeds_of_one_setting_share_a_colour_and_a_button(tmp_path: Path) -> None:
    runs = read_runs(
        [write_run(tmp_path / f"long-seed-{seed}", {"seed": seed}) for seed in (0, 1)]
        + [write_run(tmp_path / "pgd-5", PGD)]
        + [write_run(tmp_path / "long-seed-2", {"seed": 2})]
        + [write_run(tmp_path / f"s{seed}", {"seed": seed, "epochs": 4}) for seed in (0, 1)]
    )
    text = page(runs)
    found = Page(text)
    buttons = [b for b in found.all("button") if "data-run" in b]
    assert [b["data-run"] for b in buttons] == ["0", "1", "2"]
    for name in ("long (YOPO-2-2, 3 seeds)", "PGD-5", "YOPO-2-2 (2 seeds)"):
        assert f"</span>{name}</button>" in text
    chart = ElementTree.fromstring(re.findall(r"(?s)<svg viewBox.*?</svg>", text)[0])
    assert [len(chart.findall(f"g[@data-run='{i}']")) for i in range(3)] == [2, 2, 2]
    colours = {g.attrib["class"].split()[2] for g in chart.findall("g[@data-run='0']")}
    assert colours == {"c1"}  # YOPO's; PGD has c0, and another YOPO the next that is free
    swatches = [s["class"] for s in found.all("span") if "swatch" in s["class"]]
    assert swatches[:3] == swatches[3:6]  # buttons, and the key of the losses
    assert swatches[6:] == [f"swatch c{i}" for i in (1, 1, 0, 1, 2, 2)]
    curves.save_figures(runs, tmp_path / "f")
    drawn = (tmp_path / "f" / "accuracy-time.svg").read_text()
    words = re.findall(r"<!-- (.*?) -->", drawn)  # what matplotlib writes as outlines
    assert [w for w in words if w.endswith("robust")] == [
        f"{name}, robust" for name in ("long (YOPO-2-2, 3 seeds)", "PGD-5", "YOPO-2-2 (2 seeds)")
    ]


def test_seeds_are_their_mean_in_a_band(tmp_path: Path) -> None:
    """The band is as high as the seeds are apart, at the place of each epoch."""
    folders = [write_run(tmp_path / f"a-seed-{seed}", {"seed": seed}) for seed in range(3)]
    chart = curves.chart(read_runs(folders), "propagations")
    clean, robust = chart["curves"]
    epochs = list(zip(*(lines(folder) for folder in folders), strict=True))
    ticks = [(float(t["words"][:-1]), t["y"] - 4) for t in chart["texts"] if "%" in t["words"]]
    shares, heights = np.array(ticks).T
    slope, start = np.polyfit(shares, heights, 1)
    for curve, measure in ((clean, "clean"), (robust, "robust")):
        edge = [tuple(map(float, p.split(","))) for p in curve["band"].split()]
        assert len(edge) == 2 * len(epochs)
        for dot, same, low, high in zip(
            curve["dots"], epochs, edge, edge[: len(epochs) - 1 : -1], strict=False
        ):
            shares = [100 * line[measure] for line in same]
            places = [slope * s + start for s in (np.mean(shares), min(shares), max(shares))]
            assert [dot["y"], low[1], high[1]] == pytest.approx(places, abs=0.15)
            assert dot["x"] == low[0] == high[0]
            assert f"{np.mean(shares):.2f}% in the mean" in dot["tip"]
    assert "<polygon" in page(read_runs(folders))
    assert "<polygon" not in page(read_runs(folders[:1]))


def test_a_method_has_one_colour(tmp_path: Path) -> None:
    """Whatever stands beside it, in whatever order; a second setting of it has a free one."""
    overs: dict[str, Any] = {"natural": NATURAL, "pgd": PGD, "yopo": YOPO}
    overs |= {"more": {"method": {"m": 4}}}
    runs = read_runs([write_run(tmp_path / name, over) for name, over in overs.items()])
    for some in (runs[:3], runs[2::-1], runs[1:3]):
        assert curves.colours([[run] for run in some]) == [ENTRIES[run.name].hue for run in some]
    told = curves.colours([[run] for run in runs])
    assert told[:3] == [ENTRIES[run.name].hue for run in runs[:3]]
    assert told[3] not in told[:3]
    many = [[runs[2]]] * 20  # more than there are
    assert len(curves.colours(many)) == 20
    css = (Path(curves.__file__).parent / "page.css").read_text()
    for i, colour in enumerate(curves.PALETTE):
        assert f"--c{i}: {colour}" in css


def test_classes_confusion_and_radii_are_those_of_the_file(tmp_path: Path) -> None:
    counts = {"a": [[7, 3, 0], [0, 5, 5], [1, 1, 8]], "b": [[1, 9, 0], [2, 8, 0], [0, 0, 10]]}
    runs = read_runs([closer(write_run(tmp_path / name, PGD), c) for name, c in counts.items()])
    text = page(runs)
    heads, *rows = Page(text).tables["classes"]
    assert heads == ["class", "images", "a (PGD-5)", "b (PGD-5)"]
    assert rows == [  # the hardest first
        ["class 0", "10", "70% clean 100%", "10% clean 100%"],
        ["class 1", "10", "50% clean 100%", "80% clean 100%"],
        ["class 2", "10", "80% clean 100%", "100% clean 100%"],
    ]
    matrices = re.findall(r'(?s)<figure class="matrix">.*?(<svg.*?</svg>)', text)
    for svg, rows_ in zip(matrices, counts.values(), strict=True):
        cells = ElementTree.fromstring(svg).findall("rect")
        flat = [count for row in rows_ for count in row]
        assert [float(c.attrib["fill-opacity"]) * 10 for c in cells] == flat
        right = [c.attrib["class"] == "right" for c in cells]
        assert right == [i == j for i in range(3) for j in range(3)]
        tips = [c.findtext("title") for c in cells]
        assert tips[1] == f"{rows_[0][1]} of 10 images of class 0 are answered class 1"
    drawn = curves.against_eps(runs)
    assert drawn is not None
    chart, words = drawn
    assert words == "pgd-10 on 1,000 test images, L∞"
    dots = chart["curves"][0]["dots"]
    assert [dot["tip"].rpartition(": ")[2] for dot in dots[1:]] == ["80.00%", "40.00%"]
    assert dots[2]["x"] - dots[0]["x"] == pytest.approx(2 * (dots[1]["x"] - dots[0]["x"]), abs=0.2)


def test_a_part_of_few_images_is_a_number(tmp_path: Path) -> None:
    run = closer(write_run(tmp_path / "a"), [[1, 0, 0], [3, 6, 0], [4, 3, 3]])
    _, *rows = Page(text := page(read_runs([run]))).tables["classes"]
    assert {row[0]: row[2] for row in rows} == {
        "class 0": "1 of 1 clean 1 of 1",
        "class 1": "6 of 9 clean 9 of 9",
        "class 2": "30% clean 100%",
    }
    assert "a part of so few says little" in text
    more = closer(write_run(tmp_path / "b"), [[10, 0], [0, 10]])
    assert "a part of so few says little" not in page(read_runs([more]))


def test_seeds_are_a_band_at_every_radius_and_in_every_loss(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"a-seed-{seed}", {"seed": seed}) for seed in range(3)]
    for seed, folder in enumerate(folders):
        found = read(closer(folder, [[9, 1], [2, 8]]), "eval.json")
        found["radii"]["accuracy"] = [0.8, 0.4 + 0.1 * seed]
        (folder / "eval.json").write_text(json.dumps(found))
        told = [line | {"loss": 1.0 + seed, "rate": 0.1} for line in lines(folder)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in told))
    other = closer(write_run(tmp_path / "pgd", PGD), [[9, 1], [2, 8]])
    runs = read_runs([*folders, other])
    drawn = curves.against_eps(runs)
    assert drawn is not None
    seeds, alone = drawn[0]["curves"]
    assert len(seeds["band"].split()) == 2 * len(seeds["dots"]) == 6
    assert not alone["band"]
    words = "a (YOPO-2-2, 3 seeds), pgd-10 at eps 0.1: 50.00% in the mean, 40.00% to 60.00%"
    assert seeds["dots"][-1]["tip"] == words
    loss = curves.history(runs, "loss")
    assert loss is not None
    (seeds, *_) = loss["curves"]
    assert len(seeds["band"].split()) == 2 * len(seeds["dots"]) == 8
    assert seeds["dots"][1]["tip"] == ("a (YOPO-2-2, 3 seeds), epoch 2: loss 2 in the mean, 1 to 3")
    found = Page(text := page(runs))
    keys = re.findall(r'(?s)<ul class="key">(.*?)</ul>', text)
    assert [re.findall(r"swatch (c\d+).*?</span>(.*?)</li>", key) for key in keys] == [
        [("c1", "a (YOPO-2-2, 3 seeds)"), ("c0", "pgd (PGD-5)")]
    ] * 2
    assert len(found.all("ul", **{"class": "key"})) == 2
    # Seeds whose evaluations differ are no mean.
    other_attack = read(folders[0], "eval.json")
    other_attack["radii"]["attack"] = "pgd-5"
    (folders[0] / "eval.json").write_text(json.dumps(other_attack))
    drawn = curves.against_eps(read_runs(folders))
    assert drawn is not None
    assert [bool(curve["band"]) for curve in drawn[0]["curves"]] == [False, True]


def test_names_and_intervals_are_kept_on_one_line(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / name, PGD, robust=0.5) for name in ("a-b", "pgd-" * 9)])
    text = page(runs)
    kept = set(re.findall(r'<span class="whole">(.*?)</span>', text))
    assert {"47.0–53.0", "PGD-5"} <= kept
    assert max(map(len, kept)) <= 24
    assert re.search(r"\.whole \{[^}]*nowrap", text)


def test_an_image_that_was_wrong_already_is_called_so(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "a")])
    black = torch.zeros(3, 1, 4, 4)
    labels, answers, before = (list(digits) for digits in ("123", "178", "175"))
    strip = Strip(run, "pgd-40", black, black, labels, answers, before, same=True)
    captions = re.findall(r"(?s)<figcaption>(\d<br>.*?)</figcaption>", page([run], [strip]))
    assert [" ".join(re.sub("<.*?>", " ", c).split()) for c in captions] == [
        "1 still right",
        "2 wrong even clean: 7",
        "3 wrong even clean: 5 , attacked: 8",
    ]


def test_runs_of_other_images_do_not_stand_in_one_table_of_classes(tmp_path: Path) -> None:
    one = closer(write_run(tmp_path / "one"), [[5, 5], [0, 10]])
    other = closer(write_run(tmp_path / "other"), [[6, 5], [0, 10]])  # one image more
    heads, *_ = Page(page(read_runs([one, other]))).tables["classes"]
    assert heads == ["class", "images", "one (YOPO-2-2)"]


def test_losses_and_rates_are_drawn_where_they_are_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    odd = [0.5, None, "2", 1e300]
    texts = [{**line, "loss": x, "rate": 0.1} for line, x in zip(lines(folder), odd, strict=True)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in texts))
    runs = read_runs([folder])
    loss, rate = (curves.history(runs, what) for what in curves.HISTORY)
    assert loss is not None
    assert rate is not None
    assert [len(c["curves"][0]["dots"]) for c in (loss, rate)] == [1, 4]
    assert "loss 0.5" in loss["curves"][0]["dots"][0]["tip"]
    assert curves.history(read_runs([write_run(tmp_path / "b")]), "rate") is None
    text = page(runs)
    assert "Loss by epoch" in text
    assert "Learning rate by epoch" in text


def test_the_same_images_stand_together_whatever_the_attack_did(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--attacks", "pgd-2", "--samples", "40", "--eps", "0.2", "--save-examples"]
    assert yopo(monkeypatch, "eval", run, *words) == 0
    held = tensor_files.load_weights(run / "eval-examples.safetensors")
    held_right = (held["same.answers"] == held["same.labels"]).sum().item()
    out = tmp_path / "r.html"
    assert yopo(monkeypatch, "report", run, "--out", out) == 0
    same = Page(out.read_text()).text.split("The same images")[1].split("Attack by attack")[0]
    assert "Under pgd-40" in same
    assert 0 < same.count("still right") == held_right < 8
    wrong = (held["same.clean_answers"] != held["same.labels"]).sum().item()
    assert same.count("wrong even clean") == wrong
    assert same.count("read as") == 8 - held_right - wrong


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("config.yaml", "threat.eps", None),
        ("config.yaml", "data", "mnist"),
        ("result.json", "best_epoch", None),
        ("result.json", "train_seconds", "12.5"),
        ("result.json", "last.pgd-3", float("nan")),
        ("eval.json", "about.weights", None),
        ("eval.json", "attacks.cw", 0.3),
        ("metrics.jsonl", "epoch", "1"),
    ],
)
def test_values_of_another_kind_are_named(
    tmp_path: Path, file: str, name: str, value: object
) -> None:
    path = write_run(tmp_path / "run", epochs=1) / file
    tree = yaml.safe_load(path.read_text())
    *above, last = name.split(".")
    branch = tree
    for part in above:
        branch = branch[part]
    branch[last] = value
    path.write_text(yaml.safe_dump(tree) if file == "config.yaml" else json.dumps(tree))
    with pytest.raises(ValueError, match=f"{file} was edited or .* for {name}; make"):
        read_runs([path.parent])


def test_an_epoch_with_nan_is_not_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    first, second, *others = (folder / "metrics.jsonl").read_text().splitlines()
    broken = [json.dumps(json.loads(first) | {"robust": float("nan")})]
    broken += [json.dumps(json.loads(second) | {"train_seconds": float("nan")})]
    (folder / "metrics.jsonl").write_text("\n".join([*broken, *others]))
    runs = read_runs([folder])
    assert [point["epoch"] for point in runs[0].points] == [3, 4]
    assert "NaN" not in page(runs)


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / seed / "pgd") for seed in ("s0", "s1")]
    assert [r.name for r in read_runs(folders)] == ["s0/pgd", "s1/pgd"]


def test_errors_say_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_run(tmp_path / "runs" / "good")
    broken = write_run(tmp_path / "broken")
    (broken / "metrics.jsonl").write_text("{\n{}\n")
    for words, message in (
        ([tmp_path / "runs"], "expected a run folder with config.yaml"),
        ([tmp_path / "runs"], "did you mean"),
        ([good, tmp_path / "runs" / ".." / "runs" / "good"], "each run once"),
        ([broken], "line 1 of"),
        ([good, "--paper", "table9"], "expected --paper table1, table2"),
        ([good, "--out", tmp_path], "expected a file for --out"),
    ):
        assert yopo(monkeypatch, "report", *words) == 2
        assert message in capsys.readouterr().err


def test_command_writes_page_and_figures_and_prints_the_table(
    tmp_path: Path,
    three: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out, figures = tmp_path / "new" / "r.html", tmp_path / "figures"
    table = tmp_path / "table2.json"  # `yopo reproduce` writes one beside its runs
    table.write_text("{}")
    assert yopo(monkeypatch, "report", *three, table, "--out", out, "--figures", figures) == 0
    Page(out.read_text())
    printed = capsys.readouterr().out
    runs = read_runs(three)
    for each in runs:
        (line,) = (line for line in printed.splitlines() if f"│ {each.label} " in line)
        for e in each.evaluations.values():
            for attack in e["attacks"].values():
                assert f" {100 * attack['accuracy']:.2f}% " in line
    assert headline(runs)[0] in printed
    for stem in ("accuracy-time", "accuracy-propagations"):
        with Image.open(figures / f"{stem}.png") as picture:
            assert picture.size[0] > 600
        assert ElementTree.parse(figures / f"{stem}.svg").getroot().tag.endswith("svg")


def test_the_trainings_own_pgd_does_not_stand_beside_an_evaluations(tmp_path: Path) -> None:
    from yopo.cli.report import summary

    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", evaluated=False)]
    found = json.loads((folders[0] / "eval.json").read_text())
    found["attacks"]["pgd-3"] = next(iter(found["attacks"].values()))  # as result.json's
    (folders[0] / "eval.json").write_text(json.dumps(found))
    one, two = read_runs(folders)
    assert two.result is not None
    own = f"{100 * two.result['best']['pgd-3']:.2f}%"
    shown = {c.header: list(c.cells) for c in summary([one, two]).columns}
    assert shown["pgd-3"] == [f"{100 * found['attacks']['pgd-3']['accuracy']:.2f}%", "–"]
    assert shown["training's pgd-3"] == ["–", own]
    assert shown["worst case"] == [f"{100 * found['worst']['accuracy']:.2f}%", "–"]
    alone = {c.header: list(c.cells) for c in summary([two]).columns}["pgd-3"]
    assert alone == [own]


def test_evaluations_of_different_kinds_stand_apart(tmp_path: Path) -> None:
    from yopo.cli.report import summary

    folder = write_run(tmp_path / "a")
    found = read(folder, "eval.json")
    found["about"] |= {"weights": "model-last.safetensors", "images": 50, "threat": "L∞, eps = 0.7"}
    found["attacks"] = {"clean": found["attacks"]["clean"]}
    found["radii"] = {"attack": "pgd-10", "eps": [0.05, 0.1], "accuracy": [0.8, 0.4]}
    (folder / "model-last.eval.json").write_text(json.dumps(found))
    runs = read_runs([folder])
    columns = {str(c.header): list(c.cells) for c in summary(runs).columns}
    assert columns["measured with"] == [
        "best weights, 1,000 images, L∞, eps = 0.1",
        "last weights, 50 images, L∞, eps = 0.7",
    ]
    heads, *rows = Page(page(runs)).tables["attacks"]
    assert [row[heads.index("threat")] for row in rows] == ["L∞, eps = 0.1", "L∞, eps = 0.7"]
    assert rows[1][heads.index("worst case")] == "–"  # nothing attacked it


def test_figures_need_matplotlib(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(three[0].parent)
    for words in (
        ("report", three[0], "--figures", "figures"),
        ("reproduce", "figures", "--quick", "--out", "figures"),
        ("bench", "--picture", "bench.png"),
    ):
        assert yopo(monkeypatch, *words) == 2
        said = capsys.readouterr()
        assert "needs matplotlib: pip install matplotlib" in said.err
        assert not said.out  # before any work


def test_pictures_are_the_images_and_the_networks_own_answers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from yopo.data import load

    words = ["--attacks", "pgd-10", "--samples", "300", "--eps", "0.2", "--save-examples"]
    assert yopo(monkeypatch, "eval", run, *words) == 0
    out = tmp_path / "r.html"
    assert yopo(monkeypatch, "report", run, "--out", out) == 0
    found = Page(out.read_text())
    pixels = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(img["src"].split(",")[1]))))
        for img in found.all("img")
    ]
    assert len(pixels) == 48
    pixels = pixels[24:]  # after those that all networks are shown
    test = {image.tobytes() for image in load("mnist-subset").x_test.squeeze(1).numpy()}
    adversarial = torch.tensor(np.stack(pixels[2::3])).unsqueeze(1) / 255
    answers = trained()[0].eval()(adversarial).argmax(1).tolist()
    shown = re.findall(r"(\d)read as (\d)", found.text.split("Each run")[1])
    assert len(shown) == 8
    for i, (label, answer) in enumerate(shown):
        clean, eta, attacked = (p.astype(float) for p in pixels[3 * i : 3 * i + 3])
        assert pixels[3 * i].tobytes() in test
        moved = attacked - clean
        assert 0 < np.abs(moved).max() <= 0.2 * 255 + 0.51
        assert np.corrcoef(eta.ravel(), moved.ravel())[0, 1] > 0.999
        assert int(answer) == answers[i] != int(label)
    # The weights and the data are not asked again.
    (run / "model.safetensors").unlink()
    assert yopo(monkeypatch, "report", run, "--out", out) == 0
    assert Page(out.read_text()).text == found.text


def test_pictures_of_an_earlier_version_are_shown_without_answers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--attacks", "pgd-10", "--samples", "100", "--eps", "0.2", "--save-examples"]
    assert yopo(monkeypatch, "eval", run, *words) == 0
    file, out = run / "eval-examples.safetensors", tmp_path / "r.html"
    tensors, facts = tensor_files.load_weights(file), tensor_files.load_metadata(file)
    assert json.loads(facts.pop("names")) == list("0123456789")
    clean, labels = tensors["pgd-10.clean_answers"], tensors["pgd-10.labels"]
    assert torch.equal(clean, labels)  # what is attacked was right
    facts.pop("same")
    parts = ("pgd-10.images", "pgd-10.index", "pgd-10.labels")
    old = {k: tensors[k] for k in parts}
    tensor_files.save_weights(file, old, facts)
    assert yopo(monkeypatch, "report", run, "--out", out) == 0
    found = Page(out.read_text())
    assert len(found.all("img")) == found.text.count("misclassified") == 8
    assert "`yopo eval --save-examples` adds what is missing" in found.text


# ---------------------------------------------------------------- like with like


def test_other_data_of_the_same_kind_do_not_compare(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        over = {"data": {"name": "npz", "path": f"{name}.npz"}}
        folders.append(write_run(tmp_path / name, over))
    assert "do not compare" in headline(read_runs(folders))[0]
    for folder in folders:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["data"]["path"] = "same.npz"
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert "2 runs" in headline(read_runs(folders))[0]
    for digests in (("ab", None), ("ab", "ab"), ("ab", "cd")):  # None: of an earlier version
        for folder, digest in zip(folders, digests, strict=True):
            found, result = read(folder, "eval.json"), read(folder, "result.json")
            if digest:
                found["about"]["images_sha256"] = result["test_sha256"] = digest
            (folder / "eval.json").write_text(json.dumps(found))
            (folder / "result.json").write_text(json.dumps(result))
        said = headline(read_runs(folders))[0]
        assert ("do not compare" in said) is (digests == ("ab", "cd"))
    config = yaml.safe_load((folders[0] / "config.yaml").read_text())
    config["data"]["path"] = "moved.npz"  # its digest says that it is the same
    (folders[0] / "config.yaml").write_text(yaml.safe_dump(config))
    found, result = read(folders[0], "eval.json"), read(folders[0], "result.json")
    found["about"]["images_sha256"] = result["test_sha256"] = "cd"
    (folders[0] / "eval.json").write_text(json.dumps(found))
    (folders[0] / "result.json").write_text(json.dumps(result))
    assert "2 runs" in headline(read_runs(folders))[0]


def test_bf16_is_another_network(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    for precision, alike in (("tf32", True), ("bf16", False)):
        found = read(folders[0], "eval.json")
        found["about"]["precision"] = precision
        (folders[0] / "eval.json").write_text(json.dumps(found))
        said = headline(read_runs(folders))[0]
        assert ("withstand all of" in said) is alike


def test_autoattack_at_two_radii_is_two_sentences(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    for folder, eps in zip(folders, (0.1, 0.3), strict=True):
        found = read(folder, "eval.json")
        found["attacks"]["autoattack"] = found["attacks"]["cw"]
        found["about"] |= {"threat": f"L∞, eps = {eps}", "eps": eps}
        (folder / "eval.json").write_text(json.dumps(found))
    said = [s for s in headline(read_runs(folders)) if s.startswith("AutoAttack leaves")]
    assert ["eps = 0.1" in said[0], "eps = 0.3" in said[1], len(said)] == [True, True, 2]


def test_a_page_without_evaluations_names_radius_and_data(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", evaluated=False)
    text = page(read_runs([one]))
    assert text.count("mnist-subset, L∞, eps = 0.1") == 2  # under the chart and the table
    assert "pgd-3 (L∞, eps = 0.1, best weights)" in headline(read_runs([one]))[0]
    other = write_run(tmp_path / "other", {"threat": {"eps": 0.25}}, evaluated=False)
    runs = read_runs([one, other])
    text = Page(page(runs)).text
    assert "YOPO-2-2, mnist-subset, L∞, eps = 0.25" in text
    assert "do not compare" in headline(runs)[0]
    assert any("eps = 0.25" in str(cell) for c in summary(runs).columns for cell in c.cells)


def test_time_and_accuracy_of_a_rival_are_of_the_same_runs(tmp_path: Path) -> None:
    long = write_run(tmp_path / "long", PGD | {"epochs": 10}, robust=0.4)
    short = write_run(tmp_path / "short", PGD | {"epochs": 1}, robust=0.1)
    mine = write_run(tmp_path / "mine", YOPO, robust=0.5)
    (said,) = [s for s in headline(read_runs([long, short, mine])) if "robust accuracy is" in s]
    assert "50.00%, PGD-5's 40.00%" in said


def test_an_unfinished_run_that_went_on_was_evaluated_before(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", robust=0.111)
    (folder / "result.json").unlink()
    (folder / BEST).write_bytes(b"then")
    found = read(folder, "eval.json")
    found["about"]["file_sha256"] = hashlib.sha256(b"then").hexdigest()
    (folder / "eval.json").write_text(json.dumps(found))
    assert "11.10%" in headline(read_runs([folder]))[0]
    (folder / BEST).write_bytes(b"now")
    (only,) = read_runs([folder])
    assert "11.10%" not in " ".join(headline([only]))
    assert any("of other weights than the run has" in note for note in notes(only))


def test_a_network_that_learnt_nothing_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", evaluated=False)
    result = read(folder, "result.json") | {"chance": 0.9}
    result["best"] = {"clean": 0.905, "pgd-3": 0.905}
    (folder / "result.json").write_text(json.dumps(result))
    (only,) = read_runs([folder])
    assert any("90.5%, is not clearly above the 90.0%" in s for s in headline([only]))
    assert any("Clean accuracy, 90.5%" in note for note in notes(only))
    assert yopo(monkeypatch, "report", folder, "--out", tmp_path / "r.html") == 0
    assert capsys.readouterr().out.casefold().count("clean accuracy, 90.5%") == 1


def test_another_radius_is_not_put_beside_the_papers(tmp_path: Path) -> None:
    over = {"method": {"name": "pgd", "steps": 10}, "threat": {"eps": 8 / 255}}
    folders = [write_run(tmp_path / f"s{seed}", over | {"seed": seed}) for seed in (0, 1)]
    for folder, eps, share in zip(folders, (8 / 255, 4 / 255), (0.25, 0.75), strict=True):
        found = read(folder, "eval.json")
        found["about"] |= {"eps": eps, "threat": f"L∞, eps = {round(255 * eps)}/255"}
        found["attacks"]["cw"]["accuracy"] = share
        (folder / "eval.json").write_text(json.dumps(found))
    text = with_paper(read_runs(folders), "table2")
    assert ("25.00%" in text, "50.00%" in text) == (True, False)  # not the mean over two radii


# ---------------------------------------------------------------- several evaluations of a network


def quick(folder: Path, share: float) -> None:
    """Leave what `yopo eval --samples 200 --attacks pgd-10` leaves."""
    found = read(folder, "eval.json")
    (folder / "eval.json").rename(folder / "eval-203001011200.json")
    found["attacks"] = {
        "clean": found["attacks"]["clean"],
        "pgd-10": found["attacks"]["pgd-40"] | {"accuracy": share},
    }
    found["worst"] = {"accuracy": share, "interval": [share - 0.06, share + 0.06]}
    found["about"] |= {"images": 200}
    (folder / "eval.json").write_text(json.dumps(found))


@pytest.mark.parametrize("share", [0.2, 0.8])  # by chance its 200 images may be harder
def test_a_quick_evaluation_pushes_no_stronger_one_off_the_page(
    tmp_path: Path, share: float
) -> None:
    pgd, fast = write_run(tmp_path / "a", PGD, robust=0.5), write_run(tmp_path / "b", robust=0.7)
    before = headline(read_runs([pgd, fast]))[0]
    assert "70.00%" in before
    quick(fast, share)
    assert headline(read_runs([pgd, fast]))[0] == before  # one of them was evaluated quickly
    quick(pgd, share)
    runs = read_runs([pgd, fast])
    assert headline(runs)[0] == before  # and both
    found = Page(page(runs))
    heads, *rows = found.tables["attacks"]
    assert [row[heads.index("images")] for row in rows] == ["1,000", "200"] * 2
    assert [row[heads.index("pgd-10")].split()[0] for row in rows] == ["–", percent(share)] * 2
    assert all(run.evaluations.keys() == {"eval.json", "eval-203001011200.json"} for run in runs)
    assert found.text.count("Other evaluations (1)") == 2
    told = {str(c.header): [*c.cells] for c in summary(runs).columns}  # in the terminal
    assert ["1,000" in str(how) for how in told["measured with"]] == [True, False] * 2


def test_a_lower_measurement_of_the_training_on_more_images_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", robust=0.489)  # of 1,000 test images
    found = read(folder, "eval.json")
    for images, share, told in ((100, 0.51, True), (100, 0.45, False), (1000, 0.51, False)):
        found["about"] |= {"images": images}
        found["worst"] |= {"accuracy": share, "interval": [share - 0.1, share + 0.1]}
        (folder / "eval.json").write_text(json.dumps(found))
        runs = read_runs([folder])
        own = "At the end of training a smaller part of all 1,000 test images withstood pgd-3 "
        assert (f"{own}(L∞, eps = 0.1, best weights): 48.90%." in headline(runs)) is told
        cells = {str(c.header): [*c.cells] for c in summary(runs).columns}  # in the terminal
        assert cells.get("training's pgd-3") == (["–", "48.90%"] if told else None)


def test_another_radius_does_not_lead(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", robust=0.5)
    found = read(folder, "eval.json")
    found["worst"]["accuracy"] = 0.01
    found["about"] |= {"eps": 0.4, "threat": "L∞, eps = 0.4", "images": 5000}
    (folder / "eval-203001011200.json").write_text(json.dumps(found))
    assert "50.00%" in headline(read_runs([folder]))[0]


def test_what_was_set_aside_of_weights_that_are_gone_is_history(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", robust=0.5)
    result = read(folder, "result.json")
    result["weights_sha256"] = {"best": "ab" * 32, "last": "cd" * 32}
    (folder / "result.json").write_text(json.dumps(result))
    found = read(folder, "eval.json")
    found["about"]["weights_sha256"] = "ef" * 32
    (folder / "eval-203001011200.json").write_text(json.dumps(found))
    (run,) = read_runs([folder])
    assert [*run.evaluations] == ["eval.json"]
    assert not notes(run)
