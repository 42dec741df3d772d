"""How the processes of a run find each other: over a store with old keys, again, or not at all."""

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from tests.tiny import PATIENCE, as_one_of, forkserver, free_port, wait_until
from yopo.__main__ import main
from yopo.runs import meeting
from yopo.runs.meeting import Patience

SHORT = Patience(connecting=1, told=PATIENCE)  # who answers late is not gone
Plan = tuple[str, ...]  # what the first tries to connect come to


def pair(target: Any, *given: Any) -> list[Any]:
    """Two processes that do target(rank, *given); once they have ended."""
    context = forkserver()
    both = [context.Process(target=target, args=(rank, *given), daemon=True) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(PATIENCE)
    return both


def say(folder: Path, rank: int, words: object) -> None:
    (folder / str(rank)).write_text(str(words))


def said(folder: Path) -> list[str]:
    return [(folder / str(rank)).read_text() for rank in (0, 1)]


def total() -> float:
    """The sum of 1 and 2, if the two processes speak with each other."""
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return float(value)


def restarted(rank: int, late: int, port: int, folder: Path) -> None:
    """What a worker of torchrun's does, up to its end without a word."""
    as_one_of(2, rank, port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if rank == late:
        wait_until((folder / "waiting").exists)
        time.sleep(0.1)
    else:
        (folder / "waiting").touch()
    meeting.meet("gloo", None)
    say(folder, rank, total())
    os._exit(0)


@pytest.mark.parametrize("late", [0, 1])
def test_what_killed_processes_left_in_the_store_is_not_taken_for_the_new_ones(
    late: int, tmp_path: Path
) -> None:
    """With `init_process_group` alone the one that comes first waits at the old address."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        pair(restarted, late, agent.port, folder)
        assert said(folder) == ["3.0", "3.0"]


def trying(rank: int, plans: tuple[Plan, Plan], port: int, folder: Path) -> None:
    """Meet the other; the first tries to connect come to what the plan says."""
    as_one_of(2, rank, port)
    real, tried = dist.init_process_group, list[str]()

    def connect(*args: Any, **options: Any) -> None:
        if isinstance(options["store"], HashStore):  # it forgets the try
            return real(*args, **options)
        plan = dict(enumerate(plans[rank])).get(len(tried), "connects")
        tried.append(plan)
        if plan in ("connects", "is cut off"):
            real(*args, **options)
        if plan == "hangs":
            time.sleep(1)
        if plan != "connects":
            raise RuntimeError(f"it {plan}\nand pages of torch's")
        return None

    dist.init_process_group = connect
    try:
        meeting.meet("gloo", None, SHORT)
        say(folder, rank, f"{len(tried)} tries, {total()}")
    except RuntimeError as error:
        assert not dist.is_initialized()
        say(folder, rank, error)
        wait_until((folder / str(1 - rank)).exists)  # the store is in the first


@pytest.mark.parametrize(
    ("first", "second", "tries"),
    [
        (("raises",), ("raises",), 2),
        (("hangs",), ("raises",), 2),
        (("is cut off",), (), 2),  # the other one has connected
        ((), ("is cut off", "raises"), 3),  # and then cannot
    ],
)
def test_what_one_could_not_connect_to_all_try_again(
    first: Plan, second: Plan, tries: int, tmp_path: Path
) -> None:
    both = pair(trying, (first, second), free_port(), tmp_path)
    assert [process.exitcode for process in both] == [0, 0]
    assert said(tmp_path) == [f"{tries} tries, 3.0"] * 2


def test_after_three_tries_all_end_with_the_same_sentence(tmp_path: Path) -> None:
    pair(trying, (("is cut off",) * 3, ()), free_port(), tmp_path)
    text = "could not connect to each other, 3 times (process 0: it is cut off)"
    assert all(text in words for words in said(tmp_path))


def killed_in(rank: int, where: str, killed: int, port: int, folder: Path) -> None:
    """Train as one of two without torchrun; one is killed when both have come."""
    as_one_of(2, rank, port)
    with (folder / str(rank)).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    real = getattr(meeting, where)

    def dies(*args: Any, **options: Any) -> Any:
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(meeting, where, dies)
    patience = Patience(connecting=1, told=1)
    meeting.meet = partial(meeting.meet, patience=patience)
    sys.argv = ["yopo", "train", "demo", "--device", "cpu", "--out", str(folder / "run")]
    main()


@pytest.mark.parametrize(
    ("where", "killed"), [("_connected", 0), ("_connected", 1), ("_first_wrong", 1)]
)
def test_one_killed_while_they_meet_is_missed(where: str, killed: int, tmp_path: Path) -> None:
    """Without torchrun, which would end the other: it ends by itself, and says why."""
    both = pair(killed_in, where, killed, free_port(), tmp_path)
    words = " ".join(said(tmp_path)[1 - killed].split())
    assert both[killed].exitcode == -signal.SIGKILL
    assert both[1 - killed].exitcode == 2, words
    assert f"process {1 - killed} cannot reach another one" in words


def test_one_that_does_not_come_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RuntimeError, match="process 0 of 2 waited 1 s for all to come"):
        meeting.meet("gloo", None, Patience(coming=1))
    assert not dist.is_initialized()


def test_who_meets_is_missed_within_a_minute_and_later_waiting_may_take_hours() -> None:
    usual = Patience()
    assert cast(Any, HashStore()).timeout == timedelta(seconds=usual.coming)
    assert usual.connecting + usual.told < 60 < 3600 < usual.waiting
