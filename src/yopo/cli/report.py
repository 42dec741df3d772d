"""`yopo report`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from yopo.cli.common import check_drawing, fitted, loading, nothing_else, pages, say

if TYPE_CHECKING:
    from yopo.report.pictures import Strip
    from yopo.report.records import Run

EXAMPLES = """examples:
  yopo report runs/compare/* --out report.html
  yopo report runs/pgd-10 runs/yopo-5-3 --paper table2 --figures figures
The page is made from the run folders alone, and everything it needs is inside it. Cards come from
`yopo eval`; pictures from its --save-examples. Its table and headline are printed too."""


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="default report.html")
    parser.add_argument("--paper", help="table1 … table4: the paper's figures beside ours")
    parser.add_argument("--figures", type=Path, help="folder for the curves as PNG and SVG")


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Read the runs, write the page."""
    nothing_else(args, rest)
    with loading():
        from yopo.core import files
        from yopo.paper.beside import beside
        from yopo.paper.reproduction import TABLES
        from yopo.report.curves import save_figures
        from yopo.report.headline import headline
        from yopo.report.page import page
        from yopo.report.records import read_runs
        from yopo.report.words import notes

    if args.paper is not None and args.paper not in TABLES:
        raise ValueError(f"expected --paper {', '.join(TABLES)}, got {args.paper!r}")
    if args.out.is_dir():
        raise ValueError(f"expected a file for --out, got the folder {args.out}; add report.html")
    if args.out.suffix not in (".html", ".htm"):
        raise ValueError(f"expected an .html file for --out, got {args.out}")
    if args.figures:
        check_drawing("--figures")
    runs = read_runs([path for path in args.runs if not path.is_file()] or args.runs)
    sentences = headline(runs)
    below = {sentence.casefold() for sentence in sentences}  # these are not said twice
    for line in (f"{run.label}: {note}" for run in runs for note in notes(run)):
        if line.casefold() not in below:
            say(line)
    strips = [strip for run in runs for strip in load_strips(run)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = page(runs, strips, beside(runs, args.paper) if args.paper else None)
    files.write_text(args.out, text.encode(errors="replace").decode())  # names of no UTF-8
    console = pages()
    console.print(fitted(summary(runs), console.width))
    for sentence in sentences:
        console.say(f"- {sentence}")
    say(f"report: {args.out}")
    if args.figures:
        for path in (drawn := save_figures(runs, args.figures)):
            say(f"figure: {path}")
        if len(drawn) < 4:
            say("no run has points to draw against the other axis, so it has no figure")


def summary(runs: "Sequence[Run]") -> Table:
    """Each run's cost and accuracies: a row for each evaluation, or what the training measured."""
    from yopo.evaluation.card import attacked, duration
    from yopo.report.clock import busy
    from yopo.report.score import alone, trainings_own
    from yopo.report.words import evaluated_weights

    rows: list[tuple[Run, str, dict[str, float]]] = []
    weights = [run.weights(e) for run in runs for e in run.evaluations.values()]
    common = [which for which in ("best", "last") if all(which in w for w in weights)]
    for run in runs:
        for e in run.strongest_first:
            about = e["about"]
            which = common[0] if common else evaluated_weights(run, e)
            how = f"{which} weights, {about['images']:,} images, {about['threat']}"
            shares = {k: a["accuracy"] for k, a in e["attacks"].items()}
            worst = {"worst case": e["worst"]["accuracy"]} if attacked(e["attacks"]) else {}
            rows.append((run, how, shares | worst))
        if not run.evaluations or trainings_own(run, alone(run)):
            # The training's own PGD takes other steps than an evaluation's of the same name.
            others, (which, measured) = any(r.evaluations for r in runs), run.own
            own = {k: v for k, v in measured.items() if k == "clean" or not others}
            own |= {f"training's {k}": v for k, v in measured.items() if k not in own}
            many = f", {run.result['test_images']:,} images" if run.result else ""
            how = f"by training itself, {which} weights{many}, {run.threat}" if own else ""
            rows.append((run, how, own))
    ways = list(dict.fromkeys(how for _, how, _ in rows if how))
    attacks = dict.fromkeys(attack for *_, shares in rows for attack in shares)
    if "worst case" in attacks:  # after all of them
        attacks["worst case"] = attacks.pop("worst case")
    caption = "training: time spent processing batches, nothing else"
    if any(busy(run) and not run.shared for run in runs):
        caption += "; busy: epochs took so unlike times that this one does not compare"
    caption = "\n".join([*ways, caption]) if len(ways) == 1 else caption
    table = Table(caption=caption)
    more = ["measured with"] if len(ways) > 1 else []
    for name in ("run", "training", "propagations", *more, *attacks):
        text = name in ("run", *more)
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    for run, how, shares in rows:
        seconds, cost = run.spent("train_seconds"), run.spent("propagations")
        spent = "–" if seconds is None else duration(seconds)
        spent += " (shared)" if run.shared else " (busy)" if busy(run) else ""
        cells = [run.label, spent]
        cells += ["–" if cost is None else f"{cost:.0f}", *([how] if more else [])]
        cells += [f"{100 * shares[a]:.2f}%" if a in shares else "–" for a in attacks]
        table.add_row(*cells)
    return table


def load_strips(run: "Run") -> "list[Strip]":
    """A run's pictures, if it has any; what is wrong with them is said."""
    from yopo.report.pictures import read_strips

    try:
        return read_strips(run)
    except (ValueError, OSError) as error:
        say(f"{run.label}: no pictures, because {error}")
        return []
