"""Numbers in the README and the docs are those of the records; where a line ends says nothing."""

import itertools
import json
import re
import shutil
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import exchanged, growth, handed, scale, simulation
from tests.paper.test_reproduce import put
from tools import scale_page
from tools.front_page import COLOURS, FAST
from tools.reproduction_page import RECIPES, texts
from yopo.evaluation.result import wilson
from yopo.methods.registry import ENTRIES
from yopo.models.resnet50 import Bottleneck
from yopo.paper.reproduction import TABLES, folder
from yopo.paper.tables import paper_table
from yopo.report import curves
from yopo.report.curves import PALETTE
from yopo.report.headline import headline
from yopo.report.records import FREE, filled, read_runs
from yopo.runs.api import method_configs
from yopo.runs.folder import read_config, read_result
from yopo.runs.overlay import Tree
from yopo.runs.recipes import REACHED, Reached, recipe

ROOT = Path(__file__).parent.parent
DEMO = ("natural", "pgd-10", "yopo-3-5")


def said(name: str) -> str:
    """A page without its line ends."""
    return " ".join((ROOT / name).read_text().split())


def lines_of(text: str) -> list[str]:
    """Rows and list items, each on one line."""
    return re.sub(r"\n  (?=\S)", " ", text).splitlines()


def test_step_times() -> None:
    found = json.loads((ROOT / "records/speed-h200/bench-preactresnet18.json").read_text())
    results = (ROOT / "docs/results.md").read_text()
    assert len(found["rows"]) >= 6
    ratios = [r["literal"] / r["step"] for r in found["rows"]]
    for r, faster in zip(found["rows"], ratios, strict=True):
        line = f"| {r['method']} | {r['step']:.1f} | {r['literal']:.1f} | {faster:.1f} |"
        assert line in results, line
    words = f"{min(ratios):.1f} to {max(ratios):.1f}"
    assert f"a step is {words} times faster than the same method in the manner" in said("README.md")
    assert f"against which [results](results.md#step-times) has {words}," in said("docs/speed.md")


def test_a_loss_handed_over_costs_no_more() -> None:
    found = json.loads((ROOT / "records/handed-cpu/handed.json").read_text())["ratios"]
    log = (ROOT / "records/handed-cpu/log.txt").read_text()
    times = [ratio for name, ratio in found.items() if name.endswith("time")]
    memory = [ratio for name, ratio in found.items() if name.endswith("memory")]
    assert (len(times), len(memory), len(log.splitlines())) == (9, 9, 18)
    assert max(*times, *memory) <= handed.MOST == 1.05
    for name, ratio in found.items():
        assert re.search(rf"^{re.escape(name)} +{ratio:.3f} ", log, re.MULTILINE), name
    words = f"{min(times):.2f} to {max(times):.2f} times the processor time"
    assert f"{words} and {max(memory):.2f} times the memory" in said("docs/design.md")


def test_ways_to_share_a_step() -> None:
    found = json.loads((ROOT / "records/parallel-cpu/parallel.json").read_text())
    net, wide = (found["ways"][name]["ways"] for name in ("small ResNet-50", "perceptron"))
    assert found["ways"]["perceptron"]["parameters"] // 10**5 == 38
    words = said("docs/training.md")
    assert (
        f"with `ddp` takes {net['ddp']} of `flat` on a small ResNet-50 and {wide['ddp']}" in words
    )
    assert f"with `fsdp` {net['fsdp']} and {wide['fsdp']}" in words
    assert f"brings it to {net['fsdp gathered']} and {wide['fsdp gathered']}" in words
    assert f"takes {found['engine']['compiled']} of a plain one's" in said("docs/speed.md")


def test_other_peoples_networks() -> None:
    rows = json.loads((ROOT / "records/zoo-cpu/zoo.json").read_text())["networks"]
    for name in ("README.md", "docs/results.md"):
        assert f"Tried on {len(rows)} networks" in said(name)
    assert all(row["agree"] == 1 and row["untouched"] for row in rows.values())
    refused = {name: row["because"] for name, row in rows.items() if not row["trains"]}
    assert list(refused) == ["torchvision:googlenet", "torchvision:inception_v3"]
    assert all("wrap it so that it returns the logits alone" in why for why in refused.values())


def test_reproduction_is_that_of_the_records() -> None:
    """README, its picture, docs/results.md, docs/reproduction.md, tableN.json: made again."""
    for path, text in texts(ROOT).items():
        assert path.read_text() == text, f"{path}: run python -m tools.reproduction_page"


def trained(config: Tree) -> Tree:
    """The settings that decide what is trained."""
    return {k: v for k, v in filled(config).items() if k not in FREE}


@pytest.mark.parametrize("name", TABLES)
def test_rows_were_run_as_their_recipes_are(name: str) -> None:
    for row in TABLES[name].recipes:
        found = TABLES[name].folders(row, ROOT / "records" / "reproduction" / name)
        for run in read_runs(list(found.values())):
            epochs = run.config["epochs"]  # of Table 3 the first ones, for their time
            want = TABLES[name].config(row, epochs=epochs if name == "table3" else None)
            assert trained(run.config) == trained(want.tree()), run.folder


