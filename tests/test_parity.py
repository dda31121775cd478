"""The test of tests: any layout trains the same model as one rank, to the last digits of fp64."""

from __future__ import annotations

import functools

import pytest

from tests.training import LLAMA, Outcome, distance, train

LIMITS = {"loss": 1e-11, "norm": 1e-11, "weights": 1e-10, "moments": 1e-10}
UNTIED = "--untie-embeddings-and-output-weights"
FULL = "--recompute-granularity full --recompute-method"
ZB_H1, ZB_V = "--pipeline-schedule zb-h1", "--pipeline-schedule zb-v"
INTERLEAVED = "--num-virtual-stages-per-pipeline-rank 2"

CHANGES_NOTHING = (
    "--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--pipeline-schedule",
    "--num-virtual-stages-per-pipeline-rank", "--loss-chunk-size",
)

WINDOWS = "--window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable"

# (tensor, pipeline, data), flags. Global batch 8, micro-batch 2: accumulation 4, 2 or 1 at data 1, 2, 4.
LAYOUTS = [
    ((2, 1, 1), "--loss-chunk-size 5"),
    ((4, 1, 1), ""),
    ((1, 2, 1), f"--loss-chunk-size 1 {ZB_H1}"),
    ((1, 3, 1), ""),
    ((1, 4, 1), UNTIED),
    ((1, 1, 2), ""),
    ((1, 1, 4), UNTIED),
    ((2, 2, 1), "--pipeline-schedule gpipe"),
    ((2, 2, 2), ZB_V),
    ((2, 2, 2), f"{UNTIED} --recompute-granularity selective {ZB_H1} --loss-chunk-size 7"),
    ((1, 4, 2), f"{FULL} uniform --recompute-num-layers 1 --loss-chunk-size 32"),
    ((2, 3, 1), f"{FULL} block --recompute-num-layers 1"),
    ((4, 1, 2), f"{FULL} uniform --recompute-num-layers 3"),
    ((2, 1, 2), LLAMA),
    ((4, 2, 1), LLAMA),
    ((2, 1, 1), f"{LLAMA} {WINDOWS} --recompute-granularity selective"),
    ((1, 4, 1), f"{LLAMA} --qk-layernorm --rotary-percent 0.5 --rotary-interleaved {ZB_H1}"),
    ((2, 2, 2), f"{LLAMA} --num-query-groups 2 --qk-layernorm --recompute-granularity selective {INTERLEAVED}"),
    ((2, 2, 1), f"{LLAMA} --label-smoothing 0.1 --squared-relu --add-qkv-bias {ZB_V}".replace("--swiglu ", "")),
    ((2, 2, 1), f"--num-layers 5 --position-embedding-type none --activation gelu --kv-channels 12 {INTERLEAVED}"),
]


@functools.cache
def one_rank(flags: str) -> Outcome:
    """The same model on one rank: the flags without schedule and recomputation, which must change nothing."""
    words = flags.split()
    for name in CHANGES_NOTHING:
        if name in words:
            at = words.index(name)
            words = words[:at] + words[at + 2 :]
    return train(f"--fp64 {' '.join(words)}")


@pytest.mark.parametrize(("layout", "flags"), LAYOUTS, ids=[f"{a}{b}{c} {f}" for (a, b, c), f in LAYOUTS])
def test_any_layout_trains_the_same_model_as_one_rank(layout: tuple[int, int, int], flags: str) -> None:
    """C062 C068 C071 C073 C081 C082: losses, norms, weights, moments; tied or not, recomputed, loss in chunks."""
    got, want = train(f"--fp64 {flags}", layout), one_rank(flags)
    assert min(want.norms) > 0.5, "clipping is to be active"
    for name, value in distance(got, want).items():
        assert value <= LIMITS[name], f"{name} differ by {value:.1e}"
