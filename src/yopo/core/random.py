"""Seeds: everything random in a run is a function of its seed, epoch, step and process."""

import hashlib
import random

import numpy as np
import torch


def mix(*parts: object) -> int:
    """A seed made from any values, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def seed_all(seed: int) -> None:
    """Every global stream that a model may draw from: torch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