@pytest.mark.parametrize("name", RECIPES)
def test_our_recipes_were_run_as_they_are(name: str) -> None:
    runs = read_runs(sorted(ROOT.glob(RECIPES[name])))
    assert runs
    for seed, run in enumerate(runs):
        assert trained(run.config) == trained(recipe(name) | {"seed": seed}), run.folder
    results = [run.result or {} for run in runs]
    lines = lines_of((ROOT / "docs/results.md").read_text())
    (line,) = [x for x in lines if x.startswith(f"| `{name}` ({len(runs)} seed")]
    assert line.endswith(f"| {results[0]['train_seconds']:.1f} s |")  # others may have shared a GPU
    whole = sum(v for k, v in results[0].items() if k.endswith("_seconds"))
    (time,) = [x for x in lines if x.startswith("- Time: training alone. With starting")]
    assert re.search(rf"`{name}` ({whole:.1f} s|{whole / 60:.1f} min)[,.]", time)
    told = line + "".join(x for x in lines if x.startswith(f"- `{name}`: "))
    shares: dict[tuple[str, str], list[float]] = {}
    for run, result in zip(runs, results, strict=True):
        for attack, share in result["last"].items():
            shares.setdefault((attack, "own"), []).append(share)
        for attack, card in (
            (a, c) for e in run.evaluations.values() for a, c in e["attacks"].items()
        ):
            shares.setdefault((attack, card["settings"]), []).append(card["accuracy"])
    assert len(shares) > 2
    for values in shares.values():
        assert f" {100 * sum(values) / len(values):.2f}" in told


def test_time_where_nothing_was_compiled_before() -> None:
    found = json.loads((ROOT / "records/mnist-h200/fast/cold/result.json").read_text())
    whole = sum(v for k, v in found.items() if k.endswith("_seconds"))
    text = f"compiling took {found['warmup_seconds']:.0f} s and all of it {whole:.0f} s"
    assert text in said("docs/results.md")


def test_reproduction_pages_hold_the_numbers_of_the_runs(tmp_path: Path) -> None:
    for name in ("README.md", "docs/results.md", "docs/reproduction.md", "records/speed-h200"):
        source = ROOT / name
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tmp_path / name)
    results, page = (tmp_path / "docs" / f"{name}.md" for name in ("results", "reproduction"))
    file = tmp_path / "records/speed-h200/bench-preactresnet18.json"
    bench = json.loads(file.read_text())
    for row in bench["rows"]:
        row["literal"] = {"yopo-5-3": 70.0, "pgd-10": 90.0}.get(row["method"])
    file.write_text(json.dumps(bench))
    rows = [("table2", "YOPO-5-3 36 epochs", s) for s in (0, 1, 2)] + [("table2", "PGD-10", 0)]
    runs = [put(tmp_path / "records/reproduction" / t, t, row, s) for t, row, s in rows]
    written = texts(tmp_path)
    for path in (results, page):
        lines = lines_of(written[path])
        (line,) = [x for x in lines if "YOPO-5-3 36 epochs (3 seeds)" in x]
        values = [100 * run["eval"]["attacks"]["pgd-20"]["accuracy"] for run in runs[:3]]
        assert f"| {sum(values) / 3:.2f} / 44.72 ({min(values):.2f}–{max(values):.2f}) |" in line
        ratio = sum(run["seconds"] for run in runs[:3]) / 3 / runs[3]["seconds"]
        assert line.endswith(f"| {ratio:.2f} |")
        assert any("PGD-40 (not run)" in x for x in lines) == (path == results)
        assert "Trained on one fast GPU" in written[path]
        part = 70 * 36 / (90 * 105)
        assert any(f"YOPO-5-3 36 epochs {part:.2f} (ours {ratio:.2f})" in x for x in lines)
    assert written[page].count("Not run yet.") == 3
    for path, text in written.items():
        path.write_text(text)
    assert texts(tmp_path) == written
    assert json.loads((tmp_path / "records/reproduction/table2/table2.json").read_text())
    results.write_text(results.read_text().replace("<!-- headline -->", ""))
    with pytest.raises(ValueError, match="expected <!-- headline -->"):
        texts(tmp_path)


def test_the_four_rows_of_the_readme() -> None:
    """The numbers straight from the files, and what the sentence under them says."""
    readme = (ROOT / "README.md").read_text()
    runs = ROOT / "records/reproduction/table2"
    rows = {
        "PGD-10, 105 epochs": [runs / f"pgd-10-seed-{s}" for s in (0, 1)],
        "PGD-10, 40 epochs": [runs / "pgd-10-40-epochs-seed-0"],
        "YOPO-5-3, 36 epochs": [runs / f"yopo-5-3-36-epochs-seed-{s}" for s in (0, 1, 2)],
        "`cifar10-fast`, 33 epochs": [ROOT / "records/cifar10-fast-h200/33-epochs"],
    }
    found = {}
    for row, folders in rows.items():
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        shares = [sum(r["last"][a] for r in results) / len(results) for a in ("clean", "pgd-20")]
        attacked = [e["attacks"] for run in read_runs(folders) for e in run.evaluations.values()]
        strong = [a["autoattack"]["accuracy"] for a in attacked if "autoattack" in a]
        (line,) = [x for x in readme.splitlines() if x.startswith(f"| {row} |")]
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        assert [float(c) for c in cells[:2]] == pytest.approx([100 * s for s in shares], abs=0.0501)
        assert (
            cells[2] == "–"
            if not strong
            else float(cells[2]) == pytest.approx(100 * strong[0], abs=0.0501)
        )
        alone = [r["train_seconds"] for r in results if r.get("timed", True)]
        found[row] = shares[1], sum(alone) / len(alone) if alone else None, cells[3]
    (_, whole, _), control, (yopo, yopo_time, _), (_, fast_time, _) = found.values()
    assert control[1] is None
    assert whole is not None
    assert yopo_time is not None
    assert fast_time is not None
    computed = whole * 40 / 105
    times = [f"{computed / 60:.1f} min*", f"{yopo_time / 60:.1f} min", f"{fast_time / 60:.1f} min"]
    assert [told for _, _, told in found.values()] == [f"{whole / 60:.1f} min", *times]
    assert 100 * (control[0] - yopo) == pytest.approx(1, abs=0.25), "a point more robust"
    assert computed / yopo_time == pytest.approx(4 / 3, abs=0.05), "takes a third longer"
    words = "with 40, PGD-10 is a point more robust than YOPO and takes a third longer"
    assert words in said("README.md")


