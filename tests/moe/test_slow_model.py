"""A training step with experts is that of the published formulas in plain torch: loss and every gradient."""

from __future__ import annotations

import pytest
import torch

from megazero.trainer import Trainer
from tests.moe.slow_model import Gate, deepseek, deepspeed_top1, megatron_top2, model_loss
from tests.training import SMALL, assemble, train_rank

STEP = "--fp64 --num-layers 2 --init-method-std 0.1 --train-iters 1 --lr 0 --clip-grad 0 --weight-decay 0"
TOP2 = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.003"
RESIDUAL = "--num-experts 4 --expert-interval 1 --topk 1 --mlp-type residual --moe-loss-coeff 0.01 --no-moe-use-rts"
DEEPSEEK = (
    "--num-experts 8 --moe-router-topk 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.05 "
    "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate"
)


def steer(trainer: Trainer) -> None:
    """Biases that matter, and that differ by expert."""
    for info in (info for bucket in trainer.machine.optimizer.buckets for info in bucket.infos):
        if info.movement is not None:
            info.tensor.data.copy_(torch.linspace(-0.5, 0.5, info.tensor.numel(), dtype=torch.float64))


def read(trainer: Trainer) -> list:
    batches, _ = trainer.feeds["train"].global_batch(0, None)
    return [(batch.tokens.T, batch.labels.T) for batch in batches]


@pytest.mark.parametrize(
    ("flags", "gate", "coefficients"),
    [
        (TOP2, megatron_top2, {"aux_loss": 0.02, "z_loss": 0.003}),
        (RESIDUAL, deepspeed_top1, {"aux_loss": 0.01}),
        (DEEPSEEK, deepseek, {"seq_aux_loss": 0.05}),
    ],
)
def test_a_step_is_that_of_the_published_formulas(flags: str, gate: Gate, coefficients: dict[str, float]) -> None:
    """What is told of balance is a mean over layers without coefficient. What Adam keeps of a first step is a tenth of
    the gradient; the rate is 0, so that the weights are still those."""
    record, pieces, batches = train_rank(f"{SMALL} {STEP} {flags}".split(), 1, read, None, steer)
    state = assemble([pieces])
    weights = {name: value.requires_grad_() for (name, kind), value in state.items() if kind == "weight"}
    loss, paid = model_loss(weights, batches, 2, gate)
    (loss + paid).backward()
    (step,) = record.steps
    assert step["lm_loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert 2 * sum(step[name] * by for name, by in coefficients.items()) == pytest.approx(paid.item(), rel=1e-12)
    for name, value in weights.items():
        if "expert_bias" in name:
            continue
        got = state[name, "exp_avg"] / 0.1
        size = value.grad.norm()
        assert size > 0 and (got - value.grad).norm() <= 1e-10 * max(size, 1e-6), name
