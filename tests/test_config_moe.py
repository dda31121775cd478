"""Experts on the command line: both families' meanings, what follows from silence, and what is refused."""

from __future__ import annotations

import pytest

from megazero.config import check_world
from megazero.config_moe import Capacity, MoEConfig, layer_pattern
from megazero.flags import UsageError, parse

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --vocab-size 97 "
    "--lr 1e-3 --train-iters 10 --mock-data"
)


def parsed(words):
    return parse(f"{BASE} {words}".split())[0]


def fault(words):
    with pytest.raises(UsageError) as wrong:
        parsed(words)
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


def test_dense_is_none_of_no_experts_and_one():
    for words in ("", "--num-experts 0", "--num-experts 1", "--num-experts 1 1 --expert-interval 2"):
        config = parsed(words)
        assert not config.moe.any and config.experts == (1, 1, 1, 1)


def test_the_families_place_experts_at_opposite_layers():
    assert parsed("--num-experts 8").experts == (8, 8, 8, 8)
    assert parsed("--num-experts 8 --moe-layer-freq 2").experts == (8, 1, 8, 1)
    assert parsed("--num-experts 8 --expert-interval 2").experts == (1, 8, 1, 8)
    assert parsed("--num-experts 8 --topk 1").experts == (1, 8, 1, 8)
    assert parsed("--num-experts 8 --expert-interval 3").experts == (1, 1, 8, 1)
    assert parsed("--num-experts 8 --moe-layer-freq [0]*1+[1]*3").experts == (1, 8, 8, 8)
    assert parsed("--num-experts 2 8 --moe-layer-freq ([0]+[1])*2").experts == (1, 2, 1, 8)


def test_c114_a_list_has_as_many_numbers_as_there_are_moe_layers():
    message = fault("--num-experts 2 4 8 --expert-interval 2")
    assert "--num-experts 2 4 8 has 3 numbers, and 2 of 4 layers have experts (--expert-interval)" in message
    assert "give one number, or 2" in message
    assert parsed("--num-experts 2 4").experts == (1, 2, 1, 4)
    assert parsed("--num-experts 4 --expert-interval 2").experts == (1, 4, 1, 4)
    assert parsed("--num-experts 1 4").experts == (1, 1, 1, 4)
    assert "none of 4 layers has experts" in fault("--num-experts 4 --expert-interval 5")


@pytest.mark.parametrize("text", ["0", "-1", "x", "[0,2,1,1]", "[0]*", "[[1]]", "2**9", "True", "", "[1]*9999999999"])
def test_a_pattern_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="--moe-layer-freq .*: must be a number of at least 1, or a list"):
        layer_pattern(text, 4)


def test_a_pattern_of_another_length_is_refused():
    message = fault("--num-experts 4 --moe-layer-freq [0,1]")
    assert message == "--moe-layer-freq [0,1] has 2 entries, and --num-layers is 4"


def test_each_family_has_its_own_silence():
    lm, own = parsed("--num-experts 8").moe, parsed("--num-experts 8 --moe-expert-parallel-size 2").moe
    assert (lm.topk, lm.balancing) == (2, {"aux_loss": 0.0})
    assert (own.topk, own.balancing) == (1, {"deepspeed": 0.1})
    for training in (True, False):
        assert lm.capacity(training=training).factor is None
    assert own.capacity(training=True) == Capacity(1.0, 4, "random")
    assert own.capacity(training=False) == Capacity(1.0, 4, "position")
    assert parsed("--num-experts 8 --topk 1 --moe-family megatron-lm --moe-router-pre-softmax").moe.family == lm.family
    for words in (
        "--mlp-type residual", "--expert-interval 1", "--moe-loss-coeff 0.01", "--moe-min-capacity 0",
        "--moe-train-capacity-factor 2", "--moe-eval-capacity-factor 2", "--disable-moe-token-dropping",
        "--disable-moe-top2-2nd-expert-sampling", "--num-experts 4 8", "--moe-noisy-gate-policy RSample",
    ):  # fmt: skip
        assert parsed(f"--num-experts 8 {words}").moe.deepspeed, words


def test_capacities_by_both_families_flags():
    def capacities(words):
        moe = parsed(f"--num-experts 8 {words}").moe
        return moe.capacity(training=True), moe.capacity(training=False)

    assert capacities("--moe-expert-capacity-factor 1.5") == (Capacity(1.5, 0, "probs"),) * 2
    assert capacities("--moe-expert-capacity-factor 1.5 --moe-token-drop-policy position")[0].order == "position"
    assert capacities("--moe-train-capacity-factor 2 --moe-eval-capacity-factor 3 --moe-min-capacity 1 --topk 2") == (
        Capacity(2.0, 1, "choice"), Capacity(3.0, 1, "choice"),
    )  # fmt: skip
    assert [c.factor for c in capacities("--disable-moe-token-dropping")] == [None, None]
    assert [c.factor for c in capacities("--topk 1 --disable-moe-token-dropping-in-eval")] == [1.0, None]
    assert capacities("--topk 1 --no-moe-use-rts")[0].order == "position"
    assert capacities("--topk 1 --moe-token-drop-policy probs")[0].order == "probs"
    assert capacities("--topk 3")[0].order == "probs"
    assert capacities("--topk 3 --moe-token-drop-policy position")[0].order == "position"


