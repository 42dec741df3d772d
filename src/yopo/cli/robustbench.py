"""`yopo robustbench`."""

import argparse
from pathlib import Path

from yopo.cli.common import loading, nothing_else, say

EXAMPLES = """examples:
  yopo eval runs/c10 --attacks clean,autoattack --eps 8/255
  yopo robustbench runs/c10 --name Doe2026Fast --title "Fast and robust" --authors "Jo Doe" \
--venue arXiv --link https://arxiv.org/abs/...
Writes into RUN/robustbench what RobustBench's leaderboard asks for: the claim as JSON, the network
in its own classes, the weights, and the text of an issue. Nothing is sent."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo robustbench`."""
    parser.add_argument("run", type=Path, help="folder of a run, or a weights file of one")
    parser.add_argument("--name", required=True, help="of the entry: who, when, the first word")
    for word, what in (
        ("title", "of the paper"),
        ("authors", "of the paper"),
        ("venue", "where it appeared, or arXiv"),
        ("link", "its address"),
    ):
        parser.add_argument(f"--{word}", required=True, help=what)
    parser.add_argument(
        "--additional-data", action="store_true", help="trained on more than CIFAR-10"
    )
    parser.add_argument("--out", type=Path, help="another folder")
    parser.add_argument(
        "--weights",
        choices=["best", "last"],
        help="weights of a run folder: best on held-out images (default) or last",
    )


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Write the claim; say whether RobustBench's own network was there to compare with."""
    nothing_else(args, rest)
    with loading():
        from yopo.runs.robustbench import Paper, claim_run

    paper = Paper(
        name=args.name,
        title=args.title,
        authors=args.authors,
        venue=args.venue,
        link=args.link,
        additional_data=args.additional_data,
    )
    done = claim_run(args.run, paper, args.out, weights=args.weights, say=say)
    if done.compared:
        say("compared: RobustBench's own network gives the same logits")
    else:
        say("not compared with RobustBench's own network: the package robustbench is not here")
