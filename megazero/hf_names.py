"""Under which names others keep our weights, and how: a table for each family, and the arithmetic behind it.

A line of a table is a parameter of ours with its logical dims, the name or names of theirs, and the rule that leads
from one to the other. Every rule says the same kind of thing: a tensor of theirs is a block of ours, its dims taken in
another order and then reshaped. So both directions, and reading a part only, follow from one table. Another house's
names (Megatron's) would be one more table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from .config import ModelConfig
from .hf_config import GPT2, LLAMA, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, Experts
from .parallel.shard import Box

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One tensor of theirs: block `box` of ours, its dims in `order`, reshaped to `shape`."""

    name: str
    box: Box
    order: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class Row:
    """One parameter of ours, and the tensors of theirs that together hold each of its elements once."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Line:
    """One line of a table. In names {i} stands for the layer and {e} for the expert.

    dims   the logical dims of ours, by name (see `sizes_of`)
    rule   key of RULES
    only   what the model must have for the line to hold (see `has`); "" for always
    """

    ours: str
    dims: str
    rule: str
    theirs: tuple[str, ...]
    only: str = ""


def _part(name: str, start: Shape, size: Shape, order: tuple[int, ...], shape: Shape) -> Part:
    return Part(name, Box(start, size), order, shape)


def _same(shape: Shape, names: tuple[str, ...]) -> Iterator[Part]:
    """[...] as it is."""
    yield _part(names[0], (0,) * len(shape), shape, tuple(range(len(shape))), shape)


def _transposed(shape: Shape, names: tuple[str, ...]) -> Iterator[Part]:
    """[out, in] -> [in, out], as GPT-2's Conv1D keeps it."""
    yield _part(names[0], (0, 0), shape, (1, 0), shape[::-1])


def _qkv(shape: Shape, names: tuple[str, ...]) -> Iterator[Part]:
    """[groups, q + 2, head_dim, ...] -> queries [groups * q * head_dim, ...], keys and values [groups * head_dim, ...]:
    query head g * q + j belongs to group g."""
    groups, fused, size, *rest = shape
    for name, at, count in zip(names, (0, fused - 2, fused - 1), (fused - 2, 1, 1)):
        start, block = (0, at) + (0,) * (len(shape) - 2), (groups, count, size, *rest)
        yield _part(name, start, block, tuple(range(len(shape))), (groups * count * size, *rest))


def _conv1d_qkv(shape: Shape, names: tuple[str, ...]) -> Iterator[Part]:
    """[heads, 3, head_dim, in] -> [in, 3 * heads * head_dim]; the bias [heads, 3, head_dim] -> [3 * heads * head_dim]:
    all queries, then all keys, then all values."""
    order = (3, 1, 0, 2) if len(shape) == 4 else (1, 0, 2)
    yield _part(names[0], (0,) * len(shape), shape, order, (*shape[3:], prod(shape[:3])))


def _stacked(shape: Shape, names: tuple[str, ...]) -> Iterator[Part]:
    """[n, ...] -> n tensors [...]: gate and up."""
    for at, name in enumerate(names):
        yield _part(name, (at,) + (0,) * (len(shape) - 1), (1, *shape[1:]), tuple(range(len(shape))), shape[1:])


def _experts(shape: Shape, names: tuple[str, ...]) -> Iterator[Part]:
    """[experts, ...] -> a tensor [...] for each expert."""
    for expert in range(shape[0]):
        start, block = (expert,) + (0,) * (len(shape) - 1), (1, *shape[1:])
        yield _part(names[0].replace("{e}", str(expert)), start, block, tuple(range(len(shape))), shape[1:])


def _stacked_experts(shape: Shape, names: tuple[str, ...]) -> Iterator[Part]:
    """[experts, n, ...] -> n tensors [...] for each expert."""
    for expert in range(shape[0]):
        for at, name in enumerate(names):
            start, block = (expert, at) + (0,) * (len(shape) - 2), (1, 1, *shape[2:])
            yield _part(name.replace("{e}", str(expert)), start, block, tuple(range(len(shape))), shape[2:])


RULES: dict[str, Callable[[Shape, tuple[str, ...]], Iterator[Part]]] = {
    "same": _same,
    "transposed": _transposed,
    "qkv": _qkv,
    "conv1d qkv": _conv1d_qkv,
    "stacked": _stacked,
    "experts": _experts,
    "stacked experts": _stacked_experts,
}


