"""`yopo predict`."""

import argparse
from pathlib import Path

from yopo.cli.common import loading, nothing_else, say, trust_options

EXAMPLES = """examples:
  yopo predict runs/c10 picture.jpg
  yopo predict runs/own photos/*/*.jpg --top 1
Each line has the names of classes and how sure the network is of them; it may be sure and wrong."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo predict`."""
    parser.add_argument(
        "run", type=Path, help="folder of a run, a weights file of one, or hf:ORG/NAME"
    )
    parser.add_argument("pictures", nargs="+", type=Path, metavar="PICTURE")
    parser.add_argument("--top", type=int, default=3, help="names for each picture (default 3)")
    parser.add_argument(
        "--weights",
        choices=["best", "last"],
        help="weights of a run folder: best on held-out images (default) or last",
    )
    parser.add_argument("--device", default="cpu", help="cuda, cpu, … (default cpu)")
    trust_options(parser)


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Say what a network sees on pictures."""
    nothing_else(args, rest)
    if args.top < 1:
        raise ValueError(f"expected --top of at least 1, got {args.top}")
    with loading():
        from yopo.runs import saved  # noqa: F401  # `load` imports it only when it is called
        from yopo.runs.loading import classify, load

    net = load(
        args.run, args.weights, device=args.device, trust=args.trust, model_name=args.model_name
    )
    wrong = []
    for picture in args.pictures:
        try:
            if picture.is_dir():
                raise ValueError(f"{picture} is a folder; name its pictures, as {picture}/*.jpg")
            answer = classify(net, picture, args.top)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
            continue
        say(f"{picture}: " + ", ".join(f"{name} {share:.1%}" for name, share in answer))
    if wrong:
        raise ValueError("\n".join(wrong))
