"""Rows find their experts and come home, whoever holds them: against a plain loop, forward and backward, in fp64."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megazero.config import ModelConfig
from megazero.moe.activations import TWO_WAY
from megazero.moe.dispatch import Dispatch, Ranks, plan_journey
from megazero.moe.experts import BLOCK, Experts, Weights, feed_forward, grouped_mm
from megazero.parallel.groups import mesh_on_paper, open_mesh
from megazero.parallel.params import collect, initialize
from megazero.parallel.shard import ShardSpec
from megazero.parallel.topology import Topology
from megazero.parallel.weights import WeightQueue
from tests.harness import on_ranks

HIDDEN, FFN, EXPERTS, TOKENS, STD = 8, 12, 8, 6, 0.5
MODEL = ModelConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, seq_length=4, init_method_std=STD)
GATED = ModelConfig(
    num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, seq_length=4, init_method_std=STD, activation="swiglu",
    ffn_hidden_size=FFN, disable_bias_linear=True,
)


def choices(kind: str, tokens: int, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen, kept, weights) [tokens, topk] of all tokens of the world; a dropped choice weighs nothing."""
    g = torch.Generator().manual_seed(tokens + topk)
    scores = torch.rand(tokens, EXPERTS, generator=g, dtype=torch.float64)
    if kind == "one":                              # expert 0 takes every first choice, expert 1 every second one, ...
        scores = torch.arange(EXPERTS, 0, -1, dtype=torch.float64).expand(tokens, -1)
    weights, chosen = scores.topk(topk)
    kept = torch.ones_like(chosen, dtype=torch.bool)
    if kind == "dropped":
        kept = torch.rand(tokens, topk, generator=g) < 0.6
    if kind == "nothing":
        kept = torch.zeros_like(kept)
    return chosen, kept, weights * kept


def made(mesh, axis: str, model: ModelConfig) -> Experts:
    experts = Experts(model, mesh, experts=EXPERTS, ffn=FFN, axis=axis, dtype=torch.float64)
    infos = collect([("experts", experts)])
    initialize(infos, mesh.topology, mesh.rank, seed=1)
    with torch.no_grad():
        for info in infos:
            if "bias" in info.name:                # not zero, and each expert has its own
                whole = torch.arange(info.spec.numel, dtype=torch.float64).view(info.spec.shape) / 10
                info.tensor.copy_(whole[info.spec.box(mesh.topology, mesh.rank).slices()])
    return experts


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(2, rows, HIDDEN, generator=g, dtype=torch.float64).unbind()


def moved(topology: Topology, degree: int, kind: str, topk: int, model: ModelConfig) -> dict:
    """One rank's result: its tokens' outputs and gradients, and its experts' gradients with their boxes. Each data
    and each tensor rank has tokens of its own."""
    mesh = mesh_on_paper(topology, 0) if topology.world == 1 else open_mesh(topology)
    ranks = Ranks(mesh.along(topology.expert_axis(degree)), mesh.expert_tensor)
    experts = made(mesh, topology.expert_axis(degree), model)
    shares = mesh.data.size * mesh.tensor.size
    share = mesh.data.index * mesh.tensor.size + mesh.tensor.index
    mine = slice(share * TOKENS * 8 // shares, (share + 1) * TOKENS * 8 // shares)
    x, out_grad = (t[mine].clone() for t in inputs(TOKENS * 8))
    chosen, kept, weights = (t[mine].clone() for t in choices(kind, TOKENS * 8, topk))
    x.requires_grad_()
    weights.requires_grad_()
    dispatch = Dispatch(plan_journey(chosen, kept, EXPERTS, ranks), ranks)
    y = dispatch.apply(dispatch.send(x), experts, weights)
    y.backward(out_grad)
    box = {
        info.name: (info.spec.box(topology, mesh.rank), info.spec, info.tensor.grad) for info in
        collect([("experts", experts)])
    }
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "experts": box}


@functools.cache
def by_hand(kind: str, topk: int, model: ModelConfig) -> dict:
    """The same by a loop over tokens and their choices."""
    mesh = mesh_on_paper(Topology(), 0)
    experts = made(mesh, "expert", model)
    x, out_grad = inputs(TOKENS * 8)
    chosen, kept, weights = choices(kind, TOKENS * 8, topk)
    x.requires_grad_()
    weights.requires_grad_()
    y = torch.zeros_like(x)
    for token in range(len(x)):
        for number in range(topk):
            e = chosen[token, number]
            inner = experts.up[e].flatten(0, -2) @ x[token]
            inner = experts.activation.forward(inner if experts.up_bias is None else inner + experts.up_bias[e])
            out = experts.down[e] @ inner
            out = out if experts.down_bias is None else out + experts.down_bias[e]
            weighted = out * weights[token, number] * kept[token, number]
            y = y.index_add(0, torch.tensor([token]), weighted.unsqueeze(0))
    y.backward(out_grad)
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, "experts": experts}


