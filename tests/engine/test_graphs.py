"""By the compiler's count the engine's steps are what they were before it was taken apart.

`records/graphs-cpu` has all of them, before and after; one is counted here again.
"""

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import yopo
from benchmarks.graphs import NETWORKS, SETTINGS, THREAT, count

RECORDS = Path(__file__).parents[2] / "records/graphs-cpu"


def test_the_record_says_the_same_of_before_and_after() -> None:
    before, after = (json.loads((RECORDS / f"{n}.json").read_text()) for n in ("before", "after"))
    wanted = {
        f"{network}, {setting}: {method}"
        for network, (_, _, methods) in NETWORKS.items()
        for setting in SETTINGS
        for method in methods
    }
    assert before["steps"].keys() == wanted
    assert before == after
    for name, row in after["steps"].items():
        operations = row["step"]["operations"]
        assert min(row["graphs"], row["kernels"], row["bytes"], row["step"]["kernels"]) > 0
        aside = "yopo::weight_gradient" in operations
        assert aside == (name.startswith("resnet") and "two streams" in name)


@pytest.mark.usefixtures("float32")
@pytest.mark.filterwarnings("ignore")  # of torch's own making, as in the tool
def test_a_step_is_what_it_was() -> None:
    """Graphs, nodes, bytes, and the kernels and operations that a step runs.

    What kernels say depends on the processor's vector units, and so does the number of all that
    were made: 85 for 86 without any.
    """
    record = json.loads((RECORDS / "after.json").read_text())
    if (torch.__version__, platform.machine()) != (record["torch"], record["machine"]):
        pytest.skip("another version of torch makes other kernels than those of the record")
    if not torch.cpu._is_avx2_supported() or os.environ.get("ONEDNN_MAX_CPU_ISA") == "SSE41":
        pytest.skip("without AVX2 torch's own convolutions lay gradients out anew")
    build, shape, methods = NETWORKS["smallcnn"]
    was = record["steps"]["smallcnn, float32, one stream: yopo last"]
    torch.manual_seed(0)
    x, y = torch.rand(shape), torch.arange(shape[0])
    row = count(build(), methods["yopo last"], x, y, "float32", False)
    for each in (row, was):
        each.pop("kernels")
        each["step"].pop("texts")
        each["step"]["operations"].pop("aten::detach")  # views of a frozen network, made since
    assert row == was


@pytest.mark.usefixtures("float32")
@pytest.mark.filterwarnings("ignore")  # of torch's own making, as in the tool
def test_one_more_attack_pass_is_seen() -> None:
    x, y = torch.rand(4, 1, 8, 8), torch.arange(4)
    rows: list[dict[str, Any]] = []
    for steps in (1, 2, 2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
        make = lambda net, _, n=steps: yopo.PGD(net, THREAT, steps=n)  # noqa: E731
        rows.append(count(net, make, x, y, "float32", False))
    one, two, again = rows
    assert two == again
    assert one["kernels"] == two["kernels"]  # the same graphs, run once more
    assert one["step"]["kernels"] < two["step"]["kernels"]
    assert one["step"]["texts"] != two["step"]["texts"]
