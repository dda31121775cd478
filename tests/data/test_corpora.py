"""Corpora as the flags name them: split, blended, checked against the vocabulary, and never cached."""

import os
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.batch_sizes import constant
from megazero.config import DataConfig
from megazero.data import corpora
from megazero.data.blend import WINDOW, Blend
from megazero.data.corpora import left_out, open_readers, open_samples, split_documents
from megazero.data.indexed import IndexedReader, IndexedWriter
from megazero.data.loader import Loader, Share


def corpus(folder, documents, name="corpus", vocab_size=100, fingerprint=None):
    with IndexedWriter(folder / name, vocab_size=vocab_size, fingerprint=fingerprint) as writer:
        for document in documents:
            writer.add_document([document])
    return str(folder / name)


def opened(*words, seq_length=4, vocab_size=100, seed=1, fingerprint=None, **data):
    config = DataConfig(data_path=words, **data)
    return open_samples(config, seq_length=seq_length, vocab_size=vocab_size, seed=seed, fingerprint=fingerprint)


# --- splits


@pytest.mark.parametrize(
    ("weights", "documents", "ends"),
    [
        ((969, 30, 1), 1000, [969, 999, 1000]),
        ((98, 2, 0), 7, [7, 7, 7]),
        ((1, 1, 0), 5, [2, 5, 5]),  # 2.5 goes to the even number, as in Megatron
        ((1, 1, 0), 7, [4, 7, 7]),
        ((0.9, 0.1, 0), 10, [9, 10, 10]),
        ((1, 1, 1), 3, [1, 2, 3]),
        ((0, 0, 1), 4, [0, 0, 4]),
        ((1, 0, 0), 0, [0, 0, 0]),
    ],
)
def test_split_is_cut_at_borders_of_documents(weights, documents, ends):
    assert split_documents(weights, documents) == list(zip([0, *ends], ends))


shares = st.lists(st.one_of(st.integers(0, 10**6), st.floats(0, 1000)), min_size=3, max_size=3)


@settings(deadline=None)
@given(shares.filter(lambda weights: sum(weights) > 1e-300), st.integers(0, 10**12))
def test_split_leaves_no_document_out(weights, documents):
    parts = split_documents(weights, documents)
    assert parts[0][0] == 0 and parts[-1][1] == documents
    assert all(a[1] == b[0] and a[0] <= a[1] for a, b in zip(parts, parts[1:]))
    for (first, last), weight in zip(parts, weights):
        assert abs((last - first) - documents * weight / sum(weights)) <= 1 + documents * 1e-14


def test_parts_read_their_own_documents(tmp_path):
    prefix = corpus(tmp_path, [[d] * 10 for d in range(10)])
    parts = opened(prefix, split="'8, 1, 1'")
    assert list(parts) == ["train", "valid", "test"]
    assert {t for s in parts["train"] for t in s} == set(range(8))
    assert {t for s in parts["valid"] for t in s} == {8} and {t for s in parts["test"] for t in s} == {9}
    assert len({part.seed for part in parts.values()}) == 3
    assert len(parts["train"]) == 19  # 79 // 4
    assert list(opened(prefix, split="1")) == ["train"]
    assert list(opened(corpus(tmp_path, [[1] * 10, []]), split="1,1")) == ["train"]  # a document without tokens
    assert list(opened(prefix, split="0,1")) == ["valid"]


def test_documents_of_sentences_are_split_by_documents(tmp_path):
    with IndexedWriter(tmp_path / "corpus", vocab_size=100) as writer:
        for d in range(10):
            writer.add_document([[d] * 3] * (d + 1))
    parts = opened(str(tmp_path / "corpus"), split="7,2,1")
    for name, documents in (("train", range(7)), ("valid", range(7, 9)), ("test", range(9, 10))):
        assert {t for k in range(60) for t in parts[name].tokens(k)} == set(documents)


# --- blends


def labelled(folder, count, documents=8):
    """Corpora whose every token is the corpus's number."""
    return [corpus(folder, [[number] * 9] * documents, f"c{number}") for number in range(count)]


