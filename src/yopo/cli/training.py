"""What the commands that train share: their options, and what a person sees meanwhile."""

import argparse
import difflib
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from yopo.cli.common import rank
from yopo.cli.screen import Screen
from yopo.runs.folder import has_result, is_finished, read_settings
from yopo.runs.overlay import Tree, nested, overlay
from yopo.runs.progress import StopRequested

SWITCHES = ("resume", "dry-run", "settings")  # options without a value
# Settings that may be without one: of a method's own that is not known before torch is loaded.
YES_OR_NO = (
    "data.skip_broken",
    "data.flip",
    "data.resident",
    "model.normalize",
    "model.channels_last",
    "optimizer.nesterov",
    "sync_batchnorm",
)


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
    track_option(parser)
    parser.add_argument(
        "--SECTION.SETTING", metavar="VALUE", help="any setting: --epochs 20 --method.m 3 …"
    )


def track_option(parser: argparse.ArgumentParser) -> None:
    """--track, of all commands that have something to tell."""
    parser.add_argument(
        "--track", metavar="LIST", help="tell them, too: tensorboard, wandb, mlflow, trackio"
    )


def _folder(text: str) -> Path:
    if not text:  # Path("") is the working directory
        raise argparse.ArgumentTypeError("expected a folder, got nothing; is a variable unset?")
    return Path(text)


def settings_typed(rest: list[str]) -> Tree:
    """--a.b value and --a.b=value as {"a": {"b": "value"}}; --a.c alone is true."""
    typed: dict[str, str] = {}
    waiting = list(rest)
    while waiting:
        token = waiting.pop(0)
        if not token.startswith("--"):
            raise ValueError(
                f"did not expect {token!r}; settings are written --section.setting value"
            )
        name, equals, value = token.removeprefix("--").partition("=")
        if not equals:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else _alone(name)
        typed[name] = value
    return nested(typed)


def _alone(name: str) -> str:
    """What a setting without a value means: true, if it is one of yes or no."""
    near = difflib.get_close_matches(name, SWITCHES, n=1)
    if name in SWITCHES:  # else the parser would have taken it
        raise ValueError(f"--{name} is for `yopo train`")
    if name not in YES_OR_NO:
        hint = f"; did you mean --{near[0]}?" if near else ""
        raise ValueError(f"--{name} needs a value{hint}")
    return "true"


def as_written(recipe: str, config: Path | None, typed: Tree) -> Tree:
    """The settings before they are checked: the recipe, the file over it, flags over both."""
    from yopo.runs.recipes import recipe as named

    path = Path(recipe)
    tree = read_settings(path) if path.suffix in (".yaml", ".yml") else named(recipe)
    return overlay(overlay(tree, read_settings(config) if config else {}), typed)


@contextmanager
def watched(title: str, out: Path) -> Iterator[Screen]:
    """A screen for one training; where that is stopped, say how to go on, and leave."""
    screen = Screen(title, quiet=rank() > 0)
    try:
        with screen.bars:
            yield screen
    except StopRequested as stop:
        done = "stopped and saved" if stop.saved else "stopped; the last checkpoint is an older one"
        if is_finished(out):
            done = "stopped; this run is finished"
        screen.say(f"{done}. To go on: {same_command()}", words=False)
        sys.exit(130)


def check_written(*runs: Path) -> None:
    """Refuse to call a run done whose files the disk did not take."""
    if rank() == 0 and not all(map(has_result, runs)):
        raise ValueError(f"not all of it could be written; make room, then: `{same_command()}`")


@contextmanager
def lost_others_are_named() -> Iterator[None]:
    """Say in a sentence what torch says in pages, when another process is gone."""
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        inside, first = Path(dist.__file__).parent, str(error).partition("\n")[0]
        frames = traceback.extract_tb(error.__traceback__)
        # What DistributedDataParallel meets it meets in a backward pass, outside of that folder.
        of_torch = type(error).__module__ == "torch.distributed"
        lost = of_torch or ("gloo" in first and first[0] == "[")
        if not lost and not any(Path(f.filename).is_relative_to(inside) for f in frames):
            raise
        raise RuntimeError(
            f"process {rank()} cannot reach another one, which may have been killed "
            f"({first}). What was saved is kept; to go on, with as many "
            f"processes as you like: `{same_command()}`"
        ) from None


def same_command() -> str:
    """What was typed, to go on with; `yopo reproduce` and `yopo eval` go on by themselves."""
    words = sys.argv[1:]
    if words[:1] not in (["reproduce"], ["eval"]) and "--resume" not in words:
        words = [*words, "--resume"]
    command = shlex.join(["yopo", *words])
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return f"torchrun as before, -m {command}" if several else command


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
