"""What several commands share."""

import argparse
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from yopo.core import files, seals
from yopo.runs.overlay import Tree

STEERING = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]"
)


def pick_device(name: str | None) -> Any:  # noqa: ANN401
    """The device of that name; by default a GPU if there is one, and this process's own."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no GPU here; leave it out, or use cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.zeros(1).to(device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"--device {name}: torch cannot use it here ({why}); leave it out, or use cpu"
        ) from None
    return device


def trust_options(parser: argparse.ArgumentParser) -> None:
    """How a user vouches for the code that a run names."""
    parser.add_argument(
        "--trust", action="store_true", help="build whatever network the run names: it may be code"
    )
    parser.add_argument(
        "--model.name",
        dest="model_name",
        metavar="NAME",
        help="the run's network, my_module:build_model, where it is a function of your own",
    )


class Terminal(Console):
    """A console on which names from files are names: no markup, and nothing that steers it."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401
        """All words pass through here, those in tables too."""
        return super().render_str(clean(text), **options)


def say(words: object) -> None:
    """Print a line in which names from files are names."""
    print(clean(str(words)))


def clean(text: str) -> str:
    """With what would steer a terminal, or turn the order of letters, written out."""
    return STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def rank() -> int:
    """This process's number under torchrun, else 0."""
    return int(os.environ.get("RANK", "0"))


def pages() -> Console:
    """A console for wide tables: where nobody's window sets a width, 160 columns."""
    console = Terminal()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Terminal(width=160)
    return console


def read_yaml(path: Path, *, run: bool = False) -> Tree:
    """The settings in a file; in that of a run their checksum must agree."""
    try:
        tree = seals.read_yaml(path) if run else files.read_yaml(path)
    except FileNotFoundError:
        raise ValueError(f"no file {path}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"expected settings in {path}, got {type(tree).__name__}")
    return tree


def check_writable(folder: Path) -> None:
    """Find out before the work whether its result can be kept."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}); copy it first") from None


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def check_drawing(what: str) -> None:
    """Find out before the work whether its picture can be drawn."""
    if not can_draw():
        raise ValueError(f"{what} needs matplotlib: pip install matplotlib")


def nothing_else(rest: list[str]) -> None:
    """Refuse arguments that a command does not have."""
    if rest:
        raise ValueError(f"did not expect {' '.join(rest)}; see --help")
