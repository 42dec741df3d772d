"""`torchrun -m yopo eval`: the numbers of one process, shared out; who writes and who ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.cli.test_commands import TWO, yopo
from tests.cli.test_eval import run
from tests.runs.test_launch import children
from tests.tiny import PATIENCE, as_one_of, command_line, in_two, wait_until
from yopo.core import tensor_files
from yopo.evaluation import network

__all__ = ["run"]

WORDS = ("--attacks", "pgd-3-2,cw-linf-2", "--samples", "60", "--batch", "8", "--device", "cpu")
LONG = ("--attacks", "pgd-20-5", "--samples", "100", "--batch", "4", "--device", "cpu")


def evaluate(rank: int, port: int, out: str) -> None:
    """In one of two processes, with a count of the images that pass through the network."""
    as_one_of(2, rank, port)
    passed, real = [0], network.Network.forward

    def forward(self: network.Network, x: Tensor) -> Tensor:
        passed[0] += len(x)
        return real(self, x)

    network.Network.forward = forward  # type: ignore[method-assign]
    words = ["eval", f"{out}/run", *WORDS, "--save-examples", "--radii"]
    command_line(words, f"{out}/said-{rank}")
    assert not dist.is_initialized()
    torch.save({"passed": passed[0]}, f"{out}/{rank}.pt")


def told(folder: Path) -> dict[str, Any]:
    """All of eval.json that is not a time."""
    tree: dict[str, Any] = json.loads((folder / "eval.json").read_text())
    del tree["sha256"]
    for attack in tree["attacks"].values():
        del attack["seconds"]
        attack["propagations"] = round(attack["propagations"], 9)  # a sum in another order
    facts = ("images", "images_sha256", "weights_sha256", "seed", "batch", "threat")
    return tree | {"about": {key: tree["about"][key] for key in facts}}


@pytest.mark.usefixtures("float32")
def test_two_processes_write_what_one_writes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, threads = tmp_path / "alone", torch.get_num_threads()
    shutil.copytree(run, alone)
    torch.set_num_threads(1)  # as there: what is added up in another order rounds otherwise
    try:
        assert yopo(monkeypatch, "eval", alone, *WORDS, "--save-examples", "--radii") == 0
    finally:
        torch.set_num_threads(threads)
    both = in_two(evaluate, tmp_path)
    assert told(run) == told(alone)
    ours, theirs = (
        tensor_files.load_weights(folder / "eval-examples.safetensors") for folder in (run, alone)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not (run / "eval-state").exists()
    first, second = ((tmp_path / f"said-{rank}").read_text() for rank in (0, 1))
    assert first.count("worst case") == first.count("card: ") == 1
    assert second == ""
    passed = [each["passed"] for each in both]
    assert max(passed) < 0.65 * sum(passed)  # the first looks at the examples again


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_who_is_interrupted_or_killed_ends_all_and_one_process_goes_on(
    number: signal.Signals, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, kept = ["eval", str(run), *LONG], run / "eval-state"
    with (tmp_path / "said").open("w+") as said:
        launched = subprocess.Popen(
            [sys.executable, *TWO, "-m", "yopo", *words],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            wait_until(lambda: launched.poll() is not None or len([*kept.rglob("pgd*")]) > 4)
            whom = launched.pid if number == signal.SIGINT else children(launched.pid)[-1]
            os.kill(whom, number)
            assert launched.wait(PATIENCE) != 0
        finally:
            launched.kill()
    shown = (tmp_path / "said").read_text()
    assert not (run / "eval.json").exists(), shown
    if number == signal.SIGINT:
        assert f"To go on: torchrun as before, -m yopo {' '.join(words)}" in shown
    before = {*kept.rglob("pgd*")}
    assert len(before) > 4
    written: list[Path] = []
    save = tensor_files.save_weights

    def noted(path: Path, *given: Any, **options: Any) -> None:
        written.append(path)
        save(path, *given, **options)

    monkeypatch.setattr(tensor_files, "save_weights", noted)
    assert yopo(monkeypatch, *words) == 0
    assert written
    assert not {*written} & before  # no finished batch was attacked again
    assert (run / "eval.json").exists()
