"""`yopo eval`."""

import argparse
import json
import re
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from yopo.cli.common import Terminal, check_writable, nothing_else, pick_device, say, trust_options
from yopo.core import files
from yopo.runs.sections import fraction

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.nn import Module

    from yopo import L2, Linf, Result
    from yopo.runs.settings import Config

EVAL = """examples:
  yopo eval runs/first --attacks clean,pgd-20,cw,autoattack --samples 1000
  yopo eval runs/c10 --attacks pgd-50-10,cw-linf --weights last --eps 6/255
  yopo eval runs/compare/* --attacks pgd-40,cw
  yopo eval runs/c10/model.safetensors --attacks autoattack --batch 500 --save-examples
attacks: clean, pgd-STEPS[-RESTARTS], cw, cw-linf[-STEPS[-RESTARTS]], autoattack, and its stages
apgd-ce, apgd-t, fab-t, square. Each runs on the images that are classified correctly.
Writes eval.json (all numbers) and eval.md (the card, a summary) into the run folder. After an
interruption, the same command continues."""


def eval_options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo eval`."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, or a weights file of one",
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
        choices=["best", "last"],
        help="weights of a run folder: best on held-out images (default) or last",
    )
    parser.add_argument("--save-examples", action="store_true", help="write the images found, too")
    parser.add_argument("--device", help="cuda, cpu, …; by default a GPU if there is one")
    trust_options(parser)


def run_eval(args: argparse.Namespace, rest: list[str]) -> None:
    """Attack networks on their test sets; write eval.json and the card of each."""
    from yopo.attacks.names import parse_all
    from yopo.cli.saved import find
    from yopo.evaluation.suite import check_norm

    nothing_else(rest)
    attacks = parse_all(args.attacks)
    for run in args.runs:  # all checked first
        saved = find(run, args)
        for attack in attacks:
            check_norm(attack, choose_threat(saved.config, args.eps))
    for run in args.runs:
        if len(args.runs) > 1:
            say(run)
        _evaluate(run, args)


def _evaluate(run: Path, args: argparse.Namespace) -> None:
    import yopo
    from yopo.cli.saved import find, load_data, load_model
    from yopo.core import seals, tensor_files

    saved = find(run, args)
    config, weights = saved.config, saved.weights
    threat = choose_threat(config, args.eps)
    step = None if args.step is None else fraction(args.step, "--step")
    device = pick_device(args.device)
    arrays = load_data(saved)
    x, y, drawn = choose_images(arrays.x_test, arrays.y_test, args.samples, args.seed)
    model = load_model(saved, arrays).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    about = {
        "model": f"{config.model.name} ({parameters:,} parameters, trained with "
        f"{config.method.name})",
        "data": f"{config.data.name} test set{drawn}",
        "weights": weights.name,
        "file_sha256": files.file_digest(weights),
    }
    stem = run / "eval" if run.is_dir() else run.with_suffix(".eval")
    check_writable(stem.parent)
    screen = Screen()
    # Torch's advice on compiling; float32 is asked for where it is used.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    try:
        with screen.bars, _sigterm_as_interrupt():
            result = yopo.evaluate(
                model,
                (x, y),
                threat,
                args.attacks,
                batch=args.batch,
                seed=args.seed,
                precision=args.precision,
                step=step,
                compile=args.compile,
                examples=args.save_examples,
                state=stem.with_name(f"{stem.name}-state"),
                progress=screen.progress,
                about=about,
            )
    except KeyboardInterrupt:
        command = shlex.join(["yopo", *sys.argv[1:]])
        screen.say(f"stopped; finished batches are kept. To go on: {command}")
        sys.exit(130)
    screen.console.print(result_table(result))
    for warning in result.warnings:
        screen.say(f"warning ({warning.code}): {warning.text}")
    card = stem.with_name(f"{stem.name}.md")
    if args.save_examples:
        from yopo.report.pictures import SHOWN

        images = stem.with_name(f"{stem.name}-examples.safetensors")
        facts = {key: str(result.about[key]) for key in SHOWN}
        facts["names"] = json.dumps(arrays.names)
        answer = partial(_answers, model, device, args)
        tensor_files.save_weights(images, _examples(result, x, y, answer), facts)
    if aside := _set_aside(stem, result, run):
        screen.say(f"the evaluation before, which this one does not cover, is kept as {aside}")
    seals.write_json(stem.with_name(f"{stem.name}.json"), result.to_dict())
    files.write_text(card, result.card())
    result.forget()
    screen.say(f"card: {card}")


def _set_aside(stem: Path, result: "Result", run: Path) -> str | None:
    """Rename the evaluation before, unless the new one covers it or its weights were replaced."""
    from yopo.report.reading import read_evaluation

    file = stem.with_name(f"{stem.name}.json")
    new = result.about
    try:
        old = read_evaluation(file)
        about, when, sha = old["about"], old["about"]["finished"], old["about"]["weights_sha256"]
        alike = all(about[key] == new[key] for key in ("threat", "eps", "seed", "precision"))
        attacks = {n: a["settings"] for n, a in old["attacks"].items() if n != "clean"}
        covered = attacks.items() <= new["settings"].items() and about["images"] <= new["images"]
    except (OSError, ValueError):
        return None
    same = sha == new["weights_sha256"]
    if (same and alike and covered) or (not same and sha not in _weights_of(run)):
        return None
    name = f"{stem.name}-{re.sub('[^0-9]', '', when)[:16]}"
    while stem.with_name(f"{name}.json").exists():  # of the same minute
        name += "+"
    for end in (".json", ".md"):
        if (found := stem.with_name(stem.name + end)).exists():
            found.rename(stem.with_name(name + end))
    return f"{name}.json"


def _weights_of(run: Path) -> list[str]:
    """Digests of the weights that a run folder holds."""
    from yopo.report.reading import read_result

    try:
        return list(read_result(run / "result.json").get("weights_sha256", {}).values())
    except (OSError, ValueError):
        return []


def result_table(result: "Result") -> Table:
    """What each attack left, and all of them together."""
    from yopo.evaluation.card import duration, percent

    about = result.about
    table = Table(title=f"{about['images']:,} images: {about['data']}\n{about['threat']}")
    for name in ("attack", "accuracy (95% interval)", "propagations", "time"):
        table.add_column(name, justify="left" if name == "attack" else "right", overflow="fold")
    for name, outcome in result.outcomes.items():
        shown = percent(outcome.accuracy, result.interval[name])
        cost = f"{result.propagations[name]:.1f}"
        table.add_row(name, shown, cost, duration(outcome.seconds))
    table.add_section()
    table.add_row("worst case", percent(result.worst, result.worst_interval))
    return table


class Screen:
    """A bar for each attack on a terminal; elsewhere a line when one is done, or half a minute."""

    def __init__(self) -> None:
        self.console = Terminal()
        self.bars = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[accuracy]:.2%} left"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, soft_wrap=True)

    def progress(self, attack: str, part: float, accuracy: float) -> None:
        """Show how far an attack is, and the accuracy it has left."""
        if self.console.is_terminal:
            if attack not in self._tasks:
                self._tasks[attack] = self.bars.add_task(attack, total=1.0, accuracy=accuracy)
            self.bars.update(self._tasks[attack], completed=part, accuracy=accuracy)
        elif part >= 1 or time.monotonic() - self._said > 30:
            self._said = time.monotonic()
            self.say(f"{attack:<12} {part:4.0%}  {accuracy:.2%} left")


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def choose_threat(config: "Config", eps: str | None) -> "Linf | L2":
    """The run's own threat, or one of another radius."""
    from yopo.runs.build import build_threat

    threat = build_threat(config.threat)
    return threat if eps is None else type(threat)(fraction(eps, "--eps"))


def choose_images(
    x: "Tensor", y: "Tensor", samples: int | None, seed: int
) -> tuple["Tensor", "Tensor", str]:
    """All images, or some drawn at random: data sets may be sorted by class."""
    import torch

    n = len(x)
    if samples is None:
        return x, y, ""
    if not 1 <= samples <= n:
        raise ValueError(
            f"expected --samples from 1 to {n}, the test images there are, got {samples}"
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    rows = order[:samples].sort().values
    return x[rows], y[rows], f", drawn from {n:,} with seed {seed}"


def _examples(
    result: "Result", x: "Tensor", y: "Tensor", answer: Callable[["Tensor"], "Tensor"]
) -> dict[str, "Tensor"]:
    """For each attack the adversarial images, their places among those evaluated, their labels.

    The clean images and what the network answers to both are there too: a reader of the file needs
    neither the data nor the network.
    """
    tensors = {}
    for name, outcome in result.outcomes.items():
        if outcome.images is not None:
            clean = x[outcome.index]
            tensors[f"{name}.images"] = outcome.images
            tensors[f"{name}.answers"] = answer(outcome.images)
            tensors[f"{name}.clean"] = clean  # uint8
            tensors[f"{name}.clean_answers"] = answer(clean.float() / 255)
            tensors[f"{name}.index"] = outcome.index
            tensors[f"{name}.labels"] = y[outcome.index]
    return tensors


def _answers(
    model: "Module", device: "device", args: argparse.Namespace, x: "Tensor"
) -> "Tensor":  # (N, C, H, W) -> (N,)
    """The classes that the network answers with, in the precision of the evaluation."""
    import torch

    from yopo.evaluation.network import Network, products

    net = Network(model, args.precision, device)
    with torch.no_grad(), products("float32"):
        parts = [net(part.to(device)).argmax(1).cpu() for part in x.split(args.batch)]
    return torch.cat([torch.empty(0, dtype=torch.long), *parts])