def test_two_steps_of_one_attack() -> None:
    """The README's PGD-20 has smaller steps than the tables'; both pages say so."""
    table = json.loads((ROOT / "records/reproduction/table2/table2.json").read_text())["rows"]
    for row in ("PGD-10", "PGD-10 40 epochs", "YOPO-5-3 36 epochs"):
        strong = table[row]["accuracy"]["pgd-20"]
        assert strong["how"].startswith("20 steps of 0.00784")
        more = table[row]["trainer"]["last"][1] - strong["mean"]
        assert more == pytest.approx(0.01, abs=0.003), "about one image in a hundred"
    assert "20 gradient steps of 1/255" in said("README.md")
    assert "about one image in a hundred more withstands that" in said("docs/results.md")


def test_the_picture_shows_each_way_to_train() -> None:
    """Every row of Table 2 that has a time, and our recipe; nothing left out."""
    picture = (ROOT / "docs/accuracy-time.svg").read_text()
    shown = re.findall(r"<circle", picture)
    table = json.loads((ROOT / "records/reproduction/table2/table2.json").read_text())["rows"]
    assert len(shown) == len([r for r in table.values() if r]) + 1
    for name, r in table.items():
        if r:
            method = name.replace(" before", " as released").replace(f" {r['epochs']} epochs", "")
            assert f">{method} ({r['epochs']})</text>" in picture


def test_our_recipe_has_a_hue_of_its_own_in_the_picture() -> None:
    """A YOPO with other settings is no method of its own, and in no other's colour."""
    picture = (ROOT / "docs/accuracy-time.svg").read_text()
    for shade in (0, 1):
        colours = {kind: pair[shade] for kind, pair in COLOURS.items()}
        assert len({*colours.values()}) == len(colours)
        assert all(f".{kind}{{fill:{colour}" in picture for kind, colour in colours.items())
    methods = {PALETTE[e.hue] for e in ENTRIES.values() if e.hue is not None}
    assert {colour for kind, (colour, _) in COLOURS.items() if kind != FAST} < methods
    assert COLOURS[FAST][0] in {*PALETTE} - methods
    css = (Path(curves.__file__).parent / "page.css").read_text()
    assert all(f": {dark};" in css for _, dark in COLOURS.values())


def test_what_the_results_say_beside_their_tables() -> None:
    results = said("docs/results.md")
    longer, short = (ROOT / f"records/cifar10-fast-h200/{n}-epochs" for n in (58, 33))
    found = json.loads((longer / "eval.json").read_text())
    clean, worst = found["accuracy"]["clean"], found["worst"]["accuracy"]
    assert f"ends at {100 * clean:.2f} clean and {100 * worst:.2f} in the worst case" in results
    seconds = json.loads((short / "result.json").read_text())["train_seconds"] / 33
    assert f"With `--epochs 58`, {58 * seconds / 60:.1f} minutes" in results
    table = json.loads((ROOT / "records/reproduction/table2/table2.json").read_text())["rows"]
    control, yopo = (table[row] for row in ("PGD-10 40 epochs", "YOPO-5-3"))
    for attack in ("pgd-20", "cw", "worst case"):
        lead = control["accuracy"][attack]["mean"] - yopo["accuracy"][attack]["mean"]
        assert lead == pytest.approx(0.0125, abs=0.005), "about a point more robust than YOPO-5-3"
    epoch = {row: table[row]["epoch_seconds"] for row in ("PGD-10", "YOPO-5-3", "YOPO-3-5")}
    ratios = [epoch[row] / epoch["PGD-10"] for row in ("YOPO-5-3", "YOPO-3-5")]
    assert f"takes {ratios[0]:.2f} of PGD-10's time, YOPO-3-5 {ratios[1]:.2f}" in results
    assert f"with YOPO's 40 ({40 / 105:.2f} of the time)" in results
    assert f"more robust than YOPO-5-3, in {40 / 105:.2f} of its own time" in results
    few, full = (table[row]["time_ratio"] for row in ("YOPO-5-3 36 epochs", "YOPO-5-3"))
    assert f"in {few:.2f} (36 epochs, as in the released code) to {full:.2f} (40) of its" in results


