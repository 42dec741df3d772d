"""The demo's report: one self-contained HTML page, made from its record."""

import base64
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor

COLOURS = ("#7f7f7f", "#d1603d", "#2f6db5")

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>yopo demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 54rem }}
body {{ margin: 2rem auto; padding: 0 1rem }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left }}
img {{ max-width: 100%; height: auto }}
small {{ color: #555 }}
</style>
<h1>Adversarial training on 6,000 digits</h1>
<p>{headline}</p>
<div class="scroll"><table>{table}</table></div>
<p><small>{notes}</small></p>
<h2>Accuracy against training time</h2>
<img alt="PGD-10 accuracy over training time" src="{curves}">
<h2>What the attack does</h2>
<img alt="clean digits, perturbations and adversarial digits" src="{pictures}">
<p><small>Per network: the perturbation that PGD-40 found (grey is none) and the image
with it, with the network's answer; red is wrong.</small></p>
<h2>Settings</h2>
<p><small>{settings}</small></p>
</html>
"""


@dataclass
class Strip:
    """A few images, attacked on one network."""

    method: str
    clean: Tensor  # (N, H, W)
    adversarial: Tensor  # (N, H, W)
    labels: list[int]
    guesses: list[int]  # on the adversarial images


def write_page(folder: Path, record: dict[str, Any], strips: list[Strip]) -> Path:
    """Write report.html and return where it is."""
    matplotlib.use("agg")
    results = record["results"]
    path = folder / "report.html"
    path.write_text(
        PAGE.format(
            headline=html.escape(_headline(results)),
            table=_table(results),
            notes=html.escape(
                "Training: time spent processing batches, nothing else. Propagations: full passes "
                "per training image; an attack-only pass counts 2/3. Clean: all 2,000 test images. "
                f"Attacks: {record['settings']['images']} of them, L∞ eps = "
                f"{record['settings']['eps']}; PGD-40, and CW with 100 steps, each keeping the "
                "strongest example it found."
            ),
            curves=_embed(_curves(results)),
            pictures=_embed(_pictures(strips)),
            settings=html.escape(
                ", ".join(
                    f"{k} {v}"
                    for part in ("settings", "environment")
                    for k, v in record[part].items()
                )
            ),
        )
    )
    return path


def _headline(results: list[dict[str, Any]]) -> str:
    by = {r["method"].split("-")[0]: r for r in results}
    if not {"natural", "PGD", "YOPO"} <= by.keys():
        return "Stopped before all three networks were trained."
    natural, pgd, yopo = by["natural"], by["PGD"], by["YOPO"]
    return (
        f"Trained naturally, the network keeps {natural['pgd40']:.1f}% accuracy under PGD-40; "
        f"trained with {pgd['method']}, {pgd['pgd40']:.1f}%; "
        f"trained with {yopo['method']}, {yopo['pgd40']:.1f}%, in "
        f"{yopo['seconds'] / pgd['seconds']:.2f} of {pgd['method']}'s time."
    )


def _table(results: list[dict[str, Any]]) -> str:
    columns = ("method", "training", "propagations", "clean", "PGD-40", "CW")
    rows = ["<tr>" + "".join(f"<th>{c}</th>" for c in columns) + "</tr>"]
    for r in results:
        cells = (
            html.escape(r["method"]),
            f"{r['seconds']:.1f} s",
            f"{r['propagations']:.0f}",
            *(f"{r[key]:.1f}%" for key in ("clean", "pgd40", "cw")),
        )
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return "".join(rows)


def _curves(results: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for r, colour in zip(results, COLOURS, strict=False):
        seconds, held = zip(*r["curve"], strict=True)
        axes.plot(seconds, held, "o-", color=colour, label=r["method"], markersize=4)
    axes.set_xlabel("training time, s")
    axes.set_ylabel("accuracy under PGD-10, %")
    axes.set_ylim(-2, 102)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _pictures(strips: list[Strip]) -> Figure:
    rows, columns = 1 + 2 * len(strips), len(strips[0].labels)
    figure = Figure(figsize=(0.8 * columns + 1.2, 0.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for i in range(columns):
        axes[0, i].imshow(strips[0].clean[i], cmap="gray", vmin=0, vmax=1)
    axes[0, 0].set_ylabel("clean", rotation=0, ha="right", va="center")
    for k, strip in enumerate(strips):
        eta = strip.adversarial - strip.clean
        for i in range(columns):
            axes[1 + 2 * k, i].imshow(eta[i], cmap="gray", vmin=-0.5, vmax=0.5)
            axes[2 + 2 * k, i].imshow(strip.adversarial[i], cmap="gray", vmin=0, vmax=1)
            wrong = strip.guesses[i] != strip.labels[i]
            axes[2 + 2 * k, i].set_xlabel(str(strip.guesses[i]), color="#c00" if wrong else "#070")
        axes[1 + 2 * k, 0].set_ylabel(f"{strip.method}\neta", rotation=0, ha="right", va="center")
        axes[2 + 2 * k, 0].set_ylabel("x + eta", rotation=0, ha="right", va="center")
    return figure


def _embed(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
