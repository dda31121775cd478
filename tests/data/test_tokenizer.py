"""Tokenizers: text comes back, special ids come from the files, strange ids do not crash."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megazero.config import DataConfig
from megazero.data.tokenizer import (
    HUGGING_FACE_TYPES,
    REPLACEMENT,
    SENTENCEPIECE_TYPES,
    TYPES,
    ByteTokenizer,
    build_tokenizer,
)

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n" * 30
UNUSUAL = "naïve café 日本語 🎉 \t  x\r\n"


def sentencepiece_file(path, **options):
    model = io.BytesIO()
    numbers = {"vocab_size": 290, "byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT.split("\n")), model_writer=model, **numbers)
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture
def gpt2_files(tmp_path):
    model = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    model.train_from_iterator([TEXT], vocab_size=300, min_frequency=2, special_tokens=["<|endoftext|>"])
    model.save_model(str(tmp_path))
    return {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}


@pytest.fixture
def hugging_face_folder(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT], trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    model.enable_truncation(5)
    model.save(str(folder / "tokenizer.json"))
    return folder


def build(kind, vocab_size=None, **files):
    return build_tokenizer(DataConfig(tokenizer_type=kind, **files), vocab_size)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_takes_its_special_ids_from_the_file_c034(tmp_path, kind):
    usual = build(kind, tokenizer_model=sentencepiece_file(tmp_path / "usual.model", pad_id=-1))
    moved = build(kind, tokenizer_model=sentencepiece_file(tmp_path / "moved.model", unk_id=0, eos_id=1, bos_id=2))
    without = build(kind, tokenizer_model=sentencepiece_file(tmp_path / "without.model", eos_id=-1))
    assert (usual.eod, moved.eod, without.eod) == (2, 1, None)
    assert usual.vocab_size == moved.vocab_size == without.vocab_size + 1
    assert len({usual.fingerprint, moved.fingerprint, without.fingerprint}) == 3
    for tokenizer in (usual, moved, without):
        ids = tokenizer.encode("return x + 1")
        assert tokenizer.decode(ids) == "return x + 1" and max(ids) < tokenizer.vocab_size
        assert tokenizer.eod not in ids and tokenizer.eod not in tokenizer.encode("</s>")
        assert tokenizer.decode([*ids, *range(tokenizer.vocab_size + 3)])  # bytes that are no text, ids that are none


def test_gpt2_reads_vocabulary_and_merges(gpt2_files):
    tokenizer = build("GPT2BPETokenizer", **gpt2_files)
    vocab = json.loads(Path(gpt2_files["vocab_file"]).read_text(encoding="utf-8"))
    assert tokenizer.vocab_size == len(vocab) > 260 and tokenizer.eod == 0
    ids = tokenizer.encode(TEXT)
    assert len(ids) < len(TEXT) / 2 and tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(tokenizer.encode(UNUSUAL)) == UNUSUAL
    assert tokenizer.eod not in tokenizer.encode("<|endoftext|>") and tokenizer.decode([0, *ids, 0]) == TEXT
    assert tokenizer.decode([*ids, len(vocab), 10**9]) == TEXT + REPLACEMENT * 2
    assert build(None, **gpt2_files).fingerprint == tokenizer.fingerprint  # --vocab-file alone says which


def test_gpt2_reference_ids(tmp_path):
    vocab = {"a": 0, "b": 1, "c": 2, "\u0120": 3, "ab": 4, "\u0120ab": 5, "abc": 6, "<|endoftext|>": 7}
    (tmp_path / "v.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\n\u0120 ab\nab c\n", encoding="utf-8")
    tokenizer = build("GPT2BPETokenizer", vocab_file=str(tmp_path / "v.json"), merge_file=str(tmp_path / "m.txt"))
    assert tokenizer.encode("abc ab ba") == [6, 5, 3, 1, 0] and tokenizer.eod == 7


def test_gpt2_names_a_bad_merge(tmp_path):
    (tmp_path / "v.json").write_text('{"a": 0, "b": 1}')
    for merges, line in (("a b\n", 1), ("#version: 0.2\n\na\n", 3)):
        (tmp_path / "m.txt").write_text(merges)
        with pytest.raises(ValueError, match=rf"--merge-file .*m\.txt, line {line}"):
            build("GPT2BPETokenizer", vocab_file=str(tmp_path / "v.json"), merge_file=str(tmp_path / "m.txt"))


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "HFTokenizer"])
def test_hugging_face_file_or_folder(hugging_face_folder, kind):
    by_folder = build(kind, tokenizer_model=str(hugging_face_folder))
    by_file = build(kind, tokenizer_model=str(hugging_face_folder / "tokenizer.json"))
    assert by_folder.fingerprint == by_file.fingerprint and by_folder.vocab_size > 260
    ids = by_folder.encode(TEXT)  # neither cut nor wrapped in the special tokens of the template
    assert by_folder.decode(ids) == TEXT and not {0, 1, 2} & set(ids)
    assert by_folder.decode(by_folder.encode(UNUSUAL)) == UNUSUAL and by_folder.eod == 2
    assert (
        2 not in by_folder.encode("a</s>b") and by_folder.decode([2, *ids, by_folder.vocab_size]) == TEXT + REPLACEMENT
    )


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("token", ["<pad>", {"content": "<pad>", "lstrip": False}])
def test_hugging_face_eos_is_the_one_that_is_named_c034(hugging_face_folder, name, token):
    (hugging_face_folder / name).write_text(json.dumps({"eos_token": token}))
    assert build("HFTokenizer", tokenizer_model=str(hugging_face_folder)).eod == 0
    (hugging_face_folder / name).write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(ValueError, match=rf"{name} names '<nowhere>'"):
        build("HFTokenizer", tokenizer_model=str(hugging_face_folder))
    (hugging_face_folder / name).write_text(json.dumps({"eos_token": None}))
    assert build("HFTokenizer", tokenizer_model=str(hugging_face_folder)).eod == 2


def test_hugging_face_without_an_eos_has_none_c034(hugging_face_folder):
    file = hugging_face_folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"</s>"', '"<x>"'))
    assert build("HFTokenizer", tokenizer_model=str(file)).eod is None


TIK = [*(bytes([byte]) for byte in range(256)), b"ab", b" a", b" ab", b"abc", b"\xc3\xa9", b"aa", b"aaa", b"aaaa"]


def tik_file(path, tokens):
    entries = [{"rank": n, "token_bytes": base64.b64encode(t).decode(), "token_str": ""} for n, t in enumerate(tokens)]
    path.write_text(json.dumps(entries))
    return str(path)


def test_tiktoken_reference_ids(tmp_path):
    tokenizer = build("TikTokenizer", tokenizer_model=tik_file(tmp_path / "v.json", TIK))
    for text, ids in (  # of the library tiktoken with this vocabulary and Megatron's pattern
        ("abc ab", [1259, 1258]),
        ("abcab \u00e9a 12", [1259, 1256, 1032, 1260, 1097, 1032, 1049, 1050]),
        ("aaaaaaa aaaaa", [1263, 1262, 1257, 1263]),
        ("a\n\n  b</s>", [1097, 1010, 1010, 1032, 1032, 1098, 1060, 1047, 1115, 1062]),
    ):
        assert (tokenizer.encode(text), tokenizer.decode(ids)) == (ids, text)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1264, 2) and tokenizer.decode([2, 1097, 1]) == "a"
    smaller = build("TikTokenizer", 1258, tokenizer_model=str(tmp_path / "v.json"))
    assert smaller.encode("abc ab") == [1256, 1099, 1032, 1256]


def test_tiktoken_patterns_differ_where_the_case_changes(tmp_path):
    """Version 2 begins another word at a capital letter, version 1 takes letters as they come."""
    model = tik_file(tmp_path / "v.json", [*TIK[:256], b"aB"])
    newer, older = (build("TikTokenizer", tokenizer_model=model, tiktoken_pattern=name) for name in ("v2", "v1"))
    assert newer.encode("aB") == [1097, 1066] and older.encode("aB") == [1256]
    assert older.decode([1256]) == "aB" and newer.fingerprint != older.fingerprint
    assert newer.fingerprint == build("TikTokenizer", tokenizer_model=model).fingerprint


@pytest.mark.parametrize("tokens", [TIK[:255], TIK[1:], [b"a"]])
def test_tiktoken_vocabulary_must_begin_with_the_bytes(tmp_path, tokens):
    with pytest.raises(ValueError, match="the first 256 be the bytes"):
        build("TikTokenizer", tokenizer_model=tik_file(tmp_path / "v.json", tokens))


def test_word_pieces_reference_ids(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "runs", ",", "\u4eca", "Runs"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    lower, case = (build(f"BertWordPiece{k}", vocab_file=str(tmp_path / "vocab.txt")) for k in ("LowerCase", "Case"))
    assert lower.encode("Unaffable,RUNS \u00dcn \u4eca\u4eca what?") == [5, 6, 7, 9, 8, 5, 10, 10, 1, 1]
    assert case.encode("unaffable Runs runs RUNS") == [5, 6, 7, 11, 8, 1]
    assert lower.vocab_size == case.vocab_size == 14 and lower.eod == 13 and lower.fingerprint != case.fingerprint
    assert lower.decode([5, 6, 7, 8, 13]) == "unaffable runs"
    (tmp_path / "vocab.txt").write_text("\n".join(["[EOS]", *words]), encoding="utf-8")
    assert build("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt")).eod == 0
    (tmp_path / "vocab.txt").write_text("{}")
    with pytest.raises(ValueError, match="no line .UNK."):
        build("BertWordPieceCase", vocab_file=str(tmp_path / "vocab.txt"))


def test_all_names_of_both_families_are_known(tmp_path, gpt2_files, hugging_face_folder):
    words = tmp_path / "vocab.txt"
    words.write_text("[UNK]\n")
    model, tik = sentencepiece_file(tmp_path / "m.model"), tik_file(tmp_path / "tik.json", TIK)
    files = {
        **dict.fromkeys(SENTENCEPIECE_TYPES, {"tokenizer_model": model}),
        **dict.fromkeys(HUGGING_FACE_TYPES, {"tokenizer_model": str(hugging_face_folder)}),
        **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), {"vocab_file": str(words)}),
        **dict.fromkeys(("NullTokenizer", "NullMultimodalTokenizer", "ByteTokenizer"), {}),
        "GPT2BPETokenizer": gpt2_files,
        "TikTokenizer": {"tokenizer_model": tik},
    }
    assert sorted(files) == sorted(TYPES)
    for kind, names in files.items():
        tokenizer = build(kind, 5000, **names)
        text = "3 1 4" if kind.startswith("Null") else TEXT + UNUSUAL
        batch = tokenizer.encode_batch([text, "", text[:3]])
        assert [ids.tolist() for ids in batch] == [tokenizer.encode(t) for t in (text, "", text[:3])]
        assert all(ids.dtype == np.int32 for ids in batch)
    for kind in ("MultimodalTokenizer", "SFTTokenizer"):
        with pytest.raises(ValueError, match=f"{kind} makes prompts; for plain text give HuggingFaceTokenizer"):
            build(kind, tokenizer_model=str(hugging_face_folder))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_byte_tokenizer_takes_any_ids():
    tokenizer = build("ByteTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([104, 256, 105]) == "hi" and tokenizer.decode([255, 300]) == REPLACEMENT * 2


def test_null_tokenizer_reads_numbers():
    tokenizer = build("NullTokenizer", 97)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.encode("3 0  96")) == (97, None, [3, 0, 96])
    assert tokenizer.decode([3, 0, 200]) == "3 0 200"
    for text in ("97", "-1", "a", "1.0", "²"):
        with pytest.raises(ValueError, match="0 to 96"):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("SentencePieceTokenizer", "--tokenizer-model"),
        ("HFTokenizer", "--tokenizer-model"),
        ("GPT2BPETokenizer", "--vocab-file"),
        ("NullTokenizer", "--vocab-size"),
        ("Word", "--tokenizer-type Word"),
        (None, "--tokenizer-type"),
    ],
)
def test_what_is_missing_is_named(kind, flag):
    with pytest.raises(ValueError, match=flag):
        build(kind)


@pytest.mark.parametrize("content", [None, b"", b"\x00\x01", b"{}", b"[1]"])
@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HFTokenizer"])
def test_bad_file_is_named(tmp_path, kind, content):
    path = tmp_path / "model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="model"):
        build(kind, tokenizer_model=str(path))


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"# Tokenizer\n", "is not JSON"),
        ({"model": {}}, "is not a tokenizer.json: .*did not match"),
        ({"model": BPE | {"vocab": {}}}, "the vocabulary is empty"),
        ({"model": BPE | {"vocab": {"a": "x"}}}, 'invalid type: string "x"'),
        ({"model": BPE | {"merges": ["a b"]}}, "merge 0, 'a b', is none of its vocabulary"),
        ({"model": BPE | {"merges": [["a", 1]]}}, "merge 0, .'a', 1., is none"),
        ({"model": BPE | {"merges": "a b"}}, "is not a tokenizer.json: "),
        ({"model": BPE, "pre_tokenizer": {"type": "Cut"}}, "is not a tokenizer.json: "),
        ({"model": BPE | {"vocab": {"a": 2**31}}}, "id of 'a' must be a number from 0 to 2.31 - 1, not 2147483648"),
    ],
)
def test_damaged_tokenizer_json_is_one_line_with_its_flag(tmp_path, content, said):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=rf"^--tokenizer-model .*tokenizer\.json.* {said}"):
        build("HFTokenizer", tokenizer_model=str(path))


def test_merges_of_a_tokenizer_json_may_be_pairs_or_have_a_prefix(tmp_path):
    path = tmp_path / "tokenizer.json"
    for merge, vocab, prefix in (
        ("a b", {"ab": 2}, None),
        (["a", "b"], {"ab": 2}, None),
        ("a ##b", {"##b": 2, "ab": 3}, "##"),
    ):
        model = {"vocab": BPE["vocab"] | vocab, "merges": [merge], "continuing_subword_prefix": prefix}
        path.write_text(json.dumps({"model": BPE | model}))
        tokenizer = build("HFTokenizer", tokenizer_model=str(path))
        assert tokenizer.encode("ab") == [tokenizer.vocab_size - 1]


@pytest.mark.parametrize(
    ("vocab", "said"),
    [
        (b"# Readme", "is not JSON"),
        (b"{}", "the vocabulary is empty"),
        (b'{"a": "x"}', "the id of 'a' must be a number from 0 to 2.31 - 1, not 'x'"),
        (b'{"a": true}', "not True"),
        (b'{"a": -1}', "not -1"),
        (b'{"\\ud800": 0}', "holds half a character"),
    ],
)
def test_damaged_gpt2_vocabulary_is_one_line_with_its_flag(tmp_path, vocab, said):
    (tmp_path / "v.json").write_bytes(vocab)
    (tmp_path / "m.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"^--vocab-file .*v\.json.* {said}"):
        build("GPT2BPETokenizer", vocab_file=str(tmp_path / "v.json"), merge_file=str(tmp_path / "m.txt"))


def test_merges_that_are_no_text_are_named(tmp_path):
    (tmp_path / "v.json").write_text('{"a": 0}')
    (tmp_path / "m.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"^--merge-file .*m\.txt is not UTF-8"):
        build("GPT2BPETokenizer", vocab_file=str(tmp_path / "v.json"), merge_file=str(tmp_path / "m.txt"))


def test_smaller_vocab_size_than_the_tokenizer_is_refused():
    assert build("ByteTokenizer", 300).vocab_size == 257
    with pytest.raises(ValueError, match="--vocab-size 256 is less than the 257"):
        build("ByteTokenizer", 256)
