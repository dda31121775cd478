"""preprocess_data.py: the same files whatever the workers and interruptions, bad input named, nothing half-done."""

import bz2
import errno
import fcntl
import gzip
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard

from benchmarks import preprocessing
from data_tools import inputs, preprocess_data, workers
from megazero.data.indexed import IndexedReader
from megazero.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = ("bin", "idx", "json")


def jsonl(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def arguments(folder, *words, tokenizer="ByteTokenizer"):
    return ["--output-prefix", str(folder / "out" / "x"), "--tokenizer-type", tokenizer, *map(str, words)]


def preprocess(folder, *words, tokenizer="ByteTokenizer"):
    summaries = preprocess_data.run(preprocess_data.parse(arguments(folder, *words, tokenizer=tokenizer)))
    for summary in summaries:
        assert summary.pop("seconds") >= 0
    return summaries


def started(folder, *words, prepare=None, **numbers):
    command = [sys.executable, str(ROOT / "data_tools" / "preprocess_data.py"), *arguments(folder, *words, **numbers)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, preexec_fn=prepare)


def ended(process):
    """(exit code, stdout, stderr); a hang is a failure."""
    try:
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    return process.returncode, out, err


def documents(folder, key="text", level="document"):
    reader = IndexedReader(folder / "out" / f"x_{key}_{level}")
    return [ByteTokenizer().decode(reader.document(i).tolist()) for i in range(reader.num_documents)]


def left(folder):
    return sorted(os.listdir(folder / "out")) if (folder / "out").exists() else []


def content(folder):
    return [(folder / "out" / f"x_text_document.{suffix}").read_bytes() for suffix in SUFFIXES]


# --- what is written


@pytest.mark.parametrize("lines", [["", "a", "", "b c"], ["  \n\t", "a", "\u00a0", "b c"], None])
@pytest.mark.parametrize("append_eod", [True, False])
def test_documents_without_text_are_left_out_and_counted_c001(tmp_path, lines, append_eod):
    source = tmp_path / "in.jsonl"
    if lines is None:  # lines without anything, and none at the end of the file
        source.write_text('\n{"text": "a"}\n  \r\n{"text": "b c"}')
    else:
        jsonl(source, *lines)
    (summary,) = preprocess(tmp_path, "--input", source, *["--append-eod"] * append_eod)
    assert (summary["documents"], summary["empty"], summary["bad_lines"], summary["skipped"]) == (2, 2, 0, 2)
    assert summary["tokens"] == 4 + 2 * append_eod and summary["bytes"] == 2 * summary["tokens"]
    assert summary["input_bytes"] == source.stat().st_size
    assert documents(tmp_path) == ["a", "b c"]
    reader = IndexedReader(summary["prefix"])
    ends = [int(reader.document(i)[-1]) for i in range(2)]
    assert ends == ([256, 256] if append_eod else [ord("a"), ord("c")])
    assert left(tmp_path) == [f"x_text_document.{suffix}" for suffix in SUFFIXES]


def test_workers_and_blocks_change_nothing(tmp_path, monkeypatch):
    texts = ["word " * (i % 50) + str(i) if i % 7 else "" for i in range(2_000)]
    source, results = jsonl(tmp_path / "in.jsonl", *texts), []
    for number, block in ((1, 1 << 18), (3, 1 << 12), (1, 100)):
        monkeypatch.setattr(inputs, "BLOCK_BYTES", block)
        monkeypatch.setattr(preprocess_data, "BLOCK_BYTES", block)
        (summary,) = preprocess(tmp_path, "--input", source, "--append-eod", "--workers", number)
        results.append((summary, content(tmp_path)))
    assert results[0] == results[1] == results[2]
    assert documents(tmp_path) == [text for text in texts if text]
    assert results[0][0]["empty"] == len([text for text in texts if not text])


def test_there_are_no_more_workers_than_blocks(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large.gz"
    small.write_bytes(b"x" * 1000)
    large.write_bytes(b"x" * inputs.BLOCK_BYTES)
    assert preprocess_data.useful_workers(8, [str(small)] * 5) == 1
    assert preprocess_data.useful_workers(100, [str(small), str(large)]) == 8
    assert preprocess_data.useful_workers(3, [str(large)]) == 3


def test_several_files_patterns_compressions_and_keys(tmp_path):
    compress = {"b": bytes, "a": gzip.compress, "c.more": zstandard.compress, "d": bz2.compress}
    endings = {"b": "", "a": ".gz", "c.more": ".zst", "d": ".bz2"}
    for name, text in (("b", "1"), ("a", "2"), ("c.more", "3"), ("d", "4")):
        record = json.dumps({"text": text, "title": "t" + text if name != "a" else ""}).encode()
        (tmp_path / f"{name}.jsonl{endings[name]}").write_bytes(compress[name](record + b"\n"))
    names = (tmp_path / "c.more.jsonl.zst", tmp_path / "[ab].jsonl*", tmp_path / "d.jsonl.bz2")
    summaries = preprocess(tmp_path, "--input", *names, "--json-keys", "text", "title")
    assert documents(tmp_path) == ["3", "2", "1", "4"] and documents(tmp_path, "title") == ["t3", "t1", "t4"]
    assert [s["empty"] for s in summaries] == [0, 1]
    assert [Path(s["prefix"]).name for s in summaries] == ["x_text_document", "x_title_document"]
    with pytest.raises(ValueError, match="--input .*nowhere"):
        preprocess(tmp_path, "--input", tmp_path / "nowhere*")
    with pytest.raises(ValueError, match="--json-keys text text"):
        preprocess(tmp_path, "--input", *names, "--json-keys", "text", "text")


@pytest.mark.parametrize(
    ("raw", "texts"),
    [
        (b'\xef\xbb\xbf{"text": "a"}\n{"text": "\\ufeffb"}\n', ["a", "\ufeffb"]),  # a mark is none inside a text
        (b'{"text": "a"}\r\n{"text": "b\\r\\n"}\r\n', ["a", "b\r\n"]),
        ('{"text": "\U0001f389\U00020000"}\n{"text": "\\ud83c\\udf89 \u2028"}'.encode(), ["🎉𠀀", "🎉 \u2028"]),
        (b'{"text": "the last line"}', ["the last line"]),
    ],
)
def test_marks_line_ends_and_long_characters_are_read_as_meant(tmp_path, raw, texts):
    (tmp_path / "in.jsonl").write_bytes(raw)
    preprocess(tmp_path, "--input", tmp_path / "in.jsonl")
    assert documents(tmp_path) == texts


def test_a_file_is_a_document_with_format_text(tmp_path):
    for number, text in enumerate(["one\r\ntwo\n", "", '{"text": "no JSON"}\n', "\ufeffmark"]):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    (tmp_path / "4.txt.gz").write_bytes(gzip.compress(b"squeezed"))
    (summary,) = preprocess(tmp_path, "--format", "text", "--input", tmp_path / "*.txt*")
    assert documents(tmp_path) == ["one\r\ntwo\n", '{"text": "no JSON"}\n', "mark", "squeezed"]
    assert (summary["documents"], summary["empty"]) == (4, 1)
    (tmp_path / "2.txt").write_bytes("gr\u00fc\u00df\n\n".encode() + b"\xfc\n")
    with pytest.raises(ValueError, match=r"2\.txt: line 3 is not UTF-8"):
        preprocess(tmp_path, "--format", "text", "--input", tmp_path / "*.txt")
    with pytest.raises(ValueError, match="--format text has no --json-keys title"):
        preprocess(tmp_path, "--format", "text", "--json-keys", "title", "--input", tmp_path / "*.txt")


def test_sentences_become_sequences_of_their_document(tmp_path):
    record = {"text": ["Given as. ", "", "a list.", " "]}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": "One. Two!\n\nThree"}) + "\n" + json.dumps(record) + "\n")
    (summary,) = preprocess(tmp_path, "--input", source, "--split-sentences", "--append-eod")
    reader = IndexedReader(summary["prefix"])
    assert summary["prefix"].endswith("x_text_sentence") and (summary["documents"], summary["sequences"]) == (2, 6)
    found = [bytes(i for i in reader.sequence(s).tolist() if i < 256).decode() for s in range(len(reader))]
    assert found == ["One. ", "Two!\n\n", "Three", "Given as. ", "a list.", " "]
    assert [int(reader.sequence(s)[-1]) == 256 for s in range(6)] == [False, False, True, False, False, True]
    (summary,) = preprocess(tmp_path, "--input", source)  # a list is cut already
    assert summary["sequences"] == 4 and documents(tmp_path) == ["One. Two!\n\nThree", "Given as. a list. "]


def test_eod_must_exist_to_be_appended_c034(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", "3 1 4")
    with pytest.raises(ValueError, match=r"--append-eod: the NullTokenizer has no .*\(eos\)"):
        preprocess(tmp_path, "--input", source, "--append-eod", "--vocab-size", 97, tokenizer="NullTokenizer")
    (summary,) = preprocess(tmp_path, "--input", source, "--vocab-size", 97, tokenizer="NullTokenizer")
    assert IndexedReader(summary["prefix"]).document(0).tolist() == [3, 1, 4]


def test_progress_is_told_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data_tools.progress.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 100)
    preprocess(tmp_path, "--input", jsonl(tmp_path / "in.jsonl", *["text"] * 50), "--log-interval", 20, "--workers", 1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all("documents/s" in line and "MB/s" in line and "left: " in line for line in lines)
    assert lines[-1].startswith("100%, 00:00 left: 50 documents")


def test_progress_is_a_bar_on_a_terminal(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", *["text"] * 50)
    words = arguments(tmp_path, "--input", source, "--log-interval", 20)
    terminal, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    command = [sys.executable, ROOT / "data_tools" / "preprocess_data.py", *words]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=other, timeout=60).returncode == 0
    os.close(other)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert re.search(r"100%\|.+\| 00:00 left, 50 documents, [\d,]+ documents/s, \d+\.\d MB/s", shown), shown


# --- what is wrong with the input


BAD = {  # content of the file, the line that is wrong, a word of the message
    "pretty": ('{\n  "text":\n  "a"\n}\n\n', 1, "not one JSON object"),
    "two on a line": ('{"text": "a"}\n{"text": "b"} {"text": "c"}\n', 2, "Extra data"),
    "no key": ('{"text": "a"}\n{"txt": "a"}\n', 2, "no key 'text'"),
    "number": ('{"text": 3}\n', 1, "the value of 'text' is a int, not a string"),
    "list of numbers": ('{"text": ["a", 3]}\n', 1, "an element of 'text' is a int, not a string"),
    "list": ('{"text": "a"}\n\n[1]\n', 3, "a JSON list"),
    "latin-1": (b'{"text": "a"}\n{"text": "\xe9"}\n', 2, "not UTF-8"),
    "half a pair": ('{"text": "\\ud83d"}\n', 1, "surrogate"),
    "deep": ("[" * 100_000 + "\n", 1, "too deep"),
    "cut": ('{"text": "a"}\n{"text": "b', 2, "not one JSON object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_line_is_named_and_nothing_is_left_c003(tmp_path, case):
    raw, line, word = BAD[case]
    (tmp_path / "in.jsonl").write_bytes(raw.encode() if isinstance(raw, str) else raw)
    with pytest.raises(ValueError, match=rf"in\.jsonl, line {line}: .*{word}"):
        preprocess(tmp_path, "--input", tmp_path / "in.jsonl")
    assert left(tmp_path) == []


def test_bad_lines_are_skipped_and_counted_when_asked_for(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "1"}\n{\n{"text": "x"}\n{"text": "2"}\nnull\n{"text": ""}')
    words = ("--input", tmp_path / "in.jsonl", "--skip-bad-lines", "--vocab-size", 9)
    (summary,) = preprocess(tmp_path, *words, tokenizer="NullTokenizer")
    assert [summary[name] for name in ("documents", "bad_lines", "empty", "skipped")] == [2, 3, 1, 4]
    assert IndexedReader(summary["prefix"]).tokens.tolist() == [1, 2]
    said = capsys.readouterr().err.splitlines()
    assert [f"line {n}" in line for n, line in zip((2, 3, 5), said)] == [True] * 3 and len(said) == 3


def test_first_bad_line_is_named_whatever_the_workers_c003(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(preprocess_data, "BLOCK_BYTES", 1 << 10)
    lines = ['{"text": "a"}'] * 3_000
    lines[1_234] = lines[2_900] = "{"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 1235:"):
        preprocess(tmp_path, "--input", tmp_path / "in.jsonl", "--workers", 2)
    assert left(tmp_path) == []


def test_input_without_any_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no document has text under 'text'"):
        preprocess(tmp_path, "--input", jsonl(tmp_path / "in.jsonl", "", " "))
    assert left(tmp_path) == []


def test_last_line_of_the_command_is_its_summary_and_errors_are_one_line(tmp_path):
    code, out, _ = ended(started(tmp_path, "--input", jsonl(tmp_path / "in.jsonl", "a", "b")))
    assert code == 0 and json.loads(out.splitlines()[-1])["documents"] == 2
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"\n')
    for bad, word in ((tmp_path / "bad.jsonl", "line 2"), (tmp_path, "is a directory")):
        code, out, err = ended(started(tmp_path, "--input", bad))
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert err.startswith("preprocess_data.py: error:") and word in err


# --- what disturbs a run


@pytest.fixture(scope="module")
def long_input(tmp_path_factory):
    """Enough work for two workers to be disturbed in, as (path, files of an undisturbed run)."""
    folder = tmp_path_factory.mktemp("long")
    source = jsonl(folder / "in.jsonl", *[f"{i} " + "word " * 200 for i in range(12_000)])
    preprocess(folder, "--input", source, "--workers", 1)
    return source, content(folder)


def begun(process, folder, shards):
    """Waits until a run has finished some shards, or written something; gives its workers."""
    noted, tokens = folder / "out" / "x.partial" / "progress.json", folder / "out" / "x.partial" / "0" / "bin"
    deadline = time.monotonic() + 90
    while not (noted.exists() if shards else tokens.exists() and tokens.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.005)
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.parametrize("stop", ["a worker is killed", "a worker is terminated", "terminated"])
def test_a_disturbed_run_leaves_no_final_file_and_can_go_on_c003_c014(tmp_path, long_input, stop):
    source, undisturbed = long_input
    words = ("--input", source, "--workers", 2, "--shard-megabytes", 2)
    process = started(tmp_path, *words)
    children = begun(process, tmp_path, shards=True)
    assert len(children) == 2
    number = signal.SIGKILL if "killed" in stop else signal.SIGTERM
    os.kill(children[1] if "worker" in stop else process.pid, number)
    code, out, err = ended(process)
    assert out == "" and len(err.splitlines()) == 1 and "--resume" in err
    if "worker" in stop:
        assert code == 1 and f"process {children[1]}, was killed by {number.name}" in err and " of 2" in err
    else:
        assert code == 128 + number and number.name in err
    assert left(tmp_path) == ["x.partial"]
    before = json.loads((tmp_path / "out" / "x.partial" / "progress.json").read_text())["done"]["input_bytes"]
    assert 0 < before < os.path.getsize(source)
    code, out, err = ended(started(tmp_path, *words[:2], "--workers", 1, "--resume"))
    assert code == 0 and "--resume: going on after" in err
    assert content(tmp_path) == undisturbed and left(tmp_path) == [f"x_text_document.{s}" for s in SUFFIXES]
    assert json.loads(out)["documents"] == 12_000 and json.loads(out)["input_bytes"] == os.path.getsize(source)


def test_a_killed_run_can_go_on_c014(tmp_path, long_input):
    source, undisturbed = long_input
    process = started(tmp_path, "--input", source, "--workers", 2, "--shard-megabytes", 2)
    children = begun(process, tmp_path, shards=True)
    process.kill()
    process.communicate(timeout=90)
    assert left(tmp_path) == ["x.partial"]
    deadline = time.monotonic() + 90
    while any(os.path.exists(f"/proc/{child}") for child in children):  # workers do not outlive it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    preprocess(tmp_path, "--input", source, "--resume", "--workers", 1)
    assert content(tmp_path) == undisturbed


def test_without_a_finished_shard_nothing_is_left_and_resume_starts_anew_c014(tmp_path, long_input, capsys):
    source, undisturbed = long_input
    process = started(tmp_path, "--input", source, "--workers", 2)
    begun(process, tmp_path, shards=False)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 128 + signal.SIGTERM and "kept" not in err and left(tmp_path) == []
    preprocess(tmp_path, "--input", source, "--resume", "--workers", 1)
    assert "no shard is finished" in capsys.readouterr().err
    assert content(tmp_path) == undisturbed


def interrupted(folder, monkeypatch, *words):
    """A run that ends after its third shard, in this process."""
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 200)
    save, saved = preprocess_data.Journal.save, []

    def save_three(journal, done):
        save(journal, done)
        saved.append(done)
        if len(saved) == 3:
            raise OSError(errno.EIO, "the cable is pulled")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="cable"):
        patch.setattr(preprocess_data.Journal, "save", save_three)
        preprocess(folder, *words, "--workers", 1, "--shard-megabytes", 0.0005)
    assert left(folder) == ["x.partial"]


def test_a_run_goes_on_in_any_of_several_compressed_files_and_keeps_its_counts(tmp_path, monkeypatch):
    compress = {"a.jsonl": bytes, "b.jsonl.gz": gzip.compress, "c.jsonl.zst": zstandard.compress}
    for name, function in compress.items():
        lines = [
            json.dumps({"text": f"{name} {i}" if i % 5 else "", "t": str(i)}) if i != 9 else "{" for i in range(30)
        ]
        (tmp_path / name).write_bytes(function("\n".join(lines).encode()))
    words = ("--input", *(tmp_path / name for name in compress), "--json-keys", "text", "t", "--skip-bad-lines")
    wanted = preprocess(tmp_path, *words)
    texts, titles = documents(tmp_path), documents(tmp_path, "t")
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    interrupted(tmp_path, monkeypatch, *words)
    assert preprocess(tmp_path, *words, "--resume") == wanted
    assert (documents(tmp_path), documents(tmp_path, "t")) == (texts, titles)
    assert (wanted[0]["empty"], wanted[0]["bad_lines"], wanted[1]["empty"]) == (18, 3, 0)


def test_a_run_goes_on_between_files_that_are_documents(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for number in range(40):
        (tmp_path / "in" / f"{number:02}.txt").write_text(f"document {number} " * 10)
    interrupted(tmp_path, monkeypatch, "--format", "text", "--input", tmp_path / "in" / "*")
    (summary,) = preprocess(tmp_path, "--format", "text", "--input", tmp_path / "in" / "*", "--resume")
    assert documents(tmp_path) == [f"document {number} " * 10 for number in range(40)]
    assert summary["input_bytes"] == sum(path.stat().st_size for path in (tmp_path / "in").iterdir())


def test_only_the_same_run_goes_on(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "in.jsonl", *map(str, range(500)))
    interrupted(tmp_path, monkeypatch, "--input", source)
    for words, name in (
        (["--input", source, "--append-eod"], "--append-eod was False, now it is True"),
        (["--input", source, "--split-sentences"], "--split-sentences was False"),
        (["--input", source, source], "the input"),
    ):
        with pytest.raises(ValueError, match=f"--resume cannot go on with .*x.partial: {name}"):
            preprocess(tmp_path, *words, "--resume")
        assert (tmp_path / "out" / "x.partial" / "progress.json").exists()
    jsonl(tmp_path / "in.jsonl", *map(str, range(400)))
    with pytest.raises(ValueError, match="the input"):
        preprocess(tmp_path, "--input", source, "--resume")
    preprocess(tmp_path, "--input", source)  # without --resume it starts anew
    assert documents(tmp_path) == [*map(str, range(400))]


def test_a_bad_line_can_be_skipped_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK_BYTES", 200)
    lines = [json.dumps({"text": str(i)}) for i in range(200)]
    lines[150] = "{"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="line 151"):
        preprocess(tmp_path, "--input", tmp_path / "in.jsonl", "--shard-megabytes", 0.0005)
    (summary,) = preprocess(tmp_path, "--input", tmp_path / "in.jsonl", "--skip-bad-lines", "--resume")
    assert documents(tmp_path) == [str(i) for i in range(200) if i != 150] and summary["bad_lines"] == 1


def test_two_runs_do_not_write_the_same_files(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", "a")
    with preprocess_data.Journal(str(tmp_path / "out" / "x"), {}):
        with pytest.raises(ValueError, match=r"x\.partial is in use"):
            preprocess(tmp_path, "--input", source)
    preprocess(tmp_path, "--input", source)


def test_an_output_that_cannot_be_is_named_with_its_flag(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", "a")
    for prefix, folder in (("/dev/null/x", "/dev/null"), ("/dev/null/y/x", "/dev/null/y")):
        with pytest.raises(ValueError, match=f"^--output-prefix {prefix}: the folder {folder} cannot be made: "):
            preprocess(tmp_path, "--input", source, "--output-prefix", prefix)


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.parametrize("disk", ["small", "limited"])
def test_a_full_disk_is_one_clear_line_and_no_final_file(tmp_path, long_input, disk):
    source, undisturbed = long_input
    (tmp_path / "out").mkdir()
    if disk == "small" and subprocess.call(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path / "out")], stderr=subprocess.DEVNULL
    ):
        pytest.skip("no right to mount a small disk")
    try:
        prepare = None if disk == "small" else limit_file_size
        words = ("--input", source, "--workers", 2, "--shard-megabytes", 0.2)
        code, out, err = ended(started(tmp_path, *words, prepare=prepare))
        assert code == 1 and out == "" and len(err.splitlines()) == 1
        assert ("No space left on device" if disk == "small" else "File too large") in err and "x.partial/0/bin" in err
        assert left(tmp_path) == ["x.partial"]
        if disk == "small":
            subprocess.check_call(["mount", "-o", "remount,size=200m", str(tmp_path / "out")])
        preprocess(tmp_path, "--input", source, "--resume", "--workers", 1)
        assert content(tmp_path) == undisturbed
    finally:
        if disk == "small":
            subprocess.check_call(["umount", str(tmp_path / "out")])


def test_files_appear_together_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "title": "b"}\n')
    publish = preprocess_data.IndexedWriter.publish

    def publish_text_only(writer):
        if "title" in writer.prefix:
            raise OSError(errno.EIO, "no more")
        publish(writer)

    monkeypatch.setattr(preprocess_data.IndexedWriter, "publish", publish_text_only)
    with pytest.raises(OSError, match="no more"):
        preprocess(tmp_path, "--input", tmp_path / "in.jsonl", "--json-keys", "text", "title")
    assert left(tmp_path) == []


def test_a_worker_that_cannot_start_is_named(tmp_path, monkeypatch, long_input):
    monkeypatch.setattr(workers, "PROGRAM", "import sys; sys.exit(3)")
    with pytest.raises(workers.WorkerDied, match="worker 1 of 2, process [0-9]+, ended with exit code 3"):
        preprocess(tmp_path, "--input", long_input[0], "--workers", 2)
    assert left(tmp_path) == []


# --- memory


@pytest.fixture(scope="module")
def hugging_face_file(tmp_path_factory):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        ["some words, some more words"] * 3,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
        ),
    )
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    return path


def test_memory_does_not_grow_with_the_input_c011(tmp_path, hugging_face_file):
    model, peaks = preprocessing.Model("HFTokenizer", str(hugging_face_file)), []
    for megabytes in (2, 6):
        source = tmp_path / f"{megabytes}.jsonl"
        preprocessing.write_unique_words(source, megabytes)
        peaks.append(preprocessing.peak_bytes(preprocessing.tool(model, source, tmp_path / "x", 2)))
    assert peaks[1] < 1.1 * peaks[0], peaks


def test_a_line_of_30_megabytes_is_a_document_c011(tmp_path):
    text = "words and \U0001f389 " * 2_100_000
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "before"}\n' + f'{{"text": "{text}"}}\n' + '{"text": "after"}\n', encoding="utf-8")
    (summary,) = preprocess(tmp_path, "--input", source, "--workers", 2)
    reader = IndexedReader(summary["prefix"])
    assert reader.lengths.tolist() == [6, len(text.encode()), 5] and reader.lengths[1] > 30e6
    assert reader.tokens.astype(np.uint8).tobytes() == b"before" + text.encode() + b"after"
