"""Causal self-attention with grouped queries, rotary positions, and document masks.

Heads are cut over tensor. The core (attention_core.py) is torch's scaled_dot_product_attention, behind which flash
attention stands wherever the device has it, unless another one is asked for.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_core import Rule, attention_core
from .config import ModelConfig
from .data.batch import MicroBatch
from .kernels.dispatch import Kernels
from .kernels.rotary import rotary_
from .parallel.groups import Mesh
from .parallel.layers import ColumnParallelLinear, Norm, RowParallelLinear
from .parallel.params import Initial, declare
from .parallel.random import draw_seed, recompute, seed_generator
from .parallel.shard import ShardSpec


class Attention(nn.Module):
    """[seq / tensor, batch, hidden] -> the same. Fused qkv: for each query group its queries, one key, one value.

    With `adds_bias` false the last bias, `out.bias`, is left to the caller, who adds it together with the residual.
    """

    def __init__(
        self, model: ModelConfig, mesh: Mesh, layer: int, *, dtype: torch.dtype, kernels: Kernels = Kernels(),
        selective: bool = False, adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.layer, self.group, self.selective = layer, mesh.tensor, selective
        self.head_dim, self.queries = model.head_dim, model.queries_per_group
        self.dropout, self.kernels, self.products = model.attention_dropout, kernels, mesh.weights.products
        self.divisor = layer + 1.0 if model.apply_query_key_layer_scaling else None
        self.window, self.softmax_type = model.windows[layer], model.softmax_type
        self.rotary = Rotary(model, kernels.impl("rotary")) if model.position_embedding_type == "rope" else None
        fused = (model.query_groups, self.queries + 2, self.head_dim)
        initial = Initial(model.init_method_std)
        self.qkv = ColumnParallelLinear(
            model.hidden_size, fused, mesh, cut=0, initial=initial, bias=model.qkv_bias, dtype=dtype
        )
        heads = model.num_attention_heads * self.head_dim
        scaled = Initial(model.init_method_std / math.sqrt(2 * model.num_layers))
        self.out = RowParallelLinear(
            heads, model.hidden_size, mesh, initial=scaled, bias=model.bias, dtype=dtype, adds_bias=adds_bias
        )
        spec = ShardSpec((model.num_attention_heads,), ("tensor",))
        learned = model.softmax_type == "learnable"
        self.sink = declare(self, "sink", spec, mesh.topology, initial=initial, dtype=dtype) if learned else None
        self.q_norm = self.k_norm = None
        if model.qk_layernorm:
            norm = partial(
                Norm, self.head_dim, mesh, kind=model.normalization, epsilon=model.norm_epsilon, dtype=dtype,
                impl=kernels.norm(model.normalization),
            )
            self.q_norm, self.k_norm = norm(), norm()

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        fused = self.qkv(x)                                                    # [seq, batch, fused / tensor]
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = self._heads(fused).split((self.queries, 1, 1), dim=3)
            fused = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=3).flatten(2)
        if self.rotary is not None:
            fused = self.rotary(fused, batch.positions)
        core = partial(self._core, batch=batch)
        y = recompute(core, fused) if self.selective and torch.is_grad_enabled() else core(fused)
        return self.out(y)

    def _heads(self, fused: Tensor) -> Tensor:
        """[seq, batch, fused / tensor] -> [seq, batch, groups / tensor, q + 2, head_dim]."""
        return fused.unflatten(2, (-1, self.queries + 2, self.head_dim))

    def _core(self, fused: Tensor, batch: MicroBatch) -> Tensor:
        """[seq, batch, fused / tensor] -> [seq, batch, heads * head_dim / tensor]."""
        parts = self._heads(fused).split((self.queries, 1, 1), dim=3)
        if self.queries > 1:        # grouped queries must be copied: copy all, so that the fused projection can go
            parts = tuple(part.contiguous() for part in parts)
        q, k, v = (part.flatten(2, 3).permute(1, 2, 0, 3) for part in parts)   # [batch, heads, seq, head_dim]
        probability = self.dropout if batch.draw is not None else 0.0
        if batch.draw is not None and probability:
            seed_generator(q.device, draw_seed(batch.draw, self.layer, "attention", self.group.index))
        mask = document_mask(batch.documents, q.shape[2])
        sink = q.new_zeros(q.shape[1]) if self.softmax_type == "off-by-one" else self.sink
        rule = Rule(self.window, sink, self.divisor)
        core = partial(attention_core, mask=mask, dropout=probability, kernels=self.kernels, rule=rule)
        y = self.products.call(core, q, k, v)
        return y.transpose(1, 2).flatten(2).transpose(0, 1)


def document_mask(documents: Tensor | None, seq: int) -> Tensor | None:
    """documents [seq, batch] -> bool [batch, 1, seq, seq], true where a query may look; None: plain causal.

    Positions past the documents' end (padding of the sequence) form a document of their own.
    """
    if documents is None:
        return None
    ids = F.pad(documents.T, (0, seq - documents.shape[0]), value=-1)          # [batch, seq]
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    causal = torch.ones(seq, seq, dtype=torch.bool, device=ids.device).tril()
    return (same & causal).unsqueeze(1)


class Rotary(nn.Module):
    """Rotary positions (Su et al., 2021) on the first `rotary_percent` of a head's dims, halves or interleaved."""

    def __init__(self, model: ModelConfig, impl: str = "auto") -> None:
        super().__init__()
        self.impl = impl
        self.heads = (-1, model.queries_per_group + 2, model.head_dim)
        self.interleaved = model.rotary_interleaved
        self.frequencies = rotary_frequencies(model).to(torch.get_default_device())     # float64 [rotary_dim / 2]

    def forward(self, fused: Tensor, positions: Tensor | None) -> Tensor:
        """Turn queries and keys of a fused projection [seq, batch, fused / tensor], in place; values stay."""
        seq = fused.shape[0]
        if positions is None:
            at = torch.arange(seq, device=fused.device).unsqueeze(1)           # [seq, 1]
        else:
            at = F.pad(positions, (0, 0, 0, seq - positions.shape[0]))         # [seq, batch]
        angles = at.double().unsqueeze(-1) * self.frequencies.to(fused.device)
        exact = torch.promote_types(fused.dtype, torch.float32)
        cos, sin = (f(angles).to(exact)[:, :, None, None, :] for f in (torch.cos, torch.sin))
        return rotary_(fused, cos, sin, heads=self.heads, interleaved=self.interleaved, impl=self.impl)


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """Angle per position of each pair of dims, float64 [rotary_dim / 2] on the CPU; with Llama 3's scaling if asked.

    Wavelengths above original / low factor turn `rope_scaling_factor` times slower, those below original / high
    factor stay, and between the two the frequencies are blended linearly in original / wavelength.
    """
    base = torch.tensor(float(model.rotary_base), dtype=torch.float64, device="cpu")
    pairs = torch.arange(0, model.rotary_dim, 2, dtype=torch.float64, device="cpu")     # on meta this loads a compiler
    frequencies = base ** (-pairs / model.rotary_dim)
    if not model.use_rope_scaling:
        return frequencies
    turns = model.rope_original_max_positions * frequencies / (2 * math.pi)    # original length / wavelength
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / model.rope_scaling_factor)
