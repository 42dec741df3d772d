"""What several commands share."""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from yopo import files
from yopo.config import Tree


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


def rank() -> int:
    """This process's number under torchrun, else 0."""
    return int(os.environ.get("RANK", "0"))


def pages() -> Console:
    """A console for wide tables: where nobody's window sets a width, 160 columns."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, markup=False, width=160)
    return console


def read_yaml(path: Path) -> Tree:
    """The settings in a file."""
    try:
        tree = files.read_yaml(path)
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