def counts(samples, number, windows=1):
    """How many of the first samples come from each of so many corpora."""
    rows = samples.rows(list(range(windows * WINDOW)))
    assert (rows == rows[:, :1]).all()
    return np.bincount(rows[:, 0], minlength=number).tolist()


def test_blend_takes_corpora_by_weight(tmp_path):
    a, b, c = labelled(tmp_path, 3)
    parts = opened("0.5", a, "0", str(tmp_path / "nowhere"), "0.3", b, "0.2", c, split="6,2")
    assert list(parts) == ["train", "valid"]
    for part in parts.values():
        assert all(abs(n - 1024 * w) < 2 for n, w in zip(counts(part, 3), (0.5, 0.3, 0.2)))
    assert {source.seed for source in parts["train"].sources} & {s.seed for s in parts["valid"].sources} == set()


def test_blend_without_weights_takes_corpora_by_size(tmp_path):
    prefixes = [corpus(tmp_path, [[n] * 9] * d, f"c{n}") for n, d in enumerate((5, 50, 145))]
    blend = opened(*prefixes, split="1")["train"]
    sizes = [len(source) for source in blend.sources]
    assert sizes == [11, 112, 326] and blend.order.tree.counts(sum(sizes)) == sizes
    assert all(abs(n - 1024 * size / sum(sizes)) < 2 for n, size in zip(counts(blend, 3), sizes))


def test_a_corpus_in_a_blend_gives_each_of_its_samples_once_an_epoch(tmp_path):
    prefixes = labelled(tmp_path, 2)
    blend = opened("1", prefixes[0], "3", prefixes[1], split="1")["train"]
    places = [blend.order.place(k) for k in range(4 * WINDOW)]
    assert sorted(index for source, index in places if source == 0) == list(range(WINDOW))


def test_a_corpus_that_blends_with_nothing_is_read_as_alone(tmp_path):
    a, b = labelled(tmp_path, 2)
    alone = opened(a, split="1")["train"]
    for words in (("1.0", a), ("0.3", a, "0", b)):
        other = opened(*words, split="1")["train"]
        assert not isinstance(other, Blend) and other.positions(range(40)) == alone.positions(range(40))


def test_a_corpus_twice_in_a_blend_is_read_in_two_orders(tmp_path):
    a = corpus(tmp_path, [np.arange(90)] * 20)
    blend = opened(a, a, split="1")["train"]
    first, second = blend.sources
    assert first.stream.reader is second.stream.reader  # opened once
    assert first.positions(range(30)) != second.positions(range(30))


def test_a_corpus_without_a_document_for_training_is_named(tmp_path):
    a = labelled(tmp_path, 1)[0]
    empty = corpus(tmp_path, [[]], "empty")
    with pytest.raises(ValueError, match=r"empty: no document is left for training \(see --split\)"):
        opened("1", a, "1", empty)
    parts = opened("1", corpus(tmp_path, [[1] * 9], "one"), "3", a, split="2,1")  # `one` has nothing for validation
    assert isinstance(parts["train"], Blend) and not isinstance(parts["valid"], Blend)


@pytest.mark.parametrize("order", ["keyed", "megatron"])
def test_parts_that_get_nothing_are_told(tmp_path, order):
    """A part without data is no evaluation at all, which nobody should find out after the run."""
    unit = "sequence" if order == "megatron" else "document"

    def told(*words, **data):
        config = DataConfig(data_path=words, sample_order=order, **data)
        counts = dict.fromkeys(("train", "valid", "test", "web"), 5)
        return left_out(config, open_samples(config, seq_length=4, vocab_size=100, seed=1, counts=counts))

    one, ten = corpus(tmp_path, [[1] * 9], "one"), corpus(tmp_path, [[2] * 9] * 10, "ten")
    empty = corpus(tmp_path, [], "empty")
    assert told(one) == [
        f"no validation: no {unit} of {one} falls into its 3% of --split 969,30,1",
        f"no test: no {unit} of {one} falls into its 0.1% of --split 969,30,1",
    ]
    assert told("1", one, "3", ten, split="8,2") == [
        f"validation is without {one}: no {unit} of {one} falls into its 20% of --split 8,2"
    ]
    assert told(one, one, one, one, one, split="9,1")[0].startswith(
        f"no validation: no {unit} of {one}, {one}, {one} and 2 more"
    )
    assert told(train_data_path=(ten,), valid_data_path=(empty,), valid_set=("web=1", ten, "2", empty)) == [
        f"no validation: --valid-data-path {empty} holds no {unit} with tokens",
        f"validation set web is without {empty}: --valid-set web: {empty} holds no {unit} with tokens",
    ]
    assert told(ten, split="8,2") == told(one, split="1") == told(train_data_path=(one,)) == []  # not asked for
    assert left_out(DataConfig(mock_data=True), {}) == []