def _line(ours: str, dims: str, rule: str, theirs: str, only: str = "") -> Line:
    return Line(ours, dims, rule, tuple(theirs.split()), only)


_H = "transformer.h.{i}."
GPT2_TABLE = (
    _line("embedding.word.weight", "vocab hidden", "same", "transformer.wte.weight"),
    _line("embedding.position", "positions hidden", "same", "transformer.wpe.weight"),
    _line("layers.{i}.attention_norm.weight", "hidden", "same", _H + "ln_1.weight"),
    _line("layers.{i}.attention_norm.bias", "hidden", "same", _H + "ln_1.bias"),
    _line("layers.{i}.attention.qkv.weight", "groups q+2 head_dim hidden", "conv1d qkv", _H + "attn.c_attn.weight"),
    _line("layers.{i}.attention.qkv.bias", "groups q+2 head_dim", "conv1d qkv", _H + "attn.c_attn.bias"),
    _line("layers.{i}.attention.out.weight", "hidden heads*head_dim", "transposed", _H + "attn.c_proj.weight"),
    _line("layers.{i}.attention.out.bias", "hidden", "same", _H + "attn.c_proj.bias"),
    _line("layers.{i}.ffn_norm.weight", "hidden", "same", _H + "ln_2.weight"),
    _line("layers.{i}.ffn_norm.bias", "hidden", "same", _H + "ln_2.bias"),
    _line("layers.{i}.ffn.up.weight", "ffn hidden", "transposed", _H + "mlp.c_fc.weight"),
    _line("layers.{i}.ffn.up.bias", "ffn", "same", _H + "mlp.c_fc.bias"),
    _line("layers.{i}.ffn.down.weight", "hidden ffn", "transposed", _H + "mlp.c_proj.weight"),
    _line("layers.{i}.ffn.down.bias", "hidden", "same", _H + "mlp.c_proj.bias"),
    _line("final_norm.norm.weight", "hidden", "same", "transformer.ln_f.weight"),
    _line("final_norm.norm.bias", "hidden", "same", "transformer.ln_f.bias"),
    _line("head.weight", "vocab hidden", "same", "lm_head.weight", "untied head"),
)

