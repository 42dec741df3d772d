"""The inner loop where f0 is a convolution and a ReLU, as one Triton kernel.

Its n steps are small: compiled one by one, each is several kernels that wait for each other. Here
one block of threads takes all of them for its image; p, eta and f0's output stay in the caches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from yopo.models.stem import Stem

ROWS = 128  # pixels of f0's output at a time
PIXELS = 1024  # of the image
WARPS, STAGES = 4, 1  # the fastest of 27 combinations on an H200
TAPS_AT_MOST, CHANNELS_AT_MOST, PIXELS_AT_MOST = 64, 128, 16384  # what the kernel is meant for


def fits(f0: nn.Module, x: Tensor) -> bool:
    """Whether f0 is a convolution and a ReLU that the kernel can take, on a GPU."""
    parts = list(f0.children())
    if not x.is_cuda or x.dim() != 4 or x.dtype != torch.float32 or len(parts) != 2:
        return False
    conv, relu = parts
    return (  # not a subclass: its forward may be another
        isinstance(conv, nn.Conv2d)
        and type(conv) in (nn.Conv2d, Stem)
        and type(relu) is nn.ReLU
        and conv.weight.dtype == torch.float32
        and (conv.stride, conv.dilation, conv.groups) == ((1, 1), (1, 1), 1)
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
        and conv.weight[0].numel() <= TAPS_AT_MOST
        and conv.out_channels <= CHANNELS_AT_MOST
        and x[0].numel() <= PIXELS_AT_MOST
        and not any(m._forward_hooks or m._forward_pre_hooks for m in (f0, conv, relu))
    )


def inner_loop(
    conv: nn.Conv2d,
    p: Tensor,  # (B, C', H', W')
    x: Tensor,  # (B, C, H, W)
    eta: Tensor,
    grad: Tensor,  # of H0 at x + eta, the first step's
    eps: Tensor,
    step: Tensor,
    n: int,
) -> Tensor:
    """Take n projected sign steps up p·relu(conv(x + eta)); as `Plain.inner_loop`, L∞.

    Products are taken in bf16 under autocast, else in float32.
    """
    batch, channels, height, width = x.shape
    _, out, rows, columns = p.shape
    high, wide = conv.kernel_size
    assert not isinstance(conv.padding, str)
    taps = channels * high * wide
    p = p.contiguous(memory_format=torch.channels_last)
    x, grad = x.contiguous(), grad.contiguous()
    result = eta.clone(memory_format=torch.contiguous_format)
    point = torch.empty_like(x)  # x + eta
    parts = x.new_empty(batch, taps, rows * columns)  # of the gradient, by tap
    bias = conv.bias if conv.bias is not None else conv.weight.new_zeros(out)
    _steps[(batch,)](
        result,
        point,
        parts,
        x,
        grad,
        p,
        conv.weight.detach().contiguous(),
        bias.detach(),
        eps,
        step,
        n,
        height,
        width,
        rows,
        columns,
        conv.padding[0],
        conv.padding[1],
        channels,
        out,
        high,
        wide,
        half=torch.is_autocast_enabled(x.device.type),
        TAPS=max(16, triton.next_power_of_2(taps)),
        OUT=max(16, triton.next_power_of_2(out)),
        ROWS=ROWS,
        PIXELS=PIXELS,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return result if eta.is_contiguous() else torch.empty_like(eta).copy_(result)


@triton.jit  # type: ignore[untyped-decorator]
def _steps(  # type: ignore[no-untyped-def]
    eta,
    point,
    parts,
    x,
    grad,
    p,
    weight,
    bias,
    eps,
    step,
    n: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    pad_high: tl.constexpr,
    pad_wide: tl.constexpr,
    channels: tl.constexpr,
    out: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    half: tl.constexpr,
    TAPS: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    taps: tl.constexpr = channels * high * wide
    size: tl.constexpr = height * width
    eta += image * channels * size
    point += image * channels * size
    x += image * channels * size
    grad += image * channels * size
    p += image * rows * columns * out
    parts += image * rows * columns * taps
    kind: tl.constexpr = tl.bfloat16 if half else tl.float32
    radius, length = tl.load(eps).to(tl.float32), tl.load(step).to(tl.float32)

    tap = tl.arange(0, TAPS)
    into = tl.arange(0, OUT)
    inside = (tap[:, None] < taps) & (into[None, :] < out)
    w = tl.load(weight + into[None, :] * taps + tap[:, None], inside, 0.0).to(kind)  # (TAPS, OUT)
    b = tl.load(bias + into, into < out, 0.0).to(kind).to(tl.float32)
    channel, y_tap, x_tap = tap // (high * wide), tap // wide % high, tap % wide

    for s in range(n):
        if s > 0:
            for first in range(0, rows * columns, ROWS):
                r = first + tl.arange(0, ROWS)
                there = r < rows * columns
                iy = (r // columns)[:, None] + y_tap[None, :] - pad_high
                ix = (r % columns)[:, None] + x_tap[None, :] - pad_wide
                seen = there[:, None] & (tap < taps)[None, :]
                seen &= (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)
                at = channel[None, :] * size + iy * width + ix
                v = tl.load(point + at, seen, 0.0).to(kind)  # (ROWS, TAPS)
                z = tl.dot(v, w, input_precision="ieee") + b[None, :]
                known = there[:, None] & (into < out)[None, :]
                q = tl.load(p + r[:, None] * out + into[None, :], known, 0.0)
                q = tl.where(z > 0, q.to(tl.float32), 0.0).to(
                    kind
                )  # (ROWS, OUT): p through the ReLU
                g = tl.dot(q, tl.trans(w), input_precision="ieee")
                tl.store(
                    parts + tap[None, :] * (rows * columns) + r[:, None],
                    g,
                    there[:, None] & (tap < taps)[None, :],
                )
            tl.debug_barrier()
        for first in range(0, channels * size, PIXELS):
            i = first + tl.arange(0, PIXELS)
            there = i < channels * size
            if s > 0:
                slope = tl.zeros((PIXELS,), tl.float32)
                for k in tl.static_range(high * wide):
                    oy = i % size // width + pad_high - k // wide
                    ox = i % width + pad_wide - k % wide
                    seen = there & (oy >= 0) & (oy < rows) & (ox >= 0) & (ox < columns)
                    part = (i // size * (high * wide) + k) * (rows * columns)
                    slope += tl.load(parts + part + oy * columns + ox, seen, 0.0)
            else:
                slope = tl.load(grad + i, there, 0.0).to(tl.float32)
            clean = tl.load(x + i, there, 0.0)
            e = tl.load(eta + i, there, 0.0)
            e += tl.where(slope > 0, length, tl.where(slope < 0, -length, 0.0))
            e = tl.minimum(
                tl.maximum(e, tl.maximum(-clean, -radius)), tl.minimum(1 - clean, radius)
            )
            tl.store(eta + i, e, there)
            tl.store(point + i, clean + e, there)
        tl.debug_barrier()
