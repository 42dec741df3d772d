"""`yopo data`."""

import argparse
from pathlib import Path

EXAMPLES = """examples:
  yopo data get mnist cifar10
  yopo data get cifar10 --dir data"""


def options(parser: argparse.ArgumentParser) -> None:
    """Which data sets, and where to."""
    parser.add_argument("action", choices=["get"])
    parser.add_argument("names", nargs="+", metavar="NAME", help="mnist, cifar10")
    parser.add_argument("--dir", type=Path, help="where to; by default where `yopo train` looks")


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Fetch data sets."""
    from yopo.data import default_root, get

    if rest:
        raise ValueError(f"expected names of data sets, got {' '.join(rest)}")
    for name in args.names:
        get(name, args.dir or default_root(), say=print)
