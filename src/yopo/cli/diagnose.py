"""`yopo diagnose`: what the co-states of a trained network say about m, n and the split."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from yopo.cli.common import (
    can_draw,
    data_options,
    fitted,
    loading,
    nothing_else,
    pages,
    say,
    trust_options,
)
from yopo.runs.folder import DIAGNOSIS, DIAGNOSIS_PICTURE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLES = f"""examples:
  yopo diagnose runs/first
  yopo diagnose runs/c10 --images 256 --splits conv1,layer1.0,layer1
writes {DIAGNOSIS} and {DIAGNOSIS_PICTURE} into the run's folder; docs/diagnose.md explains them"""

DRIFTS = {  # panels, and what each asks
    "cosine": "Is the frozen co-state still true?\n"
    "cosine to a fresh one; 1: freezing costs nothing",
    "gain": "Is the next frozen step worth taking?\nits gain, of a fresh step's; below 0: it harms",
    "gap": "Is there anything left to gain?\n"
    "$H_0 - \\min H_0$, of what it was; 0: a larger n is wasted",
}
BESIDE = 52  # columns of the table without those of module names
Coloured = list[tuple[dict[str, Any], Any]]  # what was seen of a depth, and its colour


def options(parser: argparse.ArgumentParser) -> None:
    """Options of `yopo diagnose`."""
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--images", type=int, default=100, help="training images to look at")
    parser.add_argument("--splits", help="modules where f0 may end, as conv1,layer1; else chosen")
    parser.add_argument("--m", type=int, default=8, help="largest m to try")
    parser.add_argument("--weights", choices=["best", "last"], default="best")
    parser.add_argument("--device", help="cuda, cpu, …; by default a GPU if there is one")
    parser.add_argument("--seed", type=int, default=0)
    data_options(parser)
    trust_options(parser)


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Study one network."""
    nothing_else(args, rest)
    with loading():
        from yopo.core import files
        from yopo.runs.diagnosing import diagnose_run

    study = diagnose_run(
        args.run,
        weights=args.weights,
        images=args.images,
        splits=args.splits.split(",") if args.splits else None,
        m=args.m,
        seed=args.seed,
        device=args.device,
        trust=args.trust,
        model_name=args.model_name,
        data_root=args.data_root,
        data_path=args.data_path,
        say=say,
    )
    show(study)
    values, picture = args.run / DIAGNOSIS, args.run / DIAGNOSIS_PICTURE
    if can_draw():
        with files.whole(picture) as path:
            draw(study, path)
        say(f"wrote {values} and {picture}")
    else:
        say(f"wrote {values}; a picture needs matplotlib")


def show(study: dict[str, Any]) -> None:
    """The depths side by side, and the recommendation."""
    console = pages()
    table = Table(title="places where f0 may end; drift after 5 inner steps with p frozen")
    heads = ("f0 ends at", "affine", "inner step", "cosine", "gain", "H gap", "stops after")
    for head in heads:
        table.add_column(head, justify="left" if head == "f0 ends at" else "right")
    names = [depth["name"] for depth in study["depths"]]
    short = shortened(names, max(20, console.width - BESIDE))
    for name, depth in zip(short, study["depths"], strict=True):
        d = depth["drift"]
        stops = "-" if d["stops"] is None else str(d["stops"])
        values = (f"{d[key][5]:.2f}" for key in ("cosine", "gain", "gap"))
        affine = "yes" if depth["affine"] else "no"
        table.add_row(name, affine, f"{depth['inner_cost']:.2f}", *values, stops)
    console.print(fitted(table, console.width))
    best = f"--method.m {study['m']} --method.n {study['n']} --method.first_layer"
    console.print(f"recommended: {best} {study['first_layer']}", soft_wrap=True)
    for line in study["because"]:
        console.say(f"- {line}")


def shortened(names: Sequence[str], most: int) -> list[str]:
    """Names of at most so many letters, cut where they stay apart; as they are, if nowhere."""
    for head in range(most // 3, most):
        short = [n if len(n) <= most else f"{n[:head]}…{n[head + 1 - most :]}" for n in names]
        if len({*short}) == len({*names}):
            return short
    return list(names)


def draw(study: dict[str, Any], path: Path) -> None:
    """One picture of all of it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    depths = study["depths"]
    shades = [0.9 * i / max(1, len(depths) - 1) for i in range(len(depths))]
    coloured = list(zip(depths, plt.get_cmap("viridis")(shades), strict=True))
    figure, axes = plt.subplot_mosaic(
        [["cosine", "gain", "gap"], ["reach", "reach", "residuals"]],
        figsize=(13, 8.5),
        layout="constrained",
    )
    for key, title in DRIFTS.items():
        _draw_drift(axes[key], coloured, key, title)
    axes["cosine"].legend(title="f0 ends at", fontsize=8, title_fontsize=8)
    _draw_reach(axes["reach"], coloured, study)
    ax = axes["residuals"]
    names = list(study["residuals"])[::-1]
    ax.barh(names, [study["residuals"][name] for name in names], color="0.55")
    ax.set_title("PMP residual of each layer\n(long: still fitting this adversary)", fontsize=10)
    ax.tick_params(axis="y", labelsize=8 if len(names) < 16 else 6)
    figure.suptitle(
        f"Recommended (red star): YOPO with m = {study['m']}, n = {study['n']}, f0 ending at "
        f"{study['first_layer']}\n{study['because'][0]}",
        fontsize=11,
    )
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