LAYOUTS = [
    (Topology(), 1),
    (Topology(data=2, expert=2), 2),
    (Topology(data=4, expert=4, degrees=(2,)), 2),
    (Topology(tensor=2, data=2, expert=2), 2),
    (Topology(tensor=2, data=2, expert=4, expert_tensor=1), 4),
]


@pytest.mark.parametrize(("topology", "degree"), LAYOUTS, ids=lambda v: str(v).replace("Topology", ""))
def test_rows_meet_their_experts_in_every_layout(topology: Topology, degree: int) -> None:
    """C105: also where one expert takes all rows and some ranks none, and where every choice is dropped."""
    cases = [("free", 1, MODEL), ("free", 4, GATED), ("dropped", 2, MODEL), ("one", 1, GATED), ("one", 2, MODEL),
             ("nothing", 1, MODEL)]
    results = on_ranks(topology.world, functools.partial(every, topology, degree, cases))
    for number, case in enumerate(cases):
        want, got = by_hand(*case), [rank[number] for rank in results]
        for key in ("y", "x", "weights"):
            whole = torch.cat([rank[key] for rank in got])
            torch.testing.assert_close(whole, want[key], rtol=0, atol=1e-12)
        check_expert_gradients(topology, got, want["experts"])


def every(topology: Topology, degree: int, cases: list) -> list[dict]:
    return [moved(topology, degree, *case) for case in cases]


def check_expert_gradients(topology: Topology, got: list[dict], experts: Experts) -> None:
    """Summed over replicas and partial sums, each expert has the gradient of the loop."""
    for info in collect([("experts", experts)]):
        whole = torch.zeros(info.spec.shape, dtype=torch.float64)
        for rank in range(topology.world):
            box, spec, grad = got[rank]["experts"][info.name]
            assert isinstance(spec, ShardSpec)
            if grad is not None:
                whole[box.slices()] += grad
        want = torch.zeros_like(whole) if info.tensor.grad is None else info.tensor.grad
        torch.testing.assert_close(whole, want, rtol=0, atol=1e-12)


def test_the_grouped_product_of_torch_is_the_one_by_hand() -> None:
    """What a GPU runs, as a CPU runs it too; experts without rows in every place."""
    g = torch.Generator().manual_seed(0)
    matrices, bias = torch.randn(4, 16, 24, generator=g), torch.randn(4, 24, generator=g)
    for counts in ([3, 0, 4, 1], [0, 8, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]):
        rows = torch.randn(sum(counts), 16, generator=g)
        for own in (None, bias):
            ours, theirs = (grouped_mm(rows, matrices, counts, bias=own, grouped=grouped) for grouped in (False, True))
            torch.testing.assert_close(ours, theirs)


def gradients(activation: str, bias: bool, counts: list[int], *, blocked: bool, deferred: bool) -> list[Tensor]:
    """Output of experts and all gradients, which two backwards have added up."""
    g = torch.Generator().manual_seed(0)
    gated = activation == "swiglu"
    shapes = [(4, 2, FFN, HIDDEN) if gated else (4, FFN, HIDDEN), (4, 2, FFN) if gated else (4, FFN), (4, HIDDEN, FFN),
              (4, HIDDEN)]
    up, up_bias, down, down_bias = (
        torch.nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64)) for shape in shapes
    )
    weights = Weights(up, up_bias if bias else None, down, down_bias if bias else None)
    rows = torch.randn(sum(counts), HIDDEN, generator=g, dtype=torch.float64).requires_grad_()
    queue = WeightQueue()
    for turn in range(2):
        y = feed_forward(rows, weights, TWO_WAY[activation], counts, queue, blocked=blocked)
        with queue.deferring() if deferred else nullcontext([]) as work:
            (y * torch.arange(1, HIDDEN + 1)).sum().backward()
        assert turn or (up.grad is None) == deferred
        for late in work:
            late()
    return [y.detach(), rows.grad, *(p.grad for p in weights if p is not None)]


@pytest.mark.parametrize("activation", TWO_WAY)
def test_experts_block_by_block_are_experts_layer_by_layer(activation: str) -> None:
    """What a CPU runs and what a GPU runs, at once and deferred; an expert of more rows than a block has, and one
    without any. The layer-by-layer way has autograd's own derivative of the activation."""
    for bias, counts in ((True, [3, 0, 2 * BLOCK + 5, 1]), (False, [0, 7, 0, 2])):
        want = gradients(activation, bias, counts, blocked=False, deferred=False)
        for deferred in (False, True):
            found = gradients(activation, bias, counts, blocked=True, deferred=deferred)
            for got, wanted in zip(found, want, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
