"""docs/frameworks/timm.md, with timm's parts and one of its networks, against a plain loop.

timm lies in a folder of its own, and is imported in processes of their own: the torchvision that it
needs has no compiled part that fits torch's CPU build.
"""

import math
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import yopo
from tests.conftest import assert_same
from tests.frameworks.loops import (
    CLIP,
    MOMENTUM,
    RATE,
    THREAT,
    State,
    alone,
    by_turns,
    images,
    in_several,
    keeper,
    loader,
    page,
    same_bits,
)

FOLDER = Path(sys.prefix) / "timm"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs timm, as make frameworks has it")
EPOCHS, DECAY, AVERAGED = 2, 1e-3, 0.9


def without_compiled_parts() -> torch.library.Library:
    """Operators that torchvision names when it is imported, and nothing here calls."""
    sys.path.append(str(FOLDER))
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def classifier() -> nn.Module:
    """timm's own test network, convolutions and BatchNorm, in eval mode: no running statistics."""
    import timm

    net: nn.Module = timm.create_model("test_resnet", num_classes=4, in_chans=1).double().eval()
    draw = torch.Generator().manual_seed(0)
    for p in net.parameters():
        nn.init.normal_(p, 0.1, 0.1, generator=draw)
    return net


def several(out: Path) -> None:
    """In one process or two: timm's loop; in one the plain one, too."""
    library, keep = without_compiled_parts(), keeper(out)
    torch.set_default_dtype(torch.float64)
    world, net = int(os.environ["WORLD_SIZE"]), classifier()
    with ExitStack() as stack:
        model = net
        if world > 1:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            model = torch.nn.parallel.DistributedDataParallel(net)
        averaged = page("timm")["train"](model, loader(4 // world), THREAT, EPOCHS, "cpu")
        keep("weights", dict(net.state_dict()))
        keep("average", dict(getattr(averaged, "module", averaged).state_dict()))
    if world == 1:
        for steps, name in ((alone(4), "plain"), (by_turns(2), "shares")):
            trained, average = written_out(classifier(), steps)
            keep(f"{name} weights", trained)
            keep(f"{name} average", average)
    del library


def written_out(net: nn.Module, steps: Any) -> tuple[State, State]:
    """The page's loop without timm: decay for matrices alone, cosine by the epoch, an average."""
    flat = [p for p in net.parameters() if p.dim() < 2]
    deep = [p for p in net.parameters() if p.dim() >= 2]
    groups = [{"params": flat, "weight_decay": 0.0}, {"params": deep, "weight_decay": DECAY}]
    sgd = torch.optim.SGD(groups, RATE, momentum=MOMENTUM, nesterov=True)
    average = {k: v.clone() for k, v in net.state_dict().items()}
    (x, y), method = images().tensors, yopo.YOPO(net, THREAT, m=2, n=2)
    for epoch in range(EPOCHS):
        for group in sgd.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2
        for batches in steps:
            sgd.zero_grad()
            rows = [i for rows in batches for i in rows]
            method.backward(x[rows], y[rows])
            clip_grad_norm_(net.parameters(), CLIP)
            sgd.step()
            for name, p in net.named_parameters():
                average[name].lerp_(p.detach(), 1 - AVERAGED)
    return dict(net.state_dict()), average


def test_timms_loop_in_one_process_and_two(tmp_path: Path) -> None:
    (one,) = in_several(__name__, tmp_path / "one", world=1)
    pair = in_several(__name__, tmp_path / "two")
    for name in ("weights", "average"):
        assert_same(one[name], one[f"plain {name}"], tol=1e-10)
        assert same_bits(pair[0][name], pair[1][name])
        assert_same(pair[0][name], one[f"shares {name}"], tol=1e-10)
    assert not same_bits(one["weights"], one["average"])
