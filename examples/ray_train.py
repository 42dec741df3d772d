"""YOPO in Ray Train: each worker has its share of the batch, DistributedDataParallel exchanges.

Usage: python examples/ray_train.py --workers 2 --epochs 5 --out runs/ray
Needs `pip install 'ray[train]'`. The network in `--out` is for the embedded digits.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import yopo
from yopo.data import load

WEIGHTS = "model.safetensors"


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    data, several = load("mnist-subset"), ray.train.get_context()
    images = TensorDataset(data.x_train[: config["images"]], data.y_train[: config["images"]])
    share = config["batch"] // several.get_world_size()
    loader = prepare_data_loader(DataLoader(images, share, shuffle=True, drop_last=True))
    model = prepare_model(yopo.models.SmallCNN(width=16, hidden=100))
    method = yopo.YOPO(model, yopo.Linf(0.3, step=0.3 / 8), m=3, n=5)
    optimizer = torch.optim.AdamW(model.parameters(), config["rate"])
    for epoch in range(config["epochs"]):
        if several.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = method(x / 255, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if several.get_world_rank() == 0:
                network = getattr(model, "module", model)
                save_file(network.state_dict(), Path(folder) / WEIGHTS)
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch + 1, "loss": loss.item()}, checkpoint=checkpoint)


def main() -> None:
    """Start the workers, and say where the network is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100, help="images a step, of all workers")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("runs/ray"))
    args = parser.parse_args()
    config = {name: getattr(args, name) for name in ("epochs", "batch", "rate", "images")}
    scaling = ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available())
    run = RunConfig(storage_path=str(args.out.absolute()))
    result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run)
    found = result.fit()
    print(found.metrics, Path(found.checkpoint.path) / WEIGHTS)


if __name__ == "__main__":
    main()
