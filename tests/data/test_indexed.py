"""Token files: bytes equal to Megatron's, ids never wrap, a damaged pair is never read."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.indexed import IndexedReader, IndexedWriter, token_dtype

ROOT = Path(__file__).resolve().parents[2]

# sequences [0,1,2], [3,4], [5..8]; the second document has two of them; written and read by Megatron's own code
GOLDEN = (
    "4d4d4944494458000001000000000000000803000000000000000300000000000000"
    "030000000200000004000000"
    "000000000000000006000000000000000a00000000000000"
    "000000000000000001000000000000000300000000000000"
)


def write(prefix, documents, vocab_size=100):
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


@pytest.fixture
def golden(tmp_path):
    return write(tmp_path / "golden", [[[0, 1, 2]], [[3, 4], [5, 6, 7, 8]]])


def test_index_has_the_very_bytes_of_megatron(golden):
    assert Path(golden + ".idx").read_bytes().hex() == GOLDEN
    assert Path(golden + ".bin").read_bytes() == np.arange(9, dtype="<u2").tobytes()


def test_reader_finds_sequences_documents_and_any_range(golden):
    reader = IndexedReader(golden)
    assert (len(reader), reader.num_documents, reader.num_tokens) == (3, 2, 9)
    assert reader.lengths.tolist() == [3, 2, 4] and reader.offsets.tolist() == [0, 6, 10]
    assert reader.document_index.tolist() == [0, 1, 3]
    assert reader.sequence(1).tolist() == [3, 4] and reader.document(1).tolist() == [3, 4, 5, 6, 7, 8]
    assert reader.read(2, 5).tolist() == [2, 3, 4, 5, 6] and reader.read(9, 0).tolist() == []
    assert reader.read(0, 9).dtype == np.int64 and reader.tokens.tolist() == list(range(9))
    for start, count in ((8, 2), (-1, 1), (0, -1)):
        with pytest.raises(IndexError):
            reader.read(start, count)


def test_corpus_of_others_is_read_without_sidecar_and_with_modes(golden):
    os.unlink(golden + ".json")
    with open(golden + ".idx", "ab") as file:
        file.write(bytes(3))  # one mode for each sequence
    reader = IndexedReader(golden)
    assert reader.sidecar is None and reader.document(0).tolist() == [0, 1, 2]


def test_sidecar_tells_vocabulary_tokenizer_and_counts(tmp_path):
    with IndexedWriter(tmp_path / "a", vocab_size=70_000, fingerprint="bytes") as writer:
        writer.add_document([[1, 2]])
    sidecar = json.loads((tmp_path / "a.json").read_text())
    assert sidecar == {"vocab_size": 70_000, "fingerprint": "bytes", "documents": 1, "sequences": 1, "tokens": 2,
                       "bytes": 8, "dtype": "int32"}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 65_536), max_size=6), max_size=3), max_size=6),
    st.sampled_from([65_536, 65_537]),
)
def test_what_is_written_is_read(documents, vocab_size):
    if vocab_size == 65_536:
        documents = [[[min(i, 65_535) for i in s] for s in document] for document in documents]
    with tempfile.TemporaryDirectory() as folder:
        reader = IndexedReader(write(Path(folder, "x"), documents, vocab_size))
        assert [reader.document(i).tolist() for i in range(reader.num_documents)] == [sum(d, []) for d in documents]
        sequences = [s for document in documents for s in document]
        assert [reader.sequence(i).tolist() for i in range(len(reader))] == sequences


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3), max_size=4), max_size=4),
    st.data(),
)
def test_documents_added_together_or_one_by_one_and_after_a_pause_are_the_same(batches, data):
    pause = data.draw(st.integers(0, len(batches)))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "a"), [document for batch in batches for document in batch])
        writer = mark = None
        for number, batch in enumerate([*batches, []]):
            if number == pause:
                writer = IndexedWriter(Path(folder, "b"), vocab_size=100, partial=Path(folder, "part"), resume=mark)
            sequences = [sequence for document in batch for sequence in document]
            ids = np.array([i for sequence in sequences for i in sequence], np.int32)
            writer = writer or IndexedWriter(Path(folder, "b"), vocab_size=100, partial=Path(folder, "part"))
            writer.add_documents(ids, [len(s) for s in sequences], [len(document) for document in batch])
            mark = writer.mark()
            if number + 1 == pause:  # more is written before the run breaks off
                writer.add_document([[1, 2], [3]])
                writer.close()
        writer.finish()
        for suffix in ("bin", "idx", "json"):
            assert Path(folder, f"a.{suffix}").read_bytes() == Path(folder, f"b.{suffix}").read_bytes()
        assert sorted(os.listdir(folder)) == [f"{name}.{suffix}" for name in "ab" for suffix in ("bin", "idx", "json")]


def test_what_is_too_short_for_its_mark_is_not_gone_on_with_c014(tmp_path):
    writer = IndexedWriter(tmp_path / "x", vocab_size=9, partial=tmp_path / "part")
    writer.add_document([[1, 2, 3]])
    mark = writer.mark()
    writer.close()
    os.truncate(tmp_path / "part" / "bin", 5)
    with pytest.raises(ValueError, match="part/bin has less than 6 bytes"):
        IndexedWriter(tmp_path / "x", vocab_size=9, partial=tmp_path / "part", resume=mark)


@pytest.mark.parametrize(
    ("ids", "lengths", "counts", "said"),
    [
        ([1, 2, 9], [1, 1, 1], [2, 0, 1], "document 4: id 9 is not below the vocabulary, 9"),
        ([1, -1, 2], [2, 0, 1], [1, 2], "document 2: id -1"),
        ([1, 2], [1], [1], "2 ids in 1 sequences of 1 tokens, 1 documents of 1 sequences"),
        ([1, 2], [1, 1], [1], "2 ids in 2 sequences of 2 tokens, 1 documents of 1 sequences"),
    ],
)
def test_bad_batch_is_refused_by_document_c007(tmp_path, ids, lengths, counts, said):
    with pytest.raises(ValueError, match=said), IndexedWriter(tmp_path / "x", vocab_size=9) as writer:
        writer.add_documents(np.zeros(2, np.int32), [1, 1], [1, 1])
        writer.add_documents(np.array(ids, np.int32), lengths, counts)
    assert os.listdir(tmp_path) == []


def test_too_long_a_sequence_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("megazero.data.indexed.MAX_LENGTH", 3)
    with pytest.raises(ValueError, match="document 1: a sequence of 4 tokens, at most are 3"):
        write(tmp_path / "x", [[[1, 2, 3]], [[1, 2, 3, 4]]])


MILLIONS = """
import resource, sys
import numpy as np
from megazero.data.indexed import IndexedWriter
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with IndexedWriter(sys.argv[1], vocab_size=9) as writer:
    for _ in range(2_000):
        writer.add_documents(np.ones(1000, np.int32), np.ones(1000, np.int64), np.ones(1000, np.int64))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_index_of_two_million_documents_takes_little_memory_c010(tmp_path):
    command = [sys.executable, "-c", MILLIONS, str(tmp_path / "x")]
    grown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert int(grown.stdout) < 60_000  # KiB; the index itself has 40 MB
    assert IndexedReader(tmp_path / "x").num_documents == 2_000_000


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "int32")])
def test_uint16_exactly_where_every_id_fits_c007(tmp_path, vocab_size, dtype):
    reader = IndexedReader(write(tmp_path / "x", [[[vocab_size - 1, 0]]], vocab_size))
    assert reader.dtype.name == dtype and reader.document(0).tolist() == [vocab_size - 1, 0]
    for size in (0, 2**31 + 1):
        with pytest.raises(ValueError, match="vocabulary"):
            token_dtype(size)


