"""Whose defaults count: Megatron-LM's, Megatron-DeepSpeed's or megazero's own, by --defaults or by what is typed.

The families differ by silence in few places: where they do, a line that is written in the manner of one of them
should mean what it means there. Whose experts are meant is told by their own flags, in config_moe.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

NAMES = {"megatron": "Megatron-LM", "megatron-deepspeed": "Megatron-DeepSpeed", "megazero": "megazero"}

# Flags that one family knows and the other does not. Where the name is megazero's own too, it tells nothing; where it
# is about experts, it tells whose experts are meant and nothing else.
EVIDENCE = {
    "megatron": """use-mcore-models cross-entropy-loss-fusion cross-entropy-fusion-impl no-rope-fusion tp-comm-overlap
        no-create-attention-mask-in-dataloader no-mmap-bin-files calculate-per-token-loss logging-level manual-gc
        manual-gc-interval no-check-for-nan-in-loss-and-grad ckpt-format dist-ckpt-strictness auto-detect-ckpt-format
        use-persistent-ckpt-worker ckpt-fully-parallel-save ckpt-fully-parallel-load no-ckpt-fully-parallel-save
        use-megatron-fsdp init-model-with-meta-device""",
    "megatron-deepspeed": """deepspeed deepspeed-config no-pipeline-parallel deepspeed-activation-checkpointing
        ds-sequence-parallel-size layernorm-epsilon num-key-value-heads rotary-position-embeddings-theta
        use-flash-attn-v2 use-flash-attn-triton no-query-key-layer-scaling enable-zbh1-pipeline
        enable-zbh1-exact-semantics partition-activations remote-device universal-checkpoint""",
}

# What a family's silence means, where that is not what megazero's own defaults say.
DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "megatron-deepspeed": {
        "eval_interval": 1000, "apply_query_key_layer_scaling": True, "moe_family": "megatron-deepspeed",
    },
    "megazero": {},
}  # fmt: skip


def told_by(names: Collection[str]) -> dict[str, list[str]]:
    """Family -> those of its own flags that are among `names`, where there are any."""
    found = {family: [n for n in dict.fromkeys(names) if n in words.split()] for family, words in EVIDENCE.items()}
    return {family: own for family, own in found.items() if own}


def defaults(family: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value that a family's silence means beside the fields that are given."""
    found = dict(DEFAULTS[family])
    if given.get("attention_backend") in ("sdpa", "flash", "fused"):    # has no such scaling, there as here
        found.pop("apply_query_key_layer_scaling", None)
    if family != "megazero" and given.get("disable_bias_linear"):      # no bias, no fused approximation of the GELU
        found["activation"] = "gelu"
    return {name: value for name, value in found.items() if name not in given}


def clipping_by_default(given: Mapping[str, Any], norm: float) -> list[str]:
    """What is said where a file of DeepSpeed's leaves it open whether gradients are clipped, so that they are, at
    `norm`."""
    if given.get("deepspeed_config") is None or "clip_grad" in given:
        return []
    return [
        f"neither gradient_clipping nor --clip-grad is given: the gradient's norm is clipped at {norm}, as DeepSpeed "
        "does since June 2026 and its documentation always said; before, it did not clip, which is "
        '"gradient_clipping": 0'
    ]
