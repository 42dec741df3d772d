"""`yopo bench`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from yopo.cli.common import Terminal, check_drawing, loading, nothing_else, say

WIDE = 140  # columns of a terminal that the whole table needs

EXAMPLES = """examples:
  yopo bench
  yopo bench --model wideresnet --methods natural,yopo-5-3-before --batch 128
  yopo bench --model smallcnn --methods yopo-5-10,pgd-40 --json bench.json --picture bench.png

Times whole training steps on random images: attack, propagations, weight update, averaging.
`literal` is the same algorithm written plainly, in the manner of the paper's released code."""
METHODS = "natural,pgd-10,free-8,nfgsm,trades-10,yopo-5-3-before,yopo-5-3,trades-yopo-3-4"


def options(parser: argparse.ArgumentParser) -> None:
    """The options of `yopo bench`."""
    parser.add_argument("--model", default="preactresnet18", help="or smallcnn, wideresnet")
    parser.add_argument(
        "--methods", default=METHODS, help=f"by default {METHODS.replace(',', ', ')}"
    )
    parser.add_argument("--batch", type=int, help="256 by default, 32 on a CPU")
    parser.add_argument("--width", type=int, help="of the network, for a smaller one")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "float32"])
    parser.add_argument("--device", help="cuda, cpu, …; by default a GPU if there is one")
    parser.add_argument("--no-literal", action="store_true", help="leave the literal loops out")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--picture", type=Path, help="file for a picture of them (PNG or SVG)")


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Measure, print, write."""
    nothing_else(args, rest)
    with loading():
        import torch

        from yopo.bench.bench import SETTINGS, bench
        from yopo.runs.distributed import pick_device
    from yopo.runs.recipes import method_tree

    if args.model not in SETTINGS:
        raise ValueError(f"no model {args.model!r} to bench; there are: {', '.join(SETTINGS)}")
    if args.batch is not None and args.batch < 8:
        raise ValueError(f"expected --batch of at least 8, got {args.batch}")
    if args.width is not None and args.width < 1:
        raise ValueError(f"expected --width of at least 1, got {args.width}")
    if args.json and args.json.is_dir():
        raise ValueError(f"expected a file for --json, got the folder {args.json}; add bench.json")
    for file in filter(None, (args.json, args.picture)):
        if not file.parent.is_dir():
            raise ValueError(f"no folder {file.parent} for {file.name}")
    if args.picture and args.picture.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"expected a .png, .svg or .pdf file for --picture, got {args.picture}")
    if args.picture:
        check_drawing("--picture")
    device = pick_device(args.device)
    methods = [spec.strip() for spec in args.methods.split(",")]
    for spec in methods:
        method_tree(spec)  # a typo is found before anything is measured
    torch.backends.cudnn.benchmark = True
    console = Terminal()
    with console.status("measuring"):
        timings = bench(
            args.model,
            methods,
            batch=args.batch or (32 if device.type == "cpu" else 256),
            device=device,
            precision=args.precision,
            with_literal=not args.no_literal,
            options={} if args.width is None else {"width": args.width},
            say=console.say,
        )
    console.print(_table(timings.to_json(), narrow=console.width < WIDE))
    if args.json:
        args.json.write_text(json.dumps(timings.to_json(), indent=1) + "\n")
        say(f"figures: {args.json}")
    if args.picture:
        draw(timings.to_json(), args.picture)
        say(f"picture: {args.picture}")


def _table(values: dict[str, Any], *, narrow: bool = False) -> Table:
    notes = [f"a matrix product runs at {values['product_tflops']:.3g} TFLOP/s here"]
    notes += ["warm-up is not in the times"]
    notes += ["more columns in a wider terminal, and in --json"] if narrow else []
    table = Table(
        title=", ".join([_what(values), values["precision"], values["device"]]),
        caption="; ".join(notes),
    )
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "method": lambda r: r["method"],
        "ms a step": lambda r: f"{r['step']:.2f}",
        "low-high": lambda r: f"{r['low']:.2f}-{r['high']:.2f}",
        "images/s": lambda r: f"{r['images_per_second']:.0f}",
        "prop/s": lambda r: f"{r['propagations_per_second']:.0f}",
        "TFLOP/s": lambda r: f"{r['tflops']:.3g}",
        "of product": lambda r: f"{r['share']:.0%}",
        "GiB": lambda r: "" if r["memory"] is None else f"{r['memory']:.1f}",
        "x natural": lambda r: "" if r["natural"] is None else f"{r['natural']:.2f}",
        "literal ms": lambda r: "" if r["literal"] is None else f"{r['literal']:.1f}",
        "x literal": lambda r: "" if r["literal"] is None else f"{r['literal'] / r['step']:.1f}",
        "warm-up s": lambda r: f"{r['warmup_seconds']:.0f}",
    }
    if narrow:
        for name in ("low-high", "prop/s", "TFLOP/s", "of product", "GiB", "warm-up s"):
            del columns[name]
    for name in columns:
        first = name == "method"
        table.add_column(name, justify="left" if first else "right", no_wrap=first)
    for row in values["rows"]:
        table.add_row(*(show(row) for show in columns.values()))
    return table


def _what(values: dict[str, Any]) -> str:
    return f"{values['model']}, batch {values['batch']}"


def draw(values: dict[str, Any], path: Path) -> None:
    """Bars of the step times, the literal loops behind them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = values["rows"][::-1]
    names = [r["method"] for r in rows]
    fig, ax = plt.subplots(figsize=(8, 0.55 * len(rows) + 1.6), layout="constrained")
    literal = [r["literal"] or 0 for r in rows]
    ax.barh(names, literal, height=0.75, color="#d9d9d9", label="literal loop")
    ax.barh(names, [r["step"] for r in rows], height=0.45, color="#1f77b4", label="yopo")
    for i, r in enumerate(rows):
        text = f"{r['step']:.1f} ms"
        if r["literal"]:
            text += f", literal {r['literal']:.1f} ms ({r['literal'] / r['step']:.1f}x)"
        ax.text(max(r["step"], r["literal"] or 0), i, "  " + text, va="center", fontsize=9)
    ax.set_xlim(0, 1.45 * max(max(literal), max(r["step"] for r in rows)))
    ax.set_xlabel("milliseconds a training step")
    ax.set_title(f"{_what(values)}, {values['device']}", loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    fig.legend(frameon=False, loc="outside lower center", ncols=2)
    fig.savefig(path, dpi=150)
    plt.close(fig)