def test_what_is_said_of_the_wide_network() -> None:
    """The one row of Table 3 that was trained in full; the others' times are extrapolated."""
    rows = json.loads((ROOT / "records/reproduction/table3/table3.json").read_text())["rows"]
    whole = [row for row, of in rows.items() if of and of["epochs"] == of["recipe_epochs"]]
    assert whole == ["YOPO-5-3"]
    yopo, theirs = rows["YOPO-5-3"], paper_table("table3")["YOPO-5-3"]
    clean, pgd = (f"{100 * yopo['accuracy'][k]['mean']:.2f}" for k in ("clean", "pgd-20"))
    minutes = f"{yopo['train_seconds'] / 60:.1f} minutes"
    words = f"YOPO-5-3 reaches {clean} clean and {pgd} under PGD-20 in {minutes}; the paper has"
    assert f"{words} {theirs['clean']:.2f} and {theirs['pgd-20']:.2f}" in said("docs/results.md")
    page = said("docs/reproduction.md")
    assert f"{clean} clean (the paper {theirs['clean']:.2f}) and {pgd} under PGD-20" in page
    assert f"takes {yopo['time_ratio']:.2f} of PGD-10's time and YOPO-3-5 would take" in page
    step = 1000 * yopo["epoch_seconds"] / 191
    assert f"16, all 40 epochs: {step:.1f} / –" in said("records/speed.md")


def test_the_verdicts() -> None:
    results = said("docs/results.md")
    rows: dict[str, Tree] = {}
    for name in ("table1", "table4"):
        file = ROOT / f"records/reproduction/{name}/{name}.json"
        rows |= {f"{name} {k}": v for k, v in json.loads(file.read_text())["rows"].items()}
    yopo, pgd = (rows[f"table1 {row}"] for row in ("YOPO-5-10", "PGD-40"))
    assert f"as robust as PGD-40, in {yopo['time_ratio']:.2f} of its time" in results
    assert yopo["accuracy"]["worst case"]["mean"] >= pgd["accuracy"]["worst case"]["low"]
    small = [rows[f"table1 PGD-{r}"]["train_seconds"] / yopo["train_seconds"] for r in (5, 10)]
    assert f"in {small[0]:.1f} and {small[1]:.1f} of YOPO-5-10's time" in results
    fast, slow = (rows[f"table4 {row}"] for row in ("TRADES-YOPO-3-4", "TRADES-10"))
    clean, worst, pgd_20 = (
        slow["accuracy"][k]["mean"] - fast["accuracy"][k]["mean"]
        for k in ("clean", "worst case", "pgd-20")
    )
    assert abs(clean) < 0.002
    words = (
        f"{100 * worst:.1f} points less robust in the worst case ({100 * pgd_20:.1f} under PGD-20)"
    )
    assert f"{words}, in {fast['time_ratio']:.2f} of its time" in results


def test_one_weight_gradient_instead_of_m() -> None:
    page, told = (ROOT / "docs/reproduction.md").read_text(), said("docs/reproduction.md")
    worst: dict[tuple[str, str], float] = {}
    folders = sorted((ROOT / "records/equal-cost-cpu").glob("*-seed-0/*"))
    assert len(folders) == 8
    for first in folders:
        kind, method = first.parent.name.removesuffix("-seed-0"), first.name
        runs = read_runs([first.parents[1] / f"{kind}-seed-{s}" / method for s in (0, 1, 2)])
        found = [run.evaluations["eval.json"] for run in runs]
        shares = [100 * e["worst"]["accuracy"] for e in found]
        worst[kind, method] = sum(shares) / 3
        clean = sum(100 * e["accuracy"]["clean"] for e in found) / 3
        spent = (runs[0].result or {})["propagations"]
        f0 = "conv1 and ReLU" if kind == "relu1" else "conv1"
        line = f"| {f0} | {method} | {runs[0].config['epochs']} | {spent:.1f} | {clean:.2f} | "
        line += f"{worst[kind, method]:.2f} ({min(shares):.2f}–{max(shares):.2f}) |"
        assert line in page, line
    paper = worst["affine", "yopo-3-5"]
    more = worst["epochs", "yopo-3-5-last"] - paper
    assert f"is {more:.1f} points more robust in as many" in said("docs/results.md")
    assert f"is {worst['affine', 'yopo-3-5-last'] - paper:.1f} points more robust" in told


def test_one_weight_gradient_on_cifar10() -> None:
    page, results = said("docs/reproduction.md"), said("docs/results.md")
    found = {}
    for name in ("last-40", "33", "58"):
        (run,) = read_runs([ROOT / f"records/cifar10-fast-h200/{name}-epochs"])
        assert run.result
        one = run.config["method"].get("grad_at") == "last"
        attacked = run.evaluations.get("eval.json")
        worst = f"{100 * attacked['worst']['accuracy']:.2f}" if attacked else "–"
        clean, pgd = (100 * run.result["last"][k] for k in ("clean", "pgd-20"))
        spent = run.result["propagations"]
        line = f"| {'one' if one else 'm'} | {run.config['epochs']} | {spent:.1f} | "
        assert f"{line}{clean:.2f} | {pgd:.2f} | {worst} |" in page
        found[name] = clean, pgd, spent
    last, same, longer = found.values()
    gain, loss = last[1] - same[1], same[0] - last[0]
    words = f"{gain:.1f} points more robust and {loss:.1f} less accurate on clean images"
    assert words in page
    assert words.replace(" and", " under PGD-20 and") in results
    assert f"in `cifar10-fast` {loss:.1f} points less accurate on clean images" in results
    cost, behind = longer[2] / last[2], longer[0] - last[0]
    assert f"for {cost:.1f} times the cost, but then {behind:.1f} points less accurate" in page


