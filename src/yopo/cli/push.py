"""`yopo push`."""

import argparse
from pathlib import Path

from yopo.cli.common import loading, nothing_else, say, trust_options

EXAMPLES = """examples:
  yopo push runs/first ORG/NAME
  yopo push runs/c10 ORG/NAME --private --revision try
  yopo eval hf:ORG/NAME --attacks autoattack     and so for predict, export and yopo.load
Weights, settings, the evaluation and a model card, in one commit; where data lie on this computer
is left out. Needs yopo-torch[hub], and `hf auth login` or $HF_TOKEN."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo push`."""
    parser.add_argument("run", type=Path, help="folder of a run, or a weights file of one")
    parser.add_argument("repo", metavar="ORG/NAME", help="the repository; made if it is not there")
    parser.add_argument(
        "--weights",
        choices=["best", "last"],
        help="weights of a run folder: best on held-out images (default) or last",
    )
    parser.add_argument(
        "--private", action="store_true", help="a repository that is made is not for all to see"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="a branch; made if it is not there")
    parser.add_argument(
        "--unevaluated", action="store_true", help="publish weights that `yopo eval` has not seen"
    )
    trust_options(parser)


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Publish; say where it is."""
    nothing_else(args, rest)
    with loading():
        from yopo.runs.hub import push_run

    done = push_run(
        args.run,
        args.repo,
        weights=args.weights,
        private=args.private or None,
        revision=args.revision,
        unevaluated=args.unevaluated,
        trust=args.trust,
        model_name=args.model_name,
        say=say,
    )
    say(f"published: {done.address}")