@pytest.mark.parametrize("ids", [[70_000], [-1], [0, 65_536], [1.5], [[1, 2]]])
def test_what_is_no_id_is_refused_when_written_and_leaves_nothing_c007(tmp_path, ids):
    with pytest.raises(ValueError, match="document 1"), IndexedWriter(tmp_path / "x", vocab_size=65_536) as writer:
        writer.add_document([[1]])
        writer.add_document([ids])
    assert os.listdir(tmp_path) == []


def test_names_appear_only_at_the_end_c014(tmp_path):
    writer = IndexedWriter(tmp_path / "new" / "x", vocab_size=9)
    writer.add_document([[1, 2, 3]])
    assert all(name.endswith(".partial") for name in os.listdir(tmp_path / "new"))
    writer.finish()
    assert sorted(os.listdir(tmp_path / "new")) == ["x.bin", "x.idx", "x.json"]


def test_failed_rename_leaves_no_half_c014(tmp_path, monkeypatch):
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: rename(a, b) if ".idx" not in str(b) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "x", [[[1]]])
    assert os.listdir(tmp_path) == []


def test_cut_data_is_refused_with_both_sizes_c014(golden):
    os.truncate(golden + ".bin", 17)
    with pytest.raises(ValueError, match=r"golden\.bin has 17 bytes, .*golden\.idx says 18"):
        IndexedReader(golden)


@pytest.mark.parametrize("size", [0, 20, 34, 60, 93, 96])
def test_damaged_index_is_refused(golden, size):
    os.truncate(golden + ".idx", size)
    with pytest.raises(ValueError, match=r"golden\.idx"):
        IndexedReader(golden)


def test_strange_index_is_refused(golden):
    good = Path(golden + ".idx").read_bytes()
    for at, byte in ((0, 0), (9, 2), (17, 7), (34 + 12, 2), (34 + 36, 1), (94 - 8, 2)):
        Path(golden + ".idx").write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
        with pytest.raises(ValueError, match=r"golden\.idx"):
            IndexedReader(golden)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_named_with_its_flag(golden, suffix):
    os.unlink(golden + suffix)
    with pytest.raises(ValueError, match=rf"--data-path .*golden\{suffix}"):
        IndexedReader(golden)
    with pytest.raises(ValueError, match="give the prefix alone"):
        IndexedReader(golden + ".bin")


@pytest.mark.parametrize("change", [{"tokens": 8}, {"documents": None}, {"dtype": "int32"}])
def test_sidecar_of_other_data_is_refused(golden, change):
    content = json.loads(Path(golden + ".json").read_text())
    Path(golden + ".json").write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=r"golden\.json"):
        IndexedReader(golden)
    Path(golden + ".json").write_text("{")
    with pytest.raises(ValueError, match=r"golden\.json does not describe"):
        IndexedReader(golden)


def test_empty_corpus_is_readable(tmp_path):
    reader = IndexedReader(write(tmp_path / "x", [[], [[]]]))
    assert reader.num_documents == 2 and reader.num_tokens == 0 and reader.tokens.tolist() == []
    assert reader.document(0).tolist() == [] and reader.document(1).tolist() == []


def test_index_is_built_in_pieces(tmp_path, monkeypatch):
    documents = [[[i % 9] * (i % 4)] for i in range(100)]
    whole = Path(write(tmp_path / "a", documents) + ".idx").read_bytes()
    monkeypatch.setattr("megazero.data.indexed.CHUNK", 7)
    assert Path(write(tmp_path / "b", documents) + ".idx").read_bytes() == whole
