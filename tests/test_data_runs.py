"""Whole runs on corpora of every kind: growing batches, blends, named validation sets, Megatron's order, borders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from megazero.data.indexed import IndexedWriter
from tests.training import SMALL, Outcome, distance, train

LIMITS = {"loss": 1e-11, "norm": 1e-11, "weights": 1e-10, "moments": 1e-10}
ON_FILES = SMALL.replace("--mock-data", "")


def write(folder: Path, name: str, seed: int, documents: int = 60, low: int = 0, high: int = 97) -> str:
    rng = np.random.default_rng(seed)
    with IndexedWriter(folder / name, vocab_size=97) as writer:
        for _ in range(documents):
            writer.add_document([rng.integers(low, high, rng.integers(5, 60))])
    return str(folder / name)


@pytest.fixture
def web(tmp_path: Path) -> str:
    return write(tmp_path, "web", 1)


@pytest.fixture
def code(tmp_path: Path) -> str:
    return write(tmp_path, "code", 2, documents=40)


def lines(tmp_path: Path, flags: str, *, drop: str = "") -> list[dict]:
    """What one process writes to --metrics-jsonl for `flags` over the small model on files."""
    path = tmp_path / "lines.jsonl"
    path.unlink(missing_ok=True)
    base = re.sub(rf"{drop} \S+", "", ON_FILES) if drop else ON_FILES
    assert pretrain_gpt.main(f"{base} --log-interval 1000 --metrics-jsonl {path} {flags}".split()) == 0
    found = [json.loads(line) for line in path.read_text().splitlines()]
    timed = {"seconds", "tokens_per_second"}
    return [{key: value for key, value in line.items() if key not in timed} for line in found]


def losses(found: list[dict]) -> list[float]:
    return [line["lm_loss"] for line in found if "split" not in line]


# ----------------------------------------------------------------------------------------------------- growing batch

RAMP = "--global-batch-size 16 --rampup-batch-size 4 4 30 --train-iters 6"


def ramp_of(layout: tuple[int, int, int]) -> Outcome:
    return train(f"--fp64 {RAMP} --micro-batch-size 1", layout)


def test_any_layout_trains_the_same_model_in_a_ramp() -> None:
    """The number of micro-batches changes from step to step, and with it the pipeline's program."""
    one = ramp_of((1, 1, 1))
    assert [step["consumed_samples"] for step in one.steps] == [4, 8, 12, 20, 32, 48]
    for layout in ((1, 2, 2), (2, 1, 4)):
        got = ramp_of(layout)
        assert [step["consumed_samples"] for step in got.steps] == [4, 8, 12, 20, 32, 48]
        for name, value in distance(got, one).items():
            assert value <= LIMITS[name], f"{layout}: {name} differ by {value:.1e}"


def test_a_run_resumes_exactly_in_the_middle_of_a_ramp(tmp_path: Path, web: str) -> None:
    flags = f"--data-path {web} --global-batch-size 16 --rampup-batch-size 4 4 40 --train-samples 90 --save-interval 3"
    run = f"{flags} --save {tmp_path}/saves --lr-decay-style cosine --lr-warmup-samples 20"
    whole = lines(tmp_path, run, drop="--train-iters")
    sizes = np.diff([0, *(line["consumed_samples"] for line in whole)])
    assert sorted(set(sizes.tolist())) == [4, 8, 12, 16] and whole[-1]["consumed_samples"] >= 90 > 90 - 16
    resumed = lines(tmp_path, f"{run} --load {tmp_path}/saves --ckpt-step 3", drop="--train-iters")
    assert resumed == whole[3:]  # losses, norms, rates and counts, in every digit


def test_a_staircase_counts_tokens(tmp_path: Path, web: str) -> None:
    words = ["--step-batch-size-schedule", "0:4", "0.2K:8", "480:16"]
    found = lines(tmp_path, f"--data-path {web} {' '.join(words)}", drop="--global-batch-size")
    assert [line["consumed_samples"] for line in found] == [4, 8, 12, 20, 28] and 200 // 16 == 12


def test_rates_of_a_ramp_are_printed(capsys: pytest.CaptureFixture) -> None:
    base = SMALL.replace("--train-iters 5", "--train-samples 60 --lr-warmup-samples 30")
    words = f"{base} --global-batch-size 8 --rampup-batch-size 2 2 12 --micro-batch-size 1 --print-lr 6"
    assert pretrain_gpt.main(words.split()) == 0
    rates = [json.loads(line)["learning_rate"] for line in capsys.readouterr().out.splitlines()]
    assert rates == pytest.approx([1e-3 * n / 30 for n in (0, 2, 4, 8, 14, 22)])


