"""Mixtures of experts in whole runs: crowding, ties, recomputation, masks, checkpoints, and what is said of them."""

from __future__ import annotations

import functools
from math import gcd
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megazero.data.indexed import IndexedWriter
from megazero.flags import parse
from megazero.forward import ForwardModel
from megazero.gpt import GPTSetup, gpt_layers
from megazero.moe.pyramid import count_parameters
from megazero.parallel.groups import World, open_mesh
from megazero.parallel.shard import ShardSpec
from megazero.parallel.topology import Topology
from megazero.trainer import Trainer
from tests.test_moe_parity import FULL, LIMITS, PYRAMID, SHARED
from tests.training import SMALL, Outcome, distance, train

TWO_LAYERS = "--num-layers 2 --hidden-size 16 --num-attention-heads 2"
BIASED = (
    f"--fp64 {TWO_LAYERS} --num-experts 8 --moe-router-topk 1 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-aux-loss-coeff 0.01"
)


def assert_equal(got: Outcome, want: Outcome) -> None:
    for name, value in distance(got, want).items():
        assert value <= LIMITS[name], f"{name} differ by {value:.1e}"


def set_all(trainer: Trainer, name: str, value: float, index: int | None = None) -> None:
    """Fill parameters whose name ends so (or their element `index`), on this rank and in its master copy."""
    infos = [info for bucket in trainer.machine.optimizer.buckets for info in bucket.infos if info.name.endswith(name)]
    assert infos
    with torch.no_grad():
        for info in infos:
            (info.tensor if index is None else info.tensor[index]).fill_(value)


def crowd(trainer: Trainer) -> None:
    set_all(trainer, "expert_bias", 100.0, 0)


@pytest.mark.parametrize("flags", ["--zero-stage 0", "--zero-stage 1", "--zero-stage 2 --overlap-grad-reduce"])
def test_one_expert_takes_every_token_and_three_ranks_receive_none(flags: str) -> None:
    """C105: no hang, and the gradients of one rank; the crowded expert's and the others'."""
    want = one_rank_crowded("")
    got = train(f"{BIASED} {flags} --expert-model-parallel-size 4", (1, 1, 4), before=crowd)
    assert_equal(got, want)
    assert [layer["counts"] for layer in got.steps[-1]["experts"]] == [[128] + [0] * 7] * 2
    up = got.state["layers.0.ffn.experts.up", "exp_avg_sq"]
    assert (up[0] > 0).any() and not up[1:].any(), "an expert without tokens has a zero gradient"


def moments_and_parts(trainer: Trainer) -> tuple[int, int, int]:
    """Bytes of moments on this rank, and elements of its dense parameters and of its experts."""
    infos = [info for bucket in trainer.machine.optimizer.buckets for info in bucket.infos]
    dense, experts = (sum(i.tensor.numel() for i in infos if i.spec.is_expert is flag) for flag in (False, True))
    return trainer.machine.optimizer.bytes()["moments"], dense, experts


def test_experts_are_cut_over_their_own_data_ranks() -> None:
    """C089: at data 4 and expert 2 a rank keeps moments of a quarter of what is dense and of half of its experts."""
    flags = f"{TWO_LAYERS} --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --train-iters 1"
    for moments, dense, experts in train(flags, (1, 1, 4), look=moments_and_parts).seen:
        assert experts > dense / 2, "there are to be experts enough to tell"
        assert moments / 8 == pytest.approx(dense / 4 + experts / 2, rel=0.02)


def test_two_tokens_on_a_rank_are_enough() -> None:
    """C105: fewer tokens than experts, so that most ranks receive nothing in most micro-batches."""
    short = "--seq-length 2 --micro-batch-size 1"
    got = train(f"{BIASED} {short} --expert-model-parallel-size 4", (1, 1, 4), before=crowd)
    assert_equal(got, one_rank_crowded(short))


@functools.cache
def one_rank_crowded(flags: str) -> Outcome:
    return train(f"{BIASED} {flags}", before=crowd)


