"""`yopo recipes`."""

import argparse
from collections.abc import Iterator
from itertools import groupby

from yopo.cli.common import Terminal, nothing_else

EXAMPLES = """examples:
  yopo recipes
  yopo train cifar10-yopo-5-3 --dry-run     all settings of a recipe, and its time here"""


def options(_parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(_args: argparse.Namespace, rest: list[str]) -> None:
    """List the recipes: the network, what they took and what they reached."""
    nothing_else(rest)
    console = Terminal()
    console.say("Start with the demo: yopo train demo --out runs/first")
    console.print(f"{'':26}{'network':16}{'training':>9}{'clean':>8}{'attacked':>10}")
    for about, rows in listed():
        console.say(about)
        for name, network, took, clean, worst in rows:
            console.print(f"  {name:24}{network:16}{took:>9}{clean:>8}{worst:>10}", soft_wrap=True)
    console.say(
        "training: time spent processing batches on one NVIDIA H200. clean: test images that are "
        "right; attacked: right in the worst case over the attacks that were made. –: not "
        "measured. records/ has the runs; `yopo train RECIPE --dry-run` tells the time here."
    )


def listed() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """What recipes of one kind are, and of each its name, network, time and two accuracies."""
    from yopo.runs.recipes import REACHED, RECIPES, Reached

    for kind, group in groupby(RECIPES.items(), lambda item: item[1][0].partition(":")[0]):
        rows, alike = [], list(group)
        for name, (_, tree) in alike:
            told = REACHED.get(name, Reached(None, None, None, ""))
            took = "–" if told.seconds is None else _duration(told.seconds)
            shares = ("–" if s is None else f"{s:.1f}%" for s in (told.clean, told.worst))
            rows.append((name, tree["model"]["name"], took, *shares))
        yield alike[0][1][0] if len(alike) == 1 else kind, rows


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
