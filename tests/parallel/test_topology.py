"""Topology: every axis cuts the world into equal groups, in both views, and finding them is plain arithmetic."""

import time

import pytest

from megazero.parallel.groups import LIVE_AXES, mesh_on_paper, open_mesh
from megazero.parallel.topology import AXES, Coord, Topology


def topologies():
    """All small worlds, with every expert degree that fits, in both expert views."""
    for pipeline in (1, 2, 4):
        for data in (1, 2, 3, 4):
            for tensor in (1, 2, 4):
                for expert in range(1, data + 1):
                    if data % expert == 0:
                        yield Topology(pipeline, data, tensor, expert)
                for expert in range(1, data * tensor + 1):
                    if data * tensor % expert == 0:
                        yield Topology(pipeline, data, tensor, expert, expert_tensor=1)


def axes_of(topology):
    """All axes, and those of layers that cut their experts in fewer parts."""
    few = [n for n in range(1, topology.expert) if topology.expert % n == 0]
    return (*AXES, *(f"{axis}.{n}" for n in few for axis in ("expert", "expert_data")))


def test_every_axis_partitions_the_world():
    for topology in topologies():
        for axis in axes_of(topology):
            groups = topology.groups(axis)
            assert sorted(rank for group in groups for rank in group) == list(range(topology.world)), (topology, axis)
            alone = [group for group in groups if 0 < topology.coord(group[0]).pipeline < topology.pipeline - 1]
            if axis in ("ends", "tied_data"):
                assert all(len(group) == 1 for group in alone), "a middle stage shares nothing with the ends"
                groups = [group for group in groups if group not in alone]
            assert {len(group) for group in groups} == {topology.size(axis)}, (topology, axis)


def test_rank_and_coord_are_inverse_and_tensor_ranks_are_neighbours():
    for topology in topologies():
        for rank in range(topology.world):
            coord = topology.coord(rank)
            assert topology.rank(coord) == rank
            assert coord == tuple(topology.index(axis, rank) for axis in Coord._fields)
        assert all(group[-1] - group[0] == topology.tensor - 1 for group in topology.groups("tensor"))


def test_index_is_the_place_in_the_group():
    for topology in topologies():
        for axis in axes_of(topology):
            for group in topology.groups(axis):
                assert [topology.index(axis, rank) for rank in group] == list(range(len(group))), (topology, axis)
                assert topology.ranks_along(axis, group[-1]) == group


def test_both_views_cover_the_ranks_of_a_stage():
    for topology in topologies():
        stage = topology.data * topology.tensor
        assert topology.size("stage") == stage
        assert topology.size("expert") * topology.size("expert_data") * topology.size("expert_tensor") == stage
        for rank in range(0, topology.world, stage):
            places = {
                tuple(topology.index(axis, r) for axis in ("expert_data", "expert", "expert_tensor"))
                for r in topology.ranks_along("stage", rank)
            }
            assert len(places) == stage, "the three expert axes are coordinates of the stage"


def test_experts_are_cut_over_data_or_over_data_and_tensor():
    inside = Topology(pipeline=1, data=4, tensor=2, expert=2)
    assert inside.groups("expert") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert inside.groups("expert_data") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert inside.groups("expert_tensor") == inside.groups("tensor")
    across = Topology(pipeline=1, data=4, tensor=2, expert=4, expert_tensor=1)
    assert across.groups("expert") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert across.groups("expert_data") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert across.groups("expert_tensor") == [(rank,) for rank in range(8)]


def test_a_layer_with_few_experts_has_an_axis_of_its_own_degree():
    """Its experts lie side by side as those of any layer; the ranks that are left over hold replicas."""
    topology = Topology(pipeline=1, data=4, tensor=2, expert=4, degrees=(2,))
    assert [topology.expert_axis(n) for n in (4, 2)] == ["expert", "expert.2"]
    assert topology.groups("expert.2") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert topology.groups("expert_data.2") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    across = Topology(data=2, tensor=4, expert=8, expert_tensor=1)
    assert across.groups("expert.2") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert across.groups("expert_data.2") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_tied_data_joins_the_first_and_the_last_stage():
    topology = Topology(pipeline=3, data=2, tensor=2)
    assert topology.ranks_along("ends", 1) == (1, 9)
    assert topology.ranks_along("tied_data", 1) == (1, 3, 9, 11)
    assert topology.ranks_along("tied_data", 5) == (5,)
    assert Topology(pipeline=1, data=2, tensor=2).ranks_along("tied_data", 1) == (1, 3)


def test_a_world_of_98304_ranks_is_plain_arithmetic():
    """Counting would take minutes here; the bound leaves room for a busy machine (seen: 0.2 s)."""
    topology = Topology(pipeline=12, data=1024, tensor=8, expert=64)
    assert topology.world == 98_304
    start = time.perf_counter()
    for rank in range(0, topology.world, 97):
        assert topology.rank(topology.coord(rank)) == rank
        for axis in AXES:
            index = topology.index(axis, rank)
            if topology.size(axis) <= 64:
                assert topology.ranks_along(axis, rank)[index] == rank
    assert len(topology.ranks_along("tied_data", 5)) == 2048
    assert mesh_on_paper(topology, 98_303).data.index == 1023
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline": 0}, "pipeline axis has size 0"),
        ({"data": -1}, "data axis has size -1"),
        ({"tensor": 0}, "tensor axis has size 0"),
        ({"expert": 0}, "expert axis has size 0"),
        ({"data": 4, "expert": 3}, "expert .3. must divide the 4 ranks"),
        ({"data": 2, "tensor": 2, "expert": 4}, "expert .4. must divide the 2 ranks"),
        ({"data": 2, "tensor": 4, "expert": 2, "expert_tensor": 2}, "expert_tensor .2. must be 1 or the tensor size"),
        ({"data": 4, "expert": 4, "degrees": (3,)}, "cannot cut its experts 3 ways where expert is 4"),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Topology(**sizes)


def test_the_mesh_on_paper_is_the_topology_seen_by_one_rank():
    topology = Topology(pipeline=3, data=2, tensor=2, expert=2, degrees=(1,))
    for rank in range(topology.world):
        mesh = mesh_on_paper(topology, rank)
        assert mesh.stage == topology.coord(rank).pipeline
        for axis in (*LIVE_AXES, "expert.1", "expert_data.1"):
            group = mesh.along(axis)
            assert (group.axis, group.ranks) == (axis, topology.ranks_along(axis, rank))
            assert group.ranks[group.index] == rank and group.size == len(group.ranks)
    with pytest.raises(ValueError, match="rank 12 is not one of the 12 ranks"):
        mesh_on_paper(topology, 12)
    assert open_mesh(Topology()) == mesh_on_paper(Topology(), 0), "one rank needs no rendezvous"