def test_one_weight_gradient_under_autoattack() -> None:
    page, results = said("docs/reproduction.md"), said("docs/results.md")
    found = []
    for name in ("m-58", "last-70-1.0", "last-70-1.25"):
        (run,) = read_runs([ROOT / f"records/cifar10-fast-h200/{name}"])
        told = run.evaluations["eval.json"]
        one, epochs = run.config["method"]["grad_at"] == "last", run.config["epochs"]
        clean, pgd = (100 * told["attacks"][k]["accuracy"] for k in ("clean", "pgd-20"))
        worst, strong = 100 * told["worst"]["accuracy"], list(told["attacks"])[2:]
        assert run.result
        cells = ["one" if one else "m", epochs, run.config["train_eps"]]
        cells += [f"{run.result['propagations']:.1f}", f"{clean:.2f}", f"{pgd:.2f}"]
        assert f"| {' | '.join(map(str, cells))} | {', '.join(strong)} | {worst:.2f} |" in page
        found.append((clean, worst))
    (clean_m, worst_m), (clean, worst), (_, closest) = found
    again = f"Trained again, it has {clean_m:.2f} clean and {worst_m:.2f} after the first two parts"
    assert again in results
    assert run.result
    seconds = f"{run.result['train_seconds']:.0f} s"
    assert f"Training took {seconds} in the last row" in page
    assert f"{clean - clean_m:.1f} points more accurate on clean images" in page
    assert f"{worst - worst_m:.1f} more robust (one seed each" in page
    parts = told["attacks"]["autoattack"]["after"]
    rest = 100 * (parts["apgd-t"] - parts["square"])
    assert f"the other two took {rest:.2f} points more" in page
    lefts = [100 * parts["apgd-t"]]
    assert f"where seed 0 has {lefts[0]:.2f}:" in page
    for name, row in (("seed-1", "| 1 |"), ("seed-2", "| 2 |"), ("silu", "")):
        folder = name + "-70-1.25" if name == "silu" else f"last-70-1.25-{name}"
        (other,) = read_runs([ROOT / f"records/cifar10-fast-h200/{folder}"])
        one, two, _, four = (
            f"{100 * a['accuracy']:.2f}" for a in other.evaluations["eval.json"]["attacks"].values()
        )
        if row:
            assert f"{row} {one} | {two} | {four} |" in page
            lefts.append(float(four))
        else:
            assert f"has {one} clean, {two} under PGD-20 and {four} after the two parts" in page
            fits = f"{100 * other.points[-1]['train_accuracy']:.1f}% of them"
            assert fits in page
    mean = sum(lefts) / 3
    assert f"The mean of the three is {mean:.2f}," in page
    assert max(*lefts, closest) < 50.5
    assert f"was not reached; {mean:.2f}% in {seconds} is the closest" in results
    log = (ROOT / "records/cifar10-fast-h200/last-70-1.0-seed-1/eval.log").read_text()
    left = [line.split()[-2].rstrip("%") for line in log.splitlines()]
    words = f"has {left[0]} clean, {left[1]} under PGD-20 and at most {left[-1]} under AutoAttack"
    assert words in page


def test_a_thousand_kills() -> None:
    found = json.loads((ROOT / "records/kills-cpu/kills.json").read_text())
    lines = (ROOT / "records/kills-cpu/kills.jsonl").read_text().splitlines()
    assert found["kills"] == len(lines) == sum(found["by_method"].values())
    assert (found["runs_that_differ"], found["differences"]) == (0, [])
    words = (
        f"{found['kills']:,} SIGKILLs in {found['runs']} training runs of eleven methods, "
        f"{found['inside_a_write']} of them inside a write"
    )
    assert len(found["by_method"]) == 11
    rows = (ROOT / "records/README.md").read_text()
    assert words in rows
    beside = found["beside"], found["inside_a_write_beside"]
    assert f"In {beside[0]} of the killed starts" in rows
    assert f"beside the training, {beside[1]} of these died inside a write" in rows


def rows_of_records() -> dict[str, str]:
    """What the table says of each folder or log, by all its names."""
    found = {}
    for line in (ROOT / "records/README.md").read_text().splitlines():
        if line.startswith("| `"):
            names, _, rest = line[2:].partition(" | ")
            found.update(dict.fromkeys(re.findall(r"`([^`]+)`", names), rest))
    return found


def outcomes(log: str) -> list[str]:
    """Counted by a line for each test, and by the last line of each session."""
    counts: list[list[str]] = [[], []]
    for kind in ("passed", "skipped", "failed"):
        lines = re.findall(rf"(?m)^(?!FAILED tests/).*\b{kind.upper()}\b", log)
        ends = re.findall(rf"(?m)^(?:=+ )?(?:.*, )?(\d+) {kind}\b.* in [\d.]+s", log)
        for count, n in zip(counts, (len(lines), sum(map(int, ends))), strict=True):
            count += [f"{n} {kind}"] if n else []
    return [", ".join(count) for count in counts if count]


