"""Tensor-parallel layers against plain torch in fp64, forward and gradients, on tensor 1, 2 and 4."""

import functools

import pytest
import torch
import torch.nn.functional as F

from megazero.parallel import layers
from megazero.parallel.collectives import all_reduce
from megazero.parallel.groups import mesh_on_paper, open_mesh
from megazero.parallel.layers import ColumnParallelLinear, Norm, RowParallelLinear, VocabParallelEmbedding
from megazero.parallel.params import Initial, collect, initialize
from megazero.parallel.shard import ShardSpec
from megazero.parallel.topology import Topology
from tests.harness import RankFailed, on_ranks

SEQ, BATCH, HIDDEN = 8, 3, 12
WIDE = Initial(1.0)
options = {"dtype": torch.float64}


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Case:
    """One layer on this rank, and its parameters whole, from the same initial values."""

    def __init__(self, build, n):
        topology = Topology(tensor=n)
        self.mesh = open_mesh(topology)
        self.n, self.at = n, self.mesh.tensor.index
        self.layer = build(self.mesh)
        self.infos = collect([("layer", self.layer)])
        initialize(self.infos, topology, self.mesh.rank, seed=3)
        alone = collect([("layer", build(mesh_on_paper(Topology(), 0)))])
        initialize(alone, Topology(), 0, seed=3)
        for seed, (info, one) in enumerate(zip(self.infos, alone, strict=True)):
            if info.initial.std is None:                                # biases and norms away from 0 and 1
                one.tensor.data += numbers(100 + seed, *one.tensor.shape)
                self._shard(info).copy_(one.tensor.data[info.spec.box(topology, self.mesh.rank).slices()])
        self.whole = {info.name: info.tensor for info in alone}

    def _shard(self, info):
        """The real elements of this rank's shard."""
        box = info.spec.box(self.mesh.topology, self.mesh.rank)
        return info.tensor.data.flatten()[: box.numel].view(box.shape)

    def part(self, x, dim=0):
        """This rank's part of a whole tensor, a leaf."""
        return x.chunk(self.n, dim)[self.at].detach().clone().requires_grad_(x.is_floating_point())

    def check_gradients(self):
        """Each shard's gradient is its part of the whole one, summed over tensor where the spec says so."""
        for info in self.infos:
            box = info.spec.box(self.mesh.topology, self.mesh.rank)
            grad = info.tensor.grad.clone()
            for axis in info.spec.grad_sum:
                all_reduce(grad, self.mesh.along(axis))
            flat = grad.flatten()
            close(flat[: box.numel].view(box.shape), self.whole[info.name].grad[box.slices()])
            assert not flat[box.numel :].any(), "padding rows get no gradient"


def check_column(n, out, cut, bias):
    """x [seq / n, batch, hidden] -> [seq, batch, out / n]."""
    case = Case(lambda mesh: ColumnParallelLinear(HIDDEN, out, mesh, cut=cut, initial=WIDE, bias=bias, **options), n)
    x, upstream = numbers(1, SEQ, BATCH, HIDDEN).requires_grad_(), numbers(2, SEQ, BATCH, *out)
    weight = case.whole["layer.weight"]
    y = F.linear(x, weight.flatten(0, -2), case.whole["layer.bias"].flatten() if bias else None)
    y.unflatten(-1, out).backward(upstream)
    mine = case.part(x)
    found = case.layer(mine)
    close(found, case.part(y.unflatten(-1, out), 2 + cut).flatten(2))
    found.backward(case.part(upstream, 2 + cut).detach().flatten(2))
    close(mine.grad, case.part(x.grad))
    case.check_gradients()


