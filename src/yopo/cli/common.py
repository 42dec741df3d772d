"""What several commands share."""

import argparse
import difflib
import importlib.util
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

WHOLE = re.compile(r" *(?:pip install \S+|`[^`]*`|\S)+")  # words, and commands to copy
STEERING = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]"
)


def trust_options(parser: argparse.ArgumentParser) -> None:
    """How a user vouches for the code that a run names."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="build whatever network and data the run names: they may be code",
    )
    parser.add_argument(
        "--model.name",
        dest="model_name",
        metavar="NAME",
        help="the run's network, my_module:build_model, where it is a function of your own",
    )


def data_options(parser: argparse.ArgumentParser) -> None:
    """Where a run's data are, if they moved since it was trained."""
    for name, what in (("root", "the folder with the run's data"), ("path", "the npz file")):
        parser.add_argument(
            f"--data.{name}",
            dest=f"data_{name}",
            metavar="PLACE",
            type=Path,
            help=f"{what}, if that moved",
        )


class Terminal(Console):
    """A console on which names from files are names: no markup, and nothing that steers it."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401
        """All words pass through here, those in tables too."""
        return super().render_str(clean(text), **options)

    def say(self, text: str) -> None:
        """Print lines, on a terminal with their breaks between words."""
        if self.is_terminal:
            text = "\n".join(wrapped(text, self.width))
        self.print(text, soft_wrap=True)


def say(words: object, *, error: bool = False) -> None:
    """Print a line in which names from files are names, on a terminal with whole words."""
    Terminal(stderr=error).say(str(words))


def wrapped(
    text: str, width: int, *, words: re.Pattern[str] = WHOLE, indent: str = ""
) -> Iterator[str]:
    """Lines of whole words; a word or a command that is wider is left to the terminal.

    indent: of the lines that another goes on in.
    """
    for line in text.split("\n"):
        now, further = "", indent or ("  " if line.startswith("- ") else "")
        for piece in words.findall(line):
            if now.strip() and cell_len(now + piece) > width:
                yield now
                now, piece = further, piece.lstrip()
            now += piece
        yield now


def clean(text: str) -> str:
    """With what would steer a terminal, or turn the order of letters, written out."""
    return STEERING.sub(lambda match: ascii(match[0])[1:-1], text)


@contextmanager
def loading() -> Iterator[None]:
    """While torch is imported, which takes seconds: Ctrl-C leaves at once.

    As an exception it could come up in the midst of a package's own code, which may hold it for a
    fault of its own, or swallow it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(_number: int, _frame: FrameType | None) -> None:
        os.write(2, b"interrupted; nothing was begun\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def rank() -> int:
    """This process's number under torchrun, else 0."""
    return int(os.environ.get("RANK", "0"))


def pages() -> Terminal:
    """A console for wide tables: where nobody's window sets a width, 160 columns."""
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Terminal(width=160)
    return console


def fitted(table: Table, width: int) -> Table:
    """The table with whole words: where they do not fit side by side, a line for each cell."""
    names = [str(column.header) for column in table.columns]
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    for column, name, below in zip(table.columns, names, cells, strict=True):
        column.min_width = max(map(len, " ".join([name, *below]).split()), default=0)
    borders = 3 * len(names) + 1
    if sum(column.min_width or 0 for column in table.columns) + borders <= width:
        return table
    tall = Table(title=table.title, caption=table.caption, show_header=False)
    tall.add_column(no_wrap=True)
    tall.add_column(overflow="fold")
    for row in zip(*cells, strict=True):
        for name, cell in zip(names, row, strict=True):
            tall.add_row(name, cell)
        tall.add_section()
    return tall


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def check_drawing(what: str) -> None:
    """Find out before the work whether its picture can be drawn."""
    if not can_draw():
        raise ValueError(f"{what} needs matplotlib: pip install matplotlib")


def nothing_else(args: argparse.Namespace, rest: list[str]) -> None:
    """Refuse arguments that a command does not have."""
    if rest:
        option = next((word for word in rest if word.startswith("--")), "").partition("=")[0]
        near = difflib.get_close_matches(option, args.known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        raise ValueError(f"did not expect {' '.join(rest)}; {hint}")
