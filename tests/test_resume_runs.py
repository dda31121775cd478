"""Runs that stop and go on, in the same and in other layouts, and runs that ask something particular of a layout:
tied weights, labels of each micro-batch, data that ends, masks, uneven stages, bf16.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain_gpt
from data_tools import train_tokenizer
from megazero.data.indexed import IndexedWriter
from megazero.flags import parse
from megazero.parallel.groups import World
from megazero.trainer import Trainer
from tests.training import LLAMA, SMALL, Outcome, distance, train

Layout = tuple[int, int, int]

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --lr-decay-style cosine --lr-warmup-iters 3 --min-lr 1e-5"
UNTIED = "--untie-embeddings-and-output-weights"


def printed(run: Outcome, first: int = 0) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of the steps after `first`, in every digit."""
    keys = ("lm_loss", "grad_norm", "learning_rate")
    return [tuple(step[key] for key in keys) for step in run.steps if step["iteration"] > first]


def after(run: Outcome, first: int) -> Outcome:
    """`run` as one that resumed after step `first` would tell it."""
    return Outcome([step for step in run.steps if step["iteration"] > first], run.state)


def assert_equal(got: Outcome, want: Outcome, *, limits: tuple[float, float, float]) -> None:
    """Limits of losses and norms, of weights, of moments, in the measures of the house."""
    found = distance(got, want)
    for name, limit in (("loss", limits[0]), ("norm", limits[0]), ("weights", limits[1]), ("moments", limits[2])):
        assert found[name] <= limit, f"{name} differ by {found[name]:.1e}"


EXACT = (1e-10, 1e-10, 1e-10)           # fp64
# fp32: sums in another order; weights as in test_parity's measure, where Adam divides rounding by its own size.
CLOSE = (1e-5, 2e-3, 1e-4)


# ------------------------------------------------------------------------------------------------- the same layout


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_a_resumed_run_equals_an_uninterrupted_one_in_every_digit(layout: Layout, tmp_path: Path) -> None:
    """C040: ten steps, saved at five and resumed there, with dropout."""
    flags = f"--train-iters 10 {DROPOUT}"
    straight = train(f"{flags} --save {tmp_path} --save-interval 5", layout)
    resumed = train(f"{flags} --load {tmp_path} --ckpt-step 5", layout)
    assert len(resumed.steps) == 5 and printed(resumed) == printed(straight, 5)
    assert all(torch.equal(resumed.state[key], straight.state[key]) for key in straight.state)


@pytest.mark.parametrize("precision", ["--bf16", "--fp64"])
def test_an_interrupted_run_is_resumed_in_any_precision(precision: str, tmp_path: Path) -> None:
    """C040: stopped after five steps in earnest, by another process, with another length of the read-ahead."""
    flags = f"{precision} --train-iters 10 {DROPOUT}"
    straight = train(f"{flags} --num-workers 2", (2, 1, 1))
    train(f"{flags} --save {tmp_path} --save-interval 5", (2, 1, 1), iterations=5)
    resumed = train(f"{flags} --load {tmp_path}", (2, 1, 1))
    assert printed(resumed) == printed(straight, 5)


def told(run: Outcome) -> list[str]:
    """Everything that steps tell but the clock's, in every digit."""
    clock = ("seconds", "tokens_per_second")
    return [repr({key: value for key, value in step.items() if key not in clock}) for step in run.steps]


# A loss scale that overflows at first and whenever it has grown; each save finds it on its way to growing.
SCALED = "--fp16 --initial-loss-scale 2e6 --loss-scale-window 2 --hysteresis 1"


@pytest.mark.parametrize("precision", ["", "--bf16", SCALED])
def test_a_run_resumed_twice_in_the_middle_of_epochs_equals_an_uninterrupted_one(
    precision: str, tmp_path: Path
) -> None:
    """C040: four micro-batches a step, 20 samples an epoch, taken up again after 24 and 48 of 72 from saves in the
    background."""
    data = write_tokens(tmp_path / "few", [np.random.default_rng(3).integers(0, 97, 20 * 16 + 1)])
    flags = f"--no-mock-data {data} {precision} --train-iters 9 {DROPOUT}"
    flags += " --save-interval 3 --async-save --auto-resume"
    straight = train(f"{flags} --save {tmp_path / 'a'}", (2, 1, 1))
    legs = [train(f"{flags} --save {tmp_path / 'b'}", (2, 1, 1), iterations=stop) for stop in (3, 6, 9)]
    assert [len(leg.steps) for leg in legs] == [3, 3, 3]
    assert sum((told(leg) for leg in legs), []) == told(straight)
    assert all(torch.equal(legs[-1].state[key], straight.state[key]) for key in straight.state)
    if precision == SCALED:
        scales, skipped = ([step[key] for step in straight.steps] for key in ("loss_scale", "skipped"))
        assert any(skipped[:3]) and any(skipped[3:6]) and scales[4] > scales[2] and scales[7] > scales[5], scales


