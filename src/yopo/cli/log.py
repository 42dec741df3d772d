"""A log that cannot end a run: on a full disk, into `| head`, on a terminal that was closed."""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Log(io.TextIOBase):
    """Standard output, where what cannot be written is left out.

    It has no buffer, so that what comes once there is room again is written, and nothing is left
    to fail when the process ends.
    """

    def __init__(self, handle: int, encoding: str) -> None:
        self._handle, self._encoding, self._failed = handle, encoding, False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As of the stream it stands for."""
        return self._encoding

    def fileno(self) -> int:
        """The file itself."""
        return self._handle

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        return os.isatty(self._handle)

    def writable(self) -> bool:
        """Always, as far as anyone can tell."""
        return True

    def write(self, text: str) -> int:
        """Write, or say once that it does not work."""
        left = text.encode(self._encoding, "replace")
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as error:
            if not self._failed:
                with suppress(OSError):
                    why = error.strerror or error
                    print(f"yopo: the log cannot be written ({why}); going on", file=sys.stderr)
            self._failed = True
        return len(text)


@contextmanager
def steady() -> Iterator[None]:
    """Meanwhile, print into such a log."""
    before = sys.stdout
    try:
        handle = before.fileno()
    except (OSError, AttributeError):  # a notebook's or a test's
        yield
        return
    if isinstance(before, Log):
        yield
        return
    with suppress(OSError):
        before.flush()
    sys.stdout = Log(handle, before.encoding or "utf-8")
    try:
        yield
    finally:
        sys.stdout = before


@contextmanager
def unread_is_no_fault() -> Iterator[None]:
    """End quietly where nobody reads what is printed any more, as in `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        if not is_unread(error):
            raise
        _, takes = os.pipe()  # what is left in the buffer goes there: Python flushes it again
        os.dup2(takes, sys.stdout.fileno())
        sys.exit(141)  # as a shell says of a command that SIGPIPE ended


def is_unread(error: BaseException) -> bool:
    """Whether an error is that the reader of the standard output is gone."""
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, AttributeError):  # a test's, or a system without it
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
