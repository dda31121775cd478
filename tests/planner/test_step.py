"""A step on paper: operations by hand, the bubble of the books, the published throughput of GPT up to a trillion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.config import ModelConfig
from megazero.config_moe import MoEConfig
from megazero.flags import parse
from megazero.pipe.lower import add_communication
from megazero.pipe.simulate import Costs, simulate
from megazero.planner.devices import DEVICES, LINK_SHARE, Axis, collective_seconds, exchange_seconds
from megazero.planner.layout import Layout, layout_of
from megazero.planner.search import best_layouts
from megazero.planner.step import counted_bubble, hardware_tflops, pipelined, predict, stage_flops, step_flops

A100 = DEVICES["a100-80gb"]
H, S, L, V = 64, 32, 8, 97
SHAPE = f"--num-layers {L} --hidden-size {H} --num-attention-heads 8 --seq-length {S} --vocab-size {V} --print-layout"
CORE = 2 * S * H                    # of half of the scores and their product with the values, for a token
DENSE = 24 * H * H                  # projections 8 h^2, feed-forward 16 h^2


@pytest.mark.parametrize(
    ("words", "forward"),
    [
        ("", L * (DENSE + CORE)),
        ("--swiglu --ffn-hidden-size 160", L * (8 * H * H + 6 * H * 160 + CORE)),
        ("--group-query-attention --num-query-groups 2", L * (DENSE - 4 * H * H + H * H + CORE)),
        ("--window-size 15,0 --window-attn-skip-freq 2", L * DENSE + 4 * CORE + 4 * 4 * H * 16 * (1 - 16 / 64)),
        ("--num-experts 8 --moe-router-topk 2", L * (DENSE + 16 * H * H + 2 * 8 * H + CORE)),
        (
            "--num-experts 2 2 2 4 --topk 1 --mlp-type residual",
            L * (DENSE + CORE) + 4 * (16 * H * H + 4 * H) + 2 * H * (2 + 2 + 2 + 4),
        ),
    ],
)
def test_operations_are_those_of_hand_formulas_in_every_layout(words, forward):
    """Dense, gated, grouped, MoE and PR-MoE: three times the forward, for each token of the batch."""
    expected = 3 * 32 * S * (forward + 2 * H * V)
    for tensor, pipeline, world, more in (
        (1, 1, 1, ""), (2, 1, 4, ""), (1, 4, 8, "--pipeline-schedule zb-h1"), (2, 2, 8, "--micro-batch-size 4"),
        (1, 2, 8, "--num-virtual-stages-per-pipeline-rank 4"), (1, 2, 2, "--pipeline-schedule zb-v"),
    ):
        config, _ = parse(
            f"{SHAPE} {words} --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
            f"--global-batch-size 32 --recompute-granularity full --recompute-method uniform {more}".split()
        )
        layout = layout_of(config, V, world)
        needed, spent = step_flops(layout)
        assert needed == pytest.approx(expected, rel=1e-3)
        assert spent == pytest.approx(expected + 32 * S * forward, rel=1e-3)


def test_the_bubble_is_that_of_the_books():
    """Equal stages, as the head has no vocabulary: (p - 1) / (m + p - 1), and with v chunks a v-th of the fill."""
    model = ModelConfig(num_layers=16, hidden_size=64, num_attention_heads=8, seq_length=32)
    layout = Layout(model, 0, pipeline=4, micro_batches=12)
    assert counted_bubble(layout) == pytest.approx(3 / 15)
    assert counted_bubble(replace(layout, schedule="interleaved", chunks=2)) == pytest.approx(1.5 / 13.5)
    assert counted_bubble(replace(layout, schedule="zb-h1")) == pytest.approx(1 / 13)
    assert counted_bubble(replace(layout, pipeline=1)) == 0.0


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
)
def test_many_micro_batches_take_what_a_simulation_of_all_takes(schedule, chunks):
    """Only a few are simulated: each further round adds the same time, and to gpipe the same memory."""
    model = ModelConfig(num_layers=12, hidden_size=64, num_attention_heads=8, seq_length=32)
    for micro_batches in (3, 37, 60, 61):
        layout = Layout(model, 97, pipeline=4, schedule=schedule, chunks=chunks, micro_batches=micro_batches)
        flops = [stage_flops(layout, stage) for stage in layout.stages]
        costs = Costs(flops, flops, flops)
        whole = simulate(add_communication(layout.order(4, micro_batches, chunks), len(flops)), costs)
        assert pipelined(layout, costs).makespan == pytest.approx(whole.makespan, rel=0.01)
        assert layout.peaks([1.0] * len(flops)) == pytest.approx(list(whole.peak_held))


def test_collectives_know_where_a_group_lies():
    """A ring within a node runs at the link's pace; over nodes at that of all the network ports that it has there."""
    link, network = A100.link * LINK_SHARE, A100.network * LINK_SHARE
    inside, outside = (collective_seconds(A100, Axis(8, stride), 8e9) for stride in (1, 8))
    assert inside == pytest.approx(7e9 / link, rel=0.01)
    assert outside == pytest.approx(7e9 / network, rel=0.01)
    assert collective_seconds(A100, Axis(64), 8e9) == pytest.approx(63 / 64 * 8e9 / (8 * network), rel=0.02)
    assert collective_seconds(A100, Axis(1), 8e9) == exchange_seconds(A100, Axis(1), 8e9) == 0.0
    assert exchange_seconds(A100, Axis(16), 8e9) == pytest.approx(8e9 * 8 / 16 / network, rel=0.02)


