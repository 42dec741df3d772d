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
from yopo.core.parallel import whole

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


def sharded() -> State:
    """By FSDP2, a layer of the network and then all of it."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Sharded(page("lightning")["Robust"]):  # type: ignore[misc]
        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.network[2], mesh=mesh)
            fully_shard(self.network, mesh=mesh)

    torch.set_default_dtype(torch.float32)
    strategy, net = ModelParallelStrategy(2, 1), network(torch.float32)
    trainer = lightning.Trainer(max_epochs=1, strategy=strategy, devices=2, **QUIET)
    trainer.fit(Sharded(net, THREAT), loader(2, torch.float32))
    return {k: whole(v) for k, v in net.state_dict().items()}


def several(out: Path) -> None:
    """In each of two processes."""
    keep, two = keeper(out), {"strategy": "ddp", "devices": 2}
    keep("full", fit(torch.float64, 2, precision="64-true", **two, **FULL))
    keep("bf16", fit(torch.float32, 2, precision="bf16-mixed", **two))
    keep("all", fit(torch.float32, 2, precision="bf16-mixed", **two, **FULL))  # the page's own
    keep("sharded", sharded())


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
    assert all(same_bits(first[name], second[name]) for name in ("full", "bf16", "all"))
    assert_same(first["full"], plain(network(), alone(4, together=2), clip=CLIP), tol=1e-10)
    assert same_bits(first["bf16"], plain(network(torch.float32), by_turns(2), **HALF))
    spread = plain(network(torch.float32), alone(4), dtype=torch.float32)
    assert farthest(first["sharded"], spread) < 1e-6
    four = [[*a, *b] for a, b in zip(*[iter(by_turns(2))] * 2, strict=True)]
    expected = plain(network(torch.float32), four, clip=CLIP, **HALF)
    full = plain(network(torch.float32), four, clip=CLIP, dtype=torch.float32)
    # Sums may come in another order, which is less than bf16 makes.
    assert farthest(first["all"], expected) < farthest(first["all"], full) / 10


def farthest(a: State, b: State) -> float:
    return max(float((v - b[k]).abs().max()) for k, v in a.items())


@pytest.mark.parametrize("form", ["loss", "backward"])
def test_a_compiled_module(form: str) -> None:
    """Without self.log, which torch 2.13 does not compile in Lightning 2.6, whatever the loss."""
    import lightning

    class Compiled(page("lightning")["Robust"]):  # type: ignore[misc]
        automatic_optimization = form == "loss"

        def training_step(self, batch: Any, index: int) -> Any:
            if form == "loss":
                return self.method(*batch)
            self.method.backward(*batch)
            self.optimizers().step()
            self.zero_grad()
            return None

    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    module: Any = torch.compile(Compiled(network(), THREAT), backend="aot_eager")
    trainer = lightning.Trainer(max_epochs=1, precision="64-true", **QUIET)
    trainer.fit(module, loader(4))
    assert_same(dict(module.network.state_dict()), plain(network(), alone(4)), tol=1e-10)
    torch._dynamo.reset()
