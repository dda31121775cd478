"""How fast preprocess_data.py is beside the libraries that it calls, how soon it starts, and how much memory it takes.

Library and tool take turns, and medians are compared, so that a machine with other work is fair to both. The library is
measured alone: its own batch encode of texts that lie in memory, on one thread, nothing read, parsed or written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = """
import json, sys, time
kind, model, path = sys.argv[1:]
texts = [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
if kind == "SentencePieceTokenizer":
    import sentencepiece
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    encode = lambda some: processor.encode(some, num_threads=1)
else:
    import tokenizers
    tokenizer = tokenizers.Tokenizer.from_file(model)
    encode = lambda some: tokenizer.encode_batch(some, add_special_tokens=False)
parts = [texts[first : first + 256] for first in range(0, len(texts), 256)]
start = time.perf_counter()
for part in parts:
    encode(part)
print(time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Model:
    """A tokenizer by its --tokenizer-type and file."""

    kind: str
    path: str


@dataclass(frozen=True)
class Run:
    """One run of the tool: all seconds from the call to the end, and those from the first block to the last name."""

    wall_seconds: float
    seconds: float


def call(command: Sequence[str | Path]) -> str:
    """The standard output of a command that must succeed; libraries keep to one thread."""
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, command))}: {done.stderr}")
    return done.stdout


def tool(model: Model, source: Path, output: Path, workers: int) -> list[str | Path]:
    """The command that preprocesses `source`."""
    command: list[str | Path] = [ROOT / "data_tools" / "preprocess_data.py", "--input", source, "--append-eod"]
    command += ["--tokenizer-type", model.kind, "--tokenizer-model", model.path]
    return [*command, "--output-prefix", output, "--workers", str(workers)]


def run_tool(model: Model, source: Path, output: Path, workers: int) -> Run:
    start = time.perf_counter()
    summary = json.loads(call(tool(model, source, output, workers)).splitlines()[-1])
    return Run(time.perf_counter() - start, summary["seconds"])


def make_models(folder: Path, source: Path) -> list[Model]:
    """A SentencePiece and a Hugging Face tokenizer, both trained on the corpus."""
    trainer = [ROOT / "data_tools" / "train_tokenizer.py", "--input", source, "--vocab-size", "8000"]
    call([*trainer, "--max-sentences", "50000", "--model-prefix", folder / "sentencepiece"])
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    with open(source, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for _, line in zip(range(300), file)]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    model.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=8000, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        ),
    )
    model.save(str(folder / "tokenizer.json"))
    return [
        Model("SentencePieceTokenizer", str(folder / "sentencepiece.model")),
        Model("HuggingFaceTokenizer", str(folder / "tokenizer.json")),
    ]


def text_megabytes(source: Path) -> float:
    with open(source, encoding="utf-8") as file:
        return sum(len(json.loads(line)["text"].encode()) for line in file) / 1e6


def measure_speed(models: Iterable[Model], source: Path, folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """MB of text a second, medians: the library alone, and the tool with one and two workers, start-up not counted."""
    megabytes, found = text_megabytes(source), {}
    for model in models:
        library, one, two = [], [], []
        for _ in range(rounds):
            library.append(float(call(["-c", LIBRARY, model.kind, model.path, source])))
            one.append(run_tool(model, source, folder / "speed", 1))
            two.append(run_tool(model, source, folder / "speed", 2))
        alone = statistics.median(library)
        first, second = (statistics.median(run.seconds for run in runs) for runs in (one, two))
        found[model.kind] = {
            "library_mb_per_second": megabytes / alone,
            "one_worker_mb_per_second": megabytes / first,
            "two_workers_mb_per_second": megabytes / second,
            "one_worker_ratio": alone / first,
            "two_workers_ratio": alone / second,
            "one_worker_startup_seconds": statistics.median(run.wall_seconds - run.seconds for run in one),
            "two_workers_startup_seconds": statistics.median(run.wall_seconds - run.seconds for run in two),
        }
    return found


def peak_bytes(command: Sequence[str | Path]) -> int:
    """The most memory that a Python command and its children hold at one time, looked at fifty times a second."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peak, children = 0, Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        try:
            pids = [process.pid, *children.read_text().split()]
            pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        except (FileNotFoundError, ProcessLookupError):  # one of them has just ended
            continue
        peak = max(peak, pages * os.sysconf("SC_PAGE_SIZE"))
        time.sleep(0.02)
    error = process.communicate()[1]
    if process.returncode:
        raise ValueError(f"{' '.join(map(str, command))}: {error}")
    return peak


def write_unique_words(path: Path, megabytes: float) -> None:
    """JSON lines of about 10 kB, of words that never come twice, so that no cache is of use."""
    with open(path, "w") as file:
        for line in range(int(megabytes * 100)):
            words = (f"{number * 2654435761 % 2**32:09d}" for number in range(line * 1000, line * 1000 + 1000))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def measure_memory(models: Iterable[Model], folder: Path, sizes: Sequence[float]) -> dict[str, dict[str, float]]:
    """Peak memory in MB, all processes together, with two workers on each of some sizes of input in MB."""
    found: dict[str, dict[str, float]] = {}
    for model in models:
        peaks = {}
        for size in sizes:
            source = folder / f"words-{size}.jsonl"
            if not source.exists():
                write_unique_words(source, size)
            peaks[f"peak_megabytes_at_{size:g}"] = peak_bytes(tool(model, source, folder / "memory", 2)) / 1e6
        found[model.kind] = peaks | {"ratio": max(peaks.values()) / min(peaks.values())}
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--megabytes", type=float, default=20, help="of text for the speed; default: 20")
    add("--rounds", type=int, default=5, help="of which medians are taken; default: 5")
    add("--memory-megabytes", type=float, nargs="+", default=[20, 200], help="inputs for the memory; default: 20 200")
    add("--only", choices=("speed", "memory"), help="measure that alone")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """All that is asked for, by what is measured, then by tokenizer."""
    source = folder / "corpus.jsonl"
    corpus = [ROOT / "data_tools" / "make_corpus.py", "--output", source]
    call([*corpus, "--max-megabytes", str(args.megabytes)])
    models, found = make_models(folder, source), {}
    if args.only != "memory":
        found["speed"] = measure_speed(models, source, folder, args.rounds)
    if args.only != "speed":
        found["memory"] = measure_memory(models, folder, args.memory_megabytes)
    return found


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    for title, by_kind in found.items():
        for kind, numbers in by_kind.items():
            print(f"{title}, {kind}")
            print("\n".join(f"  {name:30}{value:10.3f}" for name, value in numbers.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
