"""docs/frameworks/ray.md in one worker and in two, against the plain loop; and the example."""

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import yopo
from tests.conftest import assert_same
from tests.frameworks.loops import (
    BATCH,
    THREAT,
    alone,
    images,
    network,
    page,
    plain,
    same_bits,
)
from yopo.core import tensor_files

ray = pytest.importorskip("ray", reason="needs ray[train]")

ROOT = Path(__file__).parents[2]


def train(config: dict[str, Any]) -> None:
    """What each worker runs; two of them take turns in drawing, so a batch is that of one."""
    from ray.train import get_context

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # as the tests have it
    net = network()
    page("ray")["train"]({"network": net, "images": images(), "batch": BATCH, "threat": THREAT})
    place = Path(config["folder"]) / str(get_context().get_world_rank())
    tensor_files.save_weights(place, dict(net.state_dict()), {})


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


def fit(loop: Any, config: dict[str, Any], out: Path, workers: int = 2) -> Any:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling, run = ScalingConfig(num_workers=workers), RunConfig(storage_path=str(out))
    return TorchTrainer(
        loop, train_loop_config=config, scaling_config=scaling, run_config=run
    ).fit()


@pytest.mark.usefixtures("cluster", "patient")
@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_are_one_process_on_the_combined_batch(workers: int, tmp_path: Path) -> None:
    fit(train, {"folder": str(tmp_path)}, tmp_path / "ray", workers)
    found = [tensor_files.load_weights(tmp_path / str(rank)) for rank in range(workers)]
    assert all(same_bits(found[0], other) for other in found)
    # Ray gives image i to worker i modulo 2, so their first batches are the first 4 images.
    assert_same(found[0], plain(network(), alone()), tol=1e-10)


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
