"""megazero/upcycle.py and scripts/upcycle.py: the dense model's output from a model with experts, which trains on."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megazero.checkpoint import Reader, folder_of
from megazero.config import Config
from megazero.data.batch import MicroBatch
from megazero.gpt import GPTSetup, gpt_layers
from megazero.parallel.groups import mesh_on_paper
from megazero.parallel.params import collect, initialize
from megazero.parallel.topology import Topology
from megazero.pipe.stage import Recompute, Stage, build_stages, cut_layers
from megazero.upcycle import Sources, Upcycling, parameters_of
from scripts import upcycle
from tests.training import LLAMA, SMALL, train

TWO_STEPS = "--fp64 --train-iters 2"
TOP2 = "--num-experts 4 --moe-router-topk 2"
PYRAMID = "--num-experts 2 4 --topk 2 --mlp-type residual --disable-moe-token-dropping"
SCALED = (
    "--num-experts 4 --moe-router-topk 3 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-topk-scaling-factor 2.5 --moe-layer-freq [0,1,1,0] --moe-router-dtype fp64 "
    "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate"
)
TOP1 = "--num-experts 4 --topk 1 --disable-moe-token-dropping"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a GPT, saved by tensor 2 x pipeline 2, and of a Llama."""
    root = tmp_path_factory.mktemp("dense")
    train(f"{TWO_STEPS} --save {root}/gpt --save-interval 2", (2, 2, 1))
    train(f"{TWO_STEPS} {LLAMA} --save {root}/llama --save-interval 2")
    return {name: root / name for name in ("gpt", "llama")}


def grow(dense: Path, moe: Path, flags: str) -> Reader:
    assert upcycle.main(f"--load {dense} --save {moe} {flags}".split()) == 0
    return Reader(folder_of(moe, 0))


def stage_of(folder: Path) -> Stage:
    """The whole model of a checkpoint on one rank, in fp64."""
    reader = Reader(folder)
    config = Config.from_json(json.dumps(reader.config))
    setup = GPTSetup(config.model, 97, torch.float64, moe=config.moe, experts=config.experts)
    layers = gpt_layers(setup)
    stage = build_stages(layers, mesh_on_paper(Topology(), 0), cut_layers(layers, [0]), Recompute())[0]
    infos = collect(stage.named_layers())
    initialize(infos, Topology(), 0, seed=1)
    assert {info.name for info in infos} == set(reader.tensors)
    for info in infos:
        values = reader.read(info.name, "weight")
        info.tensor.data[tuple(map(slice, values.shape))] = values
    return stage


