"""`yopo export`."""

import argparse
from pathlib import Path

from yopo.cli.common import data_options, loading, nothing_else, say, trust_options

EXAMPLES = """examples:
  yopo export runs/first --to onnx
  yopo export runs/first --to pt2 --out first.pt2
  yopo export runs/first --to onnx --check 500 --overwrite
The file takes images (batch, C, H, W) in [0, 1]; the normalisation is inside. Names of classes,
image shape, threat and accuracies are in its metadata. Its answers are compared with the network's.
--check attacks test images with PGD-20 on the network itself, and the ONNX file judges them; a pt2
file has gradients and is attacked itself."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo export`."""
    parser.add_argument(
        "run", type=Path, help="folder of a run, a weights file of one, or hf:ORG/NAME"
    )
    parser.add_argument("--to", required=True, choices=["onnx", "pt2"], help="kind of the file")
    parser.add_argument("--out", type=Path, help="the file; by default beside the weights")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    parser.add_argument(
        "--check", type=int, default=0, metavar="N", help="measure robust accuracy on N test images"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --check (default 0)")
    parser.add_argument(
        "--weights",
        choices=["best", "last"],
        help="weights of a run folder: best on held-out images (default) or last",
    )
    parser.add_argument("--device", help="where --check attacks; by default a GPU if there is one")
    data_options(parser)
    trust_options(parser)


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Write the file; say how it answers beside the network."""
    nothing_else(args, rest)
    if args.check < 0:
        raise ValueError(f"expected --check of at least 1, got {args.check}")
    with loading():
        from yopo.runs.exporting import export_run

    done = export_run(
        args.run,
        args.to,
        args.out,
        weights=args.weights,
        overwrite=args.overwrite,
        check=args.check,
        seed=args.seed,
        device=args.device,
        trust=args.trust,
        model_name=args.model_name,
        data_root=args.data_root,
        data_path=args.data_path,
        say=say,
    )
    if done.difference is None:
        say("not compared with the network: pip install 'yopo-torch[onnx]' brings onnxruntime")
    else:
        say(f"compared with the network: no logit differs by more than {done.difference:.1e}")
    if done.check:
        say(done.check)
    say(f"file: {done.path}")
