"""How one of several processes ends."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Let a process of several leave without taking Python apart, once all has been put away.

    Groups of processes may live as long as torch's caches of sharded tensors do. Threads of theirs
    that still hold something of Python's abort the process when they put it down after Python's
    end (pytorch#190489), and torchrun takes a run for lost whose work is done.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, full or unread
                stream.flush()
        os._exit(code)

    atexit.register(leave)  # before what registers itself from now on, which is run before it
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
