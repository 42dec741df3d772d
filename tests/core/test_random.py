"""Random starts of an evaluation: of the image alone, bit for bit, and as random as they claim."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from yopo import L2, Linf
from yopo.core import random as numbers
from yopo.core.random import FIRST, GAMMA, SECOND, Counted, image_keys

WORD = 2**64
KINDS: list[Callable[[Counted, Tensor], Tensor]] = [Counted.in_cube, Counted.in_ball]
kinds = pytest.mark.parametrize("draw", KINDS, ids=["cube", "ball"])


def splitmix(state: int) -> int:
    """The mixture in Python's own whole numbers, which do not end at 64 bits."""
    z = (state ^ state >> 30) * (FIRST % WORD) % WORD
    z = (z ^ z >> 27) * (SECOND % WORD) % WORD
    return z ^ z >> 31


def pictures(n: int, *shape: int) -> Tensor:
    """Bytes, as data sets have them."""
    return torch.randint(0, 256, (n, *(shape or (3, 5, 7))), dtype=torch.uint8).float() / 255


def test_the_mixture_is_splitmix64() -> None:
    """With the numbers that its authors' program gives for the seed 1234567."""
    state, published = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix((state + k * GAMMA) % WORD) for k in (1, 2, 3)] == published
    found = numbers._counted(torch.tensor([state]), 3)[0].tolist()
    assert [v % WORD for v in found] == published


def test_numbers_are_those_of_the_definition() -> None:
    x = pictures(2, 1, 1, 3)
    key = [sum(w * b for w, b in zip(weights(3), bits(i), strict=True)) % WORD for i in x]
    assert [k % WORD for k in image_keys(x).tolist()] == key
    purpose = "7/1"
    values = Counted(purpose).in_cube(x).flatten(1)
    for row, k in zip(values.tolist(), key, strict=True):
        start = splitmix((k + numbers.mix(purpose)) % WORD)
        halves = []
        for i in (1, 2):
            word = splitmix((start + i * GAMMA) % WORD)
            halves += [word % 2**32, word >> 32]
        signed = [h - 2**32 * (h >= 2**31) for h in halves]
        assert row == [(2 * (h >> 8) + 1) / 2**24 for h in signed][:3]


def weights(n: int) -> list[int]:
    return [splitmix(k * GAMMA % WORD) | 1 for k in range(1, n + 1)]


def bits(x: Tensor) -> list[int]:
    words: list[int] = x.flatten().view(torch.int32).tolist()
    return words


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_depend_on_nothing_but_the_image(
    draw: Callable[[Counted, Tensor], Tensor], dtype: torch.dtype
) -> None:
    x, source = pictures(40).to(dtype), Counted("0/0")
    expected = draw(source, x)
    order = torch.randperm(40)
    assert torch.equal(draw(source, x[order]), expected[order])
    assert torch.equal(draw(source, x[7:12]), expected[7:12])
    assert torch.equal(draw(source, x.to(memory_format=torch.channels_last)), expected)
    assert torch.equal(draw(source, x.float()), expected.float())


def test_threads_do_not_change_a_bit() -> None:
    """Torch shares out what is large."""
    x, before = torch.rand(3, 3, 150, 150), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append([threat.start_counted(x, Counted("a")) for threat in (Linf(0.1), L2(1.0))])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_one_pixel_one_purpose_one_place_make_another() -> None:
    x = torch.zeros(1, 1, 4, 5)
    near = [x]
    for k in range(20):  # black but for one white pixel, of which bits few are set
        near.append(x.clone())
        near[-1].view(-1)[k] = 1.0
    keys = image_keys(torch.cat(near))
    assert len(keys.unique()) == 21
    for draw in KINDS:
        same = draw(Counted("0/0"), x)
        others = [*(draw(Counted("0/0"), z) for z in near[1:]), draw(Counted("0/1"), x)]
        assert not any(bool((other == same).any()) for other in others)


