"""Declared parameters: initial values depend on seed, name and place alone, and nothing undeclared slips through."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megazero.parallel.groups import mesh_on_paper
from megazero.parallel.params import (
    ONES,
    ZEROS,
    Initial,
    _runs,
    collect,
    declare,
    initialize,
    join_tied,
    normals,
)
from megazero.parallel.shard import ShardSpec
from megazero.parallel.topology import Topology

STD = 0.02


class Layer(nn.Module):
    """One parameter of each kind that a GPT has."""

    def __init__(self, topology, unit=1):
        super().__init__()
        padded = -(-97 // (unit * topology.tensor)) * unit * topology.tensor
        specs = {
            "word": ShardSpec((97, 6), ("tensor", None), padded=padded),
            "qkv": ShardSpec((4, 3, 2, 6), ("tensor", None, None, None)),
            "gate_up": ShardSpec((2, 8, 6), (None, "tensor", None)),
            "row": ShardSpec((6, 8), (None, "tensor")),
            "position": ShardSpec((5, 6), (None, None), grad_sum=("tensor",)),
        }
        for name, spec in specs.items():
            declare(self, name, spec, topology, initial=Initial(STD), dtype=torch.float64)
        norm = ShardSpec((6,), (None,), grad_sum=("tensor",))
        declare(self, "scale", norm, topology, initial=ONES, dtype=torch.float64)
        declare(self, "bias", norm, topology, initial=ZEROS, dtype=torch.float64)


class Table(nn.Module):
    """One end of a tied parameter."""

    def __init__(self, topology, known_as="table"):
        super().__init__()
        spec = ShardSpec((8, 4), ("tensor", None), tied=True)
        self.weight = declare(
            self, "weight", spec, topology, initial=Initial(STD), dtype=torch.float32, known_as=known_as
        )


def initialized(topology, rank, unit=1, seed=1):
    infos = collect([("layer", Layer(topology, unit))])
    initialize(infos, topology, rank, seed=seed)
    return infos


def whole(topology, unit=1, seed=1):
    """Every parameter put together from the shards of one stage's first data rank."""
    values = {}
    for rank in range(topology.tensor):
        for info in initialized(topology, rank, unit, seed):
            box = info.spec.box(topology, rank)
            tensor = values.setdefault(info.name, torch.full(info.spec.shape, torch.nan, dtype=torch.float64))
            tensor[box.slices()] = info.tensor.data.flatten()[: box.numel].view(box.shape)
    return values


def test_initial_values_depend_neither_on_layout_nor_on_padding():
    """C030: tensor 1, 2, 4 and any unit of padding, bit by bit."""
    expected = whole(Topology())
    assert not any(value.isnan().any() for value in expected.values())
    for tensor, unit in itertools.product((1, 2, 4), (1, 8, 64)):
        found = whole(Topology(tensor=tensor, data=2, pipeline=2), unit)
        assert all(torch.equal(found[name], expected[name]) for name in expected), (tensor, unit)


def test_padding_starts_at_zero():
    topology = Topology(tensor=4)
    for rank, real in enumerate((64, 33, 0, 0)):
        word = next(info for info in initialized(topology, rank, unit=64) if info.name == "layer.word")
        assert word.tensor.shape[0] == 64
        assert word.tensor[:real].abs().min() > 0 if real else True
        assert not word.tensor[real:].any()


def test_initial_values_depend_on_seed_and_name():
    one, two = whole(Topology(), seed=1), whole(Topology(), seed=2)
    assert all((one[name] != two[name]).any() for name in one if name not in ("layer.scale", "layer.bias"))
    assert (normals(1, "a", 0, 64) != normals(1, "b", 0, 64)).all()


def test_constants_are_what_they_say():
    values = whole(Topology(tensor=2))
    assert (values["layer.scale"] == 1).all() and (values["layer.bias"] == 0).all()


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 300), count=st.integers(0, 120))
def test_any_range_of_normals_is_that_slice_of_the_stream(start, count):
    assert np.array_equal(normals(7, "layers.0.ffn.up.weight", start, count), STREAM[start : start + count])


STREAM = normals(7, "layers.0.ffn.up.weight", 0, 420)


def test_a_far_range_is_drawn_without_what_stands_before_it():
    """2^40 normals take an hour; the range is also where 32-bit counters would have wrapped."""
    far = normals(7, "table", 2**40 - 3, 16)
    assert np.array_equal(far[3:], normals(7, "table", 2**40, 13)) and np.isfinite(far).all()
    assert not np.array_equal(far, normals(7, "table", 2**40 - 3 - 2**32, 16))


