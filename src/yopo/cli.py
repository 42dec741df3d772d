"""The command line: `yopo train`, `compare`, `recipes`, `data get`."""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from yopo import __version__
from yopo.config import Config, Tree, fields, nested, overlay, rescaled, validate
from yopo.recipes import RECIPES, method_tree, recipe

TRAIN = """examples:
  yopo train demo --out runs/demo
  yopo train cifar10-yopo-5-3 --out runs/c10 --epochs 20 --method.n 5 --threat.eps 6/255
  yopo train cifar10-fast --method.name pgd --method.steps 7 --out runs/pgd7
  yopo train demo --data.name folder --data.root photos --data.size 64 --out runs/photos
  yopo train demo --model.name my_module:build_model --out runs/mine
  yopo train demo --out runs/demo --resume
  torchrun --nproc-per-node 2 -m yopo train cifar10-fast --out runs/two
`yopo train --settings` lists every setting."""
COMPARE = """examples:
  yopo compare demo --methods natural,pgd-15,yopo-3-5 --out runs/compare
  yopo compare cifar10-fast --methods pgd-10,yopo-5-3,trades-yopo-3-4 --epochs 15 --out runs/c10"""
DATA = """examples:
  yopo data get mnist cifar10
  yopo data get cifar10 --dir data"""


class Screen:
    """Bars on a terminal, plain lines elsewhere; silent in all processes but the first."""

    def __init__(self, title: str, epochs: int, tracker: Any = None, quiet: bool = False) -> None:  # noqa: ANN401
        self.console = Console(highlight=False, markup=False, quiet=quiet)
        self.title, self.epochs, self.tracker = title, epochs, tracker
        self.bars = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal or quiet,
        )
        self._all = self.bars.add_task(title, total=epochs, note="")
        self._one = self.bars.add_task("epoch", total=1, note="")

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, soft_wrap=True)

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        """Move the bars."""
        self.bars.update(self._all, completed=epoch + step / steps)
        self.bars.update(self._one, description=f"epoch {epoch + 1}", completed=step, total=steps)
        if note:
            self.bars.update(self._one, note=note)

    def epoch(self, line: dict[str, Any]) -> None:
        """Say what the epoch showed."""
        shown = f"loss {line['loss']:.3f}  train {line['train_accuracy']:.1%}"
        if "robust" in line:
            shown += f"  held-out clean {line['clean']:.1%}  PGD {line['robust']:.1%}"
            self.bars.update(self._all, note=f"PGD {line['robust']:.1%}")
        when = f"{line['epoch']:>4}/{self.epochs}  {line['train_seconds']:8.1f} s"
        self.console.print(f"{self.title} epoch {when}  {shown}", soft_wrap=True)
        if self.tracker is not None:
            for key, value in line.items():
                if isinstance(value, int | float) and key != "epoch":
                    self.tracker.add_scalar(key, value, line["epoch"])


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
    _run_options(train)
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
    _run_options(compare)

    commands.add_parser("recipes", help="list the recipes")

    data = commands.add_parser(
        "data", help="fetch data sets", epilog=DATA, formatter_class=raw, allow_abbrev=False
    )
    data.add_argument("action", choices=["get"])
    data.add_argument("names", nargs="+", metavar="NAME", help="mnist, cifar10")
    data.add_argument("--dir", type=Path, help="where to; by default where `yopo train` looks")

    args, rest = parser.parse_known_args()
    try:
        match args.command:
            case "train":
                run_train(args, rest)
            case "compare":
                run_compare(args, rest)
            case "recipes":
                run_recipes()
            case "data":
                run_data(args, rest)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint, if there is one, is kept", file=sys.stderr)
        sys.exit(130)


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder of the run")
    parser.add_argument("--config", type=Path, help="YAML file with settings, under the flags")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--device", help="cuda, cpu, …; by default a GPU if there is one")
    parser.add_argument("--track", choices=["tensorboard"], help="write its files into --out too")
    parser.add_argument(
        "--SECTION.SETTING", metavar="VALUE", help="any setting: --epochs 20 --method.m 3 …"
    )


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


def run_train(args: argparse.Namespace, rest: list[str]) -> None:
    """Train one network."""
    if args.settings:
        table = Table("setting", "default", "", box=None)
        for row in fields():
            table.add_row("--" + row[0], row[1], row[2])
        Console(highlight=False).print(table)
        return
    if args.recipe is None:
        raise ValueError("expected a recipe: yopo train RECIPE; `yopo recipes` lists them")
    config = resolve(args, rest)
    if args.dry_run:
        dry_run(config, args)
        return
    if args.out is None:
        raise ValueError("expected a folder for the run: --out DIR")
    result = train_one(config, args.out, args, title=config.method.name)
    if result:
        Console(highlight=False).print(result_table({config.method.name: result}))
        print(f"run: {args.out}")


def run_compare(args: argparse.Namespace, rest: list[str]) -> None:
    """Train with several methods; the same network, data, seed and clock for each."""
    if args.out is None:
        raise ValueError("expected a folder for the runs: --out DIR")
    specs = [spec.strip() for spec in args.methods.split(",")]
    configs = {
        s: resolve(args, rest, {"method": method_tree(s)}) for s in specs
    }  # all checked first
    results: dict[str, dict[str, Any]] = {}
    for spec, config in configs.items():
        out = args.out / spec
        done = out / "result.json"
        if args.resume and done.exists():
            if _read_yaml(out / "config.yaml") != config.tree():
                raise ValueError(f"{out} holds a run of another configuration; give another --out")
            results[spec] = json.loads(done.read_text())
        else:
            results[spec] = train_one(config, out, args, title=spec)
    if all(results.values()):
        Console(highlight=False).print(result_table(results))
        print(f"runs: {args.out}")


