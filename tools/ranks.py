"""Processes that train one run together, forked from this one and watched by nobody else."""

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny import as_one_of, free_port
from tools.kills import Scenario
from yopo.runs.trainer import Trainer


class Process:
    """One of the processes of a run, forked from this one."""

    def __init__(
        self,
        scenario: Scenario,
        out: Path,
        rank: int,
        world: int,
        port: int,
        first: Callable[[], None],
    ) -> None:
        here, there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(here)
            _train(scenario, out, rank, world, port, there, first)
        os.close(there)
        self._pipe, self._words = here, b""
        self.code: int | None = None
        self._spent = 0.0
        os.set_blocking(here, False)

    def words(self) -> str:
        """What it said so far: that it has met the others, and why it ended."""
        try:
            while part := os.read(self._pipe, 4096):
                self._words += part
        except BlockingIOError:
            pass
        return self._words.decode(errors="replace")

    def wait(self, seconds: float) -> int | None:
        """Its exit status, or None if it still runs."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self._spent = used.ru_utime + used.ru_stime
                break
            if time.monotonic() > end:
                return None
            time.sleep(0.01)
        return self.code

    def spent(self) -> float:
        """Seconds of a processor that it was given."""
        if self.wait(0) is None:
            with open(f"/proc/{self.pid}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:13]
            return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return self._spent

    def tell(self) -> None:
        """Let it write down where it is."""
        os.kill(self.pid, signal.SIGUSR1)
        self.wait(5)

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.wait(0) is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10)

    def close(self) -> None:
        """Forget it."""
        self.words()
        os.close(self._pipe)


def _train(
    scenario: Scenario,
    out: Path,
    rank: int,
    world: int,
    port: int,
    there: int,
    first: Callable[[], None],
) -> None:  # in the new process
    code = 1
    try:
        faulthandler.register(signal.SIGUSR1, there)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        as_one_of(world, rank, port)
        real = Trainer.run

        def run(self: Trainer) -> dict[str, Any]:
            os.write(there, b"met\n")
            return real(self)

        Trainer.run = run  # type: ignore[method-assign]
        first()
        scenario.train(out)
        code = 0
    except BaseException as error:
        os.write(there, f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(code)


def start(
    scenario: Scenario, out: Path, world: int, first: dict[int, Callable[[], None]] | None = None
) -> list[Process]:
    """All processes of a run; `first`: what some ranks do before it."""
    port = free_port()
    first = {rank: lambda: None for rank in range(world)} | (first or {})
    return [Process(scenario, out, rank, world, port, first[rank]) for rank in range(world)]