def logits_of(folder: Path) -> Tensor:
    tokens = torch.randint(97, (16, 4), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return stage_of(folder)(None, MicroBatch(tokens))


@pytest.mark.parametrize(
    ("name", "flags"), [("gpt", TOP2), ("gpt", PYRAMID), ("llama", SCALED), ("llama", PYRAMID)]
)
def test_the_output_is_that_of_the_dense_model(
    name: str, flags: str, dense: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    reader = grow(dense[name], tmp_path, flags)
    told = capsys.readouterr().out.splitlines()
    assert "the output is that of the dense model" in told and shlex.split(told[-1])[3:] == flags.split()
    want, got = logits_of(folder_of(dense[name], 2)), logits_of(reader.folder)
    assert want.abs().max() > 0.1 and (got - want).abs().max() <= 1e-12
    routers = [reader.read(name, "weight") for name in reader.tensors if name.endswith("router.weight")]
    assert len(routers) == 2 + 2 * (flags == TOP2) and all(router.std() > 0.01 for router in routers)


def test_it_trains_on_in_another_layout_than_it_was_saved_in(dense: dict[str, Path], tmp_path: Path) -> None:
    """The first loss is that of the dense model on the same batch, on each way on; then the experts part."""
    grow(dense["gpt"], tmp_path, PYRAMID)
    go_on = "--fp64 --finetune --train-iters 3"
    want = train(f"{go_on} --load {dense['gpt']}")
    whole = train(f"{go_on} --load {tmp_path} {PYRAMID}")
    spread = train(f"{go_on} --load {tmp_path} {PYRAMID} --expert-model-parallel-size 4", (2, 1, 2))
    assert whole.losses[0] == pytest.approx(want.losses[0], rel=1e-12)
    assert spread.losses == pytest.approx(whole.losses, rel=1e-11)
    up = spread.state["layers.3.ffn.experts.up", "weight"]
    assert up.shape == (4, 128, 32) and len({float(expert[0, 0]) for expert in up}) == 4


def test_use_checkpoint_args_takes_the_experts_too(dense: dict[str, Path], tmp_path: Path) -> None:
    grow(dense["gpt"], tmp_path, PYRAMID)
    words = SMALL.replace("--num-layers 4 --hidden-size 32 --num-attention-heads 4", f"--fp64 --load {tmp_path}")
    assert pretrain_gpt.main(f"{words} --finetune --use-checkpoint-args --train-iters 1".split()) == 0


def test_new_values_are_drawn_by_seed_and_name_and_copies_are_exact(dense: dict[str, Path], tmp_path: Path) -> None:
    source = Reader(folder_of(dense["gpt"], 2))
    first, again = (grow(dense["gpt"], tmp_path / name, PYRAMID) for name in ("a", "b"))
    other = grow(dense["gpt"], tmp_path / "c", f"{PYRAMID} --seed 5 --jitter 0.01")
    for name in first.tensors:
        values = first.read(name, "weight")
        assert values.dtype == torch.float64 and torch.equal(values, again.read(name, "weight"))
        if name in source.tensors:
            assert torch.equal(values, source.read(name, "weight"))
    router, up, bias = (f"layers.1.ffn.{name}" for name in ("router.weight", "experts.up", "experts.up_bias"))
    mlp = {name: source.read(f"layers.1.ffn.up.{kind}", "weight") for name, kind in ((up, "weight"), (bias, "bias"))}
    assert torch.equal(first.read(up, "weight"), torch.stack([mlp[up]] * 2))
    assert (first.read(router, "weight") - other.read(router, "weight")).abs().max() > 0.01
    noise = other.read(up, "weight") - mlp[up]
    assert noise.std() == pytest.approx(0.01, rel=0.05) and noise.mean().abs() < 1e-3
    assert torch.corrcoef(noise.flatten(1))[0, 1].abs() < 0.1
    assert torch.equal(other.read(bias, "weight"), torch.stack([mlp[bias]] * 2))


def test_weights_that_sum_to_no_fixed_number_are_scaled_on_average_only(
    dense: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Top 1 of 4: a token's weight is a probability, a quarter where the router knows nothing."""
    reader = grow(dense["gpt"], tmp_path, f"{TOP1} --on-average")
    told = capsys.readouterr().out
    assert "weights sum to about 0.25 of 4 experts, whose output is multiplied by 4\n" in told
    assert "the output is that of the dense model on average\n" in told
    down = Reader(folder_of(dense["gpt"], 2)).read("layers.1.ffn.down.weight", "weight")
    assert torch.equal(reader.read("layers.1.ffn.experts.down", "weight"), torch.stack([4 * down] * 4))


def test_one_matrix_is_in_memory_at_a_time(dense: dict[str, Path]) -> None:
    """The parameters of all experts of a layer are read expert by expert."""
    reader = Reader(folder_of(dense["gpt"], 2))
    saved = Config.from_json(json.dumps(reader.config))
    config = upcycle.with_experts(reader.folder, TOP2.split())
    assert saved != config
    tensors = Sources(reader, Upcycling(), {4: 1.0}).tensors(parameters_of(config, reader))
    for name, lazy in tensors.items():
        parts = (lazy.read, *lazy.more)
        assert len(parts) == (4 if ".ffn.experts." in name else 1)
        assert max(part().numel() for part in parts) <= max(97 * 32, 128 * 32)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "--num-experts: say how many experts a layer becomes"),
        ("--num-experts 1", "--num-experts: say how many"),
        ("--num-experts 4 --topk 1", "do not sum to one number (--moe-family megatron-deepspeed --moe-router-topk 1"),
        ("--num-experts 4 --moe-router-pre-softmax", "--moe-router-pre-softmax), so the output would change"),
        ("--num-experts 4 --moe-ffn-hidden-size 64", "--moe-ffn-hidden-size 64: an expert is a copy of the MLP"),
        ("--num-experts 2 4 8 --topk 2", "--num-experts 2 4 8 has 3 numbers, and 2 of 4 layers"),
        ("--num-experts 4 --hidden-size 64", "--hidden-size: the model stays the dense one but for its experts"),
        ("--num-experts 4 --num-expert 4", "unknown flag --num-expert"),
        ("--num-experts 4 --jitter -1", "--jitter -1.0: must be a finite number of at least 0"),
        ("--num-experts 4 --seed -1", "--seed -1: must be at least 0"),
        ("--num-experts 4 --iteration -1", "--iteration -1: must be at least 0"),
        ("--num-experts 4 --ckpt-step 1", "there is no complete checkpoint of this iteration"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(
    flags: str, words: str, dense: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert upcycle.main(f"--load {dense['gpt']} --save {tmp_path}/moe {flags}".split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("upcycle.py: error: ") and words in line
    assert not (tmp_path / "moe").exists()


def test_what_has_experts_or_is_there_is_refused(
    dense: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    grow(dense["gpt"], tmp_path / "moe", TOP2)
    for load, save, words in (
        (dense["gpt"], tmp_path / "moe", "holds a checkpoint of iteration 0 already"),
        (tmp_path / "moe", tmp_path / "more", "has experts already"),
        (tmp_path / "none", tmp_path / "more", "none: there is no complete checkpoint"),
    ):
        assert upcycle.main(f"--load {load} --save {save} {TOP2}".split()) == 2
        assert words in capsys.readouterr().err
