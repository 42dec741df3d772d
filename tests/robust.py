"""A small network with some robustness, trained once for all tests that attack it."""

from functools import cache

import torch
from torch import Tensor, nn

import yopo
from yopo.data.sources import mnist_subset

EPS = 0.1


@cache
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A float32 SmallCNN in eval mode, and test digits (2000, 1, 28, 28) in [0, 1]."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x_train, y_train, x, y = mnist_subset()
        model = yopo.models.SmallCNN(width=8, hidden=32, dropout=0.0)
        adam = torch.optim.Adam(model.parameters(), 5e-3)
        for i, rows in enumerate(torch.randperm(len(x_train)).split(50)):
            threat = yopo.Linf(EPS * min(1, (i + 1) / 60))
            yopo.Fast(model, threat).backward(x_train[rows] / 255, y_train[rows])
            adam.step()
            adam.zero_grad()
    torch.set_default_dtype(before)
    return model.eval(), x / 255, y