LOGS = sorted((ROOT / "records/tests-h200").iterdir())


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_logs_of_tests_are_counted(log: Path) -> None:
    row = rows_of_records()["tests-h200/" + log.name.replace("log.txt", "")]
    row, text = re.sub(r" \([^)]*\)", "", row), log.read_text()
    assert outcomes(text)
    assert not [count for count in outcomes(text) if count not in row]
    begun = text.count("= test session starts =")
    assert f"{begun} processes" in row or not re.search(r"\d+ processes", row)


def test_why_tests_failed_in_the_rooms() -> None:
    log = (ROOT / "records/tests-h200/rooms-1.log").read_text()
    causes = [
        log.count(f"AssertionError: {words}") for words in ("assert ['not comp", "Tensor-lik")
    ]
    assert (
        "{} did not compile, by a fault of a test (a setting of the compiler that pytest could "
        "not put back), {} were not close:".format(*causes)
        in said("records/README.md")
    )


def test_runs_whose_time_does_not_count_say_so() -> None:
    said_so = {name: row for name, row in rows_of_records().items() if "timed: false" in row}
    assert "times do not count" not in said("records/README.md")
    assert len(said_so) >= 6
    runs = ROOT / "records/cifar10-fast-h200"
    shared = {run.parent.name for run in runs.glob("*/result.json")} - {"33-epochs", "last-70-1.25"}
    for name in shared:
        assert read_result(runs / name)["timed"] is False
        assert name + "/" in {path.removeprefix("cifar10-fast-h200/") for path in said_so}


def test_plain_steps_beside_captured_ones() -> None:
    told = json.loads((ROOT / "records/speed-h200/plain-steps.json").read_text())["milliseconds"]
    natural, yopo, pgd = (told[name] for name in ("natural", "yopo-5-3", "pgd-10"))
    words = (
        f"natural {natural['plain']:.2f} and {natural['captured']:.2f} ms a step without "
        f"and with it, YOPO-5-3 {yopo['plain']:.1f} and {yopo['captured']:.1f} ms, "
        f"PGD-10 {pgd['plain']:.1f} and {pgd['captured']:.1f} ms"
    )
    assert words in said("docs/speed.md")
    ratios = [f"{each['plain'] / each['captured']:.1f}" for each in (natural, yopo, pgd)]
    assert "{}, {} and {} times faster".format(*ratios) in said("docs/speed.md")
    like = f"[like for like](docs/speed.md#plain-steps), in bf16, {min(ratios)} to {max(ratios)}"
    assert f"{like} times" in said("README.md")
    file = ROOT / "records/speed-h200/rooms-bench.json"
    step = {row["method"]: row["step"] for row in json.loads(file.read_text())["rows"]}
    times = f"{step['natural']:.2f}, {step['yopo-5-3']:.1f} and {step['pgd-10']:.1f} ms"
    assert f"`yopo bench` had {times} for the same captured steps" in said("docs/speed.md")


def test_the_demos_seeds_in_the_list_of_records() -> None:
    leads, left = [], []
    for seed in sorted((ROOT / "records/demo-seeds-cpu").iterdir()):
        natural, pgd, yopo = read_runs([seed / name for name in DEMO])
        spent = 1.01 * yopo.points[-1]["propagations"]
        there = [p["robust"] for p in pgd.points if p["propagations"] <= spent]
        leads.append(100 * (yopo.points[-1]["robust"] - there[-1]))
        left.append(100 * natural.evaluations["eval.json"]["worst"]["accuracy"])
    assert len(leads) == 10
    words = f"({max(left):.2f}% at most), and at equal cost YOPO-3-5 keeps {min(leads):.0f} to "
    assert f"{words}{max(leads):.0f} points more than PGD-10" in said("records/README.md")


def test_the_demo_at_equal_cost_with_a_schedule_for_it() -> None:
    """And in as many epochs: on the whole test set, in each of ten seeds."""
    kept: dict[str, list[float]] = {"yopo-3-5": [], "pgd-10": [], "pgd-10-3-epochs": []}
    for seed in range(10):
        base = ROOT / f"records/demo-seeds-cpu/seed-{seed}"
        results = {name: read_result(base / name) for name in kept}
        spent = {name: result["propagations"] for name, result in results.items()}
        (fair,) = method_configs("demo", ["pgd-10"], {"seed": seed}, most=25.67).values()
        assert trained(read_config(base / "pgd-10-3-epochs")) == trained(fair.tree())
        assert fair.epochs == 3
        assert round(spent["pgd-10-3-epochs"], 2) == 23 < round(spent["yopo-3-5"], 2) == 25.67
        assert round(spent["pgd-10"] / spent["yopo-3-5"], 1) == 2.1
        assert len({result["test_sha256"] for result in results.values()}) == 1
        for name, result in results.items():
            assert result["test_images"] == 2000
            kept[name].append(100 * result["last"]["pgd-20"])
    fair_, ours, longer = (kept[name] for name in ("pgd-10-3-epochs", "yopo-3-5", "pgd-10"))
    lead = [a - b for a, b in zip(ours, fair_, strict=True)]
    behind = [a - b for a, b in zip(longer, ours, strict=True)]
    words = f"it keeps {min(fair_):.2f} to {max(fair_):.2f}%, YOPO-3-5 {min(ours):.2f} to "
    words += f"{max(ours):.2f}%, {min(lead):.1f} to {max(lead):.1f} points more in a seed"
    records, results_page = said("records/README.md"), said("docs/results.md")
    assert words in records
    assert min(behind) > 0
    more = f"{min(behind):.1f} to {max(behind):.1f} points"
    assert f"PGD-10 keeps more than YOPO-3-5 in ten of ten seeds, by {more}" in records
    assert f"in 7 epochs each PGD-10 keeps {more} more than YOPO-3-5 in all ten" in results_page
    assert f"it keeps {min(lead):.1f} to {max(lead):.1f} points less" in results_page


