"""Collectives: what they return, what their backward does, and how one rank's error becomes everyone's."""

import functools

import pytest
import torch
import torch.distributed as dist

from megazero.parallel.collectives import (
    AgreedError,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather_objects,
    gather_sequence,
    reduce_scatter,
    scatter_sequence,
    start_all_gather,
    start_reduce_scatter,
    together,
)
from megazero.parallel.groups import Group, open_mesh
from megazero.parallel.topology import Topology
from tests.harness import RankFailed, on_ranks

ALONE = Group("tensor")


def value(rank, *shape, dtype=torch.float64):
    """Small whole numbers, other ones on each rank: sums are exact in every dtype."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_plain(n):
    """Every collective against the same arithmetic on the values of all ranks."""
    group = open_mesh(Topology(tensor=n)).tensor
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        every = [value(rank, 2 * n, 3, dtype=dtype) for rank in range(n)]
        mine, part = every[group.index], slice(2 * group.index, 2 * group.index + 2)
        stacked = torch.stack(every)
        assert torch.equal(all_reduce(mine.clone(), group), stacked.sum(0).to(dtype))
        assert torch.equal(all_reduce(mine.clone(), group, "max"), stacked.amax(0))
        assert torch.equal(all_reduce(mine.clone(), group, "min"), stacked.amin(0))
        assert torch.equal(all_gather(mine, group), torch.cat(every))
        assert torch.equal(all_gather(mine.T, group), torch.cat([x.T for x in every])), "not contiguous"
        assert torch.equal(reduce_scatter(mine, group), stacked.sum(0).to(dtype)[part])
        pending = [start_reduce_scatter(mine, group), start_all_gather(mine, group)]
        assert torch.equal(pending[1].wait(), torch.cat(every)), "waited for in another order than started"
        assert torch.equal(pending[0].wait(), stacked.sum(0).to(dtype)[part])
        into = torch.cat([mine] * n)
        start_all_gather(into[part.start * n : part.stop * n].copy_(mine), group, out=into).wait()
        assert torch.equal(into, torch.cat(every)), "in place, as the optimizer gathers parameters"
        for source in range(n):
            assert torch.equal(broadcast(mine.clone(), group, source), every[source])
    rough = [torch.randn(2 * n, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]
    want, mine = functools.reduce(torch.add, rough)[part], rough[group.index]
    assert torch.equal(reduce_scatter(mine, group), want), "rounded in the order of the ranks, whoever owns it"
    assert torch.equal(start_reduce_scatter(mine, group, mine[part]).wait(), want), "into its own place"
    rank = group.ranks[group.index]
    assert gather_objects({"rank": rank}, group) == [{"rank": r} for r in group.ranks]
    barrier(group)


def check_pairs(n):
    """gather_sequence and scatter_sequence, forward and backward, against autograd over all ranks' values at once."""
    group = open_mesh(Topology(tensor=n)).tensor
    at = group.index
    shards = [value(rank, 2, 3).requires_grad_() for rank in range(n)]
    upstream = [value(10 + rank, 2 * n, 3) for rank in range(n)]
    torch.autograd.backward([torch.cat(shards)] * n, upstream)         # each rank has its own use of the whole
    mine = shards[at].detach().requires_grad_()
    y = gather_sequence(mine, group)
    y.backward(upstream[at])
    assert torch.equal(y, torch.cat(shards)) and torch.equal(mine.grad, shards[at].grad)

    partial = [value(20 + rank, 2 * n, 3).requires_grad_() for rank in range(n)]
    upstream = [value(30 + rank, 2, 3) for rank in range(n)]
    torch.stack(partial).sum(0).backward(torch.cat(upstream))
    mine = partial[at].detach().requires_grad_()
    y = scatter_sequence(mine, group)
    y.backward(upstream[at])
    assert torch.equal(y, torch.stack(partial).sum(0)[2 * at : 2 * at + 2])
    assert torch.equal(mine.grad, partial[at].grad)


def check_world(n):
    check_plain(n)
    check_pairs(n)


@pytest.mark.parametrize("n", [2, 4])
def test_collectives_equal_one_ranks_arithmetic(n):
    on_ranks(n, check_world, n)


def test_a_group_of_one_returns_its_argument():
    x = torch.ones(3, requires_grad=True)
    for function in (all_reduce, all_gather, reduce_scatter, broadcast, gather_sequence, scatter_sequence):
        assert function(x, ALONE) is x
    out = torch.zeros(3)
    assert start_all_gather(x.detach(), ALONE, out=out).wait() is out and (out == 1).all()
    assert gather_objects("word", ALONE) == ["word"]
    barrier(ALONE)


def sums_along_each_axis():
    """On 4 ranks, tensor 2 x data 2: who is in which group."""
    mesh = open_mesh(Topology(data=2, tensor=2))
    rank = torch.tensor(10.0**mesh.rank)
    return [all_reduce(rank.clone(), mesh.along(axis)).item() for axis in ("tensor", "data", "pipeline", "world")]


def test_each_axis_communicates_over_its_own_ranks():
    assert on_ranks(4, sums_along_each_axis) == [
        [11, 101, 1, 1111], [11, 1010, 10, 1111], [1100, 101, 100, 1111], [1100, 1010, 1000, 1111]
    ]


def wrong_world():
    open_mesh(Topology(data=3))


def test_a_wrong_number_of_ranks_is_refused():
    with pytest.raises(RankFailed, match="needs 3 ranks, 2 were started"):
        on_ranks(2, wrong_world)


def agree(failing):
    """What each rank met when those of `failing` raise, and that they still agree afterwards."""
    group = open_mesh(Topology(data=dist.get_world_size())).world

    def action():
        if group.index in failing:
            raise FileNotFoundError(f"no file on rank {group.index}") if group.index % 2 else ValueError("bad size")
        return group.index

    try:
        return together(group, action)
    except AgreedError as error:
        assert all_reduce(torch.ones(1), group).item() == group.size
        return str(error)


def test_an_error_on_one_rank_is_raised_on_all_and_names_it():
    assert on_ranks(4, functools.partial(agree, ())) == [[0, 1, 2, 3]] * 4
    assert on_ranks(4, functools.partial(agree, (3,))) == ["no file on rank 3 (rank 3 of 4)"] * 4
    assert on_ranks(4, functools.partial(agree, (1, 2))) == ["no file on rank 1 (rank 1 of 4)"] * 4


def test_alone_an_agreed_error_says_what_was_raised():
    assert together(ALONE, lambda: 5) == [5]
    with pytest.raises(AgreedError, match="^bad size$"):
        together(ALONE, functools.partial(_raise, ValueError("bad size")))
    with pytest.raises(ZeroDivisionError):                              # a fault of our own is not dressed up
        together(ALONE, functools.partial(_raise, ZeroDivisionError()))


def _raise(error):
    raise error
