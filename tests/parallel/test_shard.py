"""ShardSpec and boxes: each element of a parameter is owned exactly once in every layout, and any layout finds it."""

import itertools
from math import gcd, prod

import numpy as np
import pytest

from megazero.parallel.shard import Box, ShardSpec, flat_to_boxes, is_cut_by_tensor, is_recorded, owned_boxes
from megazero.parallel.topology import Topology

TOPOLOGIES = [
    Topology(),
    Topology(pipeline=2, data=4, tensor=2, expert=2),
    Topology(pipeline=1, data=8, tensor=1, expert=4),
    Topology(pipeline=4, data=2, tensor=2),
    Topology(pipeline=3, data=3, tensor=4, expert=3),
    Topology(pipeline=2, data=2, tensor=4, expert=8, expert_tensor=1),
]


def spec_of(name, topology):
    """The specs that a model declares; a table of 97 rows is padded so that the tensor size divides it."""
    padded = -(-97 // topology.tensor) * topology.tensor
    return {
        "qkv": ShardSpec((12, 3, 2, 6), ("tensor", None, None, None)),
        "gate_up": ShardSpec((2, 12, 5), (None, "tensor", None)),
        "row": ShardSpec((5, 12), (None, "tensor")),
        "norm": ShardSpec((7,), (None,), grad_sum=("tensor",)),
        "position": ShardSpec((3, 5), (None, None), grad_sum=("tensor",)),
        "word": ShardSpec((97, 3), ("tensor", None), padded=padded),
        "much padding": ShardSpec((97, 3), ("tensor", None), padded=64 * 8),
        "tied word": ShardSpec((97, 3), ("tensor", None), tied=True, padded=padded),
        "experts": ShardSpec((24, 2, 4, 3), ("expert", None, "expert_tensor", None)),
        "expert bias": ShardSpec((24, 3), ("expert", None)),
        "few experts": ShardSpec((6, 4, 3), (topology.expert_axis(gcd(6, topology.expert)), "expert_tensor", None)),
    }[name]


SPECS = ("qkv", "gate_up", "row", "norm", "position", "word", "much padding", "tied word", "experts", "expert bias",
         "few experts")


def holders(spec, topology):
    """The ranks with a copy: those of stage 0, and of the last stage too where the parameter is tied."""
    stages = {0, topology.pipeline - 1} if spec.tied else {0}
    return [rank for rank in range(topology.world) if topology.coord(rank).pipeline in stages]


def owned_pieces(spec, topology):
    """(rank, box) of all that is recorded: each flat shard, its padding included, is cut over the spec's data axis."""
    for rank in holders(spec, topology):
        if is_recorded(spec, topology, rank):
            ways, index = topology.size(spec.data_axis), topology.index(spec.data_axis, rank)
            share = -(-prod(spec.local_shape(topology)) // ways)
            for box in owned_boxes(spec, topology, rank, index * share, (index + 1) * share):
                yield rank, box


def test_flat_ranges_become_few_boxes_in_order():
    """Exhaustive over all ranges of small shapes; at most 2 * ndim - 1 boxes."""
    for shape in [(), (7,), (1,), (3, 5), (5, 1), (1, 6), (2, 3, 4), (4, 3, 2), (1, 4, 1, 3), (4, 2, 3, 2), (2,) * 5]:
        count = prod(shape)
        flat = np.arange(count).reshape(shape)
        for start, stop in itertools.combinations(range(count + 1), 2):
            boxes = list(flat_to_boxes(shape, start, stop))
            found = np.concatenate([flat[box.slices()].ravel() for box in boxes])
            assert (found == np.arange(start, stop)).all(), (shape, start, stop)
            assert len(boxes) <= max(2 * len(shape) - 1, 1), (shape, start, stop)
        assert not list(flat_to_boxes(shape, count, count)) and not list(flat_to_boxes(shape, 1, 0))


def test_the_bound_on_boxes_is_reached():
    assert len(list(flat_to_boxes((4, 3, 3), 1, 35))) == 5


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_owned_boxes_cover_each_element_once(name, topology):
    """Recorded exactly once: norm, parameter count and checkpoint may simply add up."""
    spec = spec_of(name, topology)
    seen = np.zeros(spec.shape, int)
    for _, box in owned_pieces(spec, topology):
        seen[box.slices()] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("name", SPECS)
def test_any_layout_finds_its_part_in_what_any_layout_owns(name):
    for save, load in itertools.product(TOPOLOGIES, repeat=2):
        written, wanted = spec_of(name, save), spec_of(name, load)
        whole = np.random.default_rng(0).random(written.shape)
        pieces = [(box, whole[box.slices()].copy()) for _, box in owned_pieces(written, save)]
        for rank in holders(wanted, load):
            mine = wanted.box(load, rank)
            found = np.full(mine.shape, np.nan)
            for box, data in pieces:
                common = box.meet(mine)
                if common is not None:
                    found[common.slices(mine.start)] = data[common.slices(box.start)]
            assert (found == whole[mine.slices()]).all()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_padding_rows_stand_at_the_end_and_belong_to_no_box(topology):
    for name in ("word", "much padding"):
        spec = spec_of(name, topology)
        rows, width = spec.local_shape(topology)
        assert rows * topology.tensor == spec.padded and spec.numel == 97 * width
        boxes = [spec.box(topology, rank) for rank in topology.ranks_along("tensor", 0)]
        assert sum(box.shape[0] for box in boxes) == 97
        for index, box in enumerate(boxes):
            real = max(0, min(rows, 97 - index * rows))
            assert box.shape == (real, width)
            assert not owned_boxes(spec, topology, index, real * width, rows * width), "padding is owned by nobody"


def test_the_data_axis_follows_from_the_spec():
    assert ShardSpec((4, 2), ("tensor", None)).data_axis == "data"
    assert ShardSpec((4, 2), ("tensor", None), tied=True).data_axis == "tied_data"
    assert ShardSpec((4, 2), ("expert", None)).data_axis == "expert_data" and ShardSpec((4,), ("expert",)).is_expert


def test_whole_parameters_are_recorded_on_one_tensor_rank():
    topology = Topology(pipeline=1, data=2, tensor=4)
    whole, cut = ShardSpec((8,), (None,)), ShardSpec((8,), ("tensor",))
    assert [is_recorded(whole, topology, rank) for rank in range(8)] == [True, False, False, False] * 2
    assert all(is_recorded(cut, topology, rank) for rank in range(8))
    assert is_cut_by_tensor(cut, topology) and not is_cut_by_tensor(whole, topology)


def test_boxes_meet_as_arrays_do():
    whole = np.arange(7 * 5).reshape(7, 5)
    ranges = [(0, 3), (2, 5), (4, 1)]
    for (a, m), (b, n), (c, p), (d, q) in itertools.product(ranges, repeat=4):
        one, two = Box((a, b), (m, min(n, 5 - b))), Box((c, d), (p, min(q, 5 - d)))
        expected = set(whole[one.slices()].flat) & set(whole[two.slices()].flat)
        common = one.meet(two)
        assert common == two.meet(one)
        assert (set() if common is None else set(whole[common.slices()].flat)) == expected
    assert Box((1, 2), (3, 4)).shift((10, 20)) == Box((11, 22), (3, 4)) and Box((1, 2), (3, 4)).numel == 12
    assert Box((5, 6), (2, 3)).slices((4, 4)) == (slice(1, 3), slice(2, 5))


def test_a_wrong_spec_is_refused():
    with pytest.raises(ValueError, match="2 dims was given 1 cuts"):
        ShardSpec((2, 3), (None,))
    with pytest.raises(ValueError, match="padded to 96 is smaller than its 97 rows"):
        ShardSpec((97, 3), ("tensor", None), padded=96)
    with pytest.raises(ValueError, match="a dim of 97 cannot be cut 2 ways along the tensor axis"):
        ShardSpec((97, 3), ("tensor", None)).local_shape(Topology(tensor=2))
