"""docs/security.md: every sentence has a test."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile import write_full_run
from tests.reports import Page
from tools.hostile import BAD

ROOT = Path(__file__).parents[1]
# The beginning of each sentence, and what shows it.
TESTS = {
    "What you type is trusted": "runs.test_strangers.test_the_users_own_word_builds_it",
    "`yopo train`, `compare`": "runs.test_strangers."
    "test_a_run_is_trained_from_what_the_user_says_alone",
    "Modules in the working directory": "runs.test_strangers.test_a_named_function_is_not_called",
    "Do not run `python -m yopo`": "test_security.test_python_looks_in_the_working_directory",
    "It may name our own networks": "runs.test_strangers.test_a_named_function_is_not_called",
    "`yopo.load`, `yopo predict`": "runs.test_loading.test_loading_follows_the_rule_of_trust",
    "To timm it may": "runs.test_strangers.test_timm_is_not_given_options_that_are_not_plain",
    "No network is built": "runs.test_strangers."
    "test_absurd_sizes_are_refused_before_memory_is_taken",
    "Its settings start": "runs.test_strangers.test_a_strangers_pictures_are_not_blown_up",
    "Of `hf:ORG/NAME` settings": "frameworks.test_hub."
    "test_a_strangers_repository_follows_the_rule_of_trust",
    "Weights are safetensors": "cli.test_eval.test_a_run_or_checkpoint_that_does_not_fit_is_named",
    "With `yopo eval --model.name": "runs.test_borrowed.test_a_file_of_weights_runs_no_code",
    "Of these only dense": "runs.test_borrowed."
    "test_archives_that_unpack_to_more_are_refused_before",
    "It says which data": "runs.test_strangers.test_data_on_another_computer_are_not_asked_for",
    "Data that a function of yours": "runs.test_strangers."
    "test_a_function_that_makes_data_is_not_imported_without_trust",
    "Where data have": "runs.test_loading."
    "test_data_are_found_where_the_run_moved_with_them_or_named",
    "Data are never fetched": "runs.test_strangers.test_missing_data_are_not_fetched",
    "Reading data runs no code": "runs.test_strangers.test_data_run_no_code",
    "Damaged or absurd files": "test_fuzz.test_damaged_files_are_read_or_refused_in_a_sentence",
    "Links in the folder": "runs.test_strangers.test_nothing_is_written_through_a_link",
    "A folder of checkpoints": "runs.test_folder."
    "test_a_folder_that_a_link_stands_for_is_refused_before_anything_is_written",
    "`yopo robustbench` writes": "runs.test_robustbench."
    "test_only_what_was_written_is_named_and_no_link_is_followed",
    "`yopo push` sends": "frameworks.test_hub.test_what_is_published_is_a_run_with_its_evaluation",
    "`yopo report` reads": "test_security.test_the_report_builds_no_network_and_reads_no_data",
    "On the report's page": "report.test_hostile.test_no_word_becomes_an_element_or_an_attribute",
    "The page's policy": "report.test_browser.test_hostile_words_run_nothing_and_fetch_nothing",
    "In the terminal": "runs.test_strangers.test_no_name_steers_the_terminal",
    "In a card's Markdown": "runs.test_strangers."
    "test_every_word_of_an_evaluation_is_a_word_in_markdown",
    "The commit in a card": "runs.test_strangers.test_the_commit_is_read_and_git_is_not_asked",
    "Nobody vouches": "report.test_page.test_tables_and_cards_hold_every_number_of_the_records",
    "`yopo eval` goes on": "evaluation.test_journal.test_a_strangers_batches_are_computed_again",
    "With `--track` an": "runs.test_tracking."
    "test_a_strangers_note_does_not_say_which_run_trackers_go_on_with",
}


def test_every_sentence_has_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    sentences = re.findall(r"(?m)^- (.+)$", text)
    assert len(sentences) == len(TESTS)
    for sentence, start in zip(sentences, TESTS, strict=True):
        assert sentence.startswith(start)
    for test in TESTS.values():
        module, _, name = test.rpartition(".")
        path = ROOT / "tests" / f"{module.replace('.', '/')}.py"
        tree = ast.parse(path.read_text())
        assert name in {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}


@pytest.mark.parametrize("safe", [False, True])
def test_python_looks_in_the_working_directory(tmp_path: Path, safe: bool) -> None:
    """-P is how the installed command starts Python's search: not in the working directory."""
    (tmp_path / "argparse.py").write_text("open('ran', 'w'); raise SystemExit")
    words = [sys.executable, *(["-P"] if safe else []), "-m", "yopo", "--version"]
    path = {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run(words, cwd=tmp_path, env=os.environ | path, check=True, capture_output=True)
    assert (tmp_path / "ran").exists() != safe


LOOK = """
import sys, torch
def stop(*_, **__):
    raise RuntimeError("a network or a data set")
torch.nn.Module.__init__ = stop
import yopo.data
yopo.data.load = yopo.data.sources.load = stop
from yopo import cli
sys.argv = ["yopo", "report", *sys.argv[1:]]
cli.main()
builders = {"yopo.runs.build", "yopo.runs.strangers", "yopo.runs.saved"}
print("built:", sorted(builders & sys.modules.keys()))
"""


def test_the_report_builds_no_network_and_reads_no_data(tmp_path: Path) -> None:
    run, page = write_full_run(tmp_path / "run"), tmp_path / "report.html"
    words = [sys.executable, "-c", LOOK, str(run), "--out", str(page), "--paper", "table2"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "built: []" in done.stdout
    found = Page(page.read_text())
    # two strips of eight: what an attack broke, and what all networks are shown
    assert len(found.all("img")) == 2 * 8 * 3
    assert found.text.count("read as") == 2 * 7
    assert found.text.count("still right") == 2 * 1  # the class whose answer is its own


def test_the_record_of_hostile_folders() -> None:
    """What records/hostile-cpu counts: nothing of BAD, and no less than 50 folders."""
    record = json.loads((ROOT / "records" / "hostile-cpu" / "hostile.json").read_text())
    counts = record["counts"]
    assert counts["cases"] == len(record["cases"]) >= 50
    assert {key: counts[key] for key in BAD if counts[key]} == {}
    row = next(
        s for s in (ROOT / "records" / "README.md").read_text().splitlines() if "hostile-" in s
    )
    assert f"| {counts['cases']} hostile run folders" in row
    assert f" {counts['runs of commands']} times in all" in row
    runs = [found for case in record["cases"].values() for found in case.values()]
    for key in (*BAD, "done", "refused"):
        assert sum(found.get(key, 0) for found in runs) == counts[key]