def check_row(n, bias, batch_first):
    """x [seq, batch, wide / n] -> [seq / n, batch, hidden]; also batch-first in memory, as attention leaves it."""
    wide = 2 * HIDDEN
    case = Case(lambda mesh: RowParallelLinear(wide, HIDDEN, mesh, initial=WIDE, bias=bias, **options), n)
    x, upstream = numbers(1, SEQ, BATCH, wide).requires_grad_(), numbers(2, SEQ, BATCH, HIDDEN)
    y = F.linear(x, case.whole["layer.weight"], case.whole["layer.bias"] if bias else None)
    y.backward(upstream)
    mine = case.part(x, 2).detach().contiguous()
    leaf = (mine.transpose(0, 1).contiguous() if batch_first else mine).requires_grad_()
    found = case.layer(leaf.transpose(0, 1) if batch_first else leaf)
    close(found, case.part(y))
    found.backward(case.part(upstream).detach())
    close(leaf.grad.transpose(0, 1) if batch_first else leaf.grad, case.part(x.grad, 2))
    case.check_gradients()


def check_embedding(n, padded):
    """ids [seq, batch] -> [seq / n, batch, hidden], every id of the vocabulary among them."""
    table = ShardSpec((97, HIDDEN), ("tensor", None), padded=padded)
    case = Case(lambda mesh: VocabParallelEmbedding(_for(table, mesh), mesh, initial=WIDE, **options), n)
    tokens = torch.randperm(104, generator=torch.Generator().manual_seed(0)).remainder(97).view(8, 13)
    upstream = numbers(2, 8, 13, HIDDEN)
    y = F.embedding(tokens, case.whole["layer.weight"])
    y.backward(upstream)
    found = case.layer(tokens)
    close(found, case.part(y))
    found.backward(case.part(upstream).detach())
    case.check_gradients()


def _for(table, mesh):
    """The same table without padding on one rank."""
    return table if mesh.tensor.size > 1 else ShardSpec(table.shape, table.cut)


def check_norm(n, kind):
    case = Case(lambda mesh: Norm(HIDDEN, mesh, kind=kind, epsilon=1e-3, impl="auto", **options), n)
    x, upstream = numbers(1, SEQ, BATCH, HIDDEN).requires_grad_(), numbers(2, SEQ, BATCH, HIDDEN)
    weight, bias = case.whole["layer.weight"], case.whole.get("layer.bias")
    assert (bias is None) == (kind == "RMSNorm")
    centred = x if bias is None else x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    y = y if bias is None else y + bias
    y.backward(upstream)
    mine = case.part(x)
    found = case.layer(mine)
    close(found, case.part(y))
    found.backward(case.part(upstream).detach())
    close(mine.grad, case.part(x.grad))
    case.check_gradients()


def check_layers(n):
    for bias in (True, False):
        check_column(n, (2 * HIDDEN,), 0, bias)
        check_column(n, (4, 3, 2), 0, bias)                             # fused qkv: whole groups
        check_column(n, (2, 8), 1, bias)                                # gate and up: the ffn dim
        for batch_first in (True, False):
            check_row(n, bias, batch_first)
    for padded in (100, 256):                                           # 256: two of four ranks hold padding alone
        check_embedding(n, padded)
    for kind in ("LayerNorm", "RMSNorm"):
        check_norm(n, kind)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_layers_equal_plain_torch(n):
    """Also C073: norms and row biases see a part of the sequence, and their gradients are summed over tensor."""
    on_ranks(n, check_layers, n)


def check_with_fault(check, fault):
    """A check of this file with one thing spoiled in the product."""
    if fault == "bias added before the sum":
        whole = RowParallelLinear.forward
        RowParallelLinear.forward = lambda self, x: whole(self, x) + self.bias
    elif fault == "backward does not sum over the group":
        layers.start_reduce_scatter = lambda x, group: layers.start_all_gather(
            x.chunk(group.size)[group.index].contiguous(), mesh_on_paper(Topology(), 0).tensor
        )
    elif fault == "the sum over tensor is forgotten":
        globals()["all_reduce"] = lambda x, group: x
    check(2)


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (functools.partial(check_row, bias=True, batch_first=False), "bias added before the sum"),
        (functools.partial(check_column, out=(4, 3, 2), cut=0, bias=True), "backward does not sum over the group"),
        (functools.partial(check_norm, kind="LayerNorm"), "the sum over tensor is forgotten"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_planted_fault_is_seen(check, fault):
    """The tests above can fail."""
    with pytest.raises(RankFailed, match="Tensor-likes are not close"):
        on_ranks(2, check_with_fault, check, fault)
