"""The commands of data_tools/: the same files whatever the workers, bad input named by line, nothing half-done left."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from data_tools import make_corpus, preprocess_data, train_tokenizer
from megazero.data.indexed import IndexedReader
from megazero.data.tokenizer import ByteTokenizer, SentencePieceTokenizer

ROOT = Path(__file__).resolve().parents[2]


def tool(name, *arguments, cwd=ROOT):
    command = [sys.executable, str(ROOT / "data_tools" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def jsonl(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def preprocess(folder, *arguments, tokenizer="ByteTokenizer"):
    words = ["--output-prefix", str(folder / "out" / "x"), "--tokenizer-type", tokenizer, *map(str, arguments)]
    return preprocess_data.run(preprocess_data.parse(words))


def documents(folder, key="text"):
    reader = IndexedReader(folder / "out" / f"x_{key}_document")
    return [ByteTokenizer().decode(reader.document(i).tolist()) for i in range(reader.num_documents)]


def left(folder):
    return sorted(os.listdir(folder / "out")) if (folder / "out").exists() else []


# --- preprocess_data.py


@pytest.mark.parametrize("lines", [["", "a", "", "b c"], ["  \n\t", "a", "\u00a0", "b c"], None])
@pytest.mark.parametrize("append_eod", [True, False])
def test_documents_without_text_are_left_out_and_counted_c001(tmp_path, lines, append_eod):
    source = tmp_path / "in.jsonl"
    if lines is None:  # lines without anything, and none at the end of the file
        source.write_text('\n{"text": "a"}\n  \r\n{"text": "b c"}')
    else:
        jsonl(source, *lines)
    (summary,) = preprocess(tmp_path, "--input", source, *["--append-eod"] * append_eod)
    assert (summary["documents"], summary["empty"], summary["bad_lines"]) == (2, 2, 0)
    assert summary["tokens"] == 4 + 2 * append_eod and summary["bytes"] == 2 * summary["tokens"]
    assert documents(tmp_path) == ["a", "b c"]
    reader = IndexedReader(summary["prefix"])
    ends = [int(reader.document(i)[-1]) for i in range(2)]
    assert ends == ([256, 256] if append_eod else [ord("a"), ord("c")])
    assert left(tmp_path) == [f"x_text_document.{suffix}" for suffix in ("bin", "idx", "json")]


BAD = {  # content of the file, the line that is wrong, a word of the message
    "pretty": ('{\n  "text":\n  "a"\n}\n\n', 1, "not one JSON object"),
    "two on a line": ('{"text": "a"}\n{"text": "b"} {"text": "c"}\n', 2, "Extra data"),
    "no key": ('{"text": "a"}\n{"txt": "a"}\n', 2, "no key 'text'"),
    "number": ('{"text": 3}\n', 1, "a int, not a string"),
    "list": ('{"text": "a"}\n\n[1]\n', 3, "a JSON list"),
    "latin-1": (b'{"text": "a"}\n{"text": "\xe9"}\n', 2, "utf-8"),
    "half a pair": ('{"text": "\\ud83d"}\n', 1, "surrogate"),
    "deep": ("[" * 100_000 + "\n", 1, "too deep"),
    "cut": ('{"text": "a"}\n{"text": "b', 2, "not one JSON object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_line_is_named_and_nothing_is_left_c003(tmp_path, case):
    content, line, word = BAD[case]
    (tmp_path / "in.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=rf"in\.jsonl, line {line}: .*{word}"):
        preprocess(tmp_path, "--input", tmp_path / "in.jsonl")
    assert left(tmp_path) == []


def test_bad_lines_are_skipped_and_counted_when_asked_for(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{\n{"text": "b"}\nnull\n')
    (summary,) = preprocess(tmp_path, "--input", tmp_path / "in.jsonl", "--skip-bad-lines")
    assert (summary["documents"], summary["bad_lines"]) == (2, 2) and documents(tmp_path) == ["a", "b"]
    assert "line 2" in (said := capsys.readouterr().err) and "line 4" in said


def test_workers_and_batches_change_nothing(tmp_path, monkeypatch):
    texts = ["word " * (i % 50) + str(i) if i % 7 else "" for i in range(2_000)]
    source, results = jsonl(tmp_path / "in.jsonl", *texts), []
    for workers, batch_lines in ((1, 256), (2, 256), (1, 3)):
        monkeypatch.setattr(preprocess_data, "BATCH_LINES", batch_lines)
        (summary,) = preprocess(tmp_path, "--input", source, "--append-eod", "--workers", workers)
        files = [Path(f"{summary['prefix']}.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")]
        results.append((summary, files))
    assert results[0] == results[1] == results[2]
    assert documents(tmp_path) == [text for text in texts if text]
    assert results[0][0]["empty"] == len([text for text in texts if not text])


def test_first_bad_line_is_named_whatever_the_workers_c003(tmp_path):
    lines = ['{"text": "a"}'] * 3_000
    lines[1_234] = lines[2_900] = "{"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 1235:"):
        preprocess(tmp_path, "--input", tmp_path / "in.jsonl", "--workers", 2)
    assert left(tmp_path) == []


def test_several_files_patterns_and_keys(tmp_path):
    for name, text in (("b", "1"), ("a", "2"), ("c.more", "3")):
        record = {"text": text, "title": "t" + text if name != "a" else ""}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    inputs = (tmp_path / "c.more.jsonl", tmp_path / "[ab].jsonl")
    summaries = preprocess(tmp_path, "--input", *inputs, "--json-keys", "text", "title")
    assert documents(tmp_path) == ["3", "2", "1"] and documents(tmp_path, "title") == ["t3", "t1"]
    assert [s["empty"] for s in summaries] == [0, 1]
    assert [Path(s["prefix"]).name for s in summaries] == ["x_text_document", "x_title_document"]
    with pytest.raises(ValueError, match="--input .*nowhere"):
        preprocess(tmp_path, "--input", tmp_path / "nowhere*")


def test_mark_at_the_begin_of_a_file_is_no_text(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    preprocess(tmp_path, "--input", tmp_path / "in.jsonl")
    assert documents(tmp_path) == ["a"]


def test_input_without_any_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no document has text under 'text'"):
        preprocess(tmp_path, "--input", jsonl(tmp_path / "in.jsonl", "", " "))
    assert left(tmp_path) == []


def test_eod_must_exist_to_be_appended_c034(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", "3 1 4")
    with pytest.raises(ValueError, match=r"--append-eod: the NullTokenizer has no .*\(eos\)"):
        preprocess(tmp_path, "--input", source, "--append-eod", "--vocab-size", 97, tokenizer="NullTokenizer")
    (summary,) = preprocess(tmp_path, "--input", source, "--vocab-size", 97, tokenizer="NullTokenizer")
    assert IndexedReader(summary["prefix"]).document(0).tolist() == [3, 1, 4]


def test_last_line_of_the_command_is_its_summary_and_errors_are_one_line(tmp_path):
    arguments = ("--output-prefix", tmp_path / "out" / "x", "--tokenizer-type", "ByteTokenizer", "--input")
    done = tool("preprocess_data.py", *arguments, jsonl(tmp_path / "in.jsonl", "a", "b"), cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["documents"] == 2
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"\n')
    done = tool("preprocess_data.py", *arguments, tmp_path / "bad.jsonl", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("preprocess_data.py: error:") and "line 2" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_terminated_run_leaves_nothing_c014(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", *["word " * 2_000] * 5_000)
    command = [sys.executable, ROOT / "data_tools" / "preprocess_data.py", "--input", source, "--workers", "2"]
    command += ["--output-prefix", tmp_path / "out" / "x", "--tokenizer-type", "ByteTokenizer"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        partial = tmp_path / "out" / f"x_text_document.bin.{process.pid}.partial"
        while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert left(tmp_path) == []


def test_dead_worker_ends_the_run_c003(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", *["word " * 2_000] * 5_000)
    submit = preprocess_data.ProcessPoolExecutor.submit
    monkeypatch.setattr(preprocess_data.ProcessPoolExecutor, "submit", lambda pool, *_: submit(pool, os._exit, 3))
    with pytest.raises(preprocess_data.BrokenProcessPool):
        preprocess(tmp_path, "--input", source, "--workers", 2)
    assert left(tmp_path) == []


# --- make_corpus.py and train_tokenizer.py


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
