"""--deterministic-mode: the same run gives the same bits again."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

import pretrain_gpt
from megazero.flags import parse
from megazero.lookout import Lookout
from megazero.parallel.groups import World
from tests.harness import on_ranks
from tests.training import SMALL

FLAGS = (
    "--deterministic-mode --bf16 --train-iters 3 --hidden-dropout 0.1 --attention-dropout 0.1 --num-experts 4 "
    "--moe-router-topk 2 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 "
    "--overlap-grad-reduce --overlap-param-gather --save-interval 3"
)


def trained(folder: Path) -> tuple[list, list]:
    """Losses and gradient norms of a run, and the bytes of all that it saved, by rank."""
    places = f"--save {folder} --metrics-jsonl {folder}/m.jsonl --log-interval 1"
    config, notices = parse(f"{SMALL} {FLAGS} {places}".split())
    world = World(dist.get_rank(), dist.get_world_size(), 0)
    lookout = Lookout(world, pretrain_gpt.watched(config))
    pretrain_gpt.run(pretrain_gpt.prepare(config, world), world, notices, lookout)
    if world.rank:
        return [], []
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    files = [path.read_bytes() for path in sorted((folder / "iter_0000003").glob("*/rank_*.safetensors"))]
    states = [data[8 + int.from_bytes(data[:8], "little") :] for data in files]     # the header names the save
    return [(line["lm_loss"], line["grad_norm"]) for line in lines if "split" not in line], states


def both(folder: Path) -> tuple:
    assert not torch.are_deterministic_algorithms_enabled()
    found = trained(folder / "first"), trained(folder / "second")
    assert torch.are_deterministic_algorithms_enabled()
    return found


def test_two_runs_are_equal_to_the_last_bit(tmp_path: Path):
    (losses, states), again = on_ranks(4, both, tmp_path, timeout=90)[0]
    assert len(losses) == 3 and len(states) == 4 and all(states)
    assert (losses, states) == again
