"""`yopo compare`."""

import argparse
from contextlib import AbstractContextManager

from yopo.cli.common import Terminal, fitted, loading
from yopo.cli.log import steady
from yopo.cli.opening import first_line
from yopo.cli.screen import Screen
from yopo.cli.training import (
    as_written,
    check_written,
    lost_others_are_named,
    result_table,
    run_options,
    settings_typed,
    watched,
)
from yopo.runs.folder import read_settings

EXAMPLES = """examples:
  yopo compare demo --methods natural,pgd-10,yopo-3-5 --out runs/compare
  yopo compare cifar10-fast --methods pgd-10,yopo-5-3,trades-yopo-3-4 --epochs 15 --out runs/c10
  yopo compare cifar10-fast --methods nfgsm,pgd-5,yopo-3-3 --propagations 120 --out runs/equal"""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo compare`."""
    parser.add_argument("recipe", help="name of a recipe, or a YAML file")
    parser.add_argument("--methods", required=True, help="as natural,pgd-10,yopo-5-3")
    parser.add_argument(
        "--propagations",
        type=float,
        metavar="N",
        help="at equal cost, not equal epochs: as many epochs for each as N per image pay for",
    )
    run_options(parser)


@steady()
@lost_others_are_named()
def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Train with several methods; the same network, data, seed and clock for each."""
    if args.out is None:
        raise ValueError("expected a folder for the runs: --out DIR")
    typed = settings_typed(rest)
    written = as_written(args.recipe, args.config, typed)
    first_line(f"compare {args.recipe}", written, args.out, args.device, methods=args.methods)
    with loading():
        from yopo.runs.api import compare_runs, method_configs

    configs = method_configs(
        args.recipe,
        [spec.strip() for spec in args.methods.split(",")],
        typed,
        under=read_settings(args.config) if args.config else None,
        most=args.propagations,
    )

    def watch(name: str) -> AbstractContextManager[Screen]:
        return watched(name, args.out / name)

    how = {"resume": args.resume, "device": args.device, "track": args.track}
    results = compare_runs(configs, args.out, watch=watch, **how)
    if all(results.values()):  # in the first process
        console = Terminal()
        console.print(fitted(result_table(results), console.width))
        print(f"runs: {args.out}")
        check_written(*(args.out / name for name in results))
