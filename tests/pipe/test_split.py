"""Cutting a list of layers into stages: every method keeps every layer, in order, and balances what it says."""

import itertools
import random
import time

import pytest

from megazero.layout_string import expand_layout
from megazero.pipe.schedule import ROUND_ROBIN, V_SHAPE
from megazero.pipe.split import METHODS, Split, balanced, even, max_min


def gpt(blocks):
    """Names and costs as gpt_layers has them."""
    names = ["embedding", *(f"layers.{i}" for i in range(blocks)), "final_norm", "head"]
    return names, [0.0, *[1.0] * blocks, 0.0, 0.0]


def cut(split, blocks, ranks, chunks=1, *, weights=None, placement=ROUND_ROBIN):
    names, costs = gpt(blocks)
    ranges = split.ranges(names, costs, placement.homes(ranks, chunks), weights)
    assert [i for part in ranges for i in part] == list(range(len(names)))
    assert len(ranges) == ranks * chunks
    return [[names[i] for i in part] for part in ranges]


def blocks_of(stages):
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


@pytest.mark.parametrize(
    ("count", "parts", "bounds"),
    [(10, 4, [0, 3, 6, 8, 10]), (7, 3, [0, 3, 5, 7]), (24, 5, [0, 5, 10, 15, 20, 24]), (3, 4, [0, 1, 2, 3, 3])],
)
def test_even_parts_equal_the_published_vectors(count, parts, bounds):
    assert even(count, parts) == bounds


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    [
        ([1] * 10, 4, [0, 3, 6, 8, 10]),
        ([5, 1, 1, 1, 1, 5], 3, [0, 1, 5, 6]),
        ([0, *[1] * 8, 0], 4, [0, 3, 5, 7, 10]),
        ([1, 2, 3, 4, 5, 6], 3, [0, 3, 5, 6]),
        ([4, 3, 2, 1], 2, [0, 1, 4]),
        ([1, 1], 4, [0, 1, 2, 2, 2]),
        ([0, 0, *[1] * 24, 0, 0, 0], 4, [0, 8, 14, 20, 29]),
    ],
)
def test_the_rule_of_deepspeed_equals_its_vectors(weights, parts, bounds):
    assert max_min(weights, parts) == bounds


def badness(bounds, weights):
    """(largest sum of a part, sum of squares)."""
    sums = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
    return max(sums), sum(s * s for s in sums)


def test_balanced_parts_have_the_smallest_largest_sum():
    """Against all cuts there are; of the best ones the evenest."""
    draw = random.Random(1)
    for _ in range(300):
        weights = [draw.choice((1, 2, 3, 5, 13)) for _ in range(draw.randint(1, 9))]
        parts = draw.randint(1, len(weights))
        cuts = [[0, *inner, len(weights)] for inner in itertools.combinations(range(1, len(weights)), parts - 1)]
        assert badness(balanced(weights, parts), weights) == min(badness(bounds, weights) for bounds in cuts)


def test_balanced_parts_of_equal_weights_are_the_even_ones():
    for count in range(1, 30):
        for parts in range(1, count + 1):
            assert balanced([1.0] * count, parts) == even(count, parts)


def test_a_large_model_is_balanced_at_once():
    """Of heavy ends a stage each, though others could take many layers before they weigh as much."""
    weights = [1.0 + (i % 7) / 10 for i in range(400)]
    bounds = balanced(weights, 128)
    assert max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds)) < 1.5 * sum(weights) / 128
    start = time.process_time()
    bounds = balanced([200.0, *[1.0] * 998, 200.0], 64)
    assert time.process_time() - start < 2
    assert bounds == [0, *(1 + at for at in even(998, 62)), 1000]


def test_the_smallest_largest_part_differs_from_the_rule_of_deepspeed():
    weights = [1, 5, 1, 1, 2]
    assert balanced(weights, 3) == [0, 1, 2, 5]         # 1 5 4: the largest is 5
    assert max_min(weights, 3) == [0, 2, 4, 5]          # 6 2 2


