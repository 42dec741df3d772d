"""`yopo reproduce`: a table of the paper end to end, ours beside the paper's."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from yopo import checkpoint
from yopo.cli.common import nothing_else
from yopo.cli.evaluating import run_eval
from yopo.cli.training import train_one
from yopo.config import Config, Tree, overlay, validate
from yopo.paper import paper_table
from yopo.recipes import recipe

REPRODUCE = """examples:
  yopo reproduce table2 --out runs/table2                 all of Table 2: hours on one GPU
  yopo reproduce table2 --rows PGD-10,YOPO-5-3 --out runs/table2
  yopo reproduce table4 --quick --out /tmp/quick          minutes on a CPU: does it work at all?
Each row trains with the recipe of its name and is attacked as in the paper. What is finished is not
done again, so the same command goes on after an interruption."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A table of the paper."""

    recipes: dict[str, str]  # of each row
    attacks: tuple[str, ...]  # that it reports
    step: str  # of PGD
    against: str  # the row that times are compared with

    def tree(self, row: str) -> Tree:
        """The settings of a row."""
        base = recipe(self.recipes[row])
        return overlay(base, {"method": {"grad_at": "before"}}) if row.endswith("before") else base


TABLES = {
    "table1": Reproduction(
        {f"{m}": f"mnist-{m.lower()}" for m in ("PGD-5", "PGD-10", "PGD-40", "YOPO-5-10")},
        ("pgd-40", "cw"),
        "0.01",
        "PGD-40",
    ),
    "table2": Reproduction(
        {m: f"cifar10-{m.lower()}" for m in ("PGD-3", "PGD-5", "PGD-10", "YOPO-3-5", "YOPO-5-3")}
        | {"YOPO-5-3 before": "cifar10-yopo-5-3"},
        ("pgd-20", "cw"),
        "2/255",
        "PGD-10",
    ),
    "table3": Reproduction(
        {
            m: f"cifar10-wrn-{m.lower()}"
            for m in ("Natural", "PGD-3", "PGD-5", "PGD-10", "Free-8", "YOPO-3-5", "YOPO-5-3")
        },
        ("pgd-20",),
        "2/255",
        "PGD-10",
    ),
    "table4": Reproduction(
        {m: f"cifar10-{m.lower()}" for m in ("TRADES-10", "TRADES-YOPO-3-4", "TRADES-YOPO-2-5")},
        ("pgd-20", "cw"),
        "2/255",
        "TRADES-10",
    ),
}
# Embedded digits and a small network, to see that everything runs; not the paper's numbers.
QUICK: Tree = {
    "threat": {"name": "linf", "eps": 0.2, "step": 0.05},
    "data": {"name": "mnist-subset", "held_out": 500, "crop": 0, "flip": False},
    "model": {
        "name": "smallcnn",
        "options": {"width": 8, "hidden": 32, "dropout": 0.0},
        "channels_last": False,
    },
    "optimizer": {"lr": 0.05, "weight_decay": 5e-4},
    "schedule": {"name": "onecycle", "warmup": 1, "drops": []},
    "evaluate": {"steps": 10, "images": 200, "every": 1},
    "epochs": 4,
    "batch": 100,
    "eps_warmup": 2,
    "precision": "float32",
    "notes": "yopo reproduce --quick",
}


def reproduce_options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo reproduce`."""
    parser.add_argument("table", choices=list(TABLES), help="of the paper")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--rows", help="some of them, as PGD-10,YOPO-5-3; default all")
    parser.add_argument("--quick", action="store_true", help="embedded digits, minutes on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, help="test images to attack; default all")
    parser.add_argument("--attacks", help="more of them, as autoattack")
    parser.add_argument("--device", help="cuda, cpu, …; by default a GPU if there is one")


def run_reproduce(args: argparse.Namespace, rest: list[str]) -> None:
    """Train and attack every row, then print ours beside the paper's."""
    nothing_else(rest)
    what = TABLES[args.table]
    rows = list(what.recipes) if args.rows is None else [r.strip() for r in args.rows.split(",")]
    for row in rows:
        if row not in what.recipes:
            raise ValueError(f"no row {row!r} in {args.table}; it has {', '.join(what.recipes)}")
    configs = {row: _config(what, row, args) for row in rows}  # all checked first
    found = {
        row: _row(what, config, args.out / _folder(row), args) for row, config in configs.items()
    }
    summary = {
        "table": args.table,
        "quick": args.quick,
        "seed": args.seed,
        "against": what.against,
        "rows": found,
        "paper": {row: paper_table(args.table).get(row.removesuffix(" before")) for row in rows},
    }
    checkpoint.write_text(args.out / f"{args.table}.json", json.dumps(summary, indent=1) + "\n")
    Console(highlight=False).print(table(summary))
    print(f"runs and {args.table}.json: {args.out}")


def _config(what: Reproduction, row: str, args: argparse.Namespace) -> Config:
    tree = overlay(what.tree(row), {"seed": args.seed})
    if args.quick:
        tree = overlay(tree, QUICK)
    return validate(tree)


def _folder(row: str) -> str:
    return row.lower().replace(" ", "-")


def _row(what: Reproduction, config: Config, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One row: trained and attacked, as far as that is not done yet."""
    done = out / "result.json"
    common = {"resume": True, "track": None, "device": args.device}
    if not done.exists():
        train_one(config, out, argparse.Namespace(**common), title=out.name)
    samples = args.samples or (300 if args.quick else None)
    attacks = ",".join(("clean", *what.attacks, *([args.attacks] if args.attacks else [])))
    if not _evaluated(out, attacks):
        wanted = {"run": out, "attacks": attacks, "samples": samples, "batch": 500}
        wanted |= {"eps": None, "step": None if args.quick else what.step, "seed": 0}
        wanted |= {"precision": "float32", "weights": "best", "save_examples": False}
        run_eval(argparse.Namespace(**wanted, device=args.device), [])
    result, evaluation = (json.loads((out / f).read_text()) for f in ("result.json", "eval.json"))
    keep = ("train_seconds", "propagations")
    return {k: result[k] for k in keep} | {
        "accuracy": evaluation["accuracy"],
        "images": evaluation["about"]["images"],
    }


def _evaluated(out: Path, attacks: str) -> bool:
    path = out / "eval.json"
    return path.exists() and set(attacks.split(",")) <= set(
        json.loads(path.read_text())["accuracy"]
    )


def table(summary: dict[str, Any]) -> Table:
    """Ours beside the paper's."""
    rows, paper = summary["rows"], summary["paper"]
    attacks = list(next(iter(rows.values()))["accuracy"])
    reference = rows.get(summary["against"], {}).get("train_seconds")
    shown = Table(
        title=f"{summary['table']}: ours / the paper's, %"
        + (" (quick: not the paper's data or network)" if summary["quick"] else ""),
        caption=f"time: training alone, over {summary['against']}'s in this table",
    )
    for name in ("method", *attacks, "training", "time ratio"):
        shown.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row, r in rows.items():
        theirs = paper[row] or {}
        cells = [
            f"{100 * r['accuracy'][a]:.2f} / {theirs[a]:.2f}"
            if a in theirs
            else f"{100 * r['accuracy'][a]:.2f}"
            for a in attacks
        ]
        ratio = f"{r['train_seconds'] / reference:.2f}" if reference else ""
        shown.add_row(row, *cells, f"{r['train_seconds']:.1f} s", ratio)
    return shown