def test_a_thousand_corpora(tmp_path):
    prefixes = labelled(tmp_path, 9, documents=2)
    words = [word for n in range(1000) for word in (str(n % 7), prefixes[n % 9])]
    blend = opened(*words, split="1")["train"]
    assert len(blend.sources) == sum(n % 7 > 0 for n in range(1000))
    assert blend.rows(list(range(1000))).shape == (1000, 5)


def test_limit_on_open_files_is_raised_or_named(tmp_path, monkeypatch):
    prefixes = [("--data-path", prefix) for prefix in labelled(tmp_path, 3)]
    asked = []
    monkeypatch.setattr(corpora.resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    monkeypatch.setattr(corpora.resource, "getrlimit", lambda kind: (200, 4096))
    assert len(open_readers(prefixes)) == 3
    assert asked == [(resource.RLIMIT_NOFILE, (268, 4096))]
    monkeypatch.setattr(corpora.resource, "getrlimit", lambda kind: (200, 210))
    with pytest.raises(ValueError, match="3 corpora need 268 open files, the system allows 210"):
        open_readers(prefixes)


# --- paths of their own, and named validation sets


def test_parts_may_have_paths_of_their_own(tmp_path):
    a, b, c = labelled(tmp_path, 3)
    paths = {"train_data_path": ("0.7", a, "0.3", b), "valid_data_path": (c,)}
    parts = opened(**paths)
    assert list(parts) == ["train", "valid"]
    assert all(abs(n - 1024 * w) < 2 for n, w in zip(counts(parts["train"], 3), (0.7, 0.3, 0)))
    assert counts(parts["valid"], 3)[2] == 1024 and len(parts["valid"]) == 17
    assert list(opened(**paths, test_data_path=(b,))) == ["train", "valid", "test"]


def test_named_validation_sets_stand_between_valid_and_test(tmp_path):
    a, b, c = labelled(tmp_path, 3)
    sets = ("web=" + b, "code=1", b, "3", c)
    parts = opened(a, split="6,1,1", valid_set=sets)
    assert list(parts) == ["train", "valid", "web", "code", "test"]
    assert counts(parts["web"], 3)[1] == 1024
    assert all(abs(n - 1024 * w) < 2 for n, w in zip(counts(parts["code"], 3), (0, 0.25, 0.75)))
    alone = opened(a, split="1", valid_set=("web=" + b,))
    assert list(alone) == ["train", "web"]
    assert alone["web"].positions(range(50)) == parts["web"].positions(range(50))  # whatever else there is
    assert list(opened(mock_data=True, valid_set=("web=" + b,))) == ["train", "valid", "web", "test"]


# --- what is wrong is one line


def test_missing_and_unknown_data_are_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"--data-path .*nowhere\.idx"):
        opened(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="--mock-data"):
        opened()