def test_uniform_shares_the_blocks_and_leaves_the_ends_where_they_belong():
    """C057: no number of layers is lost or refused, as long as each stage gets one."""
    for blocks in range(1, 14):
        for ranks in range(1, 5):
            for chunks in range(1, 4):
                stages = ranks * chunks
                if blocks < stages:
                    with pytest.raises(ValueError, match=f"{blocks} layers cannot fill {stages} pipeline stages"):
                        cut(Split(), blocks, ranks, chunks)
                    continue
                found = cut(Split(), blocks, ranks, chunks)
                assert found[0][0] == "embedding" and found[-1][-2:] == ["final_norm", "head"]
                counts = blocks_of(found)
                assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def test_embedding_and_loss_may_count_as_a_layer():
    assert blocks_of(cut(Split(), 6, 4)) == [2, 2, 1, 1]
    assert blocks_of(cut(Split(embedding=True), 7, 4)) == [1, 2, 2, 2]
    assert blocks_of(cut(Split(loss=True), 7, 4)) == [2, 2, 2, 1]
    found = cut(Split(embedding=True, loss=True), 6, 4)
    assert found == [
        ["embedding", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "layers.4"],
        ["layers.5", "final_norm", "head"],
    ]
    assert blocks_of(cut(Split(embedding=True, loss=True), 2, 4)) == [0, 1, 1, 0]


def test_first_and_last_rank_may_hold_other_numbers_of_layers():
    assert blocks_of(cut(Split(first=1, last=2), 9, 4)) == [1, 3, 3, 2]
    assert blocks_of(cut(Split(first=1), 8, 4)) == [1, 3, 2, 2]
    assert blocks_of(cut(Split(last=1), 7, 4)) == [2, 2, 2, 1]
    # A rank's stages share its layers: rank 0 holds stages 0 and 3, rank 2 stages 2 and 5.
    assert blocks_of(cut(Split(first=2, last=4), 12, 3, 2)) == [1, 3, 2, 1, 3, 2]
    # Where the first rank holds both ends, each flag counts for its own stage.
    assert blocks_of(cut(Split(first=1, last=2), 11, 3, 2, placement=V_SHAPE)) == [1, 2, 2, 2, 2, 2]
    with pytest.raises(ValueError, match="--decoder-first-pipeline-num-layers 3 .* do not add up to the 5 layers"):
        cut(Split(first=3, last=3), 5, 2)
    with pytest.raises(ValueError, match="num-layers 1: stage 3 of 6 gets no layer"):
        cut(Split(first=1), 12, 3, 2)
    with pytest.raises(ValueError, match="only one stage"):
        cut(Split(first=3, last=3), 3, 1)
    with pytest.raises(ValueError, match="--decoder-last-pipeline-num-layers 0: must be at least 1"):
        Split(last=0)


def test_parameters_and_measured_times_are_balanced_over_all_layers():
    """A large vocabulary takes the place of blocks at both ends."""
    weights = [2.0, *[1.0] * 8, 0.01, 2.0]
    found = cut(Split("parameters"), 8, 4, weights=weights)
    assert blocks_of(found) == [1, 3, 3, 1]
    assert Split("parameters").weighs == Split("deepspeed-parameters").weighs == "parameters"
    assert Split("measured").weighs == "seconds" and Split("cost").weighs is Split().weighs is None
    assert blocks_of(cut(Split("measured"), 8, 4, weights=[0.1, *[1.0] * 8, 0.05, 4.0])) == [2, 3, 3, 0]


def test_costs_are_balanced_and_layers_without_one_stay_with_their_neighbour():
    names = ["embedding", "a", "b", "c", "norm", "d", "head"]
    costs = [0.0, 4.0, 1.0, 1.0, 0.0, 2.0, 0.0]
    assert Split("cost").ranges(names, costs, [0, 1]) == [range(2), range(2, 7)]
    assert Split("cost").ranges(names, costs, [0, 1, 2]) == [range(2), range(2, 5), range(5, 7)]
    with pytest.raises(ValueError, match="4 layers cannot fill 5 pipeline stages"):
        Split("cost").ranges(names, costs, range(5))