def resolve(args: argparse.Namespace, rest: list[str], over: Tree | None = None) -> Config:
    """Recipe, then YAML file, then `over`, then flags."""
    source = Path(args.recipe)
    tree = _read_yaml(source) if source.suffix in (".yaml", ".yml") else recipe(args.recipe)
    if args.config:
        tree = overlay(tree, _read_yaml(args.config))
    flags = nested(_flags(rest))
    if str(flags.get("epochs", "")).isdigit() and int(flags["epochs"]) > 0:
        tree = rescaled(tree, int(flags["epochs"]))
    return validate(overlay(overlay(tree, over or {}), flags))


def train_one(config: Config, out: Path, args: argparse.Namespace, title: str) -> dict[str, Any]:
    """Run one training in one folder; stop cleanly on signals."""
    from yopo.data import load
    from yopo.train import StopRequested, Trainer

    begun = any((out / "state").glob("save-*"))
    if begun and not args.resume:
        raise ValueError(f"{out} holds a run; add --resume to go on, or give another --out")
    tracker = _tracker(args.track, out)
    device = _device(args.device)
    d = config.data
    data = load(d.name, root=d.root, path=d.path, size=d.size)
    screen = Screen(title, config.epochs, tracker, quiet=_rank() > 0)
    trainer = Trainer(config, data, out, screen, device)
    if args.resume and trainer.resume():
        p = trainer.progress
        screen.say(f"going on from epoch {p.epoch + 1}, step {p.step}")
    elif args.resume:
        screen.say(f"nothing to resume in {out}; starting")
    try:
        with screen.bars, _stop_on_signals(trainer):
            return trainer.run()
    except StopRequested:
        command = ["yopo", "train", str(out / "config.yaml"), "--out", str(out), "--resume"]
        screen.say(f"stopped and saved. To go on: {shlex.join(command)}")
        sys.exit(130)
    finally:
        if tracker is not None:
            tracker.close()


@contextmanager
def _stop_on_signals(trainer: Any) -> Iterator[None]:  # noqa: ANN401
    """The first Ctrl-C or SIGTERM finishes the step and saves; a later Ctrl-C ends at once.

    torchrun passes a signal on that its processes may have had already, so what comes again within
    a second is the same one.
    """
    first = 0.0

    def ask(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if not trainer.stop:
            first = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - first > 1:
            raise KeyboardInterrupt
        trainer.stop = True

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def dry_run(config: Config, args: argparse.Namespace) -> None:
    """Show the resolved settings, and the cost after a few measured steps."""
    from yopo.data import load
    from yopo.train import Trainer

    print(yaml.safe_dump(config.tree(), sort_keys=False), end="")
    d = config.data
    data = load(d.name, root=d.root, path=d.path, size=d.size)
    with tempfile.TemporaryDirectory() as folder:
        screen = Screen("", config.epochs, quiet=True)
        trainer = Trainer(config, data, Path(folder), screen, _device(args.device))
        seconds, propagations = trainer.measure(steps=5)
    steps = len(trainer.loader)
    total = seconds * steps * config.epochs
    print(f"# {config.epochs} epochs of {steps} steps of {config.batch} images")
    print(f"# {propagations * config.epochs:.0f} propagations per image in all")
    print(f"# {1000 * seconds:.1f} ms a step, so about {total / 60:.1f} minutes of training here")


def result_table(results: dict[str, dict[str, Any]]) -> Table:
    """Test accuracy of the best weights and the last ones, side by side."""
    first = next(iter(results.values()))
    attack = next(k for k in first["last"] if k != "clean")
    table = Table(
        title=f"test accuracy, clean / {attack}, {first['test_images']} images",
        caption="best: the weights with the best held-out robust accuracy",
    )
    for name in ("method", "training", "propagations", "best", "last"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, r in results.items():
        pairs = (r.get("best", r["last"]), r["last"])
        shown = (f"{100 * p['clean']:.2f} / {100 * p[attack]:.2f}" for p in pairs)
        table.add_row(method, f"{r['train_seconds']:.1f} s", f"{r['propagations']:.0f}", *shown)
    return table


def _flags(rest: list[str]) -> dict[str, str]:
    """--a.b value and --a.b=value as {"a.b": "value"}."""
    flags: dict[str, str] = {}
    tokens = iter(rest)
    for token in tokens:
        if not token.startswith("--"):
            raise ValueError(
                f"did not expect {token!r}; settings are written --section.setting value"
            )
        name, equals, value = token.removeprefix("--").partition("=")
        if not equals:
            value = next(tokens, "--")
            if value.startswith("--"):
                raise ValueError(f"--{name} needs a value")
        flags[name] = value
    return flags


def _read_yaml(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"expected settings in {path}, got {type(tree).__name__}")
    return tree


def _tracker(kind: str | None, out: Path) -> Any:  # noqa: ANN401
    if kind is None or _rank() > 0:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "--track tensorboard needs it installed: pip install tensorboard"
        ) from None
    return SummaryWriter(str(out / "tensorboard"))


def _device(name: str | None) -> Any:  # noqa: ANN401
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no GPU here; leave it out, or use cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return torch.device(name)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _fail(message: str) -> NoReturn:
    print(f"yopo: {message}", file=sys.stderr)
    sys.exit(2)
