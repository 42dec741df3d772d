"""The loader: augmentation against slicing image by image; batches from seed, epoch and step."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch import Tensor

from yopo.data import Augment, Loader
from yopo.data.augment import PLACES, SHADES, apply, draw, generator, used

CPU = torch.device("cpu")
FULL = Augment(crop=2, flip=True, cutout=3)
Batches = list[tuple[Tensor, Tensor]]


def images(n: int, channels: int = 3, height: int = 6, width: int = 7) -> Tensor:
    shape = (n, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator())


def loader(n: int = 22, **options: object) -> Loader:
    """Labels number the images, so that they show the order."""
    settings: dict[str, object] = {"batch": 8, "seed": 3, "device": CPU, "augment": FULL}
    return Loader(images(n), torch.arange(n), **(settings | options))  # type: ignore[arg-type]


def assert_equal(a: Batches, b: Batches) -> None:
    assert len(a) == len(b)
    for (x, y), (x_other, y_other) in zip(a, b, strict=True):
        assert torch.equal(x, x_other)
        assert torch.equal(y, y_other)


def apply_reference(augment: Augment, image: NDArray[np.uint8], row: list[int]) -> Tensor:
    """One image: pad, slice, mirror, blank a square."""
    drawn = dict(zip(used(augment), row, strict=True))
    down, right, mirrored, top, left = (drawn.get(name, 0) for name in PLACES)
    c = augment.crop
    _, height, width = image.shape
    padded = np.pad(image, ((0, 0), (c, c), (c, c)))
    out = padded[:, c + down : c + down + height, c + right : c + right + width].copy()
    if mirrored:
        out = out[:, :, ::-1].copy()
    rows = slice(max(top, 0), max(top + augment.cutout, 0))
    out[:, rows, max(left, 0) : max(left + augment.cutout, 0)] = 0
    return torch.from_numpy(out)


@given(
    augment=st.builds(Augment, st.integers(0, 9), st.booleans(), st.integers(0, 9)),
    shape=st.tuples(*[st.integers(1, n) for n in (5, 3, 8, 8)]),
    seed=st.integers(0, 2**63),
)
def test_augmentation_equals_slicing_image_by_image(
    augment: Augment, shape: tuple[int, int, int, int], seed: int
) -> None:
    n, _, height, width = shape
    x = images(*shape)
    numbers = draw(augment, n=n, height=height, width=width, seed=seed, epoch=0)
    rows = zip(x.numpy(), numbers.tolist(), strict=True)
    expected = torch.stack([apply_reference(augment, image, row) for image, row in rows])
    result = apply(augment, x, numbers)
    assert result.dtype == torch.uint8
    assert torch.equal(result, expected)


def test_draws_fill_their_ranges_evenly() -> None:
    """Whole numbers from one seed, the same on every machine."""
    n = 20_000
    numbers = draw(Augment(2, True, 4), n=n, height=5, width=3, seed=0, epoch=0)
    ranges = [range(-2, 3), range(-2, 3), range(2), range(-2, 3), range(-2, 1)]
    for column, values in zip(numbers.unbind(1), ranges, strict=True):
        found, counts = column.unique(return_counts=True)
        assert found.tolist() == list(values)
        assert float((counts * len(values) / n - 1).abs().max()) < 0.1
    assert float(torch.corrcoef(numbers.T.double()).triu(1).abs().max()) < 0.03


def shaded_reference(image: Tensor, factors: list[float]) -> Tensor:  # (3, H, W) uint8
    """One image by pillow, which rounds after each of the three."""
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for kind, factor in zip(kinds, factors, strict=True):
        picture = kind(picture).enhance(factor)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def shaded_exactly(image: Tensor, factors: Tensor) -> Tensor:  # (3, H, W) uint8
    """One image in float64."""
    grey = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    y = (image.double() * factors[0]).clamp(0, 255)
    mean = (y * grey).sum(0).mean()
    y = (mean + factors[1] * (y - mean)).clamp(0, 255)
    of_each = (y * grey).sum(0)
    return (of_each + factors[2] * (y - of_each)).clamp(0, 255)


def test_shades_are_pillows_and_do_not_depend_on_the_batch() -> None:
    augment, x = Augment(jitter=0.5), images(40, height=9, width=8)
    numbers = draw(augment, n=40, height=9, width=8, seed=1, epoch=2)
    assert int(numbers.abs().max()) <= SHADES
    factors = 1 + 0.5 * numbers.double() / SHADES
    assert float((factors - 1).abs().max()) > 0.45
    expected = torch.stack(
        [shaded_reference(*one) for one in zip(x, factors.tolist(), strict=True)]
    )
    shaded = apply(augment, x, numbers)
    assert shaded.dtype == torch.uint8
    off = shaded.int() - expected.int()
    assert 0 <= int(off.min()) <= int(off.max()) <= 3  # pillow rounds down, and three times
    exact = torch.stack([shaded_exactly(*one) for one in zip(x, factors, strict=True)])
    assert float((shaded - exact).abs().max()) < 0.8  # once, and the mean's greys
    both = [apply(augment, x[part], numbers[part]) for part in (slice(7), slice(7, 40))]
    assert torch.equal(torch.cat(both), shaded)
    grey = apply(augment, x[:, :1], numbers)
    assert grey.shape == (40, 1, 9, 8)
    as_float = apply(augment, x.float() / 255, numbers)
    assert float((255 * as_float - shaded).abs().max()) <= 1  # rounded once, and the mean
    off_again = apply(Augment(jitter=1e-9), x, numbers)
    assert torch.equal(off_again, x)


def test_one_augmentation_does_not_change_anothers_numbers() -> None:
    parts = (Augment(crop=3), Augment(flip=True), Augment(cutout=4), Augment(jitter=0.5))
    whole = Augment(crop=3, flip=True, cutout=4, jitter=0.5)
    alone, together = (
        torch.cat([draw(a, n=50, height=8, width=8, seed=1, epoch=2) for a in some], 1)
        for some in (parts, [whole])
    )
    assert torch.equal(alone, together)
    assert together.any(0).all()
    assert together.shape == (50, len(used(whole))) == (50, 8)


def test_nothing_is_drawn_that_is_not_used() -> None:
    """As it would be for every picture of a large folder."""
    assert draw(Augment(), n=50, height=8, width=8, seed=1, epoch=2).shape == (50, 0)
    flips = draw(Augment(flip=True), n=50, height=8, width=8, seed=1, epoch=2)
    assert (flips.shape, flips.dtype) == ((50, 1), torch.int32)


@pytest.mark.parametrize("resident", [True, False])
def test_batches_are_the_augmented_images_over_255(resident: bool) -> None:
    made = loader(resident=resident)
    numbers = draw(FULL, n=22, height=6, width=7, seed=3, epoch=5).tolist()
    order = torch.randperm(22, generator=generator(3, 5, "order")).tolist()
    batches = list(made.epoch(5))
    assert len(batches) == len(made) == 2
    for step, (x, y) in enumerate(batches):
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        places = range(8 * step, 8 * step + 8)
        assert y.tolist() == [order[place] for place in places]
        for image, place in zip(x, places, strict=True):
            source = made.x[order[place]].numpy()
            assert torch.equal(image, apply_reference(FULL, source, numbers[place]).float() / 255)


def test_an_epoch_visits_every_image_once_in_an_order_of_its_own() -> None:
    made = loader(n=24)
    orders = [torch.cat([y for _, y in made.epoch(epoch)]).tolist() for epoch in range(3)]
    orders.append(torch.cat([y for _, y in loader(n=24, seed=4).epoch(0)]).tolist())
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(24)) for order in orders)
    left_over = [{*range(22)} - {int(i) for _, y in loader().epoch(e) for i in y} for e in range(9)]
    assert all(len(left) == 22 % 8 for left in left_over)
    assert len(set.union(*left_over)) > 6  # not the same each time


def test_global_random_state_neither_matters_nor_changes() -> None:
    expected = list(loader().epoch(0))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert_equal(list(loader().epoch(0)), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_starting_later_skips_steps_exactly(start: int, resident: bool) -> None:
    made = loader(n=24, resident=resident)
    assert_equal(list(made.epoch(1, start)), list(made.epoch(1))[start:])


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_have_the_single_process_batch(world: int, resident: bool) -> None:
    single = list(loader(n=23).epoch(2))
    ranks = [
        list(loader(n=23, rank=r, world=world, resident=resident).epoch(2)) for r in range(world)
    ]
    joined = [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*ranks, strict=True)]
    assert_equal(joined, single)  # type: ignore[arg-type]
    for parts in zip(*ranks, strict=True):
        sizes = [len(y) for _, y in parts]
        assert max(sizes) - min(sizes) <= 1


def test_memory_map_on_the_host_gives_the_same_batches(tmp_path: Path) -> None:
    x = images(22)
    file = tmp_path / "x"
    x.numpy().tofile(file)
    mapped = np.memmap(file, np.uint8, mode="r+", shape=tuple(x.shape))
    made = Loader(
        torch.from_numpy(mapped),
        torch.arange(22),
        batch=8,
        seed=3,
        device=CPU,
        augment=FULL,
        resident=False,
    )
    assert_equal(list(made.epoch(0)), list(loader().epoch(0)))


def test_leaving_an_epoch_early_leaves_no_thread() -> None:
    before = {*threading.enumerate()}  # some of which may end meanwhile
    batches = loader(n=64, resident=False).epoch(0)
    next(batches)
    assert len({*threading.enumerate()} - before) == 1
    del batches
    assert not {*threading.enumerate()} - before


def test_batches_do_not_share_memory_with_the_data() -> None:
    made = loader(augment=Augment())
    kept = made.x.clone()
    for x, y in made.epoch(0):
        x.zero_()
        y.zero_()
    assert torch.equal(made.x, kept)
    assert made.y.tolist() == list(range(22))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "at least one image, got none"),
        ({"batch": 0}, "batch of at least 1, got 0"),
        ({"batch": 23}, "at most 22.*got 23; use a smaller batch: --batch 22"),
        ({"batch": 6, "world": 4}, "multiple of world=4, got 6; use --batch 4"),
        ({"rank": 2, "world": 2}, "rank from 0 to 1, got 2"),
    ],
)
def test_bad_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(**options)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (images(4), torch.arange(5), r"each of 4 images, got torch.int64 of shape \(5,\)"),
        (images(4), torch.rand(4), "whole-number label"),
        (images(4).float(), torch.arange(4), "expected uint8 images"),
        (images(4)[0], torch.arange(3), r"expected uint8 images \(N, C, H, W\)"),
    ],
)
def test_bad_data_is_refused(x: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(x, y, batch=1, seed=0, device=CPU)


def test_other_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match="crop of at least 0 pixels, got -1"):
        Augment(crop=-1)
    with pytest.raises(ValueError, match="start from 0 to 2 steps, got 3"):
        loader().epoch(0, 3)  # at once, not at the first batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_a_gpu_no_step_waits_and_both_places_agree() -> None:
    gpu = torch.device("cuda")
    expected = list(loader().epoch(0))
    resident = loader(device=gpu).epoch(0)
    first = next(resident)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [first, *resident]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(batches, list(loader(device=gpu, resident=False).epoch(0)))
    for (x, y), (x_cpu, y_cpu) in zip(batches, expected, strict=True):
        torch.testing.assert_close(x.cpu(), x_cpu, rtol=1e-6, atol=0)
        assert torch.equal(y.cpu(), y_cpu)
