"""Small networks that were trained on digits, the same on every machine.

Their weights are kept beside this file: trained anew they would differ from CPU to CPU, and so
would what a test sees. `python -m tests.robust` made them.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

import yopo
from yopo.core import tensor_files
from yopo.data.sources import mnist_subset
from yopo.models import Normalize, SmallCNN

EPS = 0.1
WEIGHTS = Path(__file__).with_suffix(".safetensors")


def _batchnorm() -> nn.Module:
    return nn.Sequential(
        Normalize(0.13, 0.31),
        nn.Conv2d(1, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "robust": lambda: SmallCNN(width=8, hidden=32, dropout=0.0),
    "natural": lambda: SmallCNN(width=4, hidden=16),
    "adversarial": lambda: SmallCNN(width=4, hidden=16),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
    "BatchNorm": _batchnorm,
    "BatchNorm, adversarial": _batchnorm,
}


@cache
def network(name: str) -> nn.Module:
    """One of `NETWORKS`, trained, float32 and in eval mode."""
    with torch.random.fork_rng():
        model = NETWORKS[name]().float()
    stored = tensor_files.load_weights(WEIGHTS).items()
    model.load_state_dict(
        {k.removeprefix(f"{name}/"): v for k, v in stored if k.startswith(f"{name}/")}
    )
    return model.eval()


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Test images (2000, 1, 28, 28) in [0, 1], float32, and their labels."""
    _, _, x, y = mnist_subset()
    return x.float() / 255, y


def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A network with some robustness, and test digits."""
    return network("robust"), *digits()


def _train(name: str) -> nn.Module:
    torch.manual_seed(0)
    x, y, _, _ = mnist_subset()
    x = x / 255
    model = NETWORKS[name]()
    if name == "robust":
        adam = torch.optim.Adam(model.parameters(), 5e-3)
        for i, rows in enumerate(torch.randperm(len(x)).split(50)):
            yopo.Fast(model, yopo.Linf(EPS * min(1, (i + 1) / 60))).backward(x[rows], y[rows])
            adam.step()
            adam.zero_grad()
        return model
    adversarial = yopo.NFGSM(model, yopo.Linf(0.1))
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(12):  # the first on clean images, or small networks may learn nothing
        method = adversarial if epoch and "adversarial" in name else yopo.Natural(model)
        for rows in torch.randperm(len(x)).split(100):
            method.backward(x[rows], y[rows])
            adam.step()
            adam.zero_grad()
    return model


if __name__ == "__main__":
    every = {f"{name}/{k}": v for name in NETWORKS for k, v in _train(name).state_dict().items()}
    half = {k: v.half() if v.is_floating_point() else v for k, v in every.items()}  # fewer bytes
    tensor_files.save_weights(WEIGHTS, half, {})
