"""merge_data.py: every document once, in order or shuffled by a seed; only corpora of one vocabulary."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_tools import merge_data
from data_tools.shuffle import Buckets, Piece, draws
from megazero.data.indexed import IndexedReader, IndexedWriter

ROOT = Path(__file__).resolve().parents[2]


def corpus(prefix, documents, vocab_size=1000, fingerprint="t", sidecar=True):
    with IndexedWriter(prefix, vocab_size=vocab_size, fingerprint=fingerprint) as writer:
        for document in documents:
            writer.add_document(document)
    if not sidecar:
        os.unlink(f"{prefix}.json")
    return str(prefix)


def merge(folder, *words):
    (summary,) = merge_data.run(merge_data.parse(["--output-prefix", str(folder / "out" / "x"), *map(str, words)]))
    return summary


def read(prefix):
    """Its documents, each a list of sequences."""
    reader = IndexedReader(prefix)
    index = reader.document_index.tolist()
    return [[reader.sequence(s).tolist() for s in range(a, b)] for a, b in zip(index[:-1], index[1:])]


def content(prefix):
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")]


def random_documents(seed, count):
    draw = np.random.default_rng(seed)
    return [
        [draw.integers(0, 1000, draw.integers(0, 9)).tolist() for _ in range(draw.integers(0, 4))] for _ in range(count)
    ]


@pytest.mark.parametrize("memory", [1024, 1])
def test_documents_come_in_the_order_of_the_corpora(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(merge_data, "BYTES_PER_TOKEN", 1e6 / 20)  # twenty tokens to a megabyte
    monkeypatch.setattr(merge_data, "DOCUMENTS_AT_ONCE", 7)
    parts = {name: random_documents(number, 50) for number, name in enumerate(("a", "b", "c"))}
    parts["c"] += [[], [list(range(200))], [[]]]
    for name, documents in parts.items():
        corpus(tmp_path / "in" / name, documents)
    prefixes = [tmp_path / "in" / name for name in ("c", "a", "b")]
    summary = merge(tmp_path, "--input", *prefixes, "--memory-megabytes", memory)
    assert read(summary["prefix"]) == parts["c"] + parts["a"] + parts["b"]
    assert content(summary["prefix"]) == content(corpus(tmp_path / "whole", parts["c"] + parts["a"] + parts["b"]))
    assert (summary["corpora"], summary["documents"], summary["shuffled"]) == (3, 153, False)
    assert sorted(os.listdir(tmp_path / "out")) == ["x.bin", "x.idx", "x.json"]


def test_shuffle_takes_every_document_once_and_depends_on_the_seed_alone(tmp_path, monkeypatch):
    documents = random_documents(1, 400)
    prefixes = [corpus(tmp_path / f"{n}", documents[n * 100 : n * 100 + 100]) for n in range(4)]
    results = []
    for memory, tokens, seed in ((1024, 32, 5), (1, 1e4, 5), (1, 1e5, 5), (1024, 32, 6)):
        monkeypatch.setattr(merge_data, "BYTES_PER_TOKEN", tokens)
        monkeypatch.setattr(merge_data, "MOST_BITS", 12 if memory > 1 else 4)
        summary = merge(tmp_path, "--input", *prefixes, "--shuffle", "--seed", seed, "--memory-megabytes", memory)
        results.append(content(summary["prefix"]))
        assert sorted(map(str, read(summary["prefix"]))) == sorted(map(str, documents))
    assert results[0] == results[1] == results[2] != results[3]
    assert sorted(os.listdir(tmp_path / "out")) == ["x.bin", "x.idx", "x.json"]


@pytest.mark.parametrize("bits", [0, 1, 5])
def test_number_of_files_does_not_change_the_order(tmp_path, bits):
    documents = [np.full(n % 5, n, np.int64) for n in range(300)]
    buckets = Buckets(tmp_path, bits=bits, dtype=np.dtype("<u2"), seed=3)
    for first in range(0, 300, 77):
        some = documents[first : first + 77]
        lengths = np.array([len(d) for d in some])
        buckets.add(Piece(np.concatenate(some), lengths, np.ones(len(some), np.int64)))
    assert len({path.name.split(".")[0] for path in tmp_path.iterdir()}) == 1 << bits
    order = np.argsort(draws(3, 0, 300))
    pieces = list(buckets.sorted(50))
    assert np.concatenate([p.ids for p in pieces]).tolist() == np.concatenate([documents[n] for n in order]).tolist()
    assert np.concatenate([p.lengths for p in pieces]).tolist() == [len(documents[n]) for n in order]
    assert list(tmp_path.iterdir()) == [] and max(len(p.ids) for p in pieces) < 60


def test_shuffled_documents_go_anywhere():
    size, hits = 40, np.zeros((40, 40))
    for seed in range(2000):
        hits[np.arange(size), np.argsort(draws(seed, 0, size))] += 1
    chi_square = ((hits - 50) ** 2 / 50).sum()
    assert 1521 - 6 * 55 < chi_square < 1521 + 6 * 55  # (size - 1)^2 degrees of freedom, deviation sqrt(2 * 1521)
    assert len(set(draws(1, 0, 100_000).tolist())) == 100_000


def test_folders_patterns_and_files_stand_for_prefixes(tmp_path):
    for name in ("b", "a", "c"):
        corpus(tmp_path / "in" / name, [[[1]]])
    folder = str(tmp_path / "in")
    for words in (["in"], ["in/*"], ["in/*.idx"], ["in/a.bin", "in/b.idx", "in/c"]):
        found = merge_data.expand([str(tmp_path / word) for word in words])
        assert found == [f"{folder}/{name}" for name in "abc"]
    for missing in ("nowhere", "in/d*"):
        with pytest.raises(ValueError, match="--input .*: there is no "):
            merge_data.expand([str(tmp_path / missing)])


def test_corpora_of_different_vocabularies_are_not_mixed_c016(tmp_path):
    small, large = corpus(tmp_path / "s", [[[1]]], 97), corpus(tmp_path / "l", [[[130]]], 131)
    other = corpus(tmp_path / "o", [[[1]]], 97, "u")
    with pytest.raises(ValueError, match=r"s was made with a vocabulary of 97 .*, .*l with one of 131"):
        merge(tmp_path, "--input", small, large)
    with pytest.raises(ValueError, match=r"\(tokenizer t\), .*o with .* \(tokenizer u\)"):
        merge(tmp_path, "--input", small, other)
    with pytest.raises(ValueError, match="--vocab-size 96: .*s was made with a vocabulary of 97"):
        merge(tmp_path, "--input", small, "--vocab-size", 96)
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_corpora_of_other_tools_are_checked_id_by_id_c016(tmp_path):
    known = corpus(tmp_path / "known", [[[1], [96]]], 97)
    wide = corpus(tmp_path / "wide", [[[5]], [[96, 7]]], 70_000, sidecar=False)  # int32
    summary = merge(tmp_path, "--input", known, wide)
    assert read(summary["prefix"]) == [[[1], [96]], [[5]], [[96, 7]]] and summary["dtype"] == "uint16"
    assert IndexedReader(summary["prefix"]).sidecar.fingerprint is None
    bad = corpus(tmp_path / "bad", [[[5]], [], [[7, 97]]], sidecar=False)
    for words in ([known, bad], [bad, "--vocab-size", 97]):
        for shuffle in ([], ["--shuffle"]):
            with pytest.raises(ValueError, match=r"bad, document 2: id 97 is not below the vocabulary, 97"):
                merge(tmp_path, "--input", *words, *shuffle)
    assert merge(tmp_path, "--input", bad, "--vocab-size", 98)["vocab_size"] == 98
    with pytest.raises(ValueError, match=r"bad\.json is missing\): give --vocab-size"):
        merge(tmp_path, "--input", bad)


def test_a_corpus_is_not_written_over_itself(tmp_path):
    prefix = corpus(tmp_path / "out" / "x", [[[1]]])
    with pytest.raises(ValueError, match="--output-prefix .* is one of the --input corpora"):
        merge(tmp_path, "--input", prefix)
    assert read(prefix) == [[[1]]]


def test_files_that_cannot_be_are_named_with_their_flag(tmp_path):
    prefix = corpus(tmp_path / "x", [[[1]]])
    with pytest.raises(ValueError, match="^--output-prefix /dev/null/x: the folder /dev/null cannot be made"):
        merge(tmp_path, "--input", prefix, "--output-prefix", "/dev/null/x")
    os.unlink(prefix + ".bin")
    with pytest.raises(ValueError, match=rf"^--input {prefix}: there is no file .*x\.bin"):
        merge(tmp_path, "--input", prefix)


def test_damaged_corpus_is_named_in_one_line_c014(tmp_path):
    prefix = corpus(tmp_path / "x", [[[1, 2, 3]]])
    os.truncate(prefix + ".bin", 5)
    with pytest.raises(SystemExit, match=r"merge_data.py: error: .*x\.bin has 5 bytes, .*x\.idx says 6"):
        merge_data.main(["--input", prefix, "--output-prefix", str(tmp_path / "out" / "x")])


def test_a_stopped_merge_leaves_nothing_c014(tmp_path):
    prefix = corpus(tmp_path / "in", [[list(range(1000))] for _ in range(2000)])
    command = [sys.executable, ROOT / "data_tools" / "merge_data.py", "--shuffle", "--memory-megabytes", "1"]
    command += ["--input", *[prefix] * 10, "--output-prefix", tmp_path / "out" / "x"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("out/x.shuffle.*/*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (128 + signal.SIGTERM, "", "merge_data.py: stopped by SIGTERM\n")
    assert os.listdir(tmp_path / "out") == []


def test_summary_is_the_last_line(tmp_path, capsys):
    prefix = corpus(tmp_path / "in", [[[1, 2]]])
    merge_data.main(["--input", prefix, prefix, "--output-prefix", str(tmp_path / "out" / "x")])
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["sequences"], summary["tokens"], summary["bytes"]) == (2, 2, 4, 8)