def test_several_kinds_of_balancing_have_a_coefficient_each():
    kinds = "--num-experts 8 --moe-router-load-balancing-type aux_loss seq_aux_loss"
    assert parsed(f"{kinds} --moe-aux-loss-coeff 0.5 0.25").moe.balancing == {"aux_loss": 0.5, "seq_aux_loss": 0.25}
    assert "--moe-aux-loss-coeff has 1 numbers, and --moe-router-load-balancing-type 2 kinds" in fault(
        f"{kinds} --moe-aux-loss-coeff 1"
    )
    assert parsed("--num-experts 8 --moe-loss-coeff 0.01").moe.balancing == {"deepspeed": 0.01}
    assert parsed("--num-experts 8 --moe-router-load-balancing-type none --topk 1").moe.balancing == {"none": 0.0}


def test_jitter_has_two_spellings():
    assert parsed("--moe-input-jitter-eps 0.25").moe.jitter == 0.25
    assert parsed("--moe-noisy-gate-policy jitter").moe.jitter == 0.01
    assert parsed("").moe.jitter == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-experts 2 --topk 3", "--topk 3 is above the 2 experts of a layer"),
        ("--num-experts 4 --moe-router-topk 1", "--moe-router-topk 1 with --moe-router-score-function softmax needs"),
        ("--num-experts 4 --topk 2 --moe-router-pre-softmax", "contradict each other"),
        ("--num-experts 4 --topk 2 --moe-noisy-gate-policy RSample", "RSample samples one choice"),
        ("--num-experts 4 --moe-shared-expert-gate", "needs --moe-shared-expert-intermediate-size"),
        ("--num-experts 4 --moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        ("--moe-layer-freq 2 --expert-interval 2", "give one of them, not both"),
        ("--moe-expert-capacity-factor 1 --moe-train-capacity-factor 1", "give one of them, not both"),
        ("--moe-expert-capacity-factor 1 --disable-moe-token-dropping", "give one of them, not both"),
        ("--moe-router-load-balancing-type sinkhorn aux_loss", "sinkhorn stands alone"),
        ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1", "has no loss for --moe-aux-loss-coeff"),
        ("--moe-router-load-balancing-type sinkhorn --topk 1", "goes without dropping tokens"),
        ("--moe-router-load-balancing-type sinkhorn --moe-router-enable-expert-bias "
         "--moe-router-score-function sigmoid", "neither an expert bias nor groups"),
        ("--moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 1 2", "names a kind twice"),
        ("--moe-router-load-balancing-type x", "must be one of aux_loss, deepspeed, seq_aux_loss"),
        ("--moe-router-num-groups 2", "--moe-router-num-groups and --moe-router-group-topk go together"),
        ("--num-experts 9 --moe-router-num-groups 2 --moe-router-group-topk 1", "--num-experts 9 is not divisible by"),
        ("--num-experts 8 --moe-router-num-groups 2 --moe-router-group-topk 4", "4 is above --moe-router-num-groups 2"),
        ("--num-experts 8 --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2", "is not divisible"),
        ("--num-experts 8 --moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2",
         "takes 3 experts of each of --moe-router-group-topk 2 groups, and a group has 2"),
        ("--num-experts 3 --moe-expert-parallel-size 2 --expert-interval 1",
         "--moe-expert-parallel-size 2 has no common divisor with the 3 experts of layer 0"),
        ("--num-experts 4 --moe-expert-parallel-size 3", "no common divisor with the 4 experts of layer 1"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 needs --num-experts above 1"),
        ("--tensor-model-parallel-size 2 --num-experts 2 --moe-ffn-hidden-size 33", "--moe-ffn-hidden-size 33 is not"),
        ("--tensor-model-parallel-size 2 --enable-expert-tensor-parallelism --expert-tensor-parallel-size 1",
         "contradict each other"),
        ("--tensor-model-parallel-size 4 --expert-tensor-parallel-size 2", "must be 1 or --tensor-model-parallel-size"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(words, message):
    """C107 and C114 among them."""
    assert message in fault(words)


def test_c107_the_degree_fits_the_ranks_of_a_stage():
    config = parsed("--num-experts 8 --moe-expert-parallel-size 8")
    with pytest.raises(ValueError, match="--expert-model-parallel-size 8 does not divide the 4 ranks of a stage"):
        check_world(config, 4)
    check_world(config, 8)
    with pytest.raises(ValueError, match="--expert-model-parallel-size 6 does not divide the 8 ranks"):
        check_world(parsed("--num-experts 4 --moe-expert-parallel-size 6"), 8)
    check_world(parsed("--num-experts 4 --moe-expert-parallel-size 6"), 12)


def test_experts_are_cut_over_tensor_ranks_or_shared_by_them():
    words = "--num-experts 8 --tensor-model-parallel-size 2 --global-batch-size 8"
    for more, size in (
        ("", 2), ("--expert-tensor-parallel-size 1", 1), ("--topk 1", 1),
        ("--topk 1 --enable-expert-tensor-parallelism", 2), ("--topk 1 --expert-tensor-parallel-size 2", 2),
    ):  # fmt: skip
        assert parsed(f"{words} {more}").expert_tensor_size == size
    check_world(parsed(f"{words} --moe-expert-parallel-size 8"), 8)      # over data 4 x tensor 2
    with pytest.raises(ValueError, match="8 does not divide the 4 ranks of a stage"):
        check_world(parsed(f"{words} --expert-model-parallel-size 8"), 8)


def test_the_section_is_plain_values():
    assert MoEConfig() == MoEConfig(num_experts=(1,)) and hash(MoEConfig())
