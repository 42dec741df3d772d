"""A run that torchrun starts goes on by itself when one of its processes is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.tiny import PATIENCE, wait_until
from yopo.core import seals
from yopo.runs import state

EPOCHS = 12


def children(pid: int) -> list[int]:
    listed = ["ps", "-o", "pid=", "--ppid", str(pid)]
    return [int(p) for p in subprocess.run(listed, capture_output=True).stdout.split()]


def test_torchrun_starts_a_killed_worker_again_and_the_run_goes_on(tmp_path: Path) -> None:
    """The command of docs/launching.md, on two CPU processes."""
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "3", "-m"]
    tiny = ["--batch", "100", "--data.held_out", "4500", "--evaluate.images", "50", "--device=cpu"]
    tiny += ["--evaluate.steps", "2", "--model.options.width", "4", "--epochs", str(EPOCHS)]
    tiny += ["--method.name", "fast", "--checkpoint.pause", "0"]
    with (tmp_path / "said").open("w+") as said:
        run = subprocess.Popen(
            [*torchrun, "yopo", "train", "demo", "--out", str(out), "--resume", *tiny],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            # After the first epoch's checkpoint: what follows is no beginning from nothing.
            wait_until(lambda: len(state.saved(out / "state")) > 1 or run.poll() is not None)
            first = children(run.pid)
            os.kill(first[-1], signal.SIGKILL)
            assert run.wait(PATIENCE) == 0, (tmp_path / "said").read_text()
        finally:
            run.kill()
    words = (tmp_path / "said").read_text()
    assert "going on from epoch" in words
    assert seals.read_json(out / "result.json")["last"]["clean"] >= 0
    lines, torn = seals.read_lines(out / "metrics.jsonl")
    assert ([line["epoch"] for line in lines], torn) == ([*range(1, EPOCHS + 1)], None)
