"""Which images of an evaluation are shown, as who writes them and who reads them must know."""

from collections import Counter

import torch
from torch import Tensor

SAME = "same"  # name of the images that all networks are shown


def choose(labels: Tensor) -> Tensor:
    """Rows of eight images (N,), as many classes as there are, in order."""
    before: Counter[int] = Counter()
    nth = []
    for label in labels.tolist():
        nth.append(before[label])
        before[label] += 1
    order = sorted(range(len(nth)), key=lambda i: nth[i])  # of equal ones the first
    return torch.tensor(sorted(order[:8]), dtype=torch.long)
