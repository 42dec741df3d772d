"""The command line: each command has a file here, which parses what was typed and prints.

The file of the command that was typed is loaded, and no other: help needs no torch. What a command
does is a function further down: `runs.api` trains, compares and evaluates.
"""

import argparse
import difflib
import io
import logging
import os
import re
import sys
import textwrap
import traceback
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from yopo import __version__
from yopo.cli.common import Terminal, say, wrapped
from yopo.cli.ending import ends_at_once
from yopo.cli.log import is_unread, unread_is_no_fault

# Each is a module here, with EXAMPLES, `options`, which adds them to a parser, and `run`, which
# takes the arguments and what the parser did not know.
COMMANDS = {
    "train": "train a network",
    "compare": "train with several methods, all else equal",
    "eval": "attack a network",
    "predict": "name what pictures show",
    "export": "write a network as ONNX or pt2",
    "push": "publish a run on the Hugging Face Hub",
    "robustbench": "write a claim for the RobustBench leaderboard",
    "report": "one page about one or several runs",
    "diagnose": "recommend m, n and the split for a trained network",
    "bench": "time a training step",
    "reproduce": "run a table of the paper; our numbers beside the paper's",
    "recipes": "list the recipes, what they take and what they reach",
    "ls": "list runs",
    "data": "fetch data sets",
    "completion": "let a shell complete what is typed",
}
FIRST = """yopo trains networks that hold under attack. To begin with:

  yopo train demo --out runs/first    on digits that come with it
  yopo eval runs/first --attacks cw   attack the network on its test set
  yopo report runs/first              a page about it, report.html
  yopo recipes                        what else to train, and what it reaches

Commands: {}.
`yopo COMMAND --help` shows what each can do, with examples."""
# Of a command, with the flag before it.
ARGUMENTS = re.compile(r" *(?:--\S+ +(?=[^- ]))?(?:\"[^\"]*\"|\S)+")
Parsed = tuple[ModuleType, argparse.Namespace, list[str]]


def main() -> None:
    """What was typed, parsed and done."""
    run(*parsed())


class Parser(argparse.ArgumentParser):
    """A parser that says with whole words what it did not expect."""

    def error(self, message: str) -> NoReturn:
        """Say how the command is used, and what is wrong."""
        self.print_usage(sys.stderr)
        say(f"{self.prog}: error: {message}", error=True)
        sys.exit(2)


class WholeWords(argparse.RawDescriptionHelpFormatter):
    """Help with whole words: argparse would break them at hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return list(wrapped(" ".join(text.split()), width))


@unread_is_no_fault()
def parsed() -> Parsed:
    """The command that was typed, its arguments, and what its parser did not know."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no ∞ gets a ?
            stream.reconfigure(errors="replace")
    parser = Parser(
        prog="yopo",
        description="Fast adversarial training: train robust networks and compare methods.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if not sys.argv[1:]:
        print(FIRST.format(textwrap.fill(", ".join(COMMANDS), 65, subsequent_indent="  ")))
        sys.exit(0)
    typed = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if typed and typed not in COMMANDS:
        near = difflib.get_close_matches(typed, COMMANDS, n=1)
        near = [f"yopo --{typed}"] if typed in ("help", "version") else near
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        say(f"yopo: no command {typed!r}; {hint}", error=True)
        sys.exit(2)
    chosen = ModuleType("none")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, formatter_class=WholeWords, allow_abbrev=False
        )
        if name == typed:
            chosen = import_module(f"yopo.cli.{name}")
            command.epilog = _fitted(chosen.EXAMPLES)
            chosen.options(command)
            command.set_defaults(known=re.findall(r"--[\w.-]+", command.format_usage()))
    return chosen, *parser.parse_known_args(joined(sys.argv[1:]))


def joined(words: list[str]) -> list[str]:
    """With --section.setting value as one word: argparse would take the value for another RUN."""
    result: list[str] = []
    for word in words:
        last = result[-1] if result else ""
        if re.fullmatch(r"--\w+\.[^=]+", last) and not word.startswith("--"):
            result[-1] = f"{last}={word}"
        else:
            result.append(word)
    return result


@ends_at_once()
@unread_is_no_fault()
def run(command: ModuleType, args: argparse.Namespace, rest: list[str]) -> None:
    """Run a command; what goes wrong is said in a sentence."""
    log, said = logging.getLogger("yopo"), Said(logging.WARNING)
    log.addHandler(said)
    try:
        command.run(args, rest)
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():  # by torchrun
            dist.destroy_process_group()
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if is_unread(error) or not (isinstance(error, OSError) or _is_ours(error)):
            raise
        say(f"yopo: {error}", error=True)
        sys.exit(2)
    except KeyboardInterrupt:
        kept = "; what was saved is kept" if _has_saved(args) else ""
        print(f"interrupted{kept}", file=sys.stderr)
        sys.exit(130)
    finally:
        log.removeHandler(said)


def _has_saved(args: argparse.Namespace) -> bool:
    """Whether there are checkpoints in --out, or in the runs inside it."""
    from yopo.runs.folder import STATE

    out = getattr(args, "out", None)
    saves = (f"{STATE}/save-*", f"*/{STATE}/save-*")
    return isinstance(out, Path) and any(any(out.glob(name)) for name in saves)


def _fitted(examples: str) -> str:
    """As wide as the terminal: sentences, and commands with a \\ where they go on."""
    console = Terminal()
    if not console.is_terminal:
        return examples
    width = console.width - 2
    lines: list[str] = []
    for kept, some in groupby(examples.splitlines(), lambda x: x[:1] in ("", " ") or x[-1] == ":"):
        for line in some if kept else wrapped(" ".join(some), width):
            command, gap, about = line.partition("   ")  # what is said of a command
            if len(line) <= width:
                lines.append(line)
                continue
            *begun, end = wrapped(command, width - 2, words=ARGUMENTS, indent="      ")
            lines += [*(f"{part} \\" for part in begun), end]
            lines += wrapped(f"      {about.strip()}", width) if gap else []
    return "\n".join(lines)


class Said(logging.Handler):
    """Warnings of the library, as the command line says things."""

    def emit(self, record: logging.LogRecord) -> None:
        """A line."""
        say(f"yopo: {record.getMessage()}", error=True)


def _is_ours(error: Exception) -> bool:
    """Whether it was raised here, with a sentence, and not in a user's model or in torch."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return Path(raised.filename).is_relative_to(Path(__file__).parents[1])
