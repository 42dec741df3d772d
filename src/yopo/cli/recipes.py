"""`yopo recipes`."""

import argparse

from rich.console import Console
from rich.table import Table

from yopo.cli.common import nothing_else

EXAMPLES = ""


def options(_parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(_args: argparse.Namespace, rest: list[str]) -> None:
    """List the recipes."""
    nothing_else(rest)
    from yopo.runs.recipes import RECIPES

    table = Table(box=None, show_header=False)
    for name, (text, _) in RECIPES.items():
        table.add_row(name, text)
    Console(highlight=False).print(table)
