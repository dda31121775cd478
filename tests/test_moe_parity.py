"""Any layout trains the same mixture of experts as one rank, to the last digits of fp64, and tells the same of it."""

from __future__ import annotations

import functools

import pytest

from tests.training import LLAMA, Outcome, distance, train

LIMITS = {"loss": 1e-11, "norm": 1e-11, "weights": 1e-10, "moments": 1e-10}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
INTERLEAVED = "--num-virtual-stages-per-pipeline-rank 2"

# Models: what makes them, in the flags of either family. The micro-batch is 2 sequences, so a gate call sees 32 tokens.
TOP1 = "--num-experts 4 --topk 1 --moe-loss-coeff 0.01 --expert-interval 1"
TOP2 = "--num-experts 4 --topk 2 --moe-loss-coeff 0.05"
DROPLESS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
PYRAMID = "--num-experts 2 4 8 4 --expert-interval 1 --mlp-type residual --moe-loss-coeff 0.01"
SHARED = (
    f"{LLAMA} --num-experts 8 --moe-router-topk 4 --moe-router-score-function sigmoid --moe-layer-freq ([0]*1+[1]*3) "
    "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate "
    "--moe-aux-loss-coeff 0.001 --moe-router-load-balancing-type seq_aux_loss --moe-ffn-hidden-size 64"
)

LAST = "--num-experts 1 4 --topk 1 --moe-loss-coeff 0.01 --disable-moe-token-dropping"

# What all data ranks have chosen so far counts, so that their number is to be that of the one rank.
SO_FAR = (
    "--num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 0.05"
)

# (tensor, pipeline, data), the model, flags of the layout alone. Global batch 8, micro-batch 2.
LAYOUTS = [
    ((1, 1, 2), TOP1, "--expert-model-parallel-size 2 --zero-stage 0"),
    ((1, 4, 1), TOP1, ""),
    ((1, 2, 2), LAST, "--expert-model-parallel-size 2"),
    ((2, 1, 2), TOP2, "--expert-model-parallel-size 4"),
    ((2, 1, 2), DROPLESS, f"--expert-model-parallel-size 2 --zero-stage 2 {FULL}"),
    ((1, 1, 4), DROPLESS, ""),
    ((1, 1, 4), PYRAMID, "--expert-model-parallel-size 4 --zero-stage 0"),
    ((2, 2, 1), PYRAMID, f"--expert-model-parallel-size 2 --zero-stage 2 {INTERLEAVED}"),
    ((2, 2, 2), PYRAMID, f"--expert-model-parallel-size 4 {FULL}"),
    ((1, 2, 4), SHARED, "--expert-model-parallel-size 2 --pipeline-schedule zb-h1"),
    ((2, 2, 1), SHARED, f"--pipeline-schedule zb-v {FULL}"),
    ((2, 2, 1), SO_FAR, f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {FULL}"),
]


@functools.cache
def one_rank(flags: str) -> Outcome:
    return train(f"--fp64 {flags}")


@pytest.mark.parametrize(
    ("layout", "model", "flags"), LAYOUTS, ids=[f"{a}{b}{c} {n}" for n, ((a, b, c), _, _) in enumerate(LAYOUTS)]
)
def test_any_layout_trains_the_same_experts_as_one_rank(layout: tuple[int, int, int], model: str, flags: str) -> None:
    """C095 C098 C103 C111: losses, norms, weights and moments by global name; balance, load and drops as logged."""
    got, want = train(f"--fp64 {model} {flags}", layout), one_rank(model)
    for name, value in distance(got, want).items():
        assert value <= LIMITS[name], f"{name} differ by {value:.1e}"
    for ours, theirs in zip(got.steps, want.steps, strict=True):
        assert ours["dropped"] == theirs["dropped"] and ours["load"] == theirs["load"]
        for mine, other in zip(ours["experts"], theirs["experts"], strict=True):
            assert (mine.pop("counts"), mine.keys()) == (other["counts"], other.keys() - {"counts"})
            assert mine == pytest.approx({name: value for name, value in other.items() if name != "counts"}, rel=1e-11)
