"""Seeds: everything random in a run is a function of its seed, epoch, step and process.

In an evaluation it is one of the image: `Counted`.
"""

import hashlib
import random
from collections.abc import Callable
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

# SplitMix64: a counter goes up by GAMMA, and each value is mixed. Signed, as torch has numbers.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64

Draws = Callable[[Tensor, int], Tensor]


def mix(*parts: object) -> int:
    """A seed made from any values, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def seed_all(seed: int) -> None:
    """Every global stream that a model may draw from: torch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class Counted:
    """Random numbers for each image, from its pixels and a purpose alone, on its device.

    A counter is mixed with the image's key, all in whole numbers of 64 bits: so an image gets the
    same ones, bit for bit, in any batch, order and subset, in any number of threads.
    """

    def __init__(self, purpose: object) -> None:
        self.purpose = mix(purpose)

    def in_cube(self, x: Tensor) -> Tensor:
        """Uniform in (-1, 1) for each pixel of x (B, ...)."""
        return self._of_bits(x, 2, _cube)

    def in_ball(self, x: Tensor) -> Tensor:
        """Uniform in the L2 ball of radius 1 for each image of x (B, ...)."""
        return self._of_bits(x, 4, _ball)

    def _of_bits(self, x: Tensor, each: int, values: Draws) -> Tensor:
        """each: numbers that are made of one of 64 bits."""
        many = x[0].numel() if len(x) else 0
        keys = _mixed(image_keys(x) + self.purpose)
        words = _counted(keys, (many + 2) // each + 1)  # a ball needs two more
        return values(words, many).to(x.dtype).view_as(x)


def image_keys(x: Tensor) -> Tensor:
    """A number (B,) int64 for each image of x (B, ...): other pixels, another number.

    Sums of the pixels' bits, as float32, with weights of 64 bits.
    """
    bits = x.detach().flatten(1).float().contiguous().view(torch.int32)
    return torch.mul(bits, _weights(bits.shape[1], x.device)).sum(1)


@cache
def _weights(many: int, device: torch.device) -> Tensor:
    """Odd, so that no bit of a pixel is lost."""
    return _mixed(torch.arange(1, many + 1, device=device) * GAMMA) | 1


def _counted(keys: Tensor, count: int) -> Tensor:
    """The next `count` numbers (B, count) of each key (B,)."""
    return _mixed(keys[:, None] + GAMMA * torch.arange(1, count + 1, device=keys.device))


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's mixture, in the place of z int64; multiplication wraps."""
    shifted = torch.empty_like(z)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, None)):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)  # torch repeats the sign
        if factor is not None:
            z *= factor
    return z


def _cube(bits: Tensor, many: int) -> Tensor:
    """24 bits each; no value is 0 or at an end, and each has its negative."""
    odd = (bits.view(torch.int32)[:, :many] >> 7).bitwise_or_(1)
    return odd.float().mul_(2.0**-24)


def _ball(bits: Tensor, many: int) -> Tensor:
    """A direction of two dimensions more, of which the last two are left out, is in the ball."""
    normal = _quantiles(bits.device)[bits.view(torch.int16)[:, : many + 2].long()]
    length = normal.square().sum(1, keepdim=True).double().sqrt()  # exact up to here, in any order
    return normal[:, :many] / length


@cache
def _quantiles(device: torch.device) -> Tensor:
    """Of the normal distribution, 2**16 of them in units of 2**-16; from the end for rows < 0."""
    half = [round(2**16 * NormalDist().inv_cdf(0.5 + (k + 0.5) / 2**16)) for k in range(2**15)]
    return torch.tensor(half + [-q for q in reversed(half)], device=device)
