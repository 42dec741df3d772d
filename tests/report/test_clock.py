"""Times that compare runs: the median epoch's, and none where the machine was busy."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.reports import Page, write_run
from yopo.cli import report
from yopo.evaluation.card import duration
from yopo.paper.reproduced import summary
from yopo.paper.words import notes
from yopo.report.clock import busy, epoch_seconds, undisturbed
from yopo.report.curves import save_figures
from yopo.report.headline import headline
from yopo.report.page import page
from yopo.report.records import read_runs

PGD = {"method": {"name": "pgd", "steps": 5}}
# As measured beside other work: PGD-15's epochs, 0.33 of whose propagations YOPO-3-5 made.
BUSY = (12.5, 12.2, 8.8, 25.4, 82.0, 158.6, 87.4)


def timed(folder: Path, epochs: Sequence[float], cost: float, processors: float = 0.0) -> Path:
    """The run with epochs of these seconds, each of `cost` propagations, on a part of a CPU."""
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    lines, seconds = [], 0.0
    for number, each in enumerate(epochs, 1):
        seconds += each
        spent = {"train_seconds": seconds, "propagations": cost * number}
        if processors:
            spent["processor_seconds"] = processors * seconds
        lines.append(line | spent | {"epoch": number})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = json.loads((folder / "result.json").read_text()) | spent
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_few_slow_epochs_change_no_ratio(tmp_path: Path) -> None:
    pgd = timed(write_run(tmp_path / "pgd", PGD), [10.0] * 8, 3.0)
    fast = timed(write_run(tmp_path / "fast"), [4.0] * 7 + [80.0], 1.0)
    runs = read_runs([pgd, fast])
    assert epoch_seconds(runs[1]) == pytest.approx([4.0] * 7 + [80.0])
    assert [busy(run) for run in runs] == [None, None]
    assert undisturbed([runs[1]]) == pytest.approx(32.0)
    (said,) = [s for s in headline(runs) if " trained in " in s]
    assert "YOPO-2-2 trained in 0.40 of PGD-5's time (32.0 s for 3 epochs against 80.0 s" in said
    assert "by the median epoch" in said
    rows = Page(page(runs)).tables["runs"]
    assert [row[rows[0].index("training")] for row in rows[1:]] == ["80.0 s", "108.0 s"]  # totals


@pytest.mark.parametrize("slow", ["pgd", "fast"])
def test_epochs_that_scatter_say_that_the_machine_was_busy(tmp_path: Path, slow: str) -> None:
    times = {"pgd": [10.0] * 7, "fast": [10.0] * 7} | {slow: list(BUSY)}
    pgd = timed(write_run(tmp_path / "pgd", PGD), times["pgd"], 3.0)
    fast = timed(write_run(tmp_path / "fast"), times["fast"], 1.0)
    runs = read_runs([pgd, fast])
    said = " ".join(headline(runs))
    assert " trained in " not in said
    assert "The machine was busy while YOPO-2-2 or PGD-5 trained" in said
    assert "epochs took 8.8 s to 2.6 min" in said
    assert "YOPO-2-2 made 0.33 of PGD-5's propagations" in said
    found = Page(page(runs))
    column = found.tables["runs"][0].index("training")
    cells = {row[0].split()[0]: row[column] for row in found.tables["runs"][1:]}
    assert cells[slow].startswith(duration(sum(BUSY)))
    assert cells[slow].endswith("the machine was busy: epochs took 8.8 s to 2.6 min")
    assert sum("busy" in cell for cell in cells.values()) == 1
    assert "against time they stand too far right" in found.text


def test_a_busy_machine_is_told_in_the_terminal_the_figure_and_the_papers_table(
    tmp_path: Path,
) -> None:
    pgd = timed(write_run(tmp_path / "pgd-5-seed-0", PGD), [10.0] * 7, 3.0)
    fast = timed(write_run(tmp_path / "yopo-5-10-seed-0"), BUSY, 1.0)
    runs = read_runs([pgd, fast])
    told = report.summary(runs)
    assert [*told.columns[1].cells] == ["70.0 s", "6.4 min (busy)"]
    assert "busy: epochs took so unlike times" in str(told.caption)
    assert "busy" not in str(report.summary(runs[:1]).caption)
    save_figures(runs, tmp_path / "f")
    for stem, many in (("accuracy-time", 2), ("accuracy-propagations", 0)):
        drawn = (tmp_path / "f" / f"{stem}.svg").read_text()
        named = re.findall(r"<!-- (.*?) \(busy machine\), (?:robust|clean) -->", drawn)
        assert len(named) == many
    said = notes(summary("table1", tmp_path))
    words = "The machine was busy, so that the time of training does not count"
    (note,) = [text for text in said if words in text]
    assert note == f"yopo-5-10 (seed 0): {words} (epochs took 8.8 s to 2.6 min)."


def test_steady_times_that_do_not_fit_the_propagations_are_no_ratio(tmp_path: Path) -> None:
    """The machine was as busy from the first epoch to the last."""
    pgd = timed(write_run(tmp_path / "pgd", PGD), [10.0] * 7, 3.0)
    fast = timed(write_run(tmp_path / "fast"), [14.6] * 7, 1.0)
    said = " ".join(headline(read_runs([pgd, fast])))
    assert " trained in " not in said
    assert "a propagation of YOPO-2-2 took 4.4 times as long as one of PGD-5" in said


@pytest.mark.parametrize("hardware", ["x86_64 cpu, 1 threads", "one GPU"])
def test_a_machine_that_was_always_busy_is_known_by_its_processor_time(
    tmp_path: Path, hardware: str
) -> None:
    """All of PGD's epochs took twice as long as alone; neither scatter nor cost tells."""
    pgd = timed(write_run(tmp_path / "pgd", PGD, hardware=hardware), [20.0] * 7, 2.0, 0.5)
    fast = timed(write_run(tmp_path / "fast", hardware=hardware), [6.0] * 7, 1.0, 1.0)
    said = " ".join(headline(read_runs([pgd, fast])))
    if "cpu" in hardware:
        assert " trained in " not in said
        assert "(YOPO-2-2 had 1.00 processors to itself, PGD-5 0.50)" in said
        assert "YOPO-2-2 took 0.60 of PGD-5's processor time and made 0.50 of its propag" in said
    else:  # where a processor waits for the GPU its time says nothing
        assert "YOPO-2-2 trained in 0.30 of PGD-5's time" in said


def test_of_several_seeds_the_undisturbed_ones_count(tmp_path: Path) -> None:
    pgd = timed(write_run(tmp_path / "pgd", PGD), [10.0] * 7, 3.0)
    seeds = [
        timed(write_run(tmp_path / f"y-{seed}", {"seed": seed}), times, 1.0)
        for seed, times in enumerate(([5.0] * 7, BUSY))
    ]
    said = " ".join(headline(read_runs([pgd, *seeds])))
    assert "trained in 0.50 of PGD-5's time (35.0 s for 3 epochs against 70.0 s" in said