def test_the_demo_takes_less_than_four_minutes_of_one_core() -> None:
    folder_, words = ROOT / "records/demo-time-cpu", said("records/README.md")
    whole = {}
    for name in ("one-thread", "avx2"):
        told = json.loads((folder_ / f"{name}.json").read_text())
        assert told["threads"] == 1
        assert list(told["processor_seconds"]) == ["compare", "eval", "report"]
        assert sum(told["processor_seconds"].values()) == pytest.approx(told["whole"])
        log = (folder_ / f"{name}.log").read_text()
        assert all(f"yopo {command} " in log for command in told["processor_seconds"])
        whole[name] = told["whole"]
    assert max(whole.values()) < 240
    assert f"{whole['one-thread']:.0f} s for `make demo` (`one-thread`)" in words
    assert f"{whole['avx2']:.0f} s where torch and oneDNN keep to AVX2" in words
    first = (folder_ / "first.log").read_text().splitlines()[-1]
    seconds = sum(map(float, re.findall(r"[\d.]+(?= user| system)", first)))
    assert f"{seconds:.0f} s for `yopo train demo`, with AVX2" in words
    assert seconds < 60
    assert "yopo train demo --out runs/first # small digits, a minute on a CPU" in said("README.md")


@pytest.mark.parametrize("seed", range(10))
def test_the_demos_page_says_the_same_of_every_seed(seed: int) -> None:
    """Nothing withstands without robust training; at equal cost YOPO keeps more than PGD."""
    runs = read_runs([ROOT / f"records/demo-seeds-cpu/seed-{seed}/{name}" for name in DEMO])
    configs = method_configs("demo", DEMO, {"seed": seed})
    for run, name in zip(runs, DEMO, strict=True):
        assert run.config["seed"] == seed
        assert trained(run.config) == trained(configs[name].tree())
        (found,) = run.evaluations.values()
        assert list(found["attacks"]) == ["clean", "pgd-40", "cw"]
        assert found["about"]["images"] == 400
    _, pgd, yopo = runs
    told = headline(runs)
    shares = [e["worst"]["accuracy"] for run in runs for e in run.evaluations.values()]
    assert shares[0] <= 0.01
    assert min(shares[1:]) >= 0.7
    assert f"and {100 * shares[0]:.2f}% of 400 test images once attacked" in told[0]
    for run, share in zip(runs[1:], shares[1:], strict=True):
        assert f"{run.method} keeps {100 * share:.2f}% (" in told[1]
    (equal,) = [s for s in told if s.startswith("At equal cost")]
    ours = yopo.points[-1]
    theirs = [p for p in pgd.points if p["propagations"] <= 1.01 * ours["propagations"]][-1]
    assert f"{yopo.method} keeps {100 * ours['robust']:.2f}% of held-out images" in equal
    assert f"{pgd.method} {100 * theirs['robust']:.2f}% after" in equal
    low, _ = wilson(round(ours["robust"] * ours["images"]), ours["images"])
    assert theirs["robust"] < low, "by more than these images leave to chance"


def column(attacks: Iterable[str], how: str = "") -> str:
    """Of what `yopo recipes` shows, where the worst case over attacks belongs."""
    kinds = {re.sub(r"-\d+$", "", a) for a in (*attacks, *how.removeprefix("over ").split(", "))}
    kinds -= {"clean", ""}
    return "pgd_cw" if kinds == {"pgd", "cw"} else " ".join(sorted(kinds))


