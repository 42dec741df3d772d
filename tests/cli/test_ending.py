"""One of several processes ends with what it did, whatever is left of torch's threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import atexit, builtins, os, sys
class Thread:  # of torch's, that needs Python while Python ends
    def __del__(self, abort=os.abort):
        abort()
builtins.kept = Thread()
from yopo.__main__ import main
real = sys.modules["yopo.cli.ls"] = type(sys)("ls")
real.EXAMPLES, real.options = "", lambda parser: None
def run(args, rest):
    atexit.register(print, "put away")
    print("done", end=" ")
    {what}
real.run = run
sys.argv = ["yopo", "ls"]
main()
"""
ENDS = {
    "pass": 0,
    "raise ValueError('of ours')": 1,
    "sys.exit(130)": 130,
    "sys.exit('a word')": 1,
    "1 / 0": 1,
}


def ended(what: str, processes: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"WORLD_SIZE": str(processes), "RANK": "0"}
    words = [sys.executable, "-c", CODE.format(what=what)]
    return subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("what", ENDS)
def test_what_was_done_counts(what: str, tmp_path: Path) -> None:
    done = ended(what, 2, tmp_path)
    assert (done.returncode, done.stdout) == (ENDS[what], "done put away\n")
    assert bool(done.stderr) == (what not in ("pass", "sys.exit(130)"))


def test_alone_python_ends_as_ever(tmp_path: Path) -> None:
    assert ended("pass", 1, tmp_path).returncode < 0


def test_the_record() -> None:
    root = Path(__file__).parents[2] / "records"
    lines = [line.split() for line in (root / "ends-cpu/log.txt").read_text().splitlines()]
    many = {who: [int(code) for name, _, code in lines if name == who] for who in ("old", "new")}
    failed = {who: sum(map(bool, codes)) for who, codes in many.items()}
    row = next(x for x in (root / "README.md").read_text().splitlines() if "`ends-cpu/`" in x)
    assert f"after {len(lines)} trainings of two processes" in row
    assert f"{failed['old']} of {len(many['old'])} aborted" in row
    assert f"`cli/ending.py` {failed['new']} of {len(many['new'])};" in row
