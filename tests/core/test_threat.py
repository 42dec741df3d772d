from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from yopo import L2, Linf, Threat

THREATS = st.sampled_from([Linf, L2])
SHAPES = st.sampled_from([(3, 7), (2, 3, 4, 4), (1, 2, 9), (4, 1)])
DTYPES = st.sampled_from([torch.float32, torch.float64])
EPS = st.one_of(st.sampled_from([8 / 255, 0.3, 1.0]), st.floats(1e-4, 1.0))


def images(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, dtype=dtype, generator=generator)
    corner = torch.rand(shape, generator=generator)
    return torch.where(corner < 0.15, 0.0, torch.where(corner > 0.85, 1.0, x)).to(dtype)


def assert_inside(threat: Threat, eta: Tensor, x: Tensor) -> None:
    assert (x + eta).min() >= 0  # the box holds exactly
    assert (x + eta).max() <= 1
    rounding = 4 * torch.finfo(x.dtype).eps
    if isinstance(threat, Linf):
        assert eta.abs().max() <= torch.tensor(threat.eps, dtype=x.dtype)  # exactly
    else:
        assert eta.flatten(1).norm(dim=1).max() <= threat.eps * (1 + rounding)


@given(THREATS, SHAPES, DTYPES, EPS, st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 1e4]))
@settings(max_examples=200)
def test_projection_is_in_ball_and_box_and_idempotent(
    kind: type[Linf] | type[L2],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    eps: float,
    seed: int,
    scale: float,
) -> None:
    threat = kind(eps if kind is Linf else 3 * eps)
    x = images(shape, dtype, seed)
    raw = scale * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    eta = threat.project(raw, x)
    assert_inside(threat, eta, x)
    again = threat.project(eta, x)
    if kind is Linf:
        assert torch.equal(again, eta)
    else:
        torch.testing.assert_close(again, eta, rtol=1e-6, atol=1e-7)


@given(SHAPES, EPS, st.integers(0, 10**6))
@settings(max_examples=50)
def test_linf_projection_is_the_nearest_point(
    shape: tuple[int, ...], eps: float, seed: int
) -> None:
    """Against random feasible points: none is nearer to the raw eta."""
    threat, x = Linf(eps), images(shape, torch.float64, seed)
    generator = torch.Generator().manual_seed(seed)
    raw = 2 * eps * torch.randn(shape, dtype=torch.float64, generator=generator)
    distance = (threat.project(raw, x) - raw).norm()
    for _ in range(20):
        other = (x + eps * (2 * torch.rand(shape, generator=generator) - 1)).clamp(0, 1) - x
        assert distance <= (other - raw).norm() + 1e-12


def test_a_point_inside_is_left_alone() -> None:
    x = torch.full((2, 5), 0.5)
    eta = torch.full((2, 5), 0.01)
    for threat in (Linf(0.1), L2(0.1)):
        assert torch.equal(threat.project(eta, x), eta)


@given(THREATS, SHAPES, DTYPES, EPS, st.integers(0, 10**6))
@settings(max_examples=100)
def test_start_is_inside_random_and_seeded(
    kind: type[Linf] | type[L2], shape: tuple[int, ...], dtype: torch.dtype, eps: float, seed: int
) -> None:
    threat, x = kind(eps if kind is Linf else 3 * eps), images(shape, dtype, seed)
    assert_inside(threat, threat.start(x, torch.Generator().manual_seed(seed)), x)
    middle = torch.full_like(x, 0.5)
    eta = threat.start(middle, torch.Generator().manual_seed(seed))
    assert torch.equal(eta, threat.start(middle, torch.Generator().manual_seed(seed)))
    other = threat.start(middle, torch.Generator().manual_seed(seed + 1))
    assert not torch.equal(eta, other)


def test_start_is_uniform_in_the_ball() -> None:
    """Each moment to eight standard deviations of its estimate, the last one to five."""
    x = torch.full((20000, 3), 0.5)
    linf = Linf(0.1).start(x)
    assert abs(float(linf.mean())) < 2e-3
    torch.testing.assert_close(linf.var(0), torch.full((3,), 0.1**2 / 3), rtol=0.05, atol=0)
    radius = L2(0.1).start(x).norm(dim=1) / 0.1
    torch.testing.assert_close((radius**3).mean(), torch.tensor(0.5), rtol=0.02, atol=0)


@given(st.integers(0, 12), EPS, st.floats(1e-4, 2.0), st.integers(0, 10**6))
@settings(max_examples=150)
def test_linf_steps_along_one_gradient_are_one_long_step(
    n: int, eps: float, step: float, seed: int
) -> None:
    threat, x = Linf(eps, step), images((3, 2, 4, 4), torch.float64, seed)
    generator = torch.Generator().manual_seed(seed)
    eta = slow = threat.start(x, generator)
    grad = torch.randn(x.shape, generator=generator, dtype=x.dtype) * (x != 0.5)
    for _ in range(n):
        slow = threat.ascend(slow, grad, x)
    torch.testing.assert_close(threat.ascend(eta, grad, x, n=n), slow, rtol=0, atol=1e-14 * (1 + n))


def test_l2_steps_along_one_gradient_are_the_literal_loop() -> None:
    threat, x = L2(0.5, 0.2), images((3, 2, 4, 4), torch.float64, 0)
    eta = slow = threat.start(x)
    grad = torch.randn_like(x)
    for _ in range(5):
        unit = grad / grad.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        slow = threat.project(slow + 0.2 * unit, x)
    torch.testing.assert_close(threat.ascend(eta, grad, x, n=5), slow, rtol=1e-12, atol=1e-12)


def test_l2_step_survives_tiny_and_zero_gradients() -> None:
    threat = L2(0.5, 0.1)
    x = torch.full((2, 6), 0.5, dtype=torch.float32)
    grad = torch.zeros_like(x)
    grad[0] = 1e-30  # its square is zero in float32
    eta = threat.ascend(torch.zeros_like(x), grad, x)
    torch.testing.assert_close(eta.norm(dim=1), torch.tensor([0.1, 0.0], dtype=torch.float32))


def test_default_step_is_a_quarter_of_eps() -> None:
    assert Linf(8 / 255).step == 2 / 255
    assert L2(0.5).step == 0.125
    assert Linf(0.3, 0.01).step == 0.01


@pytest.mark.parametrize("kind", [Linf, L2])
@pytest.mark.parametrize("bad", [0, -0.1, float("nan"), float("inf")])
def test_bad_radius_and_step_name_the_fix(kind: type[Linf] | type[L2], bad: float) -> None:
    with pytest.raises(ValueError, match=r"eps of at most 1, .*got 8; 8 of 255 is 8/255"):
        Linf(8)
    with pytest.raises(ValueError, match=r"eps > 0.*use yopo\.Natural"):
        kind(bad)
    with pytest.raises(ValueError, match=r"step > 0.*leave it out"):
        kind(0.1, bad)


def test_eps_may_be_any_number_but_no_tensor() -> None:
    threat = Linf(Fraction(8, 255))  # type: ignore[arg-type]
    assert (type(threat.eps), type(threat.step)) == (float, float)
    assert threat == Linf(8 / 255)
    with pytest.raises(TypeError, match="expected eps as a number"):
        Linf(torch.tensor(0.1))  # type: ignore[arg-type]