def _draw_drift(ax: "Axes", coloured: Coloured, key: str, title: str) -> None:
    """How a measure of the frozen co-state falls with the inner steps."""
    for depth, colour in coloured:
        ax.plot(depth["drift"][key], "o-", color=colour, ms=3, label=depth["name"])
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("inner steps with p frozen")
    low = min(0.0, *(min(depth["drift"][key]) for depth, _ in coloured))
    ax.set_ylim(low - 0.03, 1.05)
    ax.axhline(0, color="0.6", lw=0.8)


def _draw_reach(ax: "Axes", coloured: Coloured, study: dict[str, Any]) -> None:
    """What each setting adds to the loss, against what it costs."""
    from yopo.core.propagation import ATTACK_ONLY, FULL

    for depth, colour in coloured:
        cost = [depth["cost"][key] for key in depth["reach"]]
        ax.scatter(cost, depth["reach"].values(), s=16, color=colour, alpha=0.7, lw=0)
    pgd = [int(r) * ATTACK_ONLY + FULL for r in study["pgd"]]
    ax.plot(pgd, list(study["pgd"].values()), color="0.4", lw=1.2, label="PGD-1 to PGD-20")
    best = next(depth for depth, _ in coloured if depth["name"] == study["first_layer"])
    key = f"{study['m']}-{study['n']}"
    point = (best["cost"][key], best["reach"][key])
    ax.scatter(*point, s=160, marker="*", color="crimson", zorder=3)
    ax.annotate(
        f"YOPO-{key}, {best['name']}",
        point,
        (0.6, 0.3),
        textcoords="axes fraction",
        color="crimson",
        arrowprops={"arrowstyle": "-", "color": "crimson", "lw": 0.6, "shrinkB": 8},
    )
    ax.set_xscale("log")
    ax.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"], minor=False)
    ax.minorticks_off()
    ax.axhline(study["target"], color="0.6", lw=0.8, ls="--", label="least for a recommendation")
    ax.set_title(
        "Which m, n and f0 attack best at their price?  A point is one setting: the loss it adds,\n"
        "of what a strong attack adds. A point above PGD's line is better than PGD at that price.",
        fontsize=10,
    )
    ax.set_xlabel("propagations a training step")
    ax.set_ylim(min(0.0, ax.get_ylim()[0]), 1.02)
    ax.legend(fontsize=8, loc="lower right")
