"""docs/frameworks/lightning.md, run by Lightning, against the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import assert_same
from tests.frameworks.loops import (
    CLIP,
    THREAT,
    State,
    alone,
    by_turns,
    in_several,
    keeper,
    loader,
    network,
    page,
    plain,
    same_bits,
)

pytest.importorskip("lightning", reason="needs yopo-torch[lightning]")
pytestmark = pytest.mark.filterwarnings("default")  # Lightning's own

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
HALF: dict[str, Any] = {"dtype": torch.float32, "autocast": torch.bfloat16}
FULL: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP}


def fit(dtype: torch.dtype, size: int, **options: Any) -> State:
    torch.set_default_dtype(dtype)
    net = network(dtype)
    page("lightning")["fit"](net, loader(size, dtype), THREAT, **QUIET, **options)
    return dict(net.state_dict())


def several(out: Path) -> None:
    """In each of two processes."""
    keep, two = keeper(out), {"strategy": "ddp", "devices": 2}
    keep("full", fit(torch.float64, 2, precision="64-true", **two, **FULL))
    keep("bf16", fit(torch.float32, 2, precision="bf16-mixed", **two))


def test_one_process() -> None:
    full = fit(torch.float64, 4, precision="64-true", devices=1, **FULL)
    assert_same(full, plain(network(), alone(4, together=2), clip=CLIP), tol=1e-10)
    unclipped = plain(network(), alone(4, together=2))
    assert not torch.allclose(full["0.weight"], unclipped["0.weight"])  # so clipping did something


def test_bf16_by_equal_bits() -> None:
    found = fit(torch.float32, 4, precision="bf16-mixed", devices=1)
    assert same_bits(found, plain(network(torch.float32), alone(4), **HALF))
    assert not same_bits(found, plain(network(torch.float32), alone(4), dtype=torch.float32))


def test_two_processes(tmp_path: Path) -> None:
    first, second = in_several(__name__, tmp_path)
    assert all(same_bits(first[name], second[name]) for name in ("full", "bf16"))
    assert_same(first["full"], plain(network(), alone(4, together=2), clip=CLIP), tol=1e-10)
    assert same_bits(first["bf16"], plain(network(torch.float32), by_turns(2), **HALF))