def test_normals_are_normal():
    """Moments within five standard errors, the distribution within the 0.1% point of Kolmogorov's test, no memory."""
    n = 1 << 18
    x = normals(3, "table", 0, n).astype(np.float64)
    assert np.isfinite(x).all() and 4 < np.abs(x).max() < 7
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 5 * (15 / n) ** 0.5 and abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    ordered = np.sort(x)
    cdf = torch.special.ndtr(torch.from_numpy(ordered)).numpy()
    assert np.abs(cdf - (np.arange(n) + 0.5) / n).max() < 1.95 / n**0.5
    for lag in (1, 2, 7, 8):
        assert abs((x[:-lag] * x[lag:]).mean()) < 5 / n**0.5
    assert abs((x * normals(3, "other", 0, n)).mean()) < 5 / n**0.5


def test_the_standard_deviation_is_the_one_asked_for():
    values = whole(Topology())["layer.word"]
    assert abs(values.std() / STD - 1) < 0.15
    expected = torch.from_numpy(normals(1, "layer.word", 0, 97 * 6)).double().mul(STD).view(97, 6)
    assert torch.equal(values, expected), "element i is normal number i"


def test_runs_are_the_contiguous_ranges_of_a_box():
    for shape in [(6,), (3, 4), (2, 3, 4), (2, 2, 2, 3)]:
        flat = np.arange(np.prod(shape)).reshape(shape)
        for start in np.ndindex(*shape):
            for size in itertools.product(*(range(n - s + 1) for n, s in zip(shape, start))):
                runs = list(_runs(shape, start, size))
                found = [i for first, count in runs for i in range(first, first + count)]
                box = tuple(slice(s, s + n) for s, n in zip(start, size))
                assert found == flat[box].ravel().tolist(), (shape, start, size)
    assert list(_runs((4, 3, 2), (1, 0, 0), (2, 3, 2))) == [(6, 12)], "whole inner dims are one run"


def test_an_undeclared_parameter_is_refused_by_name():
    layer = Layer(Topology())
    layer.inner = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layers\.3\.inner\.weight was not declared"):
        collect([("layers.3", layer)])


def test_parameters_come_once_and_in_the_order_of_the_model():
    topology = Topology()
    first, second = Layer(topology), Layer(topology)
    names = [info.name for info in collect([("a", first), ("b", second)])]
    own = ["word", "qkv", "gate_up", "row", "position", "scale", "bias"]
    assert names == [f"a.{name}" for name in own] + [f"b.{name}" for name in own]
    first.again = first.word
    assert [info.name for info in collect([("a", first)])] == names[:7]


def test_a_parameter_that_two_layers_hold_without_a_name_for_it_is_refused():
    """On ranks of their own they would train one each."""
    layer = Layer(Topology())
    with pytest.raises(ValueError, match="again.word is a.word of another layer"):
        collect([("a", layer), ("again", layer)])


def test_matrices_decay_and_vectors_do_not():
    decay = {info.name.split(".")[1]: info.decay for info in collect([("layer", Layer(Topology()))])}
    assert decay == {
        "word": True, "qkv": True, "gate_up": True, "row": True, "position": True, "scale": False, "bias": False
    }


def test_tied_ends_on_one_rank_are_one_parameter():
    topology = Topology()
    layers = [("embedding", Table(topology)), ("other", Table(topology, "another")), ("head", Table(topology))]
    join_tied(layers)
    assert layers[0][1].weight is layers[2][1].weight and layers[1][1].weight is not layers[0][1].weight
    assert [info.name for info in collect(layers)] == ["table", "another"]
    layers[0][1].weight.data.fill_(3.0)
    assert (layers[2][1].weight == 3).all()


def test_tied_ends_on_two_ranks_have_one_name_and_one_value():
    topology = Topology(pipeline=2)
    ends = []
    for rank, name in enumerate(("embedding", "head")):
        infos = collect([(name, Table(topology))])
        initialize(infos, topology, rank, seed=5)
        ends.append(infos[0])
        assert mesh_on_paper(topology, rank).along(infos[0].spec.data_axis).ranks == (0, 1)
    assert ends[0].name == ends[1].name == "table" and torch.equal(ends[0].tensor, ends[1].tensor)
