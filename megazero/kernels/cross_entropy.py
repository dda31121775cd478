"""Cross entropy of rows of logits whose vocabulary may be cut: what a rank computes of it alone.

Forward, over this rank's real columns i:   m = max x_i,  Z = sum exp(x_i - m),  x_target or 0,  sum x_i
Backward, with log n = log sum exp(x_i) over the whole vocabulary V and the share s of smoothing:
    dx_i = (exp(x_i - log n) - (1 - s) [i = target] - s / V) dy;  0 in columns that are padding

How ranks put their statistics together, and the autograd function around both, is parallel/loss.py's business.
Statistics in fp32 (fp64 for fp64). Forward and backward read the logits once; the backward may write in their place.
The kernels make no copy in fp32, torch one of some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .dispatch import jit, tl, use_triton
from .rows import statistics_dtype

BLOCK = 4096            # elements that a program works on at once
CHUNK_ELEMENTS = 1 << 22          # of an fp32 temporary of torch: 16 MiB
CACHED_ELEMENTS = 1 << 17         # the same on a CPU: 512 KiB, which stay in its cache from one operation to the next


def row_chunks(logits: Tensor) -> list[slice]:
    """Ranges of rows whose fp32 copy stays small."""
    most = CHUNK_ELEMENTS if logits.is_cuda else CACHED_ELEMENTS
    rows, step = logits.shape[0], max(1, most // logits.shape[1])
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def statistics_reference(logits: Tensor, labels: Tensor, *, first: int, real: int) -> Tensor:
    """`row_statistics` in plain formulas."""
    x = logits[:, :real].to(statistics_dtype(logits.dtype))
    here = (labels >= first) & (labels < first + real)
    out = x.new_zeros(4, len(x))
    out[0] = -torch.inf
    if real:
        out[0] = x.amax(1)
        out[1] = (x - out[0].unsqueeze(1)).exp().sum(1)
        out[2] = torch.where(here, x.gather(1, (labels - first).clamp(0, real - 1).unsqueeze(1)).squeeze(1), 0.0)
        out[3] = x.sum(1)
    return out


def gradient_reference(
    logits: Tensor, labels: Tensor, log_normalizer: Tensor, dy: Tensor, *, first: int, real: int, share: float,
    vocab: int,
) -> Tensor:
    """`logits_gradient` in plain formulas."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    x = logits.to(log_normalizer.dtype)
    target = (columns + first == labels.unsqueeze(1)).to(x.dtype)
    g = ((x - log_normalizer.unsqueeze(1)).exp() - (1 - share) * target - share / vocab) * dy.unsqueeze(1)
    return g.masked_fill(columns >= real, 0.0).to(logits.dtype)


