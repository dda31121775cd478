"""One MoE layer, forward and backward, beside other people's and a dense feed-forward of the same active operations.

All contenders have the same weights, see the same tokens, and drop none. Each has processes of its own, as its users
start it (ours keep freed memory, as pretrain_gpt.py does); they take turns, and medians of the ratios within a round
are compared, so that a machine with other work is fair to all. At degree 2 two processes share the tokens, and ours the
experts too; the peers hold them all twice and sum their gradients as torch's DDP does, for what the gradients are after
a backward must be the same (but for the few numbers of the router).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from benchmarks.turns import Contender, Turns, median_ratio, take_turns  # noqa: E402
from megazero.allocator import keep_freed_memory  # noqa: E402
from megazero.config import ModelConfig  # noqa: E402
from megazero.config_moe import MoEConfig  # noqa: E402
from megazero.data.batch import MicroBatch  # noqa: E402
from megazero.moe.layer import MoELayer, MoESetup  # noqa: E402
from megazero.parallel.groups import mesh_on_paper, open_mesh  # noqa: E402
from megazero.parallel.params import collect, initialize  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.pipe.output import hidden_of  # noqa: E402
from megazero.products import products_of  # noqa: E402

OURS, DENSE, LOOP = "megazero", "dense", "plain loop"
MIXTRALS = {"Mixtral, eager": "eager", "Mixtral, grouped_mm": "grouped_mm"}
SEQUENCES = 4
DIRECTIONS = 8          # in which outputs are compared
STD = 0.05

Layer = Callable[[Tensor], Tensor]      # [seq, batch, hidden] -> the same


class Dense(nn.Module):
    """A gated feed-forward as wide as the experts of one token together."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Loop(nn.Module):
    """Experts one after the other, each on the tokens that chose it: how it is first written."""

    def __init__(self, hidden: int, ffn: int, experts: int, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Dense(hidden, ffn) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.topk)
        weights = weights / weights.sum(-1, keepdim=True) if self.topk > 1 else weights
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            y = y.index_add(0, token, expert(tokens[token]) * weights[token, place].unsqueeze(-1))
        return y.view_as(x)


def our_layer(args: argparse.Namespace, topk: int, degree: int) -> MoELayer:
    """The layer as a block of a model has it, with its router's statistics and a balancing loss."""
    topology = Topology(data=degree, expert=degree)
    cpu = torch.device("cpu")
    products = products_of(cpu)
    mesh = open_mesh(topology, cpu, products) if degree > 1 else mesh_on_paper(topology, 0, cpu, products)
    model = ModelConfig(
        num_layers=1, hidden_size=args.hidden, num_attention_heads=1, seq_length=args.tokens, activation="swiglu",
        ffn_hidden_size=args.ffn, disable_bias_linear=True, init_method_std=STD,
    )
    moe = MoEConfig(
        num_experts=(args.experts,), moe_router_topk=topk, moe_router_pre_softmax=topk == 1, moe_aux_loss_coeff=(0.01,)
    )
    layer = MoELayer(MoESetup(model, moe, 0, args.experts), mesh)
    initialize(collect([("layer", layer)]), topology, mesh.rank, seed=1)
    return layer


def whole_weights(args: argparse.Namespace, topk: int) -> dict[str, Tensor]:
    """Those of our layer on one rank, by name, for the peers."""
    return {name: value.detach() for name, value in our_layer(args, topk, 1).named_parameters()}


def filled(expert: Dense, weights: dict[str, Tensor], number: int) -> Dense:
    expert.gate_up.weight.data.copy_(weights["experts.up"][number].flatten(0, 1))
    expert.down.weight.data.copy_(weights["experts.down"][number])
    return expert


def loop_layer(args: argparse.Namespace, topk: int) -> Loop:
    weights, loop = whole_weights(args, topk), Loop(args.hidden, args.ffn, args.experts, topk)
    loop.router.weight.data.copy_(weights["router.weight"])
    for number, expert in enumerate(loop.experts):
        filled(expert, weights, number)
    return loop


def mixtral_layer(args: argparse.Namespace, topk: int, way: str) -> nn.Module:
    """transformers' block; it divides the weights by their sum, so for one choice they are all 1."""
    mixtral = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=args.hidden, intermediate_size=args.ffn, num_local_experts=args.experts, num_experts_per_tok=topk,
        experts_implementation=way,
    )
    block, weights = mixtral.MixtralSparseMoeBlock(config), whole_weights(args, topk)
    block.gate.weight.data.copy_(weights["router.weight"])
    block.experts.gate_up_proj.data.copy_(weights["experts.up"].flatten(1, 2))
    block.experts.down_proj.data.copy_(weights["experts.down"])
    return block


