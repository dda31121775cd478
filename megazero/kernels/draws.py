"""Random numbers that kernels draw anew wherever they are needed: a pure function of (seed, row, column).

Philox4x32 with 7 rounds, the fewest that pass every test of BigCrush (Salmon et al., 2011): four numbers a counter, the
counter being (column // 4, row), the key the 64 bits of the seed. So nothing but a seed is kept for a backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import jit, tl

ROUNDS = 7
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)     # of Philox4x32


def keep_reference(seed: int, rows: int, width: int, probability: float) -> Tensor:
    """bool [rows, width]: which elements a dropout keeps, in plain torch."""
    return (bits_reference(seed, rows, width) >> 8) >= int(torch.tensor(probability * 2**24, dtype=torch.float32))


def bits_reference(seed: int, rows: int, width: int) -> Tensor:
    """int64 [rows, width]: 32 random bits for each element."""
    low = 2**32 - 1
    row, group = torch.meshgrid(torch.arange(rows), torch.arange(-(-width // 4)), indexing="ij")
    counter = [group, row & low, row >> 32, torch.zeros_like(row)]
    key = [seed & low, seed >> 32 & low]
    for _ in range(ROUNDS):
        even, odd = ((counter[2 * i] >> 16, counter[2 * i] & 0xFFFF) for i in (0, 1))
        parts = []
        for (high, small), multiplier in zip((even, odd), MULTIPLIERS, strict=True):
            carry = (small * multiplier >> 16) + high * multiplier      # the product of 64 bits, without its last 16
            parts.append((carry >> 16 & low, (carry << 16 | small * multiplier & 0xFFFF) & low))
        (high_0, low_0), (high_2, low_2) = parts
        counter = [high_2 ^ counter[1] ^ key[0], low_2, high_0 ^ counter[3] ^ key[1], low_0]
        key = [(k + step) & low for k, step in zip(key, KEY_STEPS, strict=True)]
    return torch.stack(counter, dim=-1).flatten(1)[:, :width]


@jit
def keep(seed, row, block, probability, BLOCK: tl.constexpr):
    """bool [BLOCK]: whether a dropout keeps the elements of block number `block` of a row; BLOCK is 4 or more."""
    group = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    none = group * 0
    row = tl.to_tensor(row).to(tl.int64)
    a, b, c, d = tl.philox(seed, group, none + row.to(tl.int32), none + (row >> 32).to(tl.int32), none, 7)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))
    return (bits >> 8) >= (tl.to_tensor(probability) * 16777216.0).to(tl.uint32)
