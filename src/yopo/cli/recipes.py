"""`yopo recipes`."""

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from yopo.cli.common import Terminal, nothing_else

if TYPE_CHECKING:
    from yopo.runs.recipes import Reached

EXAMPLES = """examples:
  yopo recipes
  yopo train cifar10-yopo-5-3 --dry-run     all settings of a recipe, and its time here"""


def options(_parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """List the recipes: the network, what they took and what they reached."""
    nothing_else(args, rest)
    console = Terminal()
    console.say("Start with the demo: yopo train demo --out runs/first")
    console.print(
        f"{'':26}{'network':16}{'training':>9}{'clean':>8}{'PGD, CW':>9}{'AutoAttack':>12}"
    )
    for about, rows in listed():
        console.say(about)
        for name, network, took, clean, worst, suite in rows:
            row = f"  {name:24}{network:16}{took:>9}{clean:>8}{worst:>9}{suite:>12}"
            console.print(row, soft_wrap=True)
    console.say(
        "training: time spent processing batches on one NVIDIA H200. clean: test images that are "
        "right; PGD, CW: right under both, image by image; AutoAttack: right under that suite, the "
        "strongest here, and so the number to go by. *: of 1,000 test images or fewer. –: not "
        "measured. Where there are several seeds, their mean; AutoAttack is of one. records/ has "
        "the runs; `yopo train RECIPE --dry-run` tells the time here."
    )


def listed() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """What recipes of one kind are, and of each its name, network, time and three accuracies."""
    from yopo.runs.recipes import REACHED, RECIPES, Reached

    for kind, group in groupby(RECIPES.items(), lambda item: item[1][0].partition(":")[0]):
        rows, alike = [], list(group)
        for name, (_, tree) in alike:
            told = REACHED.get(name, Reached(None, None, None, None, ""))
            took = "–" if told.seconds is None else _duration(told.seconds)
            shares = (_share(told, of) for of in ("clean", "pgd_cw", "autoattack"))
            rows.append((name, tree["model"]["name"], took, *shares))
        yield alike[0][1][0] if len(alike) == 1 else kind, rows


def _share(told: "Reached", of: str) -> str:
    """As 43.0%, with a mark if it is of few images."""
    share = getattr(told, of)
    return "– " if share is None else f"{share:.1f}%{'*' if of in told.few else ' '}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
