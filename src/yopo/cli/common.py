"""What several commands share."""

import os
from typing import Any

from rich.console import Console


def pick_device(name: str | None) -> Any:  # noqa: ANN401
    """The device of that name; by default a GPU if there is one, and this process's own."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no GPU here; leave it out, or use cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return torch.device(name)


def rank() -> int:
    """This process's number under torchrun, else 0."""
    return int(os.environ.get("RANK", "0"))


def pages() -> Console:
    """A console for wide tables: where nobody's window sets a width, 160 columns."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, markup=False, width=160)
    return console


def nothing_else(rest: list[str]) -> None:
    """Refuse arguments that a command does not have."""
    if rest:
        raise ValueError(f"did not expect {' '.join(rest)}; see --help")
