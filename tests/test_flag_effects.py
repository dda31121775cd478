"""Every honoured flag changes what it should: a field with no entry here, or in flag_effects.py, fails the suite."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megazero import metrics
from megazero.flag_tables import RENAMED, SETS
from megazero.flags import all_settings, parse
from megazero.flops import Flops
from megazero.lookout import Lookout
from megazero.lr_curves import Done
from megazero.parallel.groups import World, choose_device
from megazero.plan import plan_stages
from tests.flag_effects import SHOWN
from tests.training import SMALL, train

HERE = Path(__file__).parent


def asked(words: str) -> Any:
    return parse(f"{SMALL} {words}".split())[0]


@functools.cache
def trained(words: str) -> tuple:
    """Losses, norms and weights of two steps of a small model."""
    run = train(words, iterations=2)
    return run.losses, run.norms, tuple(value.double().sum().item() for value in run.state.values())


def rates(words: str) -> list:
    """Of the first steps."""
    config = parse(f"{SMALL.replace('--lr-decay-style constant', '')} {words}".split())[0]
    schedule = pretrain_gpt.schedule_of(config, config.batch.sizes(1, 16))
    return [schedule.at(Done(step, 8 * step, 128 * step)) for step in range(5)]


def stages(words: str) -> list:
    """The layers of each stage of two pipeline ranks, and their parameters."""
    config = asked(f"--num-layers 6 --pipeline-model-parallel-size 2 {words}")
    layers, how = pretrain_gpt.layers_of(config, 97), pretrain_gpt.pipelining_of(config)
    return [str(plan) for plan in plan_stages(layers, pretrain_gpt.topology_of(config, 2), how)]


def device(words: str) -> object:
    """The backend, or why there is none."""
    try:
        return choose_device(asked(words).parallel.distributed_backend, 0)[1]
    except ValueError as wrong:
        return str(wrong)


def timeout(words: str) -> object:
    """What a run meets the others with."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError) as met:
        patch.setattr(pretrain_gpt, "connect", lambda *_, **how: (_ for _ in ()).throw(InterruptedError(str(how))))
        config = asked(words)
        lookout = Lookout(World(), pretrain_gpt.watched(config))
        pretrain_gpt.run(pretrain_gpt.prepare(config, World()), World(), [], lookout)
    return str(met.value)


def queue(words: str) -> object:
    """What TensorBoard's writer is made with."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "EventFileWriter", lambda *how: made.append(how))
        logging = asked(f"--tensorboard-dir x {words}").logging
        metrics.Metrics(logging, iterations=1, world=1, writes=True, flops=lambda seq_length: Flops(1.0))
    return made


def gate(words: str) -> set:
    """The precision of every router."""
    layers = pretrain_gpt.layers_of(asked(f"--num-experts 4 {words}"), 97)
    built = [layer.build(pretrain_gpt.open_mesh(pretrain_gpt.topology_of(asked("--num-experts 4"), 1)))
             for layer in layers]
    return {module.precision for layer in built for module in layer.modules() if "precision" in vars(module)}


SGD, LAMB, MUON = "--optimizer sgd", "--optimizer lamb", "--optimizer muon"
WARM = "--lr-scheduler WarmupLR --warmup-num-steps 4"
COSINE = "--lr-scheduler WarmupCosineLR --warmup-num-steps 3 --total-num-steps 5"

# Field -> what shows it, the flags that both sides have, and those that must make a difference.
PROBES: dict[str, tuple[Callable[[str], object], str, str]] = {
    "norm_epsilon": (trained, "", "--norm-epsilon 0.5"),
    "init_method_std": (trained, "", "--init-method-std 0.1"),
    "activation": (trained, "", "--activation squared_relu"),
    "position_embedding_type": (trained, "", "--position-embedding-type none"),
    "window_size": (trained, "", "--window-size 2,0"),
    "window_attn_skip_freq": (trained, "--window-size 2,0", "--window-attn-skip-freq 2"),
    "softmax_type": (trained, "", "--softmax-type learnable"),
    "clip_grad": (trained, "", "--clip-grad 0.01"),
    "adam_beta1": (trained, "", "--adam-beta1 0.5"),
    "adam_beta2": (trained, "", "--adam-beta2 0.5"),
    "adam_eps": (trained, "", "--adam-eps 0.01"),
    "decoupled_weight_decay": (trained, "", "--no-decoupled-weight-decay"),
    "sgd_momentum": (trained, SGD, "--sgd-momentum 0.5"),
    "lamb_min_coeff": (trained, LAMB, "--lamb-min-coeff 5"),
    "lamb_max_coeff": (trained, LAMB, "--lamb-max-coeff 0.02"),
    "muon_momentum": (trained, MUON, "--muon-momentum 0.5"),
    "muon_num_ns_steps": (trained, MUON, "--muon-num-ns-steps 1"),
    "muon_bf16": (trained, MUON, "--muon-bf16"),
    "make_vocab_size_divisible_by": (stages, "", "--make-vocab-size-divisible-by 128"),
    "warmup_min_lr": (rates, WARM, "--warmup-min-lr 1e-4"),
    "warmup_min_ratio": (rates, COSINE, "--warmup-min-ratio 0.5"),
    "cos_min_ratio": (rates, COSINE, "--cos-min-ratio 0.5"),
    "num_layers_per_virtual_pipeline_stage": (stages, "", "--num-layers-per-virtual-pipeline-stage 1"),
    "pipeline_split": (stages, "--max-position-embeddings 4096", "--pipeline-split parameters"),
    "pipeline_model_parallel_layout": (stages, "", "--pipeline-model-parallel-layout Et|tttttL"),
    "account_for_embedding_in_pipeline_split": (
        stages, "--num-layers 7", "--account-for-embedding-in-pipeline-split"
    ),
    "account_for_loss_in_pipeline_split": (stages, "", "--account-for-loss-in-pipeline-split"),
    "distributed_backend": (device, "--distributed-backend gloo", "--distributed-backend nccl"),
    "distributed_timeout_minutes": (timeout, "", "--distributed-timeout-minutes 3"),
    "tensorboard_queue_size": (queue, "", "--tensorboard-queue-size 7"),
    "moe_router_dtype": (gate, "", "--moe-router-dtype fp64"),
    "masked_softmax_fusion": (
        lambda words: pretrain_gpt.kernels_of(asked(words)).impl("softmax"), "", "--no-masked-softmax-fusion"
    ),
}  # fmt: skip


def test_every_field_has_an_entry():
    shown = [name for names in SHOWN.values() for name in names.split()]
    assert sorted([*shown, *PROBES]) == sorted(all_settings())


@pytest.mark.parametrize("name", PROBES)
def test_a_flag_makes_a_difference(name: str):
    probe, both, own = PROBES[name]
    torch.manual_seed(0)
    assert probe(both) != probe(f"{both} {own}".strip())


@pytest.mark.parametrize("place", SHOWN)
def test_the_test_that_shows_a_field_is_there_and_names_it(place: str):
    file, name = place.split("::")
    text = (HERE / file).read_text(encoding="utf-8")
    assert name in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    for field in SHOWN[place].split():
        assert re.search(rf"{field.replace('_', '[-_]')}(?![\w-])", text), field


def test_every_other_spelling_sets_a_field_that_is_shown():
    fields = {*RENAMED.values(), *(name for sets in SETS.values() for part in sets for name in part)}
    assert fields <= set(all_settings())
