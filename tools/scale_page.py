"""Write docs/scale.md from records/scale-cpu/scale.json. Usage: python -m tools.scale_page

What was measured and what is computed stand apart. tests/test_records.py does the same, and
compares.
"""

import json
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import growth
from benchmarks.scale import HEAD
from benchmarks.simulation import MACHINE, Assumed, tables

ROOT = Path(__file__).parents[1]
WORDS = {  # of what is assumed
    "inside": "GB/s that one GPU sends to others of its machine",
    "between": "GB/s that one GPU sends to other machines",
    "overlap": "of a weight pass beside which DDP and FSDP2 exchange",
    "disk": "GB/s that all processes together write to the disk",
    "full": "weight passes and attack passes of a step, the m + 1 of YOPO-3-3",
    "weights": "weight passes among them",
}
INTRO = """
What a step, an epoch and a checkpoint take on 1, 8 and 64 GPUs. We had one GPU at a time: what was
measured stands first, what is computed from it after. `python -m benchmarks.scale` measures again,
`python -m benchmarks.scale --simulate` computes with numbers of your own. This page is made by
`python -m tools.scale_page` from `records/scale-cpu/`, and a test compares.
"""
GROWTH = f"""
CPU time of one thread, or memory, against one size with all else fixed. The exponent k of size^k is
fitted to the three largest sizes; up to {growth.FLAT} it is called flat, up to {growth.LINEAR}
linear, above that worse. The times count as ratios within this run alone, on a machine that others
used too.
"""
RANKS = """
One step of YOPO-3-3 on a small network, in one process and in two, each with as many images (gloo,
one thread each): the messages of a step, their bytes, and the slower process's CPU time over that
of one process. Gradients are exchanged once a step. FSDP2 gathers each group of weights twice in
every pass; inside `yopo.gathered` once a step.
"""
COMPUTED = f"""
Bytes are counted from the networks' shapes; counted so, the messages above come out to the byte (a
test compares). A GPU sends 2·(n − 1)/n of what is reduced, and (n − 1)/n of what is gathered or
scattered, as in a ring. Computing on one GPU is a·FLOP + b·(bytes kept for the way back), with a
and b from natural training of two networks on one H200, PreAct-ResNet18 and WRN-34-10
(`records/speed-h200/rooms-bench.json`, `records/reproduction/table3/`); ResNet-50's own time was
not measured. Cores that decode: pictures that a GPU takes in a second over those that a core
decodes. State: weights, gradients, momentum and average in float32. Checkpoint: weights, momentum,
average and best weights, and each process's BatchNorm statistics. Up to {MACHINE} GPUs are one
machine's.
"""


def _filled(text: str) -> str:
    return "\n" + textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False) + "\n"


def page(root: Path = ROOT) -> str:
    """What docs/scale.md should hold."""
    record = json.loads((root / "records/scale-cpu/scale.json").read_text())
    parts = record["parts"]
    assumed = Assumed()
    lines = [
        "# What it costs on many GPUs",
        _filled(INTRO),
        "## Measured: growth",
        _filled(GROWTH),
        HEAD,
    ]
    lines += [growth.line(row) for row in record["growth"]]
    lines += ["", "## Measured: two processes", _filled(RANKS), *_ranks(record["ranks"])]
    lines += ["", "## Measured: parts", "", *_parts(parts, record["environment"])]
    lines += [
        "",
        "## Computed: 1, 8 and 64 GPUs",
        _filled(COMPUTED),
        "Assumed, each an option of `--simulate`:",
        "",
    ]
    lines += [*_assumed(assumed), ""]
    lines += ["MB are what one GPU sends in one step, ms what that step takes.", ""]
    lines += [tables(assumed, parts["decoded"])]
    return "\n".join(lines) + "\n"


def _ranks(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| way | messages | bytes | CPU time of one process |", "|---|---|---|---|"]
    for row in rows:
        sent = [f"{many} {kind}" for kind, many in row["messages"].items() if many]
        sizes = [f"{many:,} {kind}" for kind, many in row["bytes"].items() if many]
        lines.append(f"| {row['way']} | {', '.join(sent)} | {', '.join(sizes)} | {row['ratio']} |")
    return lines


def _parts(parts: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    width, height, size = parts["picture"]
    written = parts["checkpoint bytes a second"] / 1e6
    where = f"{environment['machine']}, torch {environment['torch']}"
    text = (
        f"One core decodes {parts['decoded']:.0f} JPEGs of {width}×{height} ({size:,} bytes) to "
        f"224 px in a second of CPU time. A sealed checkpoint of "
        f"{parts['checkpoint bytes'] / 1e6:.0f} MB was written at {written:.0f} MB/s of wall time, "
        f"with its checksums, on the disk of a shared machine ({where}). How long training waits "
        "for one is in `records/checkpoint-cpu/`."
    )
    return textwrap.wrap(text, 120)


def _assumed(assumed: Assumed) -> list[str]:
    lines = ["| option | value | what |", "|---|---|---|"]
    for field in fields(assumed):
        lines.append(
            f"| `--{field.name}` | {getattr(assumed, field.name):g} | {WORDS[field.name]} |"
        )
    return lines


if __name__ == "__main__":
    (ROOT / "docs/scale.md").write_text(page())