def test_recomputation_decides_as_the_forward_did() -> None:
    """C099 C098: all scores tied, and with jitter; in every digit, and told once."""
    for flags in ("--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01",
                  "--num-experts 4 --topk 2 --moe-noisy-gate-policy Jitter",
                  "--num-experts 4 --topk 1 --moe-noisy-gate-policy RSample",
                  "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 "
                  "--moe-router-load-balancing-type global_aux_loss"):
        words = f"{TWO_LAYERS} {flags} --train-iters 3"
        runs = [train(f"{words} {how}", before=functools.partial(set_all, name="router.weight", value=0.0))
                for how in ("", FULL)]
        assert distance(*runs) == {"loss": 0, "norm": 0, "weights": 0, "moments": 0}
        assert [step["experts"] for step in runs[0].steps] == [step["experts"] for step in runs[1].steps]
        assert runs[0].steps[-1]["aux_loss" if "global" not in flags else "global_aux_loss"] > 0.5


def test_an_evaluation_routes_alike_in_every_layout() -> None:
    """Its capacity is another one than in training, and it draws nothing and reports nothing."""
    flags = (
        "--fp64 --num-experts 4 --topk 2 --moe-eval-capacity-factor 0.5 --moe-train-capacity-factor 2 --train-iters 2 "
        "--eval-interval 1 --eval-iters 2"
    )
    got, want = train(f"{flags} --expert-model-parallel-size 4", (2, 1, 2)), train(flags)
    full = train(f"{flags} --disable-moe-token-dropping-in-eval")
    losses = [[loss for _, _, loss in run.evaluations] for run in (got, want, full)]
    assert len(losses[1]) > 1 and losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[2] != pytest.approx(losses[1], rel=1e-6), "dropping is to matter"


def test_masked_tokens_do_not_count_in_the_balance(tmp_path: Path) -> None:
    """C115: documents end in samples and not in others; also where the experts' stage reads no labels."""
    draw = np.random.default_rng(2)
    with IndexedWriter(tmp_path / "text", vocab_size=257) as writer:
        for length in (3, 60, 2, 1, 90, 1, 120, 5) * 4:
            writer.add_document([np.append(draw.integers(0, 256, length), 256)])
    flags = (
        f"--no-mock-data --data-path {tmp_path}/text --split 1,0,0 --tokenizer-type ByteTokenizer --vocab-size 257 "
        "--fp64 --num-layers 3 --moe-layer-freq [0,1,0] --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 "
        "--train-iters 3"
    )
    want, unmasked = train(f"{flags} --eod-mask-loss"), train(flags)
    assert abs(want.steps[0]["aux_loss"] - unmasked.steps[0]["aux_loss"]) > 1e-4, "the masks are to matter"
    for layout in ((2, 1, 1), (1, 3, 1)):
        got = train(f"{flags} --eod-mask-loss", layout)
        assert_equal(got, want)
        assert got.steps[-1]["aux_loss"] == pytest.approx(want.steps[-1]["aux_loss"], rel=1e-11)


@pytest.mark.parametrize("model", [PYRAMID, SHARED])
def test_experts_are_resumed_over_any_number_of_ranks(model: str, tmp_path: Path) -> None:
    """Saved by four expert ranks, resumed by two whose tensor group shares each expert, then by one; the bias too."""
    flags = f"--fp64 {model} --save {tmp_path} --save-interval 2"
    etp = "--enable-expert-tensor-parallelism" if model == PYRAMID else ""
    train(f"{flags} --train-iters 2 --expert-model-parallel-size 4", (1, 1, 4))
    train(f"{flags} --load {tmp_path} --train-iters 4 --expert-model-parallel-size 2 {etp}", (2, 1, 2))
    got = train(f"{flags} --load {tmp_path} --train-iters 6")
    want = train(f"--fp64 {model} --train-iters 6")
    assert_equal(got, Outcome(want.steps[4:], want.state))
    if model == SHARED:
        assert want.state["layers.1.ffn.router.expert_bias", "weight"].abs().max() > 1e-3


