"""The first sentences: what natural training lacks, what robustness costs, and equal cost."""

import json
from pathlib import Path

from tests.report.test_clock import timed
from tests.reports import Page, write_run
from yopo.report.headline import headline
from yopo.report.page import page
from yopo.report.records import read_runs

PGD = {"method": {"name": "pgd", "steps": 5}}
NATURAL = {"method": {"name": "natural"}}


def clean(folder: Path, share: float) -> Path:
    found = json.loads((folder / "eval.json").read_text())
    found["attacks"]["clean"]["accuracy"] = share
    (folder / "eval.json").write_text(json.dumps(found))
    return folder


def held_out(folder: Path, robust: list[float]) -> Path:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = (json.dumps(line | {"robust": r}) for line, r in zip(lines, robust, strict=True))
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in told))
    return folder


def demo(tmp_path: Path, costs: tuple[float, float] = (3.0, 1.0)) -> list[Path]:
    """Natural, PGD-5 and YOPO-2-2 as in the demo: at equal epochs YOPO ends below PGD."""
    natural = clean(write_run(tmp_path / "natural", NATURAL, robust=0.0), 0.975)
    pgd = clean(write_run(tmp_path / "pgd-5", PGD, robust=0.89), 0.96)
    fast = clean(write_run(tmp_path / "yopo-2-2", robust=0.83), 0.95)
    timed(natural, [1.0] * 4, 0.5)
    held_out(timed(pgd, [10.0] * 4, costs[0]), [0.2, 0.4, 0.6, 0.9])
    held_out(timed(fast, [4.0] * 4, costs[1]), [0.3, 0.5, 0.7, 0.8])
    return [natural, pgd, fast]


def test_the_first_sentence_is_what_natural_training_lacks(tmp_path: Path) -> None:
    runs = read_runs(demo(tmp_path))
    first, costs, equal, *_ = headline(runs)
    assert first == (
        "Natural training answers 97.50% of the clean images right, and 0.00% of 1,000 test "
        "images once attacked with all of pgd-40, cw (L∞, eps = 0.1, best weights)."
    )
    assert "under that attack PGD-5 keeps 89.00% (96.00% clean) for 12 propagations" in costs
    assert "YOPO-2-2 keeps 83.00% (95.00% clean) for 4; natural training made 2." in costs
    assert equal.startswith("At equal cost, the 4 propagations per image of YOPO-2-2's training")
    assert "YOPO-2-2 keeps 80.00% of held-out images under pgd-3, PGD-5 20.00% after 3" in equal
    assert "PGD-5 was then in the middle of a training planned for longer" in equal
    text = page(runs)
    assert "<code>yopo compare --propagations 4</code>" in text
    assert Page(text).text.index(first) < Page(text).text.index("Accuracy and cost")


def test_runs_of_equal_cost_are_said_to_be(tmp_path: Path) -> None:
    said = headline(read_runs(demo(tmp_path, (2.0, 2.0))))
    assert said[2] == "YOPO-2-2 and PGD-5 compare at equal cost: 8 and 8 propagations per image."


def test_no_lesson_where_the_records_teach_none(tmp_path: Path) -> None:
    natural, pgd, fast = demo(tmp_path)
    assert "PGD-5 is the most robust of 2 runs" in headline(read_runs([pgd, fast]))[0]
    found = json.loads((natural / "eval.json").read_text())
    found["worst"] |= {"accuracy": 0.88, "interval": [0.85, 0.91]}  # within chance
    (natural / "eval.json").write_text(json.dumps(found))
    assert headline(read_runs([natural, pgd, fast]))[0].startswith("PGD-5 has the highest")


def test_accuracy_stands_first_and_no_section_gives_another_number(tmp_path: Path) -> None:
    """The training's own PGD, on other images, is folded away and says why it differs."""
    found = Page(page(read_runs(demo(tmp_path))))
    assert [*found.tables] == ["runs", "attacks", "own", "card"]
    assert found.tables["runs"][0][:3] == ["run", "clean", "under attack"]
    assert found.tables["attacks"][0][:3] == ["run", "worst case", "clean"]
    for one, other in zip(found.tables["runs"][1:], found.tables["attacks"][1:], strict=True):
        assert (one[1], one[2]) == (other[2].split()[0], other[1])
    assert "Numbers differ from those above because images and attack do" in found.text
