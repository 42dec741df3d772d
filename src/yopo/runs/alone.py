"""One process at a time trains in a folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep a second process from training in the same folder; a killed one leaves no lock."""
    if sys.platform == "win32":
        yield
        return
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system has locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is training in {out}") from None
        yield
    finally:
        os.close(folder)
        if fresh:
            with suppress(OSError):  # it holds a run
                out.rmdir()