def test_samples_left_are_counted_from_where_a_run_stopped(tmp_path: Path, web: str) -> None:
    flags = f"--data-path {web} --train-samples 48 --save {tmp_path}/saves --save-interval 2"
    assert len(lines(tmp_path, flags, drop="--train-iters")) == 6
    resumed = f"{flags} --load {tmp_path}/saves --ckpt-step 2 --global-batch-size 16"
    larger = lines(tmp_path, resumed, drop="--train-iters")
    assert [(line["iteration"], line["consumed_samples"]) for line in larger] == [(3, 32), (4, 48)]


# ------------------------------------------------------------------------------------------------- kinds of corpora


@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_a_blend_trains_alike_on_any_number_of_ranks_and_workers_c028(web: str, code: str, order: str) -> None:
    flags = f"--fp64 --no-mock-data --data-path 0.7 {web} 0.3 {code} --sample-order {order} --split 9,1"
    one = train(flags)
    for layout, workers in (((1, 1, 2), 0), ((1, 2, 2), 2), ((1, 1, 1), 1)):
        got = train(f"{flags} --num-workers {workers}", layout)
        assert max(abs(a - b) for a, b in zip(got.losses, one.losses, strict=True)) < 1e-11


def test_megatrons_order_is_another_order_of_the_same_tokens(tmp_path: Path, web: str) -> None:
    keyed, megatron = (lines(tmp_path, f"--data-path {web} --sample-order {o}") for o in ("keyed", "megatron"))
    assert losses(keyed) != losses(megatron) and len(keyed) == len(megatron)


def test_validation_sets_are_told_by_name(tmp_path: Path, web: str, code: str) -> None:
    sets = f"--valid-set code={code} --valid-set both=1 {web} 1 {code} --eval-interval 2 --eval-iters 2"
    found = lines(tmp_path, f"--data-path {web} --split 6,3,1 {sets}")
    told = [(line["iteration"], line["split"]) for line in found if "split" in line]
    names = ["valid", "code", "both"]
    assert told == [(2, n) for n in names] + [(4, n) for n in names] + [(5, n) for n in (*names, "test")]
    alone = lines(tmp_path, f"--data-path {web} --split 6,3,1 --eval-interval 2 --eval-iters 2")
    assert [line for line in found if line.get("split") not in ("code", "both")] == alone
    own = lines(tmp_path, f"--train-data-path {web} --valid-data-path {code} --eval-interval 5 --eval-iters 2")
    assert [line["split"] for line in own if "split" in line] == ["valid"]


def test_validation_sets_are_evaluated_alike_on_ranks_of_a_pipeline(web: str, code: str) -> None:
    flags = f"--fp64 --no-mock-data --train-data-path {web} --valid-set c={code} --eval-interval 3 --eval-iters 2"
    one, four = train(flags), train(flags, (1, 2, 2))
    assert [e[:2] for e in one.evaluations] == [e[:2] for e in four.evaluations] == [("c", 3), ("c", 5)]
    assert all(abs(a[2] - b[2]) < 1e-11 for a, b in zip(one.evaluations, four.evaluations))


def test_nothing_is_cached_whatever_the_cache_path_c017_c019(tmp_path: Path, web: str) -> None:
    places = [tmp_path / "cache0", tmp_path / "cache1"]
    runs = []
    for place in places:
        place.mkdir()
        for order in ("keyed", "megatron"):
            words = f"--fp64 --no-mock-data --data-path {web} --data-cache-path {place} --sample-order {order}"
            runs.append(train(words, (1, 1, 2)).losses)
        assert not list(place.iterdir())
    assert runs[0] == runs[2] and runs[1] == runs[3]
    names = sorted(path.name for path in tmp_path.iterdir())
    write(tmp_path, "web", 7)  # other tokens under the old name: nothing of the old ones is left
    again = train(f"--fp64 --no-mock-data --data-path {web} --data-cache-path {places[0]}", (1, 1, 2)).losses
    assert again != runs[0] and sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_one_document_shorter_than_a_sample_trains_by_going_round_c023(tmp_path: Path, order: str) -> None:
    with IndexedWriter(tmp_path / "tiny", vocab_size=97) as writer:
        writer.add_document([np.arange(10)])
    flags = f"--data-path {tmp_path}/tiny --split 1 --seq-length 64 --train-iters 3 --sample-order {order}"
    assert len(losses(lines(tmp_path, flags))) == 3


def test_documents_without_an_end_token_are_told_apart_c034(tmp_path: Path, web: str) -> None:
    """The null tokenizer has no end token, so the borders come from the offsets; each flag changes the loss."""
    flags = ("", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    first = [losses(lines(tmp_path, f"--data-path {web} {flag}"))[0] for flag in flags]
    assert len(set(first)) == 4
