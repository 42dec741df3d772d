"""docs/frameworks/accelerate.md, run by Accelerate, against the plain loop; and its checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import yopo
from tests.conftest import assert_same
from tests.frameworks.loops import (
    CLIP,
    THREAT,
    State,
    alone,
    as_a_file,
    images,
    in_several,
    keeper,
    network,
    page,
    plain,
    same_bits,
)

pytest.importorskip("accelerate", reason="needs yopo-torch[accelerate]")
pytestmark = pytest.mark.filterwarnings("default")  # Accelerate's own

HALF: dict[str, Any] = {"dtype": torch.float32, "autocast": torch.bfloat16}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """It remembers the first precision that it was given."""
    forget()
    yield
    forget()


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def train(dtype: torch.dtype, size: int, together: int = 1, **options: Any) -> State:
    """Each of several processes takes the next batch."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    forget()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=together, **options)
    torch.set_default_dtype(dtype)
    net = network(dtype)
    page("accelerate")["train"](accelerator, net, DataLoader(images(dtype), size), THREAT)
    return dict(net.state_dict())


def several(out: Path) -> None:
    """In each of two processes."""
    keep = keeper(out)
    keep("full", train(torch.float64, 2, together=2))
    keep("bf16", train(torch.float32, 2, mixed_precision="bf16"))


def test_one_process() -> None:
    full = train(torch.float64, 4, together=2)
    assert_same(full, plain(network(), alone(4, together=2), clip=CLIP), tol=1e-10)


def test_bf16_by_equal_bits() -> None:
    found = train(torch.float32, 4, mixed_precision="bf16")
    assert same_bits(found, plain(network(torch.float32), alone(4), clip=CLIP, **HALF))


def test_two_processes(tmp_path: Path) -> None:
    first, second = in_several(__name__, tmp_path)
    assert all(same_bits(first[name], second[name]) for name in ("full", "bf16"))
    assert_same(first["full"], plain(network(), alone(4, together=2), clip=CLIP), tol=1e-10)
    two = plain(network(torch.float32), alone(2, together=2), clip=CLIP, **HALF)
    assert same_bits(first["bf16"], two)


def test_the_page_as_a_file(tmp_path: Path) -> None:
    as_a_file("accelerate", tmp_path, "--cpu")


class Loop:
    """Free carries its perturbation, an average its weights, and the engine both."""

    def __init__(self) -> None:
        self.net = network()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        free = yopo.Free(self.net, THREAT, m=2, optimizer=self.optimizer)
        self.ema = yopo.EMA(self.net, 0.9)
        self.engine = yopo.Engine(free, self.optimizer, ema=self.ema, compile=False)

    def run(self, first: int, last: int) -> None:
        x, y = images().tensors
        for i in range(first, last):
            self.engine.step(x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])

    def state(self) -> State:
        averaged = {f"ema.{k}": v for k, v in self.ema.model.state_dict().items()}
        return dict(self.net.state_dict()) | averaged


def test_its_checkpoints_hold_what_the_engine_carries(tmp_path: Path) -> None:
    from accelerate import Accelerator

    whole = Loop()
    whole.run(0, 4)
    for stops in (True, False):
        accelerator, loop = Accelerator(cpu=True), Loop()
        accelerator.prepare(loop.net, loop.optimizer)
        accelerator.register_for_checkpointing(loop.engine)
        if stops:
            loop.run(0, 2)
            accelerator.save_state(str(tmp_path))
        else:
            accelerator.load_state(str(tmp_path))
            loop.run(2, 4)
            assert same_bits(loop.state(), whole.state())
        forget()
    fresh = Loop()  # without what the engine carries the end is another
    fresh.net.load_state_dict(whole.net.state_dict())
    assert not same_bits(fresh.state(), whole.state())
