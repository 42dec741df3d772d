"""Data that comes with the package."""

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor


def mnist_subset() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Real MNIST digits: x_train, y_train, x_test, y_test.

    6,000 training and 2,000 test images (uint8, (N, 1, 28, 28)), the same number of each digit,
    the test images from the official test set. For demos and tests, not for results.
    """
    with (
        (files("yopo.data") / "mnist_subset.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        x_train, y_train, x_test, y_test = (
            torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test")
        )
    return x_train[:, None], y_train.long(), x_test[:, None], y_test.long()