def kolmogorov(values: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """√n times the largest distance from the distribution; above 1.95 in one case of 1,000."""
    at = cdf(values.double().sort().values)
    n = len(at)
    ranks = torch.arange(n + 1, dtype=torch.float64) / n
    return math.sqrt(n) * float(
        torch.maximum((at - ranks[:-1]).abs(), (at - ranks[1:]).abs()).max()
    )


def normal(v: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(v / math.sqrt(2)))


def starts(draw: Callable[[Counted, Tensor], Tensor]) -> Tensor:
    """(20000, 24), of fixed images: the tests below hold for them or they do not."""
    torch.manual_seed(0)
    return draw(Counted("tests"), pictures(20000, 1, 4, 6)).flatten(1).double()


def test_the_cube_is_filled_evenly() -> None:
    v = starts(Counted.in_cube)
    assert kolmogorov(v.flatten(), lambda t: (t + 1) / 2) < 1.95
    assert v.abs().max() < 1
    for column in v.T[:4]:  # each pixel over the images, each image over its pixels
        assert kolmogorov(column, lambda t: (t + 1) / 2) < 1.95
    correlated(v * math.sqrt(3))


def test_the_ball_is_filled_evenly() -> None:
    v = starts(Counted.in_ball)
    radius = v.norm(dim=1)
    assert radius.max() <= 1 + 1e-15
    assert kolmogorov(radius, lambda r: r**24) < 1.95
    direction = v / radius[:, None]
    # The first coordinate of a direction in 24 dimensions, squared, is Beta(1/2, 23/2).
    beta = torch.distributions.Beta(torch.tensor(0.5).double(), torch.tensor(11.5).double())
    torch.manual_seed(0)
    drawn = beta.sample((200_000,)).sort().values
    ranks = torch.searchsorted(drawn, direction[:, 0].square()).double() / len(drawn)
    assert kolmogorov(ranks, lambda t: t) < 2.2  # for the sample that it is compared with
    assert abs(float((direction[:, 0] > 0).double().mean()) - 0.5) < 3.3 * 0.5 / math.sqrt(20000)
    correlated(direction * math.sqrt(24))


def correlated(v: Tensor) -> None:
    """Of variance 1: no pixel goes with another, nor an image with the next one."""
    n = len(v)
    among = v.T @ v / n - torch.eye(24).double()
    assert among.abs().max() < 5 / math.sqrt(n) * 1.5  # 300 pairs; squares vary by up to √2
    next_ = (v[1:] * v[:-1]).mean()
    assert abs(float(next_)) < 4 / math.sqrt(v.numel())
    assert abs(float((v[:, 1:] * v[:, :-1]).mean())) < 4 / math.sqrt(v.numel())


def test_the_table_of_the_normal_distribution_is_one() -> None:
    table = numbers._quantiles(torch.device("cpu")).double() / 2**16
    assert len(table) == 2**16
    assert torch.equal(table, -table.flip(0))
    assert kolmogorov(table, normal) < 0.01
    assert float(table.square().mean()) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("threat", [Linf(0.1), L2(1.5)], ids=["Linf", "L2"])
def test_starts_are_in_ball_and_box(threat: Linf | L2) -> None:
    x = pictures(50)
    x[:, :, 0] = 0
    eta = threat.start_counted(x, Counted("0/0"))
    assert float((x + eta).min()) >= 0
    assert float((x + eta).max()) <= 1
    flat = eta.flatten(1)
    size = flat.abs().amax(1) if isinstance(threat, Linf) else flat.norm(dim=1)
    assert float(size.max()) <= threat.eps * (1 + 1e-6)
    assert float(size.min()) > threat.eps / 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@kinds
def test_a_gpu_draws_what_a_cpu_draws(draw: Callable[[Counted, Tensor], Tensor]) -> None:
    x = pictures(9, 3, 32, 32)
    assert torch.equal(draw(Counted("0/0"), x.cuda()).cpu(), draw(Counted("0/0"), x))