@jit
def _forward(
    x_ptr, label_ptr, top_ptr, total_ptr, target_ptr, sum_ptr, first, real, columns, x_row_stride,
    BLOCK: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """All statistics of one row in one pass. Each lane keeps a maximum and a sum of its own; of the two exponentials
    that moving a sum to a new maximum takes, one is always 1, so one is computed."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride
    top = tl.full((BLOCK,), -3.0e38, STATISTICS)            # below any logit, and -inf - top is no NaN
    total = tl.zeros((BLOCK,), STATISTICS)
    sum_x = tl.zeros((BLOCK,), STATISTICS)
    for start in range(0, real, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < columns, other=0.0).to(STATISTICS)  # `real` would forbid vectors
        x = tl.where(at < real, x, -float("inf"))
        small = tl.exp(-tl.abs(x - top))
        total = tl.where(x > top, total * small + 1.0, total + small)
        top = tl.maximum(top, x)
        sum_x += tl.where(at < real, x, 0.0)
    highest = tl.max(top, 0)
    tl.store(top_ptr + row, tl.where(highest < -2.9e38, -float("inf"), highest))
    tl.store(total_ptr + row, tl.sum(total * tl.exp(top - highest), 0))
    tl.store(sum_ptr + row, tl.sum(sum_x, 0))
    target = tl.load(label_ptr + row) - first
    here = (target >= 0) & (target < real)
    tl.store(target_ptr + row, tl.load(x_ptr + target, mask=here, other=0.0).to(STATISTICS))


@jit
def _backward(
    x_ptr, dx_ptr, label_ptr, log_n_ptr, dy_ptr, first, real, columns, hit: tl.float64, even: tl.float64,
    x_row_stride, dx_row_stride, BLOCK: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """One block of one row; x and dx may be the same memory."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row_stride + at, mask=at < columns, other=0.0).to(STATISTICS)
    x = tl.where(at < real, x, -float("inf"))
    g = tl.exp(x - tl.load(log_n_ptr + row)) - tl.full((BLOCK,), even, STATISTICS)
    g -= tl.where(at == tl.load(label_ptr + row) - first, tl.full((BLOCK,), hit, STATISTICS), 0.0)
    g = tl.where(at < real, g * tl.load(dy_ptr + row), 0.0)
    tl.store(dx_ptr + row * dx_row_stride + at, g, mask=at < columns)


def _options(logits: Tensor) -> dict:
    """Compile-time arguments."""
    block = min(BLOCK, 1 << max(0, logits.shape[1] - 1).bit_length())
    return {
        "BLOCK": block,
        "STATISTICS": tl.float64 if logits.dtype == torch.float64 else tl.float32,
        "num_warps": min(8, max(1, block // 512)),
    }


def _rows(logits: Tensor) -> Tensor:
    """The same with columns that lie side by side."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def row_statistics(
    logits: Tensor, labels: Tensor, *, first: int, real: int, sums: bool = True, impl: str = "auto"
) -> Tensor:
    """logits [rows, columns], labels [rows] of the whole vocabulary -> [4, rows], fp32 (fp64 for fp64): the largest
    logit, the sum of exponentials below it, the target's logit (0 where another rank has it), the sum of logits.

    Column 0 is entry `first` of the vocabulary; from column `real` on all is padding. The last of the four may be
    anything unless it is asked for by `sums`. `impl` as in dispatch.py.
    """
    out = torch.empty(4, len(logits), dtype=statistics_dtype(logits.dtype), device=logits.device)
    if not use_triton(logits, impl):
        return _torch_statistics_(out, logits, labels, first, real, sums)
    logits = _rows(logits)
    if len(logits):
        _forward[(len(logits),)](
            logits, labels.contiguous(), *out.unbind(), first, real, logits.shape[1], logits.stride(0),
            **_options(logits),
        )  # fmt: skip
    return out


def _torch_statistics_(out: Tensor, logits: Tensor, labels: Tensor, first: int, real: int, sums: bool) -> Tensor:
    """`row_statistics` by torch, into `out` [4, rows]."""
    out.zero_()
    top, total, target, sum_x = out.unbind()
    top.fill_(-torch.inf)
    for rows, here, local in _labelled(logits, labels, first, real):
        x = logits[rows, :real].to(out.dtype)
        torch.amax(x, 1, out=top[rows])
        target[rows] = x.gather(1, local).squeeze(1).masked_fill_(~here, 0.0)
        if sums:
            torch.sum(x, 1, out=sum_x[rows])
        total[rows] = (x - top[rows].unsqueeze(1)).exp_().sum(1)
    return out


def _labelled(logits: Tensor, labels: Tensor, first: int, real: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each chunk of rows: where it lies, which of its labels are real columns here, and these columns [rows, 1], 0
    for the others. None where a rank has padding alone."""
    here = (labels >= first) & (labels < first + real)
    local = (labels - first).masked_fill(~here, 0).unsqueeze(1)
    for rows in row_chunks(logits) if real else []:
        yield rows, here[rows], local[rows]


def logits_gradient(
    logits: Tensor, labels: Tensor, log_normalizer: Tensor, dy: Tensor, *, first: int, real: int, share: float,
    vocab: int, in_place: bool = False, impl: str = "auto",
) -> Tensor:
    """logits [rows, columns], labels, log n and dy [rows] -> dlogits [rows, columns], in the memory of the logits if
    `in_place` (and they must have been given up). `impl` as in dispatch.py."""
    by_triton = use_triton(logits, impl)
    logits = _rows(logits) if by_triton else logits
    out = logits if in_place else torch.empty_like(logits, memory_format=torch.contiguous_format)
    if not by_triton:
        return _torch_gradient_(out, logits, labels, (log_normalizer, dy), (first, real), (share, vocab))
    options, columns = _options(logits), logits.shape[1]
    if logits.numel():
        _backward[(len(logits), -(-columns // options["BLOCK"]))](
            logits, out, labels.contiguous(), log_normalizer.contiguous(), dy.contiguous(), first, real, columns,
            1.0 - share, share / vocab, logits.stride(0), out.stride(0), **options,
        )  # fmt: skip
    return out


def _torch_gradient_(
    out: Tensor, logits: Tensor, labels: Tensor, of_rows: tuple[Tensor, Tensor], place: tuple[int, int],
    smoothing: tuple[float, int],
) -> Tensor:
    """`logits_gradient` by torch, into `out`, which may be the logits."""
    (log_normalizer, dy), (first, real), (share, vocab) = of_rows, place, smoothing
    out[:, real:] = 0.0
    wide = logits.dtype != log_normalizer.dtype
    for rows, here, local in _labelled(logits, labels, first, real):
        to = out[rows, :real]
        x = torch.empty_like(to, dtype=log_normalizer.dtype) if wide else to      # else in its own place
        torch.sub(logits[rows, :real], log_normalizer[rows].unsqueeze(1), out=x).exp_()
        if share:
            x -= share / vocab
        x.scatter_add_(1, local, (-(1 - share) * here.to(x.dtype)).unsqueeze(1))
        x *= dy[rows].unsqueeze(1)
        if wide:
            to.copy_(x)
    return out
