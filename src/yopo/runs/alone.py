"""One process at a time trains in a folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_held = set[int]()  # folders, as they are open in this process


@cache
def _not_by_workers() -> None:
    """What a run forks has none of its locks: a worker may outlive it by seconds."""

    def let_go() -> None:
        while _held:
            with suppress(OSError):
                os.close(_held.pop())

    os.register_at_fork(after_in_child=let_go)


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep a second process from training in the same folder; a killed one leaves no lock."""
    if sys.platform == "win32":
        yield
        return
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    _held.add(folder)
    _not_by_workers()
    try:
        with suppress(OSError):  # not every file system has locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is training in {out}") from None
        yield
    finally:
        if folder in _held:  # and this is no process that was forked meanwhile
            _held.remove(folder)
            os.close(folder)
        if fresh:
            with suppress(OSError):  # it holds a run
                out.rmdir()
