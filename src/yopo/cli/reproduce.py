"""`yopo reproduce`: the paper's tables and figures end to end, ours beside the paper's."""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from yopo.cli.common import check_drawing, nothing_else, pages, say
from yopo.cli.eval import evaluate
from yopo.cli.log import steady
from yopo.cli.training import lost_others_are_named, watched
from yopo.core import files
from yopo.paper.reproduction import FIGURES, TABLES, folder
from yopo.runs.folder import (
    EVALUATION,
    LAST,
    LAST_EVALUATION,
    is_finished,
    is_run,
    mark_untimed,
    settle_untimed,
)
from yopo.runs.overlay import Tree
from yopo.runs.settings import Config, validate

if TYPE_CHECKING:
    from yopo.paper.reproduced import Summary

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
QUICK_SAMPLES = 300


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
    nothing_else(rest)
    from yopo.attacks.names import parse_all

    if args.samples is not None and args.attacks is None:
        raise ValueError("--samples is for --attacks; the paper's attacks take all test images")
    if args.samples is not None and args.samples < 1:
        raise ValueError(f"expected --samples of at least 1, got {args.samples}")
    if args.epochs is not None and args.attacks:
        raise ValueError("--epochs is for times alone, without --attacks; leave one of them out")
    if args.show and (args.rows or args.epochs or args.attacks or args.quick):
        raise ValueError("--show shows all that is in --out; leave --rows and the like out")
    if args.show and not args.out.is_dir():
        raise ValueError(f"no folder {args.out} to show")
    if args.what == "figures":
        _figures(args)
        return
    usual = ["clean", *TABLES[args.what].attacks]
    asked = [a.name for a in parse_all(args.attacks)] if args.attacks else []
    more = [name for name in asked if name not in usual]
    parse_all([*usual, *more])  # all is checked before hours of training
    bench = _bench(args.bench)
    if not args.show:
        rows = None if args.rows is None else [r.strip() for r in args.rows.split(",")]
        for path in _trained(args.what, args.out, rows, args):
            if args.epochs is None:  # a shorter run is for its time
                _attack(args.what, path, more, args)
    _print(args, bench)


def _trained(
    name: str, out: Path, rows: Sequence[str] | None, args: argparse.Namespace
) -> Iterator[Path]:
    """Each row's run folder for each seed, when it is trained; all rows where none are named."""
    what = TABLES[name]
    rows = rows or list(what.recipes)
    for row in rows:
        if row not in what.recipes:
            raise ValueError(f"no row {row!r} in {name}; it has {', '.join(what.recipes)}")
    wanted: dict[Path, Config] = {}
    for row in rows:
        most = what.config(row, quick=args.quick).epochs
        if args.epochs is not None and not 1 <= args.epochs < most:
            raise ValueError(f"expected --epochs under {row}'s {most}, got {args.epochs}")
        for seed in _seeds(args.seeds):
            config = what.config(row, seed=seed, quick=args.quick, epochs=args.epochs)
            wanted[out / f"{folder(row)}-seed-{seed}"] = config
        for path in what.folders(row, out).values():  # a table has one length a row
            if path not in wanted and (n := _settings(path)["epochs"]) != config.epochs:
                raise ValueError(
                    f"{path} was trained for {n} epochs, not {config.epochs}; give another --out"
                )
    for path, config in wanted.items():  # all checked first
        _check(path, config)
    for path, config in wanted.items():
        if not is_finished(path):
            _train(path, config, args)
        settle_untimed(path)
        yield path


@steady()
@lost_others_are_named()
def _train(path: Path, config: Config, args: argparse.Namespace) -> None:
    """Train one row with one seed, or go on with it."""
    from yopo.runs.api import train_run

    begun = is_run(path)
    if args.untimed:
        mark_untimed(path)
    with watched(path.name, config.epochs, path) as screen:
        train_run(config, path, resume=begun, device=args.device, watch=screen, name=path.name)


def _seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"expected numbers for --seeds, as 0,1,2, got {text!r}")
    return list(dict.fromkeys(map(int, words)))


def _check(path: Path, config: Config) -> None:
    """Refuse a folder that holds a run of other settings."""
    if not is_run(path):
        return
    there = _settings(path)
    free = ("evaluate", "checkpoint", "diagnose", "engine", "notes")  # not of what is trained
    other = [k for k, v in config.tree().items() if k not in free and there[k] != v]
    if other:
        raise ValueError(
            f"{path} holds a run of other settings ({', '.join(other)}); give another --out"
        )


def _settings(path: Path) -> Tree:
    from yopo.report.records import read_runs

    return validate(read_runs([path])[0].config).tree()


def _attack(name: str, path: Path, more: list[str], args: argparse.Namespace) -> None:
    """The paper's attacks on the last weights and all test images, and more where asked for.

    What is asked for on fewer images is an evaluation of its own, of that weights file.
    """
    from yopo.runs.distributed import pick_device

    what = TABLES[name]
    usual, step = ["clean", *what.attacks], None if args.quick else what.step
    gpu = pick_device(args.device).type == "cuda"
    most = QUICK_SAMPLES if args.quick else None
    if args.samples is None:
        plans = [(path, [*usual, *more], most)]
    else:
        plans = [(path, usual, most)]
        if not {*more} <= {*_attacked(path / EVALUATION, most, step)}:
            plans.append((path / LAST, ["clean", *more], args.samples))
    for target, attacks, samples in plans:
        file = path / (EVALUATION if target == path else LAST_EVALUATION)
        met = _attacked(file, samples, step)
        if not {*attacks} <= {*met}:
            every = list(dict.fromkeys([*attacks, *met]))  # what is there stays there
            evaluate(
                target,
                ",".join(every),
                weights="last" if target == path else None,
                samples=samples,
                step=step,
                batch=1000 if gpu else 500,
                precision="tf32" if gpu else "float32",
                compile=gpu and "autoattack" in every,
                device=args.device,
            )


def _attacked(file: Path, samples: int | None, step: float | None) -> list[str]:
    """The attacks that the last weights met as the table asks: these images, eps and steps."""
    from yopo.attacks.names import parse
    from yopo.evaluation.card import settings
    from yopo.report.records import read_runs
    from yopo.runs.evaluating import choose_threat

    (run,) = read_runs([file.parent])
    if (there := run.evaluations.get(file.name)) is None or not run.result:
        return []
    threat, about = choose_threat(validate(run.config)), there["about"]
    images = min(samples or run.result["test_images"], run.result["test_images"])
    if "last" not in run.weights(there) or (about["images"], about["eps"]) != (images, threat.eps):
        return []
    met = {name: a["settings"] for name, a in there["attacks"].items()}
    return [name for name, how in met.items() if how == settings(parse(name), threat, step)]


def _bench(file: Path | None) -> dict[str, Any] | None:
    from yopo.report.reading import read_bench

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


def _figures(args: argparse.Namespace) -> None:
    """The paper's Figure 3: runs in OUT/table1 and OUT/table2, curves in OUT/figure3a and 3b."""
    from yopo.report.curves import save_figures
    from yopo.report.groups import timed
    from yopo.report.records import read_runs

    if args.rows or args.epochs or args.bench or args.attacks or args.untimed:
        raise ValueError("figures take --out, --seeds, --quick, --show and --device, nothing else")
    check_drawing("a figure")
    for name, (table, rows) in FIGURES.items():
        if not args.show:
            for _ in _trained(table, args.out / table, rows, args):
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