def test_small_products_are_slower_for_each_operation():
    rates = [2 * n**3 / A100.matmul_seconds(n, n, n) for n in (128, 512, 2048, 8192)]
    assert rates == sorted(rates) and 0.7 * A100.flops < rates[-1] < A100.flops


# Narayanan et al. (SC'21, arXiv 2104.04473), table 1: heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s per
# GPU. A100 with 80 GB, mixed precision, sequence 2048, vocabulary 51,200, blocks recomputed, interleaved schedule.
WEAK_SCALING = (
    (24, 2304, 24, 1, 1, 32, 512, 137), (32, 3072, 30, 2, 1, 64, 512, 138), (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135), (64, 8192, 48, 8, 2, 512, 1536, 138), (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148), (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163), (160, 25600, 128, 8, 64, 3072, 3072, 163),
)


def test_the_published_weak_scaling_is_predicted():
    """Micro-batch and stages per rank, which the table does not tell, are the planner's own choice. The mean of the
    errors' sizes is seen at 3.5%; the best constant in place of a prediction would have 5.4%."""
    errors = []
    for heads, hidden, layers, tensor, pipeline, ranks, batch, published in WEAK_SCALING:
        model = ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048)
        data = ranks // (tensor * pipeline)
        start = Layout(
            model, 51200, tensor=tensor, pipeline=pipeline, data=data, micro_batches=batch // data, zero=0, sent=2,
            schedule="interleaved" if pipeline > 1 else "1f1b", recompute="full", fused=False,
        )
        (found,) = best_layouts(start, A100, ("tensor", "pipeline", "schedule", "recompute"), count=1)
        predicted = hardware_tflops(found)
        errors.append(predicted / published - 1)
        print(f"{ranks:5} GPUs: {predicted:6.1f} TFLOP/s predicted, {published} published: {errors[-1]:+.1%}")
    mean = sum(map(abs, errors)) / len(errors)
    print(f"mean {mean:.1%}")
    assert mean < 0.05 and max(map(abs, errors)) < 0.10


def test_what_overlaps_is_not_waited_for():
    model = ModelConfig(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048)
    layout = Layout(model, 50304, data=64, micro_batch=8, micro_batches=1)
    plain, beside = predict(layout, A100), predict(replace(layout, overlaps=(True, True)), A100)
    assert beside.reduction == 0.0 < plain.reduction
    assert plain.seconds - beside.seconds == pytest.approx(plain.reduction)
    assert 0 < plain.mfu < 1 and plain.exposed > beside.exposed


def test_experts_cost_what_their_tokens_cost():
    """Of 64 experts a token meets one: about a dense model's time, and an exchange that a dense one has not."""
    model = ModelConfig(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048)
    dense = predict(Layout(model, 50304, data=64, micro_batch=8, micro_batches=1), A100)
    moe = MoEConfig(num_experts=(64,), moe_family="megatron-deepspeed")
    sparse = predict(Layout(model, 50304, moe, data=64, expert=64, micro_batch=8, micro_batches=1), A100)
    assert dense.exchange == 0 < sparse.exchange
    assert dense.seconds < sparse.seconds < 2 * dense.seconds
    assert sparse.fullest.elements > dense.fullest.elements
