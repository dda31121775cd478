"""inspect_data.py: counts and checksum of a corpus, the text of a document, and exactly the samples of the loader."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from data_tools import inspect_data
from megazero.config import DataConfig
from megazero.data.corpora import open_samples
from megazero.data.indexed import IndexedWriter

from .test_tokenizer import sentencepiece_file


def inspect(capsys, *words):
    inspect_data.main([*map(str, words)])
    return capsys.readouterr().out


def inspect_json(capsys, *words):
    return json.loads(inspect(capsys, *words, "--json"))


def corpus(prefix, documents, vocab_size=257, fingerprint="bytes"):
    with IndexedWriter(prefix, vocab_size=vocab_size, fingerprint=fingerprint) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


@pytest.fixture
def letters(tmp_path):
    return corpus(tmp_path / "letters", [[[104, 105], [256]], [[111, 107, 256]]])


def counted(prefix, documents, start):
    """A corpus of documents of 1 to 20 tokens that count up from `start`."""
    ends = start + np.cumsum(np.arange(documents) % 20 + 1)
    return corpus(prefix, [[list(range(end - n % 20 - 1, end))] for n, end in enumerate(ends.tolist())], 1 << 20, None)


def test_a_corpus_is_described(letters, capsys):
    found = inspect_json(capsys, letters)
    tokens = Path(letters + ".bin").read_bytes()
    assert found == {
        "prefix": letters,
        "dtype": "uint16",
        "sequences": 3,
        "documents": 2,
        "tokens": 6,
        "bytes": 12,
        "vocabulary": 257,
        "tokenizer": "bytes",
        "tokens_sha256": hashlib.sha256(tokens).hexdigest(),
    }
    printed = inspect(capsys, letters)
    assert [line.split(maxsplit=1) for line in printed.splitlines()] == [[k, str(v)] for k, v in found.items()]
    Path(letters + ".json").unlink()
    found = inspect_json(capsys, letters)
    assert found["vocabulary"] is None and found["tokenizer"] is None


def test_text_of_a_document(letters, tmp_path, capsys):
    found = inspect_json(capsys, letters, "--document", 0)
    assert (found["document"], found["ids"], found["text"]) == (0, [104, 105, 256], "hi")
    assert inspect(capsys, letters, "--document", 1).endswith("\n\ndocument 1, 3 tokens:\nok\n")
    Path(letters + ".json").unlink()  # then nobody knows what the ids mean
    assert inspect(capsys, letters, "--document", 1).endswith("111 107 256\n")
    assert inspect_json(capsys, letters, "--document", 1, "--tokenizer-type", "ByteTokenizer")["text"] == "ok"


def test_type_of_the_tokenizer_is_found_out_and_its_fingerprint_compared_c016(tmp_path, letters, capsys):
    model = sentencepiece_file(tmp_path / "m.model")
    tokenizer = inspect_data.build_tokenizer(DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model))
    ids = tokenizer.encode("def f(x): return 1")
    prefix = corpus(tmp_path / "sp", [[ids]], tokenizer.vocab_size, tokenizer.fingerprint)
    found = inspect_json(capsys, prefix, "--document", 0, "--tokenizer-model", model, "--sample", 0, "--seq-length", 4)
    assert found["text"] == "def f(x): return 1"
    assert found["texts"] == [tokenizer.decode(found["samples"][0])]
    with pytest.raises(SystemExit, match="letters was made with the tokenizer bytes, not with sentencepiece-"):
        inspect(capsys, letters, "--document", 0, "--tokenizer-model", model)


@pytest.mark.parametrize("order", ["keyed", "megatron"])
@pytest.mark.parametrize("part", ["train", "valid"])
def test_samples_are_those_of_the_loader(tmp_path, capsys, order, part):
    paths = ["0.3", counted(tmp_path / "a", 300, 0), "0.7", counted(tmp_path / "b", 100, 100_000)]
    words = ["--data-path", *paths, "--split", "80,20,0", "--part", part, "--num-samples", 500, "--seq-length", 16]
    found = inspect_json(capsys, *words, "--seed", 7, "--sample-order", order, "--samples", 3, 0, 499)
    data = DataConfig(data_path=tuple(paths), split="80,20,0", sample_order=order)
    numbers = {"seq_length": 16, "vocab_size": 1 << 20, "seed": 7}
    samples = open_samples(data, counts={"train": 500, "valid": 500, "test": 500}, **numbers)[part]
    assert found == {"samples": [samples.rows([k])[0].tolist() for k in (3, 0, 499)]}
    assert all(len(sample) == 17 for sample in found["samples"])
    printed = inspect(capsys, *words, "--seed", 7, "--sample-order", order, "--sample", 3)
    assert printed == f"\nsample 3 of the {part} part:\n{' '.join(map(str, found['samples'][0]))}\n"


def test_sample_of_one_corpus_and_of_parts_with_data_of_their_own(tmp_path, capsys):
    a, b = counted(tmp_path / "a", 300, 0), counted(tmp_path / "b", 100, 100_000)
    alone = inspect_json(capsys, a, "--sample", 5, "--seq-length", 8)
    assert alone["samples"] == inspect_json(capsys, "--data-path", a, "--samples", 5, "--seq-length", 8)["samples"]
    own = ["--train-data-path", a, "--valid-data-path", b, "--valid-set", f"extra={b}", "--seq-length", 8]
    for part, least, most in (("train", 0, 10_000), ("valid", 100_000, 110_000), ("extra", 100_000, 110_000)):
        found = inspect_json(capsys, *own, "--part", part, "--samples", 0, 1)["samples"]
        assert all(least <= i < most for sample in found for i in sample)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["LETTERS", "--document", 2], "--document 2: .*letters has documents 0 to 1"),
        (["LETTERS", "--document", -1], "--document -1"),
        (["--train-data-path", "x", "--samples", 0, "--seq-length", 2], "--train-data-path x: there is no file x.idx"),
        (
            ["--train-data-path", "LETTERS", "--samples", 0, "--seq-length", 2, "--part", "test"],
            "--part test is empty: --test-data-path gives it no token",
        ),
        (["nowhere"], "PREFIX nowhere: there is no file nowhere.idx"),
        (["LETTERS", "--sample", 0, "--seq-length", 2, "--part", "test"], "--part test is empty"),
        (["LETTERS", "--sample", 0, "--seq-length", 2, "--part", "other"], "--part other: give one of train, valid"),
        (["LETTERS", "--sample", -1, "--seq-length", 2], "--samples -1: must be at least 0"),
    ],
)
def test_what_cannot_be_shown_is_one_line(letters, words, said):
    with pytest.raises(SystemExit, match=f"^inspect_data.py: error: {said}"):
        inspect_data.main([str(word).replace("LETTERS", letters) for word in words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "either the PREFIX"),
        (["a", "--data-path", "b", "--samples", "1"], "either the PREFIX"),
        (["--data-path", "b"], "--samples K"),
        (["--data-path", "b", "--document", "1", "--samples", "1"], "--document give the PREFIX"),
        (["a", "--sample", "1"], "--samples needs --seq-length"),
        (["a", "--sample", "1", "--seq-length", "4", "--sample-order", "megatron"], "needs --num-samples"),
    ],
)
def test_words_that_do_not_go_together_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        inspect_data.main(words)
    assert said in capsys.readouterr().err