@pytest.mark.parametrize("name", REACHED)
def test_what_the_recipes_promise_was_measured(name: str) -> None:
    """AutoAttack where it was made, and PGD with CW beside it, never in its place."""
    told = REACHED[name]
    table = re.fullmatch(r"(reproduction/table\d) (.+)", told.where)
    shares: dict[str, tuple[float, int]] = {}  # and of how many images
    if table:
        folder_, row = ROOT / "records" / table[1], table[2]
        found = json.loads((folder_ / f"{folder_.name}.json").read_text())
        of = found["rows"][row]
        assert TABLES[found["table"]].recipes[row] == name
        for attack, a in of["accuracy"].items():
            shown = {"worst case": column([], a["how"])} if a else {}
            if a and attack in ("clean", "worst case", "autoattack"):
                shares[shown.get(attack, attack)] = a["mean"], a["images"]
        shares.pop("pgd", None)  # alone it has no column: Table 3's rows
        seconds = of["recipe_seconds"]
        runs = [folder_ / f"{folder(row)}-seed-{s}" for s in of["seeds"]]
        devices = {read_result(one)["environment"]["hardware"] for one in runs}
    else:
        runs = [ROOT / "records" / where for where in told.where.split(", ")]
        for run in reversed(runs):  # what the first has, it says
            file = next(f for f in ("model-last.eval.json", "eval.json") if (run / f).exists())
            found = json.loads((run / file).read_text())
            images = found["about"]["images"]
            shares["clean"] = found["accuracy"]["clean"], images
            shares[column(found["attacks"])] = found["worst"]["accuracy"], images
            assert trained(read_config(run)) == trained(recipe(name))
        result = read_result(runs[0])
        counts = name != "demo"  # of a CPU the accuracies alone, says records/README.md
        seconds = result["train_seconds"] if counts else None
        devices = {result["environment"]["hardware"]} if counts else {"NVIDIA H200"}
    assert devices == {"NVIDIA H200"}
    assert told.seconds == (None if seconds is None else round(seconds))
    assert shares.keys() <= {"clean", "pgd_cw", "autoattack"}
    for of, written in zip(Reached._fields[1:4], told[1:4], strict=True):
        share, images = shares.get(of, (None, 10_000))
        # A half goes up, as in the README: 79.15 is 79.2, though 100 * 0.7915 is below it.
        assert written == (None if share is None else round(100 * share + 1e-6, 1)), of
        assert (of in told.few) == (images <= 1000), of


def test_every_autoattack_of_a_recipes_own_run_is_shown() -> None:
    """A run of a recipe, as it is, that AutoAttack was made on: the list does not leave it out."""
    for file in sorted((ROOT / "records").rglob("*eval.json")):
        found = json.loads(file.read_text())
        if (
            "autoattack" not in found.get("attacks", {})
            or not (file.parent / "config.yaml").exists()
        ):
            continue
        config = trained(read_config(file.parent)) | {"seed": 0}
        for name, told in REACHED.items():
            if config == trained(recipe(name)):
                assert told.autoattack is not None, f"{name}: {file}"


def test_costs_grow_as_the_page_says(float32: None) -> None:
    record = json.loads((ROOT / "records/scale-cpu/scale.json").read_text())
    assert (ROOT / "docs/scale.md").read_text() == scale_page.page(ROOT), (
        "python -m tools.scale_page"
    )
    assert len(record["growth"]) >= 20
    for row in record["growth"]:
        found = growth.exponent(row["sizes"][-growth.UPPER :], row["costs"][-growth.UPPER :])
        assert row["exponent"] == pytest.approx(found, abs=0.006)
        assert row["growth"] == growth.verdict(found) != "worse", row["cost"]


def test_bytes_counted_from_shapes_are_those_that_two_processes_sent() -> None:
    record = json.loads((ROOT / "records/scale-cpu/scale.json").read_text())
    net = exchanged.network()
    groups = simulation.groups(net, (Bottleneck,))
    sent = {row["way"]: row["bytes"] for row in record["ranks"]}
    assert sent["flat"]["reduced"] == simulation.flat_message(net)
    assert sent["ddp"]["reduced"] == simulation.ddp_messages(net)
    for way, whole in (("fsdp", False), ("fsdp gathered", True)):
        counted = simulation.fsdp_messages(groups, 2, 4, whole)
        assert (sent[way]["gathered"], sent[way]["scattered"]) == counted


def test_what_many_gpus_cost_can_be_computed_anew(
    capsys: pytest.CaptureFixture[str], float32: None
) -> None:
    page = (ROOT / "docs/scale.md").read_text()
    written = re.findall(r"^\| `(--\w+)` \| (\S+) \|", page, re.M)
    options = {f"--{name}": value for name, value in asdict(simulation.Assumed()).items()}
    assert [option for option, _ in written] == [*options]

    def computed(*words: str) -> str:
        scale.main(["--simulate", *words])
        return capsys.readouterr().out.strip()

    assert computed() in page
    assert computed(*itertools.chain(*written)) in page  # in the units that stand there
    for option, value in options.items():  # each counts
        assert computed(option, str(2 * value)) not in page


@pytest.mark.parametrize("name", ["checkpoint", "shards"])
def test_training_hardly_waits_for_a_large_checkpoint(name: str) -> None:
    record = json.loads((ROOT / f"records/checkpoint-cpu/{name}.json").read_text())
    assert record["parameters"] >= 50_000_000
    assert record["processes"] == {"checkpoint": 1, "shards": 2}[name]
    waits = statistics.median(row["waits"] / row["at once"] for row in record["rounds"])
    assert record["ratios"]["waits / at once"] == pytest.approx(waits)
    assert waits <= 0.2


def test_large_folders_take_no_more_memory_than_small_ones() -> None:
    read = json.loads((ROOT / "records/data-cpu/results.json").read_text())
    assert read["setting"]["size"] == 224
    for name in ("the same batches", "epoch"):
        few, many = read[name]["2000"], read[name]["40000"]
        assert abs(many["peak, MB"] / few["peak, MB"] - 1) < 0.1
        assert many["peak, MB"] < 1500
        assert many["first batch, s"] < 5
    assert read["epoch"]["40000"]["pictures"] > 39_000
    assert read["pictures a second"]["ratio"] >= 0.95
    assert read["pictures a second"]["of processor time"] >= 0.95