def test_dropout_is_on_in_these_runs() -> None:
    assert train(DROPOUT).losses[0] != train("").losses[0]


def test_iterations_count_from_zero_again_and_all_else_goes_on(tmp_path: Path) -> None:
    """--reset-iteration: data, moments and rates are those of steps 4 to 6, and so they are after a second resume."""
    flags = "--fp64 --lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-5 --lr-decay-iters 6"
    straight = train(f"{flags} --train-iters 6 --save {tmp_path / 'a'} --save-interval 3")
    again = f"{flags} --train-iters 3 --load {tmp_path / 'a'} --ckpt-step 3 --reset-iteration"
    reset = train(f"{again} --save {tmp_path / 'b'} --save-interval 2")
    assert printed(reset) == printed(straight, 3)
    assert [step["iteration"] for step in reset.steps] == [1, 2, 3]
    gone_on = train(f"{flags} --train-iters 3 --load {tmp_path / 'b'} --ckpt-step 2")
    assert printed(gone_on) == printed(reset, 2)
    assert all(torch.equal(gone_on.state[key], straight.state[key]) for key in straight.state)
    with pytest.raises(ValueError, match="--reset-iteration needs --load"):
        parse(f"{SMALL} --reset-iteration".split())


def test_a_run_that_counted_anew_goes_on_from_its_own_saves(tmp_path: Path) -> None:
    """The same command again, after an interruption: --auto-resume finds what it has saved, and counts on."""
    train(f"--train-iters 3 --save {tmp_path / 'a'} --save-interval 3")
    flags = f"--train-iters 4 --load {tmp_path / 'a'} --reset-iteration --save {tmp_path / 'b'} --save-interval 2"
    first = train(f"{flags} --auto-resume", iterations=2)
    second = train(f"{flags} --auto-resume")
    assert [step["iteration"] for step in first.steps + second.steps] == [1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------- other layouts


@functools.cache
def one_rank(flags: str) -> Outcome:
    return train(flags)


@pytest.mark.parametrize(
    ("writer", "reader", "flags"),
    [
        ((2, 2, 1), (1, 3, 2), "--fp64"),         # test_any_to_any.py has more layouts, without final weights
        ((1, 1, 2), (2, 2, 1), f"--fp64 {LLAMA}"),
        ((1, 1, 2), (1, 1, 1), "--fp64 --micro-batch-size 1"),      # C043: any data size goes on at the next sample
        ((1, 1, 1), (1, 1, 4), "--fp64"),
        ((2, 1, 2), (1, 2, 1), UNTIED),                      # fp32
    ],
)
def test_a_run_goes_on_in_another_layout_as_if_it_had_always_been_on_one_rank(
    writer: Layout, reader: Layout, flags: str, tmp_path: Path
) -> None:
    want = one_rank(f"{flags} --train-iters 6")
    train(f"{flags} --train-iters 6 --save {tmp_path} --save-interval 3", writer, iterations=3)
    got = train(f"{flags} --train-iters 6 --load {tmp_path}", reader)
    assert [step["consumed_samples"] for step in got.steps] == [32, 40, 48]
    assert_equal(got, after(want, 3), limits=EXACT if "--fp64" in flags else CLOSE)


def samples_read(trainer: Trainer, first: int, last: int) -> list[list[int]]:
    """The samples of the steps first + 1 to last, of eight each, that this rank reads."""
    batches = [b for step in range(first, last) for b in trainer.feeds["train"].global_batch(step * 8, step + 1)[0]]
    return [row for batch in batches for row in batch.tokens.T.tolist()]


def test_over_a_change_of_the_data_size_each_sample_is_read_once() -> None:
    """C043: five steps by two data ranks and five by one read what one rank reads in ten."""
    by_two = train("--train-iters 1", (1, 1, 2), look=functools.partial(samples_read, first=0, last=5)).seen
    by_one = train("--train-iters 1", look=functools.partial(samples_read, first=5, last=10)).seen
    want = train("--train-iters 1", look=functools.partial(samples_read, first=0, last=10)).seen
    assert sorted(by_two[0] + by_two[1] + by_one[0]) == sorted(want[0]) and len(want[0]) == 80


# ----------------------------------------------------------------------------------------------------- tied weights


def both_ends(trainer: Trainer) -> dict[str, tuple[int, bytes]]:
    """Of each copy of the word table on this rank: its tensor index and its bytes."""
    tensor = trainer.machine.mesh.tensor.index
    layers = [named for stage in trainer.machine.engine.stages.values() for named in stage.named_layers()]
    tables = {name: layer.word.weight for name, layer in layers if name == "embedding"}
    tables |= {name: layer.weight for name, layer in layers if name == "head"}
    return {name: (tensor, table.detach().view(torch.uint8).numpy().tobytes()) for name, table in tables.items()}


def test_both_copies_of_a_tied_weight_hold_the_same_bytes_beside_data_and_tensor_ranks() -> None:
    """C061: after ten steps of two micro-batches on each data rank; pipe/test_schedules_run.py has all schedules."""
    layout = (2, 2, 2)
    seen = train("--train-iters 10 --lr 1e-2", layout, look=both_ends).seen
    embeddings = {table for rank in seen for name, table in rank.items() if name == "embedding"}
    heads = {table for rank in seen for name, table in rank.items() if name == "head"}
    assert embeddings == heads and len(heads) == layout[0]
    one_step = train("--train-iters 1", layout, look=both_ends).seen[-1]
    assert heads != set(one_step.values())


# ------------------------------------------------------------------------------------------------------------- data


def write_tokens(prefix: Path, documents: list[np.ndarray], vocab: int = 97) -> str:
    with IndexedWriter(prefix, vocab_size=vocab) as writer:
        for tokens in documents:
            writer.add_document([tokens])
    return f"--data-path {prefix} --split 1,0,0"


def train_on_file(data: str, flags: str, layout: Layout = (1, 1, 1)) -> Outcome:
    return train(f"--no-mock-data {data} {flags}", layout)


def test_the_loss_is_the_mean_over_all_unmasked_tokens_however_the_batch_is_cut(tmp_path: Path) -> None:
    """C093: ends of documents in some samples and not in others; 256 is the byte tokenizer's."""
    draw = np.random.default_rng(2)
    lengths = [length for long in (60, 90, 120, 30) for length in (1, 2, 1, 3, 1, 1, 2, 4, 1, 1, 3, 1, long)]
    documents = [np.append(draw.integers(0, 256, length), 256) for length in lengths]
    data = write_tokens(tmp_path / "uneven", documents, vocab=257)
    flags = "--fp64 --tokenizer-type ByteTokenizer --vocab-size 257 --eod-mask-loss --train-iters 4"
    want = train_on_file(data, f"{flags} --micro-batch-size 8")
    unmasked = train_on_file(data, f"{flags.replace('--eod-mask-loss ', '')} --micro-batch-size 8")
    assert abs(unmasked.norms[0] / want.norms[0] - 1) > 1e-2, "the masks are to matter"
    for mbs, layout in ((1, (1, 1, 1)), (4, (1, 1, 1)), (2, (1, 1, 2)), (2, (2, 2, 1))):
        assert_equal(train_on_file(data, f"{flags} --micro-batch-size {mbs}", layout), want, limits=EXACT)


def sentencepiece_model(folder: Path, name: str, **ids: int) -> Path:
    """A small SentencePiece model with some special ids left out."""
    lines = [f"line {n} of a text with a few words and {n * n} numbers" for n in range(200)]
    path = folder / f"{name}.model"
    with open(path, "wb") as out:
        train_tokenizer.sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=out, vocab_size=60, model_type="bpe", minloglevel=2, **ids
        )
    return path


