"""Stages: every layer of the model stands on exactly one, uneven or not, and recomputation covers what it is told."""

import pytest
import torch
from torch import nn

from megazero.config import ModelConfig
from megazero.data.batch import MicroBatch
from megazero.gpt import GPTSetup, gpt_layers
from megazero.parallel.groups import mesh_on_paper
from megazero.parallel.params import collect
from megazero.parallel.shard import is_recorded
from megazero.parallel.topology import Topology
from megazero.parallel.weights import WeightQueue
from megazero.pipe.stage import LayerSpec, Recompute, Stage, build_stages, cut_layers

BATCH = MicroBatch(torch.zeros(2, 1, dtype=torch.int64))


class Scale(nn.Module):
    """A layer that counts how often it ran."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.runs = nn.Parameter(torch.tensor(factor)), 0

    def forward(self, x, batch):
        self.runs += 1
        return torch.sin(x * self.factor)


def model(blocks, ends=(1, 2)):
    """Layers like a GPT's: some without cost at both ends, `blocks` costly ones between them."""
    return [
        *[LayerSpec(f"front{i}", lambda mesh: Scale(1.0), cost=0.0) for i in range(ends[0])],
        *[LayerSpec(f"layers.{i}", lambda mesh: Scale(1.5), recomputable=True) for i in range(blocks)],
        *[LayerSpec(f"back{i}", lambda mesh: Scale(0.5), cost=0.0) for i in range(ends[1])],
    ]


def test_every_layer_stands_on_one_stage_in_order():
    """C057: the parts meet end to end, sizes differ by at most one, earlier stages take the remainder."""
    for blocks in range(1, 33):
        for stages in range(1, blocks + 1):
            for ends in ((1, 2), (0, 0), (2, 0)):
                layers = model(blocks, ends)
                parts = cut_layers(layers, range(stages)).slices
                assert [i for part in parts for i in part] == list(range(len(layers)))
                costly = [sum(layers[i].cost > 0 for i in part) for part in parts]
                assert sum(costly) == blocks and costly == sorted(costly, reverse=True)
                assert max(costly) - min(costly) <= 1
                assert parts[0].start == 0 and parts[-1].stop == len(layers)


def test_layers_without_cost_stay_at_their_ends():
    parts = cut_layers(model(5), range(3)).slices
    assert parts == (range(3), range(3, 5), range(5, 8))
    assert cut_layers(model(3), [0]).slices == (range(6),)


def test_too_few_layers_are_refused():
    with pytest.raises(ValueError, match="3 layers cannot fill 4 pipeline stages .--pipeline-model-parallel-size."):
        cut_layers(model(3), range(4))


def gpt(layers):
    config = ModelConfig(num_layers=layers, hidden_size=16, num_attention_heads=4, seq_length=8)
    return gpt_layers(GPTSetup(config, vocab=97))


def stages_of(layers, mesh):
    return build_stages(layers, mesh, cut_layers(layers, range(mesh.pipeline.size)), Recompute())


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_number_of_parameters_does_not_depend_on_the_layout(tensor):
    """C057, C062: five layers on 1, 2, 3 and 4 stages; the tied table counts once, its two holders share one data axis.

    An element of a tied parameter has one owner among both ends, so both together count it once.
    """
    counts = set()
    for pipeline in (1, 2, 3, 4):
        topology = Topology(pipeline=pipeline, tensor=tensor)
        total = 0.0
        for rank in range(topology.world):
            stages = stages_of(gpt(5), mesh_on_paper(topology, rank))
            assert list(stages) == [topology.coord(rank).pipeline]
            for info in collect([named for stage in stages.values() for named in stage.named_layers()]):
                if is_recorded(info.spec, topology, rank):
                    share = topology.size(info.spec.data_axis)
                    total += info.spec.box(topology, rank).numel / share
        counts.add(total)
    assert counts == {5 * 3280 + 97 * 16 + 8 * 16 + 2 * 16}         # 12 h^2 + 13 h for each block


def test_stages_hold_their_layers_under_global_names():
    names = []
    for rank in range(4):
        (stage,) = stages_of(gpt(5), mesh_on_paper(Topology(pipeline=4), rank)).values()
        names += [[name for name, _ in stage.named_layers()]]
    assert names == [
        ["embedding", "layers.0", "layers.1"], ["layers.2"], ["layers.3"], ["layers.4", "final_norm", "head"]
    ]


def test_one_stage_ties_head_and_embedding_into_one_object():
    (stage,) = stages_of(gpt(2), mesh_on_paper(Topology(), 0)).values()
    layers = dict(stage.named_layers())
    assert layers["head"].weight is layers["embedding"].word.weight


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Recompute(), [(range(8), False)]),
        (Recompute("uniform", 1), [(range(1), False), *[(range(i, i + 1), True) for i in range(1, 6)],
                                   (range(6, 8), False)]),
        (Recompute("uniform", 2), [(range(1), False), (range(1, 3), True), (range(3, 5), True), (range(5, 6), True),
                                   (range(6, 8), False)]),
        (Recompute("uniform", 9), [(range(1), False), (range(1, 6), True), (range(6, 8), False)]),
        (Recompute("block", 2), [(range(1), False), (range(1, 2), True), (range(2, 3), True), (range(3, 8), False)]),
        (Recompute("block", 9), [(range(1), False), *[(range(i, i + 1), True) for i in range(1, 6)],
                                 (range(6, 8), False)]),
    ],
    ids=str,
)
def test_recomputation_cuts_a_stage_as_asked(how, expected):
    """uniform: pieces of `count` layers, all recomputed; block: the first `count` layers, one by one."""
    layers = [(spec, spec.build(None)) for spec in model(5)]
    stage = Stage(layers, how, WeightQueue())
    assert stage.segments == expected

    plain = Stage(layers, Recompute(), WeightQueue())
    x = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (wanted,) = torch.autograd.grad(plain(x, BATCH).sum(), x)
    for module in stage.layers:
        module.runs = 0
    (found,) = torch.autograd.grad(stage(x, BATCH).sum(), x)
    assert torch.equal(found, wanted)
    again = {i for segment, again in expected if again for i in segment}
    assert [module.runs for module in stage.layers] == [2 if i in again else 1 for i in range(8)]


def test_evaluation_recomputes_nothing():
    layers = [(spec, spec.build(None)) for spec in model(5)]
    with torch.no_grad():
        Stage(layers, Recompute("uniform", 1), WeightQueue())(torch.ones(2), BATCH)
    assert [module.runs for _, module in layers] == [1] * 8