_L = "model.layers.{i}."
_QKV = "{0}q_proj.{1} {0}k_proj.{1} {0}v_proj.{1}"
_ATTENTION_LINES = (
    _line("embedding.word.weight", "vocab hidden", "same", "model.embed_tokens.weight"),
    _line("layers.{i}.attention_norm.weight", "hidden", "same", _L + "input_layernorm.weight"),
    _line("layers.{i}.attention.qkv.weight", "groups q+2 head_dim hidden", "qkv",
          _QKV.format(_L + "self_attn.", "weight")),
    _line("layers.{i}.attention.qkv.bias", "groups q+2 head_dim", "qkv", _QKV.format(_L + "self_attn.", "bias"),
          "qkv bias"),
    _line("layers.{i}.attention.out.weight", "hidden heads*head_dim", "same", _L + "self_attn.o_proj.weight"),
    _line("layers.{i}.attention.out.bias", "hidden", "same", _L + "self_attn.o_proj.bias", "bias"),
    _line("layers.{i}.attention.q_norm.weight", "head_dim", "same", _L + "self_attn.q_norm.weight", "q/k norm"),
    _line("layers.{i}.attention.k_norm.weight", "head_dim", "same", _L + "self_attn.k_norm.weight", "q/k norm"),
    _line("layers.{i}.ffn_norm.weight", "hidden", "same", _L + "post_attention_layernorm.weight"),
    _line("final_norm.norm.weight", "hidden", "same", "model.norm.weight"),
    _line("head.weight", "vocab hidden", "same", "lm_head.weight", "untied head"),
)
LLAMA_TABLE = (
    *_ATTENTION_LINES,
    _line("layers.{i}.ffn.up.weight", "2 ffn hidden", "stacked",
          _L + "mlp.gate_proj.weight " + _L + "mlp.up_proj.weight", "dense"),
    _line("layers.{i}.ffn.up.bias", "2 ffn", "stacked",
          _L + "mlp.gate_proj.bias " + _L + "mlp.up_proj.bias", "dense bias"),
    _line("layers.{i}.ffn.down.weight", "hidden ffn", "same", _L + "mlp.down_proj.weight", "dense"),
    _line("layers.{i}.ffn.down.bias", "hidden", "same", _L + "mlp.down_proj.bias", "dense bias"),
)
QWEN3_MOE_TABLE = (
    *LLAMA_TABLE,
    _line("layers.{i}.ffn.router.weight", "experts hidden", "same", _L + "mlp.gate.weight", "experts"),
    _line("layers.{i}.ffn.experts.up", "experts 2 expert_ffn hidden", "stacked experts",
          _L + "mlp.experts.{e}.gate_proj.weight " + _L + "mlp.experts.{e}.up_proj.weight", "experts"),
    _line("layers.{i}.ffn.experts.down", "experts hidden expert_ffn", "experts",
          _L + "mlp.experts.{e}.down_proj.weight", "experts"),
)
_SHARED = _L + "mlp.shared_expert."
QWEN2_MOE_TABLE = (
    *QWEN3_MOE_TABLE,
    _line("layers.{i}.ffn.shared.up.weight", "2 shared_ffn hidden", "stacked",
          _SHARED + "gate_proj.weight " + _SHARED + "up_proj.weight", "experts"),
    _line("layers.{i}.ffn.shared.down.weight", "hidden shared_ffn", "same", _SHARED + "down_proj.weight", "experts"),
    _line("layers.{i}.ffn.shared_gate.weight", "1 hidden", "same", _L + "mlp.shared_expert_gate.weight", "experts"),
)
_MOE = _L + "block_sparse_moe."
MIXTRAL_TABLE = (
    *_ATTENTION_LINES,
    _line("layers.{i}.ffn.router.weight", "experts hidden", "same", _MOE + "gate.weight"),
    _line("layers.{i}.ffn.experts.up", "experts 2 expert_ffn hidden", "stacked experts",
          _MOE + "experts.{e}.w1.weight " + _MOE + "experts.{e}.w3.weight"),
    _line("layers.{i}.ffn.experts.down", "experts hidden expert_ffn", "experts", _MOE + "experts.{e}.w2.weight"),
)
TABLES: dict[str, tuple[Line, ...]] = {
    GPT2: GPT2_TABLE, LLAMA: LLAMA_TABLE, QWEN2: LLAMA_TABLE, QWEN3: LLAMA_TABLE, MIXTRAL: MIXTRAL_TABLE,
    QWEN2_MOE: QWEN2_MOE_TABLE, QWEN3_MOE: QWEN3_MOE_TABLE,
}  # fmt: skip


def sizes_of(model: ModelConfig, vocab: int, experts: Experts | None) -> dict[str, int]:
    """The size of each logical dim."""
    sizes = {
        "vocab": vocab, "positions": model.positions, "hidden": model.hidden_size, "ffn": model.ffn, "1": 1, "2": 2,
        "groups": model.query_groups, "q+2": model.queries_per_group + 2, "head_dim": model.head_dim,
        "heads*head_dim": model.num_attention_heads * model.head_dim,
    }
    if experts is None:
        return sizes
    sizes |= {"experts": experts.count, "expert_ffn": experts.ffn}
    return sizes if experts.shared_ffn is None else sizes | {"shared_ffn": experts.shared_ffn}


def has(model: ModelConfig, experts: Experts | None, layer: int) -> dict[str, bool]:
    """What a layer of a model has, for the conditions of a table."""
    sparse = experts is not None and layer in experts.layers
    return {
        "": True, "untied head": not model.tied, "bias": model.bias, "qkv bias": model.qkv_bias,
        "q/k norm": model.qk_layernorm, "dense": not sparse, "dense bias": model.bias and not sparse,
        "experts": sparse,
    }


def rows_of(family: str, model: ModelConfig, vocab: int, experts: Experts | None = None) -> list[Row]:
    """Every parameter of a model with its tensors of that family, bottom up."""
    sizes = sizes_of(model, vocab, experts)
    table = TABLES[family]
    first = next(at for at, line in enumerate(table) if "{i}" in line.ours)
    lines = [(line, 0) for line in table[:first]]
    lines += [(line, i) for i in range(model.num_layers) for line in table if "{i}" in line.ours]
    lines += [(line, 0) for line in table[first:] if "{i}" not in line.ours]
    rows = []
    for line, layer in lines:
        if has(model, experts, layer)[line.only]:
            shape = tuple(sizes[dim] for dim in line.dims.split())
            theirs = tuple(name.replace("{i}", str(layer)) for name in line.theirs)
            rows.append(Row(line.ours.replace("{i}", str(layer)), shape, tuple(RULES[line.rule](shape, theirs))))
    return rows