def our_run(layer: MoELayer) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """x -> the output and the layer's own losses."""
    batch = MicroBatch(torch.empty(0, 0, dtype=torch.int64), draw=(1, 1, 1), auxiliary=1.0)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        out = layer(x, batch)
        return hidden_of(out), out.loss

    return run


def peer(name: str, args: argparse.Namespace) -> Layer:
    if name == DENSE:
        return Dense(args.hidden, args.choices * args.ffn)
    if name == LOOP:
        return loop_layer(args, args.choices)
    return mixtral_layer(args, args.choices, MIXTRALS[name])


def step(run: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, grad: Tensor) -> Tensor:
    """Forward and backward; the output."""
    x = x.clone().requires_grad_()
    y, *losses = run(x)
    torch.autograd.backward([y, *losses], [grad, *(None for _ in losses)])
    return y.detach()


def contender(name: str, rank: int, args: argparse.Namespace) -> Contender:
    """What runs in the processes of that name; its numbers are what random directions see of the first output."""
    generator = torch.Generator().manual_seed(rank)
    shape = (args.tokens // args.processes // SEQUENCES, SEQUENCES, args.hidden)
    x, grad = torch.randn(2, *shape, generator=generator).unbind()
    if name == OURS:
        keep_freed_memory()
        run = our_run(our_layer(args, args.choices, args.processes))
    else:
        layer = peer(name, args)
        if args.processes > 1:
            layer = DistributedDataParallel(layer, gradient_as_bucket_view=True)

        def run(x: Tensor) -> tuple[Tensor, ...]:
            return (layer(x),)

    directions = torch.randn(x.numel(), DIRECTIONS, generator=generator)
    return Contender(lambda: step(run, x, grad), (step(run, x, grad).flatten() @ directions).tolist())


def check_equal(found: dict[str, Turns], choices: int) -> None:
    """All but the dense one compute the same layer; those that weigh a single choice by 1 are told apart by that."""
    for name, turns in found.items():
        alike = name != DENSE and not (choices == 1 and name in MIXTRALS)
        own, loop = torch.tensor(turns.numbers), torch.tensor(found[LOOP].numbers)
        off = ((own - loop).norm() / loop.norm()).item()
        assert not alike or off < 1e-4, f"{name} computes another layer: {off:.1e}"


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each degree, number of choices and contender: median milliseconds, and medians of the round-by-round
    ratios over the dense feed-forward and over the fastest peer."""
    rows = []
    peers = [LOOP, *(MIXTRALS if importlib.util.find_spec("transformers") is not None else ())]
    for degree, choices in ((degree, choices) for degree in args.degree for choices in args.topk):
        its = argparse.Namespace(**vars(args), processes=degree, choices=choices)
        found = take_turns(
            contender, [OURS, DENSE, *peers], its, ranks=degree, threads=args.threads, rounds=args.rounds
        )
        check_equal(found, choices)
        fastest = min((found[name] for name in peers), key=lambda turns: turns.median)
        for name, turns in found.items():
            rows.append({
                "degree": degree, "topk": choices, "layer": name, "milliseconds": 1e3 * turns.median,
                "over_dense": median_ratio(turns.seconds, found[DENSE].seconds),
                "over_the_fastest_peer": median_ratio(turns.seconds, fastest.seconds),
                "over_the_loop": median_ratio(turns.seconds, found[LOOP].seconds),
                "processor_over_the_loop": median_ratio(turns.worked, found[LOOP].worked),
            })  # fmt: skip
    return rows


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hidden", type=int, default=256)
    add("--ffn", type=int, default=1024)
    add("--experts", type=int, default=8)
    add("--tokens", type=int, default=2048, help="of all processes together; default: 2048")
    add("--topk", type=int, nargs="+", default=[1, 2])
    add("--degree", type=int, nargs="+", default=[1, 2], help="processes that share the experts; default: 1 2")
    add("--threads", type=int, default=1, help="of each process; default: 1")
    add("--rounds", type=int, default=15, help="of which medians are taken; default: 15")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rows = measure(args)
    if importlib.util.find_spec("transformers") is None:
        print("Mixtral is left out, for the package transformers is not installed")
    heads = f"{'ms':>8}{'/ dense':>9}{'/ fastest peer':>16}{'/ loop':>8}{'processor':>11}"
    print(f"{'degree':>6}{'top':>5}  {'':22}{heads}")
    for row in rows:
        degree, topk, name, *figures = row.values()
        ms, dense, fastest, loop, processor = figures
        print(f"{degree:6}{topk:5}  {name:22}{ms:8.1f}{dense:9.3f}{fastest:16.3f}{loop:8.3f}{processor:11.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
