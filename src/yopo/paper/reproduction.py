"""What `yopo reproduce` runs: the rows of the paper's tables, each with its recipe and folder."""

import re
from dataclasses import dataclass
from pathlib import Path

from yopo.report.records import TIMED
from yopo.runs.folder import runs_in
from yopo.runs.overlay import Tree, overlay
from yopo.runs.recipes import recipe
from yopo.runs.settings import Config, validate


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A table of the paper."""

    recipes: dict[str, str]  # of each row
    attacks: tuple[str, ...]  # that it reports
    step: float  # of PGD
    against: str  # the row that times are compared with

    def config(
        self, row: str, *, seed: int = 0, quick: bool = False, epochs: int | None = None
    ) -> Config:
        """The settings of a row; with `epochs`, the recipe's first ones, hardly attacked."""
        tree = overlay(recipe(self.recipes[row]), {"seed": seed})
        tree = overlay(tree, _OWN.get(row, {}))
        if quick:
            tree = overlay(tree, QUICK)
        if epochs is not None:
            notes = f"{TIMED}. {tree['notes']}"
            tree = overlay(tree, {"epochs": epochs, "evaluate": {"steps": 1}, "notes": notes})
        return validate(tree)

    def folders(self, row: str, out: Path) -> dict[int, Path]:
        """The run folders of a row, by seed."""
        start, by_seed = f"{folder(row)}-seed-", {}
        for path in runs_in(out, f"{start}*"):
            if (seed := path.name.removeprefix(start)).isdecimal():
                by_seed[int(seed)] = path
        return dict(sorted(by_seed.items()))


# Rows that are not the paper's; it has the method that they begin with.
_OWN: dict[str, Tree] = {
    "PGD-10 40 epochs": {"epochs": 40, "schedule": {"drops": [30, 36]}},  # YOPO's
    "YOPO-3-5 last": {"method": {"grad_at": "last"}},
    "YOPO-5-3 before": {"method": {"grad_at": "before"}},
    "YOPO-5-3 36 epochs": {"epochs": 36, "schedule": {"drops": [30, 34]}},  # the released code's
}
CONTROLS = ("PGD-10 40 epochs", "YOPO-3-5 last")  # whose method is another in the paper


def folder(row: str) -> str:
    """ "YOPO-5-3 before" as "yopo-5-3-before": of its runs."""
    return row.lower().replace(" ", "-")


def in_bench(row: str) -> str:
    """The same in `yopo bench`, which knows nothing of epochs."""
    return folder(re.sub(r" \d+ epochs", "", row))


def _rows(prefix: str, *rows: str) -> dict[str, str]:
    return {row: f"{prefix}-{row.split()[0].lower()}" for row in rows}


TABLES = {
    "table1": Reproduction(
        _rows("mnist", "PGD-5", "PGD-10", "PGD-40", "YOPO-5-10"),
        ("pgd-40", "cw"),
        0.01,
        "PGD-40",
    ),
    "table2": Reproduction(
        _rows(
            "cifar10",
            *("PGD-3", "PGD-5", "PGD-10", "PGD-10 40 epochs"),
            *("YOPO-3-5", "YOPO-3-5 last", "YOPO-5-3", "YOPO-5-3 before", "YOPO-5-3 36 epochs"),
            "Free-8",
        ),
        ("pgd-20", "cw"),
        2 / 255,
        "PGD-10",
    ),
    "table3": Reproduction(
        _rows(
            "cifar10-wrn",
            *("Natural", "PGD-3", "PGD-5", "PGD-10", "PGD-10 40 epochs"),
            *("Free-8", "YOPO-3-5", "YOPO-5-3"),
        ),
        ("pgd-20",),
        2 / 255,
        "PGD-10",
    ),
    "table4": Reproduction(
        _rows("cifar10", "TRADES-10", "TRADES-YOPO-3-4", "TRADES-YOPO-2-5"),
        ("pgd-20", "cw"),
        2 / 255,
        "TRADES-10",
    ),
}
# Figure 3, accuracy against time on (a) MNIST and (b) CIFAR-10, with the rows its text compares.
FIGURES = {
    "figure3a": ("table1", ("PGD-40", "YOPO-5-10")),
    "figure3b": ("table2", ("PGD-10", "YOPO-5-3")),
}
# Embedded digits and a small network, to see that everything runs; not the paper's numbers.
QUICK: Tree = {
    "threat": {"name": "linf", "eps": 0.1, "step": 0.025},
    "data": {"name": "mnist-subset", "held_out": 500, "crop": 0, "flip": False},
    "model": {
        "name": "smallcnn",
        "options": {"width": 8, "hidden": 32, "dropout": 0.0},
        "channels_last": False,
    },
    "optimizer": {"name": "adamw", "lr": 4e-3, "weight_decay": 5e-4},
    "schedule": {"name": "onecycle", "warmup": 1, "drops": []},
    "evaluate": {"steps": 10, "images": 200, "every": 1},
    "epochs": 4,
    "batch": 100,
    "eps_warmup": 2,
    "precision": "float32",
    "notes": "yopo reproduce --quick",
}