def test_layers_may_be_counted_by_a_pattern_over_their_names():
    assert cut(Split("type:LAYERS"), 5, 2) == cut(Split(), 5, 2)
    assert blocks_of(cut(Split(r"type:layers\.[02]$"), 4, 2)) == [2, 2]
    assert cut(Split("deepspeed-type:layers"), 24, 4)[0] == ["embedding", *(f"layers.{i}" for i in range(6))]
    with pytest.raises(ValueError, match="no layer's name matches; they are called embedding, layers.N, final_norm"):
        cut(Split("type:nothing"), 4, 2)
    with pytest.raises(ValueError, match="not a regular expression"):
        Split("type:(")


def test_deepspeeds_rule_cuts_by_parameters_too():
    weights = [3.0, *[1.0] * 8, 0.01, 3.0]
    names, costs = gpt(8)
    bounds = max_min(weights, 4)
    found = Split("deepspeed-parameters").ranges(names, costs, range(4), weights)
    assert found == [range(a, b) for a, b in itertools.pairwise(bounds)]
    with pytest.raises(ValueError, match="7 layers cannot fill 8 pipeline stages by --pipeline-split deepspeed-type:l"):
        cut(Split("deepspeed-type:layers"), 4, 4, 2)       # its last stage would be empty, and there would be no loss


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("E|(t|)*3,L", "E t t t L"),
        ("E,t*3|(tt|)*2,t|L", "Ettt tt tt t L"),
        ("Et|t|(tt|)*2 tL", "Et t tt tt tL"),
        ("((t|)*2t)*2", "t t tt t t"),
        ("t*12|t", "tttttttttttt t"),
    ],
)
def test_a_layout_reads_as_in_megatron(text, stages):
    assert expand_layout(text) == stages.split(" ")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Et|m|L", "m stands for no layer"),
        ("Et|d|L", "d stands for no layer"),
        ("E**2", r"'\*' stands where it means nothing"),
        ("E*", r"'\*' stands"),
        ("(E", r"'\(' stands"),
        ("E)", r"'\)' stands"),
        ("t2", "'2' stands"),
        ("t*1,2", "'2' stands"),
        ("t*999999999", "absurdly long"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused_by_its_letter(text, why):
    with pytest.raises(ValueError, match=why):
        Split(layout=text)


def test_a_layout_says_where_each_layer_stands():
    found = cut(Split(layout="E|(t|)*3,L"), 3, 5)
    assert found == [["embedding"], ["layers.0"], ["layers.1"], ["layers.2"], ["final_norm", "head"]]
    assert blocks_of(cut(Split(layout="Ettt|t|t|tt,L"), 7, 2, 2)) == [3, 1, 1, 2]
    assert cut(Split(layout="E||tt|L"), 2, 4)[1] == []
    with pytest.raises(ValueError, match="it has 5 stages, but there are 4"):
        cut(Split(layout="E|(t|)*3,L"), 3, 4)
    with pytest.raises(ValueError, match=r"the layers must be E t\*4 L, in this order, not E t\*3 L"):
        cut(Split(layout="E|ttt|L"), 4, 3)
    with pytest.raises(ValueError, match=r"must be E t\*2 L, in this order, not t\*2 E L"):
        cut(Split(layout="tt|EL"), 2, 2)
    with pytest.raises(ValueError, match="the first and the last stage cannot be empty"):
        cut(Split(layout="|Ett|L"), 2, 3)


def test_a_layout_fits_a_model_without_ends():
    names, costs = ["in", "middle", "out"], [1.0, 1.0, 2.0]
    assert Split(layout="t|tt").ranges(names, costs, [0, 1]) == [range(1), range(1, 3)]
    with pytest.raises(ValueError, match=r"must be t\*3, in this order, not E t\*3"):
        Split(layout="Et|tt").ranges(names, costs, [0, 1])


def test_only_one_way_of_cutting_may_be_asked_for():
    with pytest.raises(ValueError, match="--pipeline-split parameters; --pipeline-model-parallel-layout: each says"):
        Split("parameters", layout="E|tL")
    with pytest.raises(ValueError, match="--account-for-embedding.*only one may be given"):
        Split(first=1, loss=True)
    with pytest.raises(ValueError, match="--pipeline-split even: must be one of uniform, parameters"):
        Split("even")
    assert {m for m in METHODS if ":" not in m} == {Split(m).method for m in METHODS if ":" not in m}
    with pytest.raises(ValueError, match="no layer of the model has a cost"):
        Split().ranges(["a"], [0.0], [0])
