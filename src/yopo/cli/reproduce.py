"""`yopo reproduce`: the paper's tables and figures end to end, ours beside the paper's."""

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from yopo.cli.common import check_drawing, nothing_else, pages, say
from yopo.cli.eval import evaluate
from yopo.cli.log import steady
from yopo.cli.training import lost_others_are_named, watched
from yopo.core import files
from yopo.paper.reproduction import FIGURES, TABLES
from yopo.runs.progress import Watcher
from yopo.runs.settings import Config

if TYPE_CHECKING:
    from yopo.paper.reproduced import Summary
    from yopo.paper.running import How

EXAMPLES = """examples:
  yopo reproduce table2 --out runs/table2                 all of Table 2: an hour on one H200
  yopo reproduce table2 --rows PGD-10,YOPO-5-3 --seeds 0,1,2 --attacks autoattack --out runs/table2
  yopo reproduce table3 --epochs 2 --out runs/table3      times alone: two epochs of each row
  yopo reproduce table4 --quick --out /tmp/quick          minutes on a CPU: does it work at all?
  yopo reproduce table2 --out runs/table2 --show          what is there; trains nothing
  yopo reproduce figures --out runs                       Figure 3, from runs/table1 and runs/table2
Each row trains with the recipe of its name, once for each seed, in OUT/row-seed-N, and its last
weights are attacked as in the paper. What is finished is not done again, so the same command goes
on after an interruption; one attack more runs those before it anew, for the worst case over all.
The table shows all that is in OUT."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo reproduce`."""
    parser.add_argument("what", choices=[*TABLES, "figures"], help="of the paper")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rows", help="some of them, as PGD-10,YOPO-5-3; default all")
    parser.add_argument("--seeds", default="0", help="as 0,1,2; default 0")
    parser.add_argument("--epochs", type=int, help="fewer than the recipes': for times alone")
    parser.add_argument("--quick", action="store_true", help="embedded digits, minutes on a CPU")
    parser.add_argument("--attacks", help="more than the paper's, as autoattack")
    parser.add_argument("--samples", type=int, help="test images for --attacks; default all")
    parser.add_argument("--show", action="store_true", help="what is in --out, and train nothing")
    parser.add_argument("--bench", type=Path, help="`yopo bench --json` file of the same network")
    parser.add_argument(
        "--untimed", action="store_true", help="several at once on one GPU: do not count their time"
    )
    parser.add_argument("--device", help="cuda, cpu, …; by default a GPU if there is one")


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Train and attack what is not done yet, then print the table or draw the figures."""
    nothing_else(args, rest)
    if args.show and (args.rows or args.epochs or args.attacks or args.quick):
        raise ValueError("--show shows all that is in --out; leave --rows and the like out")
    if args.show and not args.out.is_dir():
        raise ValueError(f"no folder {args.out} to show")
    from yopo.paper.running import How, reproduce

    how = How(
        seeds=_seeds(args.seeds),
        epochs=args.epochs,
        quick=args.quick,
        attacks=args.attacks.split(",") if args.attacks else (),
        samples=args.samples,
        untimed=args.untimed,
        device=args.device,
    )
    how.check()
    if args.what == "figures":
        _figures(args, how)
        return
    bench = _bench(args.bench)
    if not args.show:
        rows = None if args.rows is None else [r.strip() for r in args.rows.split(",")]
        reproduce(args.what, args.out, rows, how, watched=_watched, evaluate=evaluate)
    _print(args, bench)


@contextmanager
def _watched(path: Path, _config: Config) -> Iterator[Watcher]:
    """A screen for the training of one row with one seed."""
    with steady(), lost_others_are_named(), watched(path.name, path) as screen:
        yield screen


def _seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"expected numbers for --seeds, as 0,1,2, got {text!r}")
    return list(dict.fromkeys(map(int, words)))


def _bench(file: Path | None) -> dict[str, Any] | None:
    from yopo.bench.reading import read_bench

    if file is None:
        return None
    try:
        return read_bench(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read --bench {file}; expected what `yopo bench --json` writes ({error})"
        ) from None


def _print(args: argparse.Namespace, bench: dict[str, Any] | None) -> None:
    from yopo.paper.reproduced import summary
    from yopo.paper.words import legend, notes

    ours = summary(args.what, args.out, bench)
    console = pages()
    console.print(rich_table(ours))
    for note in (*legend(ours), *notes(ours)):
        console.say(f"- {note}")
    if not args.show:
        text = json.dumps(ours, indent=1, ensure_ascii=False) + "\n"
        files.write_text(args.out / f"{args.what}.json", text)
        say(f"runs and {args.what}.json: {args.out}")


def rich_table(ours: "Summary") -> Table:
    """Ours beside the paper's."""
    from yopo.paper.reproduced import OTHER
    from yopo.paper.tables import paper
    from yopo.paper.words import cells, heads

    title = f"{ours['table']}, {paper()['tables'][ours['table']]['title']}: ours / the paper's"
    other = any(note.startswith(OTHER) for note in ours["notes"])
    shown = Table(title=title + (" (not the paper's setting, see below)" if other else ""))
    for name in heads(ours):
        method = name == "method"
        shown.add_column(
            name, justify="left" if method else "right", no_wrap=method, overflow="fold"
        )
    for row in ours["rows"]:
        words = (c if isinstance(c, str) else "\n".join(c) for c in cells(ours, row))
        texts = (re.sub(r"(?<=\d)–(?=\d)", " – ", text) for text in words)
        shown.add_row(*(re.sub("[;,] ", "\n", text) for text in texts))  # columns are narrow
    return shown


def _figures(args: argparse.Namespace, how: "How") -> None:
    """The paper's Figure 3: runs in OUT/table1 and OUT/table2, curves in OUT/figure3a and 3b."""
    from yopo.paper.running import train_rows
    from yopo.report.curves import save_figures
    from yopo.report.groups import timed
    from yopo.report.records import read_runs

    if args.rows or args.epochs or args.bench or args.attacks or args.untimed:
        raise ValueError("figures take --out, --seeds, --quick, --show and --device, nothing else")
    check_drawing("a figure")
    for name, (table, rows) in FIGURES.items():
        if not args.show:
            for _ in train_rows(table, args.out / table, rows, how, _watched):
                pass  # attacks are for the tables
        trained = {row: TABLES[table].folders(row, args.out / table) for row in rows}
        missing = [row for row, folders in trained.items() if not folders]
        if missing:
            say(f"{name}: not drawn, because {table} has no run of {', '.join(missing)}")
            continue
        runs = [timed(read_runs(list(folders.values()))) for folders in trained.values()]
        if not all(runs):
            say(f"{name}: not drawn, because a row has no finished run whose time counts")
            continue
        first = [seeds[0] for seeds in runs]  # one seed of each
        for path in save_figures(first, args.out / name):
            say(f"{name}: {path}")