def test_a_tokenizer_without_a_special_token_trains_unless_that_token_is_asked_for(tmp_path: Path) -> None:
    """C034: SentencePiece says -1 for an id that is not there; it must never become an index."""
    data = write_tokens(tmp_path / "words", [np.arange(400) % 60], vocab=60)
    model = "--tokenizer-type SentencePieceTokenizer --vocab-size 97 --tokenizer-model"
    padless = sentencepiece_model(tmp_path, "padless", pad_id=-1)
    endless = sentencepiece_model(tmp_path, "endless", eos_id=-1)
    assert len(train_on_file(data, f"{model} {padless} --eod-mask-loss --train-iters 2").steps) == 2
    assert len(train_on_file(data, f"{model} {endless} --train-iters 2").steps) == 2
    with pytest.raises(ValueError, match="the tokenizer has no end-of-document token"):
        train(f"{model} {endless} --eod-mask-loss --train-iters 2")


# ---------------------------------------------------------------------------------------------------------- layouts


def test_layers_that_stages_do_not_divide_are_all_there() -> None:
    """C057: five layers on one to four stages: the same parameters are counted, the same loss comes out."""
    said, runs = set(), []
    for stages in (1, 2, 3, 4):
        flags = f"--fp64 --num-layers 5 --train-iters 2 --pipeline-model-parallel-size {stages}"
        config, _ = parse(f"{SMALL} {flags}".split())
        said.add(pretrain_gpt.describe(pretrain_gpt.prepare(config, World(0, stages, 0))).split(", ")[1])
        runs.append(train(flags, (1, stages, 1)))
    held = sum(weight.numel() for (_, kind), weight in runs[0].state.items() if kind == "weight")
    assert said == {f"{held:,} parameters"}
    for run in runs[1:]:
        assert_equal(run, runs[0], limits=EXACT)


def test_bf16_trains_over_gloo_in_every_axis() -> None:
    """Sums over ranks in bf16 come out as one rank's do, to its three digits."""
    want = train("--bf16 --train-iters 4")
    for layout in ((2, 1, 1), (2, 2, 2)):
        got = train("--bf16 --train-iters 4", layout)
        assert got.losses == pytest.approx(want.losses, rel=1e-3)
        assert got.norms == pytest.approx(want.norms, rel=1e-2)
