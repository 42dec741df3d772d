"""`yopo ls`."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from yopo.cli.common import Terminal, nothing_else
from yopo.runs import folder

EXAMPLES = """examples:
  yopo ls
  yopo ls runs runs/compare
Accuracy is of test images, clean / attacked by the training's own PGD; of a run that is not
finished, of held-out images. What `yopo eval` measured stands in `yopo report`."""


def options(parser: argparse.ArgumentParser) -> None:
    """Which folders."""
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path("runs")],
        metavar="DIR",
        help="a run, or a folder of runs; by default runs",
    )


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """A line for each run."""
    nothing_else(args, rest)
    for path in args.folders:
        if not path.is_dir():
            raise ValueError(f"no folder {path}; `yopo train RECIPE --out DIR` makes a run")
    rows = [row(run) for path in args.folders for run in _runs(path)]
    if not rows:
        raise ValueError(f"no runs in {', '.join(map(str, args.folders))}")
    console = Terminal()
    heads = ("method", "state", "clean / PGD", "age", "run")
    widths = [max(len(cells[i]) for cells in [heads, *rows]) for i in range(len(heads))]
    for cells in [heads, *rows]:
        shown = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        console.print("  ".join(shown).rstrip(), soft_wrap=True)


def _runs(path: Path) -> Iterator[Path]:
    """The runs in a folder, and in those inside it, as `yopo compare` makes them."""
    if folder.is_run(path):
        yield path
    for inside in sorted(p for p in path.iterdir() if p.is_dir()):
        yield from [inside] if folder.is_run(inside) else folder.runs_in(inside)


def row(run: Path) -> tuple[str, str, str, str, str]:
    """Its method, its state, its accuracy, its age and where it is."""
    from yopo.methods.registry import said

    age = _age(time.time() - max(f.stat().st_mtime for f in folder.marks(run)))
    try:
        config, (lines, _) = folder.read_config(run), folder.read_lines(run)
        result = folder.read_result(run) if folder.is_finished(run) else None
    except (ValueError, OSError):
        return "–", "damaged", "–", age, str(run)
    state = "finished" if result else _unfinished(config, lines)
    looks = [[line.get(k) for k in ("clean", "robust")] for line in lines]
    measured = (result.get("best") or result["last"]) if result else None
    if measured is not None:
        shares = [measured["clean"], *(v for k, v in measured.items() if k != "clean")]
    else:
        shares = next((look for look in reversed(looks) if None not in look), [])
    accuracy = " / ".join(f"{share:.1%}" for share in shares) or "–"
    return said(config["method"]), state, accuracy, age, str(run)


def _unfinished(config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """How far it is, or where it collapsed and did not go back."""
    done = lines[-1]["epoch"] if lines else 0
    last = lines[-1].get("action") if lines else None
    guard = config.get("guard")
    most = guard.get("most") if isinstance(guard, dict) else None
    back = sum(line.get("action") == "rollback" for line in lines)
    gone = last == "rollback" and isinstance(most, int) and back > most
    if gone or last == "stop":
        return f"collapsed in epoch {done}"
    return f"epoch {done} of {config['epochs']}"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
