"""`yopo train` and `yopo compare`."""

import argparse
import difflib
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from yopo.cli.common import Terminal, pick_device, rank, read_yaml
from yopo.cli.log import steady
from yopo.cli.screen import Screen
from yopo.runs import checkpoint
from yopo.runs.overlay import Tree, nested, overlay
from yopo.runs.recipes import method_tree, recipe
from yopo.runs.settings import (
    Config,
    fields,
    refuse_another,
    rescaled,
    validate,
    what_counts,
    with_radius,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SWITCHES = ("resume", "dry-run", "settings")  # options without a value
TRAIN = """examples:
  yopo train demo --out runs/first
  yopo train cifar10-yopo-5-3 --out runs/c10 --epochs 20 --method.n 5 --threat.eps 6/255
  yopo train cifar10-fast --method.name pgd --method.steps 7 --out runs/pgd7
  yopo train demo --data.name folder --data.root photos --data.size 64 --threat.eps 8/255 --out own
  yopo train demo --model.name my_module:build_model --out runs/mine
  yopo train demo --out runs/first --resume
  torchrun --nproc-per-node 2 -m yopo train cifar10-fast --out runs/two
`yopo train --settings` lists every setting."""
COMPARE = """examples:
  yopo compare demo --methods natural,pgd-15,yopo-3-5 --out runs/compare
  yopo compare cifar10-fast --methods pgd-10,yopo-5-3,trades-yopo-3-4 --epochs 15 --out runs/c10
  yopo compare cifar10-fast --methods nfgsm,pgd-5,yopo-3-3 --propagations 120 --out runs/equal"""


def train_options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo train`."""
    parser.add_argument("recipe", nargs="?", help="name of a recipe, or a YAML file")
    run_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the settings and the cost")
    parser.add_argument("--settings", action="store_true", help="list every setting and leave")


def compare_options(parser: argparse.ArgumentParser) -> None:
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


def run_options(parser: argparse.ArgumentParser) -> None:
    """Options of all commands that train."""
    parser.add_argument(
        "--out", type=_folder, help="folder of the run (compare: one subfolder for each method)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="YAML file with settings; overrides the recipe, flags override it",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--device", help="cuda, cpu, …; by default a GPU if there is one")
    parser.add_argument("--track", choices=["tensorboard"], help="write its files into --out too")
    parser.add_argument(
        "--SECTION.SETTING", metavar="VALUE", help="any setting: --epochs 20 --method.m 3 …"
    )


def _folder(text: str) -> Path:
    if not text:  # Path("") is the working directory
        raise argparse.ArgumentTypeError("expected a folder, got nothing; is a variable unset?")
    return Path(text)


@steady()
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
        Terminal().print(result_table({config.method.name: result}))
        print(f"run: {args.out}")
        _check_written(args.out)


@steady()
def run_compare(args: argparse.Namespace, rest: list[str]) -> None:
    """Train with several methods; the same network, data, seed and clock for each."""
    if args.out is None:
        raise ValueError("expected a folder for the runs: --out DIR")
    given = nested(_flags(rest)).get("method", {})
    configs: dict[str, Config] = {}
    for spec in (spec.strip() for spec in args.methods.split(",")):  # all checked first
        method = method_tree(spec)
        for name in given:
            if name in method:
                raise ValueError(f"--method.{name} contradicts {spec}; write it in --methods")
        over: Tree = {"method": method}
        if args.propagations is not None:
            over["epochs"] = _affordable(resolve(args, rest, over), spec, args.propagations, rest)
        configs[spec] = resolve(args, rest, over)
        out = args.out / spec
        if not (args.resume and (out / "result.json").exists()):
            _check_free(out, args.resume)
        else:
            there = validate(read_yaml(out / "config.yaml", run=True))
            refuse_another(out, what_counts(there), what_counts(configs[spec]))
    results: dict[str, dict[str, Any]] = {}
    for spec, config in configs.items():
        out = args.out / spec
        done = _result(out) if args.resume else None
        results[spec] = done or train_one(config, out, args, title=spec)
    if all(results.values()):
        Terminal().print(result_table(results))
        print(f"runs: {args.out}")
        _check_written(*(args.out / spec for spec in results))


def _result(out: Path) -> dict[str, Any] | None:
    """What a finished run showed; one whose result is damaged finishes again."""
    from yopo.report.reading import read_result

    try:
        return read_result(out / "result.json")
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"{error}; the run finishes again")
        return None


def _affordable(config: Config, spec: str, most: float, rest: list[str]) -> int:
    """The epochs that `most` propagations per image pay for."""
    from yopo.runs.build import propagations

    if "epochs" in _flags(rest):
        raise ValueError("--propagations decides the epochs; leave --epochs out")
    cost = propagations(config)
    if not cost <= most < float("inf"):
        raise ValueError(
            f"expected --propagations of at least {cost:.2f}, an epoch of {spec}; got {most:g}"
        )
    return int(most / cost + 1e-6)


def _check_written(*runs: Path) -> None:
    """Refuse to call a run done whose files the disk did not take."""
    if rank() == 0 and not all((run / "result.json").exists() for run in runs):
        raise ValueError(f"not all of it could be written; make room, then: {_same_command()}")


def resolve(args: argparse.Namespace, rest: list[str], over: Tree | None = None) -> Config:
    """Recipe, then YAML file, then `over`, then flags."""
    source = Path(args.recipe)
    tree = read_yaml(source) if source.suffix in (".yaml", ".yml") else recipe(args.recipe)
    flags = nested(_flags(rest))
    for given in (read_yaml(args.config) if args.config else {}, over or {}, flags):
        if (epochs := _epochs(given.get("epochs"))) is not None:
            tree = rescaled(tree, epochs)
        threat = given.get("threat", {})
        if isinstance(threat, dict) and "eps" in threat and "step" not in threat:
            tree = with_radius(tree, threat)
        tree = overlay(tree, given)
    return validate(tree)


def _epochs(value: Any) -> int | None:  # noqa: ANN401
    """A number of epochs, where `validate` will take it for one: 3.0 is 3."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number >= 1 and number.is_integer() else None


@contextmanager
def _lost_others_are_named() -> Iterator[None]:
    """Say in a sentence what torch says in pages, when another process is gone."""
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        inside = Path(dist.__file__).parent
        frames = traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(inside) for frame in frames):
            raise
        raise RuntimeError(
            f"process {rank()} cannot reach another one, which may have been killed "
            f"({str(error).partition(chr(10))[0]}). What was saved is kept; to go on, with as many "
            f"processes as you like: {_same_command()}"
        ) from None


@steady()
@_lost_others_are_named()
def train_one(config: Config, out: Path, args: argparse.Namespace, title: str) -> dict[str, Any]:
    """Run one training in one folder; stop cleanly on signals."""
    from yopo.data import load
    from yopo.runs.build import out_of_reach
    from yopo.runs.progress import StopRequested
    from yopo.runs.trainer import Trainer

    _check_free(out, args.resume)
    tracker = _tracker(args.track, out)
    device = pick_device(args.device)
    d = config.data
    data = load(d.name, root=d.root, path=d.path, size=d.size)
    screen = Screen(title, config.epochs, tracker, quiet=rank() > 0)
    trainer = Trainer(config, data, out, screen, device)
    if args.resume and trainer.resume():
        p = trainer.progress
        screen.say(f"going on from epoch {p.epoch + 1}, step {p.step}")
    elif args.resume:
        screen.say(f"nothing to resume in {out}; starting")
    if (weak := out_of_reach(config)) is not None:
        screen.say(f"{title}: {weak}")
    try:
        with screen.bars, _stop_on_signals(trainer), _alone_in(out):
            return trainer.run()
    except StopRequested as stop:
        done = "stopped and saved" if stop.saved else "stopped; the last checkpoint is an older one"
        if (out / "result.json").exists():
            done = "stopped; this run is finished"
        screen.say(f"{done}. To go on: {_same_command()}")
        sys.exit(130)
    finally:
        if tracker is not None:
            tracker.close()


def _check_free(out: Path, resume: bool) -> None:
    """Refuse a folder that holds a run which is not to be gone on with."""
    saved = checkpoint.saved(out / "state")
    if saved and not resume:
        raise ValueError(f"{out} holds a run; add --resume to go on, or give another --out")
    if (out / "result.json").exists() and not saved:
        raise ValueError(f"{out} holds a finished run without checkpoints; give another --out")
    inside = sorted(path.parent.name for path in out.glob("*/metrics.jsonl"))
    if inside and not (out / "config.yaml").exists():
        raise ValueError(f"{out} holds other runs, first {inside[0]}; give another --out")


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Keep a second process from training in the same folder; a killed one leaves no lock."""
    if fcntl is None or rank() > 0:
        yield
        return
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system has locks
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is training in {out}") from None
        yield
    finally:
        os.close(folder)
        if fresh:
            with suppress(OSError):  # it holds a run
                out.rmdir()


def _same_command() -> str:
    """What was typed, to go on with; `yopo reproduce` goes on by itself."""
    words = sys.argv[1:]
    if words[:1] != ["reproduce"] and "--resume" not in words:
        words = [*words, "--resume"]
    command = shlex.join(["yopo", *words])
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return f"torchrun as before, -m {command}" if several else command


@contextmanager
def _stop_on_signals(trainer: Any) -> Iterator[None]:  # noqa: ANN401
    """The first Ctrl-C, SIGTERM or SIGHUP finishes the step and saves; a later Ctrl-C ends at once.

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

    asking = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        asking.append(signal.SIGHUP)  # the terminal was closed; under nohup that means nothing
    before = {s: signal.signal(s, ask) for s in asking}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def dry_run(config: Config, args: argparse.Namespace) -> None:
    """Show the resolved settings, and the cost after a few measured steps."""
    from yopo.data import load
    from yopo.runs.build import out_of_reach
    from yopo.runs.trainer import Trainer

    print(yaml.safe_dump(config.tree(), sort_keys=False), end="")
    d = config.data
    data = load(d.name, root=d.root, path=d.path, size=d.size)
    with tempfile.TemporaryDirectory() as folder:
        screen = Screen("", config.epochs, quiet=True)
        trainer = Trainer(config, data, Path(folder), screen, pick_device(args.device))
        seconds, propagations = trainer.measure(steps=5)
    steps = len(trainer.loader)
    total = seconds * steps * config.epochs
    print(f"# {config.epochs} epochs of {steps} steps of {config.batch} images")
    print(f"# {propagations * config.epochs:.0f} propagations per image in all")
    if (weak := out_of_reach(config)) is not None:
        print(f"# {weak}")
    print(f"# {1000 * seconds:.1f} ms a step, so about {total / 60:.1f} minutes of training here")


def result_table(results: dict[str, dict[str, Any]]) -> Table:
    """Test accuracy of the best weights and the last ones, side by side."""
    first = next(iter(results.values()))
    attack = next(k for k in first["last"] if k != "clean")
    table = Table(
        title=f"test accuracy, clean / {attack}, {first['test_images']} images",
        caption="best: the weights with the best held-out robust accuracy (natural: clean), "
        "or with evaluate.keep last those of the last evaluated epoch",
    )
    for name in ("method", "training", "propagations", "best", "last"):
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for method, r in results.items():
        pairs = (r.get("best"), r["last"])  # no best where every epoch collapsed
        shown = (f"{100 * p['clean']:.2f} / {100 * p[attack]:.2f}" if p else "–" for p in pairs)
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
                near = difflib.get_close_matches(name, SWITCHES, n=1)
                only = name in SWITCHES  # else the parser would have taken it
                hint = f"; did you mean --{near[0]}?" if near else ""
                raise ValueError(
                    f"--{name} is for `yopo train`" if only else f"--{name} needs a value{hint}"
                )
        flags[name] = value
    return flags


def _tracker(kind: str | None, out: Path) -> Any:  # noqa: ANN401
    if kind is None or rank() > 0:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "--track tensorboard needs it installed: pip install tensorboard"
        ) from None
    return SummaryWriter(str(out / "tensorboard"))
