"""rotary_:  pairs (a, b) of the queries and keys turn by an angle of their position, in place of the fused projection.

    a' = a cos - b sin,  b' = b cos + a sin
    da = da' cos + db' sin,  db = db' cos - da' sin          the same with -sin

A pair is dims (i, i + half) of a head or, interleaved, (2 i, 2 i + 1), for the first 2 half of its dims; the others
stay, and so do values. Only cosines and sines are kept (Su et al., 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import jit, tl, use_triton

HEADS = tuple[int, int, int]    # (query groups or -1, queries of a group + 2, head_dim)


def rotary_reference(fused: Tensor, cos: Tensor, sin: Tensor, heads: HEADS, interleaved: bool) -> Tensor:
    """The op in plain formulas, out of place: what the kernel and the torch path must equal."""
    x = fused.unflatten(2, heads).to(cos.dtype)
    turned, rest = x.split((2 * cos.shape[-1], heads[2] - 2 * cos.shape[-1]), dim=-1)
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    whole = torch.cat((turned, rest), dim=-1)
    return torch.cat((whole[..., :-1, :], x[..., -1:, :]), dim=-2).flatten(2).to(fused.dtype)


@jit
def _turn(
    x_ptr, y_ptr, cos_ptr, sin_ptr, batch, heads, rows, head_dim, half, sign,
    x_seq_stride, x_batch_stride, x_stride, y_seq_stride, y_batch_stride, y_stride, cos_seq_stride, cos_batch_stride,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; COPY: what does not turn is written too, since y is not x."""
    token = tl.program_id(0).to(tl.int64)
    seq, column = token // batch, token % batch
    x_ptr += seq * x_seq_stride + column * x_batch_stride
    y_ptr += seq * y_seq_stride + column * y_batch_stride
    angle = seq * cos_seq_stride + column * cos_batch_stride
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    is_value = head % rows == rows - 1
    moves = (head < heads) & (COPY | (is_value == 0))
    at = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + angle + at, mask=at < half, other=0.0)
    sin = tl.load(sin_ptr + angle + at, mask=at < half, other=0.0) * sign
    if COPY:
        cos = tl.where(is_value, 1.0, cos)
        sin = tl.where(is_value, 0.0, sin)
    start = head * head_dim
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        mask = moves & (both < 2 * half)
        pairs = tl.load(x_ptr + (start + both) * x_stride, mask=mask, other=0.0).to(cos.dtype)
        a, b = tl.split(tl.reshape(pairs, (BLOCK_HEADS, BLOCK_HALF, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK_HEADS, 2 * BLOCK_HALF))
        tl.store(y_ptr + (start + both) * y_stride, turned, mask=mask)
    else:
        mask = moves & (at < half)
        a = tl.load(x_ptr + (start + at) * x_stride, mask=mask, other=0.0).to(cos.dtype)
        b = tl.load(x_ptr + (start + half + at) * x_stride, mask=mask, other=0.0).to(cos.dtype)
        tl.store(y_ptr + (start + at) * y_stride, a * cos - b * sin, mask=mask)
        tl.store(y_ptr + (start + half + at) * y_stride, b * cos + a * sin, mask=mask)
    if COPY and BLOCK_REST:
        rest = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < heads) & (rest < head_dim)
        kept = tl.load(x_ptr + (start + rest) * x_stride, mask=mask)
        tl.store(y_ptr + (start + rest) * y_stride, kept, mask=mask)


def _launch(x: Tensor, y: Tensor, angles: tuple[Tensor, Tensor], heads: HEADS, interleaved: bool, sign: float) -> None:
    """y = x turned, both [seq, batch, fused / tensor]; y is x, or has memory of its own."""
    (cos, sin), (_, rows, head_dim) = (t.expand(x.shape[0], -1, 1, 1, -1).contiguous() for t in angles), heads
    half, count = cos.shape[-1], x.shape[-1] // head_dim
    block = 1 << (half - 1).bit_length()
    some = min(1 << (count - 1).bit_length(), max(1, 1024 // block))
    rest = head_dim - 2 * half
    if x.numel():
        _turn[(x.shape[0] * x.shape[1], -(-count // some))](
            x, y, cos, sin, x.shape[1], count, rows, head_dim, half, sign,
            *x.stride(), *y.stride(), cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0,
            BLOCK_HEADS=some, BLOCK_HALF=block, BLOCK_REST=1 << (rest - 1).bit_length() if rest else 0,
            INTERLEAVED=interleaved, COPY=y is not x, num_warps=max(1, some * block // 256),
        )  # fmt: skip


class _Rotary(torch.autograd.Function):
    """In place of the fused projection, whose own backward does not need it. Backward turns the other way."""

    @staticmethod
    def forward(ctx, fused: Tensor, cos: Tensor, sin: Tensor, heads: HEADS, interleaved: bool, kernel: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how = heads, interleaved, kernel
        ctx.mark_dirty(fused)
        if kernel:
            _launch(fused, fused, (cos, sin), heads, interleaved, 1.0)
        else:
            _rotate_(fused.unflatten(2, heads), cos, sin, interleaved)
        return fused

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (cos, sin), (heads, interleaved, kernel) = ctx.saved_tensors, ctx.how
        if kernel:
            turned = torch.empty_like(grad, memory_format=torch.contiguous_format)
            _launch(grad, turned, (cos, sin), heads, interleaved, -1.0)
        else:
            turned = grad.clone(memory_format=torch.contiguous_format)
            _rotate_(turned.unflatten(2, heads), cos, -sin, interleaved)
        return turned, None, None, None, None, None


def _rotate_(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Turn the pairs of all but the last of the q + 2 rows by the given angles, in place."""
    half = cos.shape[-1]
    turned = heads[..., :-1, : 2 * half]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    x, y = a.to(cos.dtype), b.to(cos.dtype)
    left, right = x * cos - y * sin, y * cos + x * sin
    a.copy_(left)
    b.copy_(right)


def rotary_(
    fused: Tensor, cos: Tensor, sin: Tensor, *, heads: HEADS, interleaved: bool, impl: str = "auto"
) -> Tensor:
    """Turn queries and keys of a fused projection [seq, batch, fused / tensor], in place, by angles of which `cos` and
    `sin` [seq, batch or 1, 1, 1, half] are given in fp32 (fp64 for fp64). `impl` as in dispatch.py."""
    return _Rotary.apply(fused, cos, sin, heads, interleaved, use_triton(fused, impl))
