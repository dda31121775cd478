"""Corpora and tokenizers from what every machine has: text comes back, the same input gives the same bytes."""

import gzip
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from data_tools import make_corpus, train_tokenizer
from megazero.data.indexed import IndexedReader
from megazero.data.tokenizer import SentencePieceTokenizer

ROOT = Path(__file__).resolve().parents[2]


def tool(name, *arguments, cwd=ROOT):
    command = [sys.executable, str(ROOT / "data_tools" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def jsonl(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    make_corpus.main(["--output", str(path), "--max-megabytes", "2"])
    return path


@pytest.fixture(scope="module")
def model(corpus):
    path = corpus.with_name("tokenizer")
    train_tokenizer.main(["--input", str(corpus), "--vocab-size", "1000", "--model-prefix", str(path)])
    return str(path) + ".model"


def test_corpus_is_the_library_of_python(corpus, tmp_path):
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert 1.5e6 < sum(len(r["text"].encode()) for r in records) <= 2e6
    assert all((stdlib / r["source"]).read_bytes().decode("utf-8") == r["text"] for r in records[:20])
    assert not any({"test", "site-packages"} & set(Path(r["source"]).parts) for r in records)
    make_corpus.main(["--output", str(tmp_path / "again.jsonl"), "--max-megabytes", "2"])
    assert (tmp_path / "again.jsonl").read_bytes() == corpus.read_bytes()


def test_corpus_of_a_folder_leaves_out_what_is_no_text(tmp_path, capsys):
    for name, content in (("a.txt", b"one"), ("d/b.txt", b"two"), ("c.txt", b"\xff"), ("e.txt", b" "), ("f.md", b"x")):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    arguments = ["--folder", str(tmp_path / "in"), "--output", str(tmp_path / "out.jsonl"), "--pattern"]
    make_corpus.main([*arguments, "**/*.txt"])
    assert sorted(json.loads(line)["text"] for line in (tmp_path / "out.jsonl").open()) == ["one", "two"]
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["bytes"], summary["not_text"]) == (2, 6, 1)
    with pytest.raises(SystemExit, match="no text in"):
        make_corpus.main([*arguments, "*.rst"])


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_source_code_comes_back_from_a_trained_tokenizer(corpus, model, tmp_path, model_type):
    if model_type == "unigram":
        arguments = ["--model-type", "unigram", "--vocab-size", "500", "--max-sentences", "1500"]
        train_tokenizer.main(["--input", str(corpus), *arguments, "--output", str(tmp_path / "u.model")])
        model = str(tmp_path / "u.model")
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.vocab_size == (500 if model_type == "unigram" else 1000)
    assert tokenizer.eod is not None and tokenizer.eod not in tokenizer.encode("</s>")
    for line in corpus.open(encoding="utf-8"):
        text = json.loads(line)["text"]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for text in (
        "\tif x:\r\n",
        "  a  b  \n\n\n   ",
        "日本 🎉\x0c\x00",
        "<0x0A> </s> <unk> \n",
        " ",
        "\n",
        "",
        "e\u0301 ﬁ",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_twice_gives_the_same_bytes(corpus, tmp_path):
    arguments = ["--input", str(corpus), "--vocab-size", "400", "--max-sentences", "2000", "--model-prefix"]
    for name in "ab":
        train_tokenizer.main([*arguments, str(tmp_path / name)])
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    train_tokenizer.main([*arguments, str(tmp_path / "c"), "--seed", "2"])
    assert (tmp_path / "a.model").read_bytes() != (tmp_path / "c.model").read_bytes()


def test_drawn_lines_keep_their_order_and_are_drawn_evenly():
    assert train_tokenizer.draw(iter("abc"), 5, 1) == ["a", "b", "c"]
    items, hits = [f"{i:03}" for i in range(100)], dict.fromkeys(range(100), 0)
    for seed in range(400):
        drawn = train_tokenizer.draw(iter(items), 10, seed)
        assert len(drawn) == 10 and drawn == sorted(drawn)
        for item in drawn:
            hits[int(item)] += 1
    assert 15 < min(hits.values()) <= max(hits.values()) < 70  # 40 expected, deviation 6


def test_text_files_are_read_by_lines_and_long_ones_cut(tmp_path):
    (tmp_path / "in.txt").write_text("one\n\n" + "x" * 10_000 + "\n" + "é" * 3_000, encoding="utf-8")
    lines = list(train_tokenizer.sentences([str(tmp_path / "in.txt")], ["text"]))
    assert lines[0] == "one" and "".join(lines) == "one" + "x" * 10_000 + "é" * 3_000
    assert max(len(line.encode()) for line in lines) <= train_tokenizer.MAX_SENTENCE_BYTES


def test_compressed_json_lines_are_json_lines(tmp_path):
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "one\ntwo"}) + "\n" + json.dumps({"text": ["three.", "four"]}))
    assert list(train_tokenizer.sentences([str(tmp_path / "in.jsonl.gz")], ["text"])) == [
        "one",
        "two",
        "three.",
        "four",
    ]


def test_errors_of_training_are_one_line(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", "a b c")
    for arguments, words in (
        (["--input", source, "--vocab-size", "5000"], "--vocab-size 5000 cannot be trained on 1 lines"),
        (["--input", source, "--vocab-size", "10"], "--vocab-size 10"),
        (["--input", str(tmp_path / "nowhere"), "--vocab-size", "300"], "nowhere"),
        (["--input", jsonl(tmp_path / "empty.jsonl", ""), "--vocab-size", "300"], "no text"),
    ):
        with pytest.raises(SystemExit) as error:
            train_tokenizer.main([*arguments, "--model-prefix", str(tmp_path / "m")])
        assert words in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "in.jsonl").write_text("{\n")
    done = tool("train_tokenizer.py", "--input", source, "--vocab-size", "300", "--model-prefix", tmp_path / "m")
    assert done.returncode == 1 and "in.jsonl, line 1" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("m*"))


def test_three_commands_make_data_from_nothing(tmp_path):
    done = tool("make_corpus.py", "--output", "c.jsonl", "--max-megabytes", "0.3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = tool("train_tokenizer.py", "--input", "c.jsonl", "--vocab-size", 600, "--output", "t", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    fingerprint = json.loads(done.stdout)["fingerprint"]
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "t.model", "--append-eod")
    done = tool("preprocess_data.py", "--input", "c.jsonl", "--output-prefix", "d", *tokenizer, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reader = IndexedReader(tmp_path / json.loads(done.stdout)["prefix"])
    assert reader.sidecar.fingerprint == fingerprint and reader.sidecar.vocab_size == 600
    built = SentencePieceTokenizer(str(tmp_path / "t.model"))
    texts = [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").open()]
    assert [built.decode(reader.document(i).tolist()) for i in range(reader.num_documents)] == texts
    assert all(reader.document(i)[-1] == built.eod for i in range(reader.num_documents))


def test_an_output_that_cannot_be_is_named_with_its_flag(tmp_path):
    (tmp_path / "in.txt").write_text("some text\n")
    with pytest.raises(SystemExit, match="^make_corpus.py: error: --output /dev/null/x: the folder /dev/null cannot"):
        make_corpus.main(["--output", "/dev/null/x", "--folder", str(tmp_path), "--pattern", "*"])
    words = ["--input", str(tmp_path / "in.txt"), "--model-prefix", "/dev/null/x", "--vocab-size", "300"]
    with pytest.raises(SystemExit, match="^train_tokenizer.py: error: --model-prefix /dev/null/x.model: the folder"):
        train_tokenizer.main(words)
