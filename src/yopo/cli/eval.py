"""`yopo eval`."""

import argparse
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.table import Table

from yopo.cli.common import data_options, fitted, loading, nothing_else, rank, say, trust_options
from yopo.cli.screen import Screen
from yopo.cli.training import (
    lost_others_are_named,
    same_command,
    settings_typed,
    track_option,
)
from yopo.runs.folder import BEST, CARD, EVALUATION

if TYPE_CHECKING:
    from yopo import Result
    from yopo.runs.overlay import Tree

EXAMPLES = f"""examples:
  yopo eval runs/first --attacks clean,pgd-20,cw,autoattack --samples 1000
  yopo eval runs/c10 --attacks pgd-50-10,cw-linf --weights last --eps 6/255
  yopo eval runs/compare/* --attacks pgd-40,cw
  yopo eval runs/c10/{BEST} --attacks autoattack --batch 500 --save-examples
  torchrun --nproc-per-node 8 -m yopo eval runs/c10 --attacks autoattack
  yopo eval --model.name timm:resnet50 --weights FILE --data.name folder --data.root DIR
attacks: clean, pgd-STEPS[-RESTARTS], cw, cw-linf[-STEPS[-RESTARTS]], autoattack, and its stages
apgd-ce, apgd-t, fab-t, square. Each runs on the images that are classified correctly.
Writes {EVALUATION} (all numbers) and {CARD} (the card, a summary) into the run folder. After an
interruption, the same command continues."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo eval`."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="folder of a run, a weights file of one, or hf:ORG/NAME",
    )
    parser.add_argument(
        "--attacks", default="clean,pgd-20", help="list, see below (default clean,pgd-20)"
    )
    parser.add_argument("--samples", type=int, help="test images, drawn with --seed; default all")
    parser.add_argument("--batch", type=int, default=250, help="images at a time (default 250)")
    parser.add_argument("--eps", help="radius, as 8/255; by default the run's threat.eps")
    parser.add_argument(
        "--step", help="step size of PGD and cw-linf (default 2.5·eps/steps, in L2 at least eps/4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random starts (default 0)")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], default="float32")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the network first; worth it for AutoAttack on a GPU",
    )
    parser.add_argument(
        "--weights",
        metavar="WHICH",
        help="of a run folder: best on held-out images (default) or last; without a RUN, the file "
        "with the weights of --model.name",
    )
    parser.add_argument(
        "--save-examples",
        action="store_true",
        help="write the images found, too, and which classes were confused",
    )
    parser.add_argument(
        "--radii", action="store_true", help="a short PGD at other radii, too, for a curve"
    )
    parser.add_argument("--device", help="cuda, cpu, …; by default a GPU if there is one")
    track_option(parser)
    data_options(parser)
    trust_options(parser)


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Attack networks on their test sets; write the numbers and the card of each."""
    if args.runs:
        nothing_else(args, rest)
        if args.weights not in (None, "best", "last"):
            raise ValueError(f"expected --weights best or last of a run, got {args.weights}")
    with loading():
        from yopo.runs import evaluating
        from yopo.runs.hub import local
        from yopo.runs.sections import read_number

    whose: dict[str, Any] = {"eps": args.eps and read_number(args.eps, "--eps")}
    if args.runs:
        whose |= {"trust": args.trust, "model_name": args.model_name, "weights": args.weights}
        whose |= {"data_root": args.data_root, "data_path": args.data_path}
        runs = [local(path, say) for path in args.runs]
    else:
        whose["settings"] = someone_elses(args, rest)
        runs = [Path(args.weights)]
    for path in runs:  # all checked first
        evaluating.check(path, args.attacks, **whose)
    for path in runs:
        if len(runs) > 1 and rank() == 0:
            say(path)
        evaluate(
            path,
            args.attacks,
            samples=args.samples,
            step=args.step and read_number(args.step, "--step"),
            seed=args.seed,
            batch=args.batch,
            precision=args.precision,
            compile=args.compile,
            examples=args.save_examples,
            radii=args.radii,
            device=args.device,
            track=args.track,
            **whose,
        )


def someone_elses(args: argparse.Namespace, rest: list[str]) -> "Tree":
    """The settings of a network that no run of ours made."""
    if args.weights is None or args.model_name is None:
        raise ValueError(
            "expected a RUN, or a network of someone else's as --model.name NAME --weights FILE"
        )
    known = {
        "model.name": args.model_name,
        "data.root": args.data_root,
        "data.path": args.data_path,
    }
    words = [f"--{name}={value}" for name, value in known.items() if value is not None]
    return settings_typed([*words, *rest])


def evaluate(run: Path, attacks: str, **how: Any) -> None:  # noqa: ANN401
    """Evaluate a run as `evaluate_run` does, and show it on a screen."""
    from yopo.evaluation.card import UNATTACKED, attacked
    from yopo.runs.api import evaluate_run

    screen = Screen(quiet=rank() > 0)
    # Torch's advice on compiling; float32 is asked for where it is used.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")

    def show(result: "Result") -> None:
        screen.bars.stop()
        screen.console.print(fitted(result_table(result), screen.console.width))
        if not attacked(result.outcomes):
            screen.say(UNATTACKED)
        for warning in result.warnings:
            screen.say(f"warning ({warning.code}): {warning.text}")

    try:
        with screen.bars, _sigterm_as_interrupt(), lost_others_are_named():
            how |= {"progress": screen.attack, "show": show, "say": screen.say}
            evaluation = evaluate_run(run, attacks, **how, together=True)
    except KeyboardInterrupt:
        said = f"stopped; finished batches are kept. To go on: {same_command()}"
        screen.say(said, words=False)
        sys.exit(130)
    if (aside := evaluation.aside) is not None:
        screen.say(f"the evaluation before, which this one does not cover, is kept as {aside.name}")
    screen.say(f"card: {evaluation.files.card}")


def result_table(result: "Result") -> Table:
    """What each attack left, and all of them together."""
    from yopo.evaluation.card import attacked, duration, percent

    about = result.about
    table = Table(title=f"{about['images']:,} images: {about['data']}\n{about['threat']}")
    for name in ("attack", "accuracy (95% interval)", "propagations", "time"):
        table.add_column(name, justify="left" if name == "attack" else "right", overflow="fold")
    for name, outcome in result.outcomes.items():
        shown = percent(outcome.accuracy, result.interval[name])
        cost = f"{result.propagations[name]:.1f}"
        table.add_row(name, shown, cost, duration(outcome.seconds))
    if attacked(result.outcomes):
        table.add_section()
        table.add_row("worst case", percent(result.worst, result.worst_interval))
    return table


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
