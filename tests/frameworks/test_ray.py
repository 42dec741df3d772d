"""Two workers of Ray Train against one process on the combined batch, and the example."""

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import yopo
from tests.conftest import assert_same
from yopo.core import tensor_files

ray = pytest.importorskip("ray", reason="needs ray[train]")

ROOT = Path(__file__).parents[2]
IMAGES, BATCH = 24, 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 4)
    )


def images() -> TensorDataset:
    x = torch.rand(IMAGES, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.arange(IMAGES) % 4)


def steps(model: nn.Module, loader: Any) -> None:
    """An epoch, each image with a start of its own."""
    method = yopo.YOPO(model, yopo.Linf(0.1), m=2, n=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x, y in loader:
        method.backward(x, y, 0.1 * torch.sin(1000 * x))
        optimizer.step()
        optimizer.zero_grad()


def train(config: dict[str, Any]) -> None:
    """What each worker runs; two of them take turns in drawing, so a batch is that of one."""
    from ray.train import get_context, report
    from ray.train.torch import prepare_data_loader, prepare_model

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # as the tests have it
    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    loader = prepare_data_loader(DataLoader(images(), BATCH // world))
    model = prepare_model(network())
    steps(model, loader)
    state: dict[str, Tensor] = dict(model.module.state_dict())
    tensor_files.save_weights(Path(config["folder"]) / str(rank), state, {})
    report({"workers": world})


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")  # a busy machine


def fit(loop: Any, config: dict[str, Any], out: Path) -> Any:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=str(out))
    return TorchTrainer(
        loop, train_loop_config=config, scaling_config=scaling, run_config=run
    ).fit()


@pytest.mark.usefixtures("cluster", "patient")
@pytest.mark.filterwarnings("default")  # Ray's own
def test_two_workers_are_one_process_on_the_combined_batch(tmp_path: Path) -> None:
    fit(train, {"folder": str(tmp_path)}, tmp_path / "ray")
    one = network()
    # Ray gives image i to worker i modulo 2, so their first batches are the first 8 images.
    steps(one, DataLoader(images(), BATCH))
    found = [tensor_files.load_weights(tmp_path / str(rank)) for rank in (0, 1)]
    assert all(torch.equal(found[0][k], v) for k, v in found[1].items())
    assert_same(found[0], dict(one.state_dict()), tol=1e-10)


@pytest.mark.usefixtures("cluster", "patient", "float32")
@pytest.mark.filterwarnings("default")
def test_the_example_trains_and_keeps_its_network(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "ray_train.py"))
    config = {"epochs": 1, "batch": 100, "rate": 4e-3, "images": 200}
    result = fit(example["train"], config, tmp_path)
    assert result.metrics["epoch"] == 1
    weights = tensor_files.load_tensors(Path(result.checkpoint.path) / example["WEIGHTS"])
    net = yopo.models.SmallCNN(width=16, hidden=100)
    net.load_state_dict(weights)
    torch.manual_seed(0)
    begun = yopo.models.SmallCNN(width=16, hidden=100).state_dict()
    assert all(not torch.equal(weights[k], v) for k, v in begun.items())
