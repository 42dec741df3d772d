"""The command line: `yopo train`, `compare`, `eval`, `report`, `diagnose`, `bench` and more."""

import argparse
import io
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from yopo import __version__
from yopo.cli.benching import BENCH, bench_options, run_bench
from yopo.cli.common import clean, nothing_else
from yopo.cli.diagnosing import DIAGNOSE, diagnose_options, run_diagnose
from yopo.cli.evaluating import EVAL, eval_options, run_eval
from yopo.cli.reporting import REPORT, report_options, run_report
from yopo.cli.reproducing import REPRODUCE, reproduce_options, run_reproduce
from yopo.cli.training import COMPARE, TRAIN, compare_options, run_compare, run_train, train_options
from yopo.runs.recipes import RECIPES

DATA = """examples:
  yopo data get mnist cifar10
  yopo data get cifar10 --dir data"""


# help, examples, options, and what runs: (arguments, what the parser did not know)
Command = tuple[
    str,
    str,
    Callable[[argparse.ArgumentParser], None],
    Callable[[argparse.Namespace, list[str]], None],
]


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no ∞ gets a ?
            stream.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(
        prog="yopo",
        description="Fast adversarial training: train robust networks and compare methods.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, examples, options, _) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        options(command)
    args, rest = parser.parse_known_args()
    try:
        COMMANDS[args.command][3](args, rest)
        if dist.is_available() and dist.is_initialized():  # by torchrun
            dist.destroy_process_group()
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if not isinstance(error, OSError) and not _is_ours(error):
            raise
        print(clean(f"yopo: {error}"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; what was saved is kept", file=sys.stderr)
        sys.exit(130)


def _is_ours(error: Exception) -> bool:
    """Whether it was raised here, with a sentence, and not in a user's model or in torch."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return Path(raised.filename).is_relative_to(Path(__file__).parents[1])


def run_recipes(_args: argparse.Namespace, rest: list[str]) -> None:
    """List the recipes."""
    nothing_else(rest)
    table = Table(box=None, show_header=False)
    for name, (text, _) in RECIPES.items():
        table.add_row(name, text)
    Console(highlight=False).print(table)


def data_options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo data`."""
    parser.add_argument("action", choices=["get"])
    parser.add_argument("names", nargs="+", metavar="NAME", help="mnist, cifar10")
    parser.add_argument("--dir", type=Path, help="where to; by default where `yopo train` looks")


def run_data(args: argparse.Namespace, rest: list[str]) -> None:
    """Fetch data sets."""
    from yopo.data import default_root, get

    if rest:
        raise ValueError(f"expected names of data sets, got {' '.join(rest)}")
    for name in args.names:
        get(name, args.dir or default_root())


COMMANDS: dict[str, Command] = {
    "train": ("train a network", TRAIN, train_options, run_train),
    "compare": (
        "train with several methods, all else equal",
        COMPARE,
        compare_options,
        run_compare,
    ),
    "eval": ("attack a network", EVAL, eval_options, run_eval),
    "report": ("one page about one or several runs", REPORT, report_options, run_report),
    "diagnose": (
        "recommend m, n and the split for a trained network",
        DIAGNOSE,
        diagnose_options,
        run_diagnose,
    ),
    "bench": ("time a training step", BENCH, bench_options, run_bench),
    "reproduce": (
        "run a table of the paper; our numbers beside the paper's",
        REPRODUCE,
        reproduce_options,
        run_reproduce,
    ),
    "recipes": ("list the recipes", "", lambda _: None, run_recipes),
    "data": ("fetch data sets", DATA, data_options, run_data),
}
