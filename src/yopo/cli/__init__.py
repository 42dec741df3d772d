"""The command line: `yopo train`, `compare`, `eval`, `report`, `diagnose`, `bench` and more."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from yopo import __version__
from yopo.cli.benching import add_bench, run_bench
from yopo.cli.diagnosing import DIAGNOSE, diagnose_options, run_diagnose
from yopo.cli.evaluating import EVAL, eval_options, run_eval
from yopo.cli.reporting import add_report, run_report
from yopo.cli.reproducing import REPRODUCE, reproduce_options, run_reproduce
from yopo.cli.training import COMPARE, TRAIN, run_compare, run_options, run_train
from yopo.recipes import RECIPES

DATA = """examples:
  yopo data get mnist cifar10
  yopo data get cifar10 --dir data"""


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="yopo",
        description="Fast adversarial training: train robust networks and compare methods.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter

    train = commands.add_parser(
        "train", help="train a network", epilog=TRAIN, formatter_class=raw, allow_abbrev=False
    )
    train.add_argument("recipe", nargs="?", help="name of a recipe, or a YAML file")
    run_options(train)
    train.add_argument("--dry-run", action="store_true", help="show the settings and the cost")
    train.add_argument("--settings", action="store_true", help="list every setting and leave")

    compare = commands.add_parser(
        "compare",
        help="train with several methods, all else equal",
        epilog=COMPARE,
        formatter_class=raw,
        allow_abbrev=False,
    )
    compare.add_argument("recipe", help="name of a recipe, or a YAML file")
    compare.add_argument("--methods", required=True, help="as natural,pgd-10,yopo-5-3")
    run_options(compare)

    evaluating = commands.add_parser(
        "eval", help="attack a network", epilog=EVAL, formatter_class=raw, allow_abbrev=False
    )
    eval_options(evaluating)

    commands.add_parser("recipes", help="list the recipes")

    data = commands.add_parser(
        "data", help="fetch data sets", epilog=DATA, formatter_class=raw, allow_abbrev=False
    )
    data.add_argument("action", choices=["get"])
    data.add_argument("names", nargs="+", metavar="NAME", help="mnist, cifar10")
    data.add_argument("--dir", type=Path, help="where to; by default where `yopo train` looks")

    add_bench(commands)
    diagnose = commands.add_parser(
        "diagnose",
        help="recommend m, n and the split for a trained network",
        epilog=DIAGNOSE,
        formatter_class=raw,
        allow_abbrev=False,
    )
    diagnose_options(diagnose)
    add_report(commands)

    reproduce = commands.add_parser(
        "reproduce",
        help="a table of the paper, ours beside its own",
        epilog=REPRODUCE,
        formatter_class=raw,
        allow_abbrev=False,
    )
    reproduce_options(reproduce)

    args, rest = parser.parse_known_args()
    try:
        match args.command:
            case "train":
                run_train(args, rest)
            case "compare":
                run_compare(args, rest)
            case "eval":
                run_eval(args, rest)
            case "recipes":
                run_recipes()
            case "data":
                run_data(args, rest)
            case "reproduce":
                _nothing_else(rest)
                run_reproduce(args)
            case "bench":
                _nothing_else(rest)
                run_bench(args)
            case "diagnose":
                run_diagnose(args, rest)
            case "report":
                _nothing_else(rest)
                run_report(args)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint, if there is one, is kept", file=sys.stderr)
        sys.exit(130)


def run_recipes() -> None:
    """List the recipes."""
    table = Table(box=None, show_header=False)
    for name, (text, _) in RECIPES.items():
        table.add_row(name, text)
    Console(highlight=False).print(table)


def run_data(args: argparse.Namespace, rest: list[str]) -> None:
    """Fetch data sets."""
    from yopo.data import default_root, get

    if rest:
        raise ValueError(f"expected names of data sets, got {' '.join(rest)}")
    for name in args.names:
        get(name, args.dir or default_root())


def _nothing_else(rest: list[str]) -> None:
    if rest:
        raise ValueError(f"did not expect {' '.join(rest)}; see --help")


def _fail(message: str) -> NoReturn:
    print(f"yopo: {message}", file=sys.stderr)
    sys.exit(2)
