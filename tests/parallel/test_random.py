"""Draws without history: a mask is a function of what it belongs to, never of what was drawn before it."""

import functools
import itertools
from unittest import mock

import pytest
import torch

from megazero.parallel import random
from megazero.parallel.random import draw_seed, dropout, recompute
from tests.harness import on_ranks
from tests.training import LLAMA, SMALL, distance, train, train_rank

DRAW = (1234, 7, 3)
PLACE = {"layer": 2, "purpose": "ffn output", "index": 0}


def mask(draw=DRAW, **place):
    return dropout(torch.ones(64, 4), 0.5, draw, **{**PLACE, **place}) != 0


def test_a_mask_is_a_function_of_its_place_alone():
    """C077: seed, iteration, micro-batch, layer, purpose and the tensor index of a cut tensor all change it."""
    places = [
        {}, {"draw": (1235, 7, 3)}, {"draw": (1234, 8, 3)}, {"draw": (1234, 7, 4)}, {"layer": 3},
        {"purpose": "attention output"}, {"index": 1}, {"index": None},
    ]
    masks = [mask(**place) for place in places]
    for one, two in itertools.combinations(masks, 2):
        assert 0.3 < (one != two).float().mean() < 0.7, "two masks are independent"
    for place, before in zip(places, masks):
        torch.manual_seed(len(place))
        torch.rand(11)                                              # what others drew changes nothing
        assert torch.equal(mask(**place), before)


def test_dropout_keeps_the_mean_and_leaves_evaluation_alone():
    x = torch.ones(1 << 16)
    y = dropout(x, 0.25, DRAW, **PLACE)
    assert abs((y == 0).float().mean() - 0.25) < 0.01 and torch.equal(y[y != 0].unique(), torch.tensor([1 / 0.75]))
    assert dropout(x, 0.25, None, **PLACE) is x and dropout(x, 0.0, DRAW, **PLACE) is x


def test_draw_seeds_use_all_their_bits():
    """A CPU generator takes only 32 bits of its seed: those must differ too, in 30,000 draws of a run."""
    seeds = {draw_seed((1, i, m), layer, "embedding", t) for i in range(30) for m in range(10) for layer in range(25)
             for t in (None, 0, 1, 2)}
    assert len(seeds) == 30_000 and max(seeds).bit_length() == 64
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 29_990


def test_recomputation_draws_the_same_mask():
    """C078, in small: gradients are those of the forward that was seen, though others draw in between."""
    def run(x):
        return (x * x + dropout(x, 0.3, DRAW, **PLACE)).sin()

    x = torch.randn(64, requires_grad=True)
    (expected,) = torch.autograd.grad(run(x).sum(), x)
    y = recompute(run, x)
    torch.rand(5)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)


def masks_of_a_run(argv, world):
    """The masks of hidden dropout, in order of drawing, of one training run on this rank."""
    seen = []
    plain = torch.native_dropout

    def record(x, probability, training):
        y, kept = plain(x, probability, training)
        seen.append(kept.clone())
        return y, kept

    with mock.patch.object(torch, "native_dropout", record):
        train_rank(argv, world, None, None)
    return seen


def masks_of(layout, iterations):
    """What each rank of a layout (tensor, pipeline, data) draws with a global batch of 4 and micro-batches of 1."""
    tensor, pipeline, data = layout
    argv = (
        f"{SMALL} --hidden-dropout 0.5 --micro-batch-size 1 --global-batch-size 4 --train-iters {iterations} "
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    ).split()
    world = tensor * pipeline * data
    return on_ranks(world, functools.partial(masks_of_a_run, argv, world))


def test_every_mask_of_a_model_differs_from_every_other():
    """C077: over tensor ranks (all hidden states are cut), data ranks, stages, layers, micro-batches and iterations."""
    ranks = masks_of((2, 2, 2), iterations=2)
    # 2 iterations x 2 micro-batches x (embedding and 2 layers with 2 masks | 2 layers with 2 masks)
    assert [len(masks) for masks in ranks] == [20] * 4 + [16] * 4
    every = [m.flatten() for masks in ranks for m in masks]
    assert {m.numel() for m in every} == {8 * 32}
    assert len({tuple(m.tolist()) for m in every}) == len(every) == 144


def test_data_and_pipeline_sizes_change_no_mask():
    """The masks of a global batch are one set, however micro-batches and layers are spread."""
    def every(layout):
        return sorted(tuple(m.flatten().tolist()) for masks in masks_of(layout, iterations=1) for m in masks)

    one = every((1, 1, 1))
    assert len(one) == 4 * 9 and every((1, 2, 2)) == one


def test_training_with_dropout_is_the_same_over_any_pipeline_and_data_ranks():
    flags = "--fp64 --hidden-dropout 0.1 --attention-dropout 0.1 --train-iters 3"
    expected = train(flags)
    for layout in ((1, 2, 1), (1, 1, 2), (1, 3, 2)):
        for name, value in distance(train(flags, layout), expected).items():
            assert value < 1e-10, (layout, name, value)


RECOMPUTE = (
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
)


def bits_of_a_run(flags, world):
    """Losses, norms and this rank's part of the state after two steps."""
    argv = f"{SMALL} {flags} --train-iters 2 --tensor-model-parallel-size {world}".split()
    record, pieces, _ = train_rank(argv, world, None, None)
    return [(step["lm_loss"], step["grad_norm"]) for step in record.steps], [data for *_, data in pieces]


def check_recomputation(world):
    for model in ("", LLAMA):
        flags = f"{model} --hidden-dropout 0.3 --attention-dropout 0.3 --global-batch-size 4"
        expected = bits_of_a_run(flags, world)
        for how in RECOMPUTE:
            found = bits_of_a_run(f"{flags} {how}", world)
            assert found[0] == expected[0], (model, how)
            assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True)), (model, how)


@pytest.mark.parametrize("tensor", [1, 2])
def test_recomputation_changes_no_bit(tensor):
    """C078: dropout 0.3, every kind of recomputation: losses, norms, weights and moments are bit-equal."""
    on_ranks(tensor, check_recomputation, tensor)


def test_a_history_of_draws_would_be_seen():
    """Without seeds of their own, two runs after one seed are alike, but recomputation changes them."""
    def run(how):
        torch.manual_seed(0)
        return bits_of_a_run(f"--hidden-dropout 0.3 {how}", 1)[0]

    with mock.patch.object(random, "seed_generator", lambda device, seed: None):
        expected = run("")
        assert run("") == expected
        assert all(run(how) != expected for how in RECOMPUTE[1:])