def test_the_bias_stays_wide_and_moves_once_per_global_batch() -> None:
    """In bf16 too it is kept in fp32, and every step moves each expert by the rate, or not at all."""
    run = train(f"--bf16 {SHARED} --train-iters 3", (1, 1, 2))
    bias = run.state["layers.2.ffn.router.expert_bias", "weight"]
    assert bias.dtype == torch.float32
    steps = (bias / 1e-3).round()
    assert torch.equal(bias, steps * 1e-3) or (bias - steps * 1e-3).abs().max() < 1e-9
    assert 0 < steps.abs().max() <= 3
    assert ("layers.2.ffn.router.expert_bias", "exp_avg") not in run.state


class Thirds:
    """Where a model is filled from: every weight is a third."""

    def read_flat(self, name: str, kind: str, spec: ShardSpec, *, start: int, stop: int, **where: object) -> Tensor:
        return torch.full((stop - start,), 1 / 3)


def test_the_bias_is_wide_in_evaluations_of_a_checkpoint_too() -> None:
    """A model of bf16 that only runs forward chooses by the bias that was trained, not by one cut to eight bits."""
    config, _ = parse(f"{SMALL} {SHARED}".split())
    setup = GPTSetup(config.model, 97, torch.bfloat16, moe=config.moe, experts=config.experts)
    model = ForwardModel(gpt_layers(setup), open_mesh(Topology()))
    model.load(Thirds())
    layers = dict(named for stage in model.stages.values() for named in stage.named_layers())
    router = layers["layers.2"].ffn.router
    assert router.weight.dtype == torch.bfloat16
    assert router.expert_bias.tolist() == torch.full((8,), 1 / 3).tolist()


def test_every_expert_starts_with_values_of_its_own() -> None:
    state = train(f"--fp64 {PYRAMID} --train-iters 1 --lr 0", (1, 1, 2)).state
    up = state["layers.2.ffn.experts.up", "weight"]
    assert up.shape == (8, 128, 32) and len({float(expert[0, 0]) for expert in up}) == 8


def test_a_split_by_cost_knows_what_works_on_a_token() -> None:
    """Two residual blocks, each with an MLP and two experts of a token, weigh as much as four dense ones."""
    words = "--num-layers 6 --num-experts 8 --moe-layer-freq [1]*2+[0]*4 --topk 2 --mlp-type residual"
    config, _ = parse(f"{SMALL} {words} --pipeline-model-parallel-size 2 --pipeline-split cost".split())
    plan = pretrain_gpt.prepare(config, World(0, 2, 0))
    assert [layer.cost for layer in plan.layers[3:7]] == [1.0] * 4
    assert plan.layers[1].cost == plan.layers[2].cost == pytest.approx(1 + 2 * 8 / 12, rel=0.05)
    assert [sum(layer.startswith("layers") for layer in stage.layers) for stage in plan.stages] == [2, 4]


@pytest.mark.parametrize("model", [PYRAMID, SHARED])
def test_a_plan_counts_what_arithmetic_counts(model: str) -> None:
    config, _ = parse(f"{SMALL} {model}".split())
    plan = pretrain_gpt.prepare(config, World(0, 1, 0))
    assert plan.parameters == count_parameters(config.model, config.moe, vocab=97).total


def test_a_layout_is_planned_and_told_with_its_degrees() -> None:
    """C107 C114: the groups on paper, and a line for each number of experts that is cut in fewer parts."""
    words = f"{SMALL} --num-experts 2 4 8 4 --expert-interval 1 --expert-model-parallel-size 4 --global-batch-size 16"
    config, _ = parse(words.split())
    plan = pretrain_gpt.prepare(config, World(0, 4, 0))
    assert plan.topology.degrees == (2,) and plan.topology.expert == 4
    assert [plan.topology.size(plan.topology.expert_axis(gcd(n, 4))) for n in config.experts] == [2, 4, 4, 4]
    said = pretrain_gpt.describe(plan)
    assert "expert 4" in said
