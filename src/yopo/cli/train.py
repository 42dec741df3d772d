"""`yopo train`."""

import argparse
import re
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

import yaml
from rich.table import Table

from yopo.cli.common import Terminal, fitted, loading, rank
from yopo.cli.log import steady
from yopo.cli.opening import first_line
from yopo.cli.training import (
    as_written,
    check_written,
    lost_others_are_named,
    result_table,
    run_options,
    settings_typed,
    watched,
)
from yopo.core.words import fraction
from yopo.runs.folder import read_settings
from yopo.runs.overlay import Tree

if TYPE_CHECKING:
    from yopo.runs.settings import Config

WIDEST = 28  # letters of a value in the list of settings
EXAMPLES = """examples:
  yopo train demo --out runs/first
  yopo train cifar10-yopo-5-3 --out runs/c10 --epochs 20 --method.n 5 --threat.eps 6/255
  yopo train cifar10-fast --method.name pgd --method.steps 7 --out runs/pgd7
  yopo train own --data.root photos --out runs/own
  yopo train demo --model.name my_module:build_model --out runs/mine
  yopo train demo --out runs/first --resume
  torchrun --nproc-per-node 2 -m yopo train cifar10-fast --out runs/two
`yopo train --settings` lists every setting, `yopo train RECIPE --settings` as RECIPE has it."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo train`."""
    parser.add_argument("recipe", nargs="?", help="name of a recipe, or a YAML file")
    run_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the settings and the cost")
    parser.add_argument(
        "--settings",
        action="store_true",
        help="list every setting, of a recipe as it has them, and leave",
    )


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Train one network, or show what would be trained."""
    if args.settings:
        with loading():
            from yopo.runs.api import configure
            from yopo.runs.settings import fields

        rows, said = list(fields()), ""
        if args.recipe is not None:
            given = read_settings(args.config) if args.config else {}
            config = configure(args.recipe, given, settings_typed(rest))
            rows = [_of_recipe(row, config.tree()) for row in rows]
            said = f"\n*: the value of {args.recipe}, which is not the default"
        show_settings(rows)
        Terminal().say(said)
        return
    if args.recipe is None:
        raise ValueError("expected a recipe: yopo train RECIPE; `yopo recipes` lists them")
    typed = settings_typed(rest)
    written = as_written(args.recipe, args.config, typed)  # what is misspelt is found at once
    if args.dry_run:
        with loading():
            from yopo.runs.api import configure

        given = read_settings(args.config) if args.config else {}
        dry_run(configure(args.recipe, given, typed), args.device)
        return
    train(args, typed, written)


@steady()
@lost_others_are_named()
def train(args: argparse.Namespace, typed: Tree, written: Tree) -> None:
    """Train one network."""
    if args.out is not None:
        first_line(f"train {args.recipe}", written, args.out, args.device)
    with loading():
        from yopo.runs.api import configure, train_run

    config = configure(args.recipe, read_settings(args.config) if args.config else {}, typed)
    if args.out is None:
        raise ValueError("expected a folder for the run: --out DIR")
    name = config.method.name
    how = {"resume": args.resume, "device": args.device, "track": args.track}
    with watched(name, args.out) as screen:
        result = train_run(config, args.out, watch=screen, **how)
    if result:  # in the first process
        console = Terminal()
        console.print(fitted(result_table({name: result}), console.width))
        print(f"run: {args.out}")
        check_written(args.out)


def show_settings(rows: Iterable[tuple[str, str, str]]) -> None:
    """Each with its default and what it is; those of a method, or a threat, under its name."""
    console = Terminal()
    for group, inside in groupby(rows, _group):
        settings = list(inside)
        console.print(f"\n{group}" if group else "\nthe run")
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        widest = max(len(name) for name, *_ in settings)
        table.add_column(min_width=max(28, widest + 4), no_wrap=True)
        table.add_column(min_width=max(len(_written(d)) for _, d, _ in settings), no_wrap=True)
        table.add_column()
        for name, default, text in settings:
            about = re.sub(r"^\([a-z0-9-]+\) ?", "", text) if group else text
            table.add_row(f"  --{name}", _written(default), about)
        console.print(table)


def _of_recipe(row: tuple[str, str, str], tree: Tree) -> tuple[str, str, str]:
    """With the value that it has there, marked if that is not the default."""
    name, default, text = row
    section, _, kind = _group(row).partition(" ")
    if kind and tree[section]["name"] != kind:
        return row
    value = tree[section][name.partition(".")[2]] if section else tree[name]
    if value and isinstance(value, dict):
        value = ",".join(f"{key}={inner}" for key, inner in value.items())
    if value and isinstance(value, list):
        value = ",".join(map(str, value))
    shown = "" if value is None else str(value)
    if shown == default:
        return row
    shown = _written(shown) or "none"
    return name, f"{shown if len(shown) <= WIDEST else f'{shown[:WIDEST]}…'} *", text


def _group(row: tuple[str, str, str]) -> str:
    """As method yopo, threat linf, data; of what stands in no section, nothing."""
    section, dot, _ = row[0].partition(".")
    kind = re.match(r"\(([a-z0-9-]+)\)", row[2]) if section in ("method", "threat") else None
    return f"{section} {kind[1]}" if kind else section * bool(dot)


def _written(default: str) -> str:
    """8/255 as 8/255."""
    try:
        return fraction(float(default)) if "." in default else default
    except ValueError:
        return default


def dry_run(config: "Config", device: str | None) -> None:
    """Show the resolved settings, and the cost after a few measured steps."""
    from yopo.runs.api import measure_cost
    from yopo.runs.build import out_of_reach

    cost = measure_cost(config, device)
    if rank() > 0:
        return
    config = cost.config
    print(yaml.safe_dump(config.tree(), sort_keys=False), end="")
    for line in "\n".join(cost.notes).splitlines():
        print(f"# {line}")
    steps = cost.steps * config.epochs
    print(f"# {config.epochs} epochs of {cost.steps:,} steps of {cost.batch} images")
    for phase, seconds, spent in cost.phases if len(cost.phases) > 1 else ():
        words = [f"{phase.size or config.data.size} px"] if config.schedule.sizes else []
        if config.schedule.m:
            words.append(f"m = {phase.m or config.method.model_dump()['m']}")
        print(
            f"# epochs {phase.first + 1} to {phase.end}: {', '.join([*words, ''])}"
            f"{spent:.2f} propagations per image and epoch, {1000 * seconds:.1f} ms a step"
        )
    print(f"# {cost.propagations:.0f} propagations per image in all")
    if (weak := out_of_reach(config)) is not None:
        print(f"# {weak}")
    took = _long(cost.seconds)
    print(f"# {1000 * cost.seconds / steps:.1f} ms a step, so about {took} of training here")
    twice = "" if config.evaluate.keep == "last" else ", twice if another epoch's weights are best"
    print(
        f"# not in it: PGD-{config.evaluate.steps} on {cost.held:,} held-out images over all "
        f"epochs and on {cost.test:,} test images at the end{twice}; "
        f"{cost.evaluations:.2g} propagations per training image"
    )


def _long(seconds: float) -> str:
    """In minutes, or in hours or days where there are many."""
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.1f} minutes"
    return f"{minutes / 60:.1f} hours" if minutes < 48 * 60 else f"{minutes / 1440:,.1f} days"
