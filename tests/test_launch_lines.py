"""Launch lines of both families: each trains three steps, is laid out, or is refused in one line with the reason."""

from __future__ import annotations

import functools
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from megazero.config import DataConfig
from megazero.data.indexed import IndexedWriter
from megazero.data.tokenizer import SPELLING, VISIBLE, build_tokenizer
from megazero.flags import parse
from megazero.parallel.groups import World
from tests.harness import on_ranks
from tests.launch_lines import FITS, LINES, PARTS, TRAINS, Line
from tests.training import train_rank


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A GPT-2 vocabulary of the bytes and the end of a document, and a corpus of it."""
    folder = tmp_path_factory.mktemp("files")
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    tokens = [*map(chr, VISIBLE), *SPELLING.values(), "<|endoftext|>"]
    vocab.write_text(json.dumps({token: number for number, token in enumerate(dict.fromkeys(tokens))}))
    merges.write_text("#version: 0.2\n")
    data = DataConfig(vocab_file=str(vocab), merge_file=str(merges))
    size = build_tokenizer(data).vocab_size
    with IndexedWriter(folder / "corpus", vocab_size=size) as writer:
        for document in range(40):
            writer.add_document([np.append((np.arange(200) + document) % (size - 1), size - 1)])
    return {"corpus": f"{folder}/corpus", "vocab": str(vocab), "merges": str(merges), "tmp": str(folder)}


def words_of(line: Line, files: dict[str, str]) -> list[str]:
    return shlex.split(line.words.format(**PARTS, **files).format(**files))


def kind(ends: str) -> list[Line]:
    return [line for line in LINES if line.ends == ends]


def test_there_are_lines_enough():
    assert len(LINES) >= 60 and len({line.name for line in LINES}) == len(LINES)
    assert len(kind(TRAINS)) >= 12 and len(kind(FITS)) >= 20


@pytest.mark.parametrize("line", kind(FITS), ids=lambda line: line.name)
def test_a_line_is_laid_out(line: Line, files: dict[str, str]):
    plan = pretrain_gpt.prepare(parse(words_of(line, files))[0], World(0, line.world, 0))
    assert plan.topology.world == line.world and plan.iterations > 1
    assert len(plan.stages) == plan.config.parallel.pipeline_model_parallel_size and plan.parameters > 10_000


@pytest.mark.parametrize("line", kind(TRAINS), ids=lambda line: line.name)
def test_a_line_trains(line: Line, files: dict[str, str]):
    train_three = functools.partial(train_rank, words_of(line, files), line.world, None, 3)
    record, *_ = on_ranks(line.world, train_three)[0]
    assert [step["iteration"] for step in record.steps] == [1, 2, 3]
    assert all(math.isfinite(step["lm_loss"]) for step in record.steps)


REFUSED = [line for line in LINES if line.ends not in (FITS, TRAINS)]


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line.name)
def test_a_line_is_refused_by_one_rank_in_one_line_before_any_meets_another(
    line: Line, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(pretrain_gpt, "connect", lambda *_, **__: pytest.fail("it went on to meet the others"))
    for rank in (0, line.world - 1):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", line.world)):
            monkeypatch.setenv(name, str(value))
        assert pretrain_gpt.main(words_of(line, files)) == 2
        out, err = capsys.readouterr()
        if rank == 0:
            assert line.ends.format(**files) in err and err.count("\n") == 1, err
        assert out == "" and (rank == 0 or err == "")


def test_every_line_says_whose_defaults_count_where_its_flags_tell(files: dict[str, str]):
    for name, family in (("mixtral", "Megatron-LM"), ("the second stage", "Megatron-DeepSpeed")):
        (line,) = [line for line in LINES if line.name == name]
        first, *_ = parse(words_of(line, files))[1]
        assert first.startswith(f"defaults of {family} (guessed from --")
    assert not Path(files["tmp"], "tb").exists()
