"""The tools that kill runs find no difference, and would find one."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it forks others, and torch must not have started threads."""
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_killed_runs_end_as_the_unkilled_one(tmp_path: Path) -> None:
    record = tmp_path / "record"
    done = python("-m", "tools.kills", "--kills", "8", "--only", "free", "--out", str(record))
    assert done.returncode == 0, done.stderr
    found = json.loads((record / "kills.json").read_text())
    assert found["kills"] == 8
    assert found["runs_that_differ"] == 0
    lines = (record / "kills.jsonl").read_text().splitlines()
    assert sum(found["by_place"].values()) == len(lines) == 8


SABOTAGE = """
import signal, sys
from pathlib import Path
from tools import kills
from yopo.runs.snapshot import Snapshot

folder = Path(sys.argv[1])
run = kills.Scenario("free", "accumulation, bf16, AdamW", kills.write_data(folder / "data.npz"))
assert kills.forked(lambda: run.train(folder / "whole"), None).code == 0

def dies(say):
    kills._die_at_place("step", 6, say)
    run.train(folder / "killed")

for sabotage in (False, True):
    ended = kills.forked_with_words(dies, None)
    assert (ended.code, ended.words) == (-signal.SIGKILL, "after step"), ended.words
    if sabotage:
        real = Snapshot.put_back
        lost = lambda tensors: tensors | {"method.eta": 0 * tensors["method.eta"]}
        Snapshot.put_back = lambda self, tensors: real(self, lost(tensors))
    assert kills.forked(lambda: run.train(folder / "killed"), None).code == 0
    found, expected = (kills.outcome(folder / name) for name in ("killed", "whole"))
    print(kills.differences(found, expected))
    (folder / "killed").rename(folder / f"killed {sabotage}")
"""


def test_a_state_that_is_not_put_back_is_found(tmp_path: Path) -> None:
    """Free's perturbation, forgotten by a run that goes on after a kill."""
    done = python("-c", SABOTAGE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    sound, forgetful = done.stdout.splitlines()
    assert sound == "[]"
    assert "model-last.safetensors fc1.weight differs" in forgetful
    assert "metrics differ" in forgetful


def test_when_one_of_two_is_killed_the_other_says_so_and_the_run_goes_on() -> None:
    done = python("-m", "tools.rank_kills", "--runs", "1")
    assert done.returncode == 0, done.stderr
    assert "1 forked, the other ended after" in done.stdout


def test_the_record_of_killed_ranks() -> None:
    """All ended in a minute, all went on with another number of processes, none was wrong."""
    there = ROOT / "records/rank-kills-cpu"
    kills = [json.loads(line) for line in (there / "kills.jsonl").read_text().splitlines()]
    assert len(kills) >= 100
    assert all(kill["killed"] and kill["code"] is not None for kill in kills)
    assert max(kill["seconds"] for kill in kills) <= 60
    assert {kill["resumed_with"] for kill in kills} == {1, 3}  # of two
    assert [kill for kill in kills if kill["wrong"]] == []
    assert {kill["how"] for kill in kills} == {"forked", "torchrun"}
    assert (
        f"# {len(kills)} runs of two processes, one of which was killed"
        in (there / "README.md").read_text()
    )
    row = next(
        x for x in (ROOT / "records/README.md").read_text().splitlines() if "rank-kills" in x
    )
    assert f"| {len(kills)} training runs of two processes" in row