def test_data_of_another_vocabulary_is_refused_c016(tmp_path):
    prefix = corpus(tmp_path, [[1, 2, 3]], vocab_size=131, fingerprint="bytes")
    with pytest.raises(ValueError, match=r"vocabulary of 131.*has 97"):
        opened(prefix, vocab_size=97)
    with pytest.raises(ValueError, match=r"tokenizer bytes.*give other"):
        opened(prefix, vocab_size=131, fingerprint="other")
    for fingerprint in ("bytes", "", None):  # a tokenizer without content cannot be another one
        assert "train" in opened(prefix, vocab_size=131, fingerprint=fingerprint)
    other = corpus(tmp_path, [[1, 2, 3]], "other", vocab_size=90)
    with pytest.raises(ValueError, match=r"corpus was made with a vocabulary of 131"):
        opened(other, prefix, vocab_size=97)
    with pytest.raises(ValueError, match=r"corpus was made with a vocabulary of 131"):
        opened(other, vocab_size=97, valid_set=("web=" + prefix,))


@pytest.mark.parametrize("sidecar", [True, False])
def test_the_flag_that_names_a_corpus_is_named_c016(tmp_path, sidecar):
    good = corpus(tmp_path, [[1] * 9], vocab_size=90)
    bad = corpus(tmp_path, [[130] * 9], "bad", vocab_size=131)
    if not sidecar:
        os.remove(bad + ".json")
    for prefix in (bad, str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=f"^--train-data-path {prefix}"):
            opened(train_data_path=(prefix,), vocab_size=97)
        with pytest.raises(ValueError, match=f"^--valid-data-path {prefix}"):
            opened(train_data_path=(good,), valid_data_path=(prefix,), vocab_size=97)
        with pytest.raises(ValueError, match=f"^--valid-set web: {prefix}"):
            opened(good, valid_set=("web=" + prefix,), vocab_size=97)
        with pytest.raises(ValueError, match=f"^PREFIX {prefix}"):
            open_samples(DataConfig(data_path=(prefix,)), seq_length=4, vocab_size=97, seed=1, flag="PREFIX")


def test_ids_without_sidecar_are_checked_on_first_use_c016(tmp_path):
    documents = [[d % 97] * 50 for d in range(200)]
    early = corpus(tmp_path, [[5, 130], *documents], "early", vocab_size=131)
    late = corpus(tmp_path, [*documents, [5, 130, 5], [1] * 50], "late", vocab_size=131)
    for prefix in (early, late):
        os.remove(prefix + ".json")
    with pytest.raises(ValueError, match=r"early has token id 130, the vocabulary .* has 97 entries"):
        opened(early, vocab_size=97, split="1")
    samples = opened(late, vocab_size=97, split="1")["train"]
    with Loader(samples, Share(1, constant(len(samples))), vocab_size=97, seed=1) as loader:
        with pytest.raises(ValueError, match=r"^document 200 of .*late: sample \d+ of the train part of .* id 130 at"):
            loader.global_batch(0, 1)
    assert "train" in opened(late, vocab_size=131, split="1")


def test_mock_parts_differ():
    parts = open_samples(DataConfig(mock_data=True), seq_length=16, vocab_size=97, seed=1)
    rows = [parts[name].tokens(0).tolist() for name in ("train", "valid", "test")]
    assert rows[0] != rows[1] != rows[2] != rows[0]


def test_opening_does_not_look_at_every_document(tmp_path):
    prefix = corpus(tmp_path, [[1, 2, 3]] * 50)
    data = bytearray((tmp_path / "corpus.idx").read_bytes())
    data[34 + 4 * 50 + 8 * 20 : 34 + 4 * 50 + 8 * 21] = bytes(8)  # a wrong offset in the middle of the train part
    (tmp_path / "corpus.idx").write_bytes(data)
    assert len(opened(prefix, split="1")["train"]) == (150 - 1) // 4
    assert IndexedReader(prefix).read(60, 3).tolist() == [1, 2, 3]


def test_nothing_is_cached_c017_c019(tmp_path):
    a, b = labelled(tmp_path, 2)
    before = sorted(tmp_path.iterdir())
    assert counts(opened(a, b, split="1")["train"], 2) == [512, 512]
    assert sorted(tmp_path.iterdir()) == before
    corpus(tmp_path, [[7] * 9] * 8, "c0")  # another corpus of equal length under the same name
    assert counts(opened(a, b, split="1")["train"], 8)[7] == 512
