"""How fast the data path is beside what it could be: samples of the loader, a huge corpus's first batch, tokenizing.

Each figure stands beside a reference measured in the same run, the two taking turns, and medians are compared, so that
a machine with other work is fair to both. (a) and (c) of the output are those of benchmarks/preprocessing.py.
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
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from benchmarks import preprocessing  # noqa: E402
from megazero.batch_sizes import constant  # noqa: E402
from megazero.config import DataConfig  # noqa: E402
from megazero.data.corpora import open_samples  # noqa: E402
from megazero.data.indexed import CODES, HEADER, MAGIC, VERSION, IndexedWriter  # noqa: E402
from megazero.data.loader import Loader, Share  # noqa: E402
from megazero.data.samples import SampleSource  # noqa: E402

VOCAB = 50_000
SEQ_LENGTH = 1024
MICRO_BATCH, GLOBAL_BATCH = 8, 512
DOCUMENT = 700  # tokens
BATCHES = 8  # global batches of one turn


def write_corpus(prefix: str, tokens: int) -> None:
    """A corpus of random tokens in uint16."""
    rng = np.random.default_rng(1)
    with IndexedWriter(prefix, vocab_size=VOCAB) as writer:
        for _ in range(tokens // DOCUMENT):
            writer.add_document([rng.integers(0, VOCAB, DOCUMENT, dtype=np.uint16)])


def write_sparse_corpus(prefix: str, *, documents: int, length: int) -> None:
    """A corpus of equal documents of zeros in uint16. Only what opening reads is written: the rest of the files is
    holes.

    So offsets and document index are right at their ends alone, and the corpus is good for one split.
    """
    tokens = documents * length
    lengths_at = HEADER.size
    offsets_at = lengths_at + 4 * documents
    documents_at = offsets_at + 8 * documents
    with open(prefix + ".idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype("<u2")], documents, documents + 1))
        for at, value, kind in (
            (offsets_at - 4, length, "<i4"),
            (documents_at - 8, 2 * (tokens - length), "<i8"),
            (documents_at + 8 * documents, documents, "<i8"),
        ):
            file.seek(at)
            file.write(np.array(value, kind).tobytes())
    with open(prefix + ".bin", "wb") as file:
        file.truncate(2 * tokens)


def opened(*words: str) -> SampleSource:
    """The training samples of a blend, as a run would open them."""
    data = DataConfig(data_path=words, split="1")
    return open_samples(data, seq_length=SEQ_LENGTH, vocab_size=VOCAB, seed=1)["train"]


def take_batches(samples: SampleSource, num_workers: int, turn: int) -> float:
    """Seconds for each sample of BATCHES global batches, as micro-batches of tensors; start-up is not counted."""
    first = turn * (BATCHES + 1) * GLOBAL_BATCH
    share = Share(MICRO_BATCH, constant(GLOBAL_BATCH))
    with Loader(samples, share, vocab_size=VOCAB, seed=1, num_workers=num_workers) as loader:
        loader.global_batch(first, 1)
        start = time.perf_counter()
        for batch in range(1, BATCHES + 1):
            loader.global_batch(first + batch * GLOBAL_BATCH, batch + 1)
        return (time.perf_counter() - start) / (BATCHES * GLOBAL_BATCH)


def take_slices(tokens: np.ndarray, turn: int) -> float:
    """Seconds for each of as many slices at random places of a memory map, made int64 as a model wants them."""
    places = np.random.default_rng(turn).integers(0, len(tokens) - SEQ_LENGTH, BATCHES * GLOBAL_BATCH).tolist()
    start = time.perf_counter()
    for place in places:
        np.array(tokens[place : place + SEQ_LENGTH + 1], np.int64)
    return (time.perf_counter() - start) / len(places)


def measure_samples(folder: Path, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Samples a second of the loader and of numpy alone, and their ratio: the median over turns of each."""
    prefixes = [str(folder / f"corpus{number}") for number in range(10)]
    for prefix in prefixes:
        write_corpus(prefix, tokens // len(prefixes))
    whole = str(folder / "whole")
    write_corpus(whole, tokens)
    memory_map = np.memmap(whole + ".bin", np.uint16, "r")
    blend = opened(*(word for number, prefix in enumerate(prefixes) for word in (str(number + 1), prefix)))
    one = opened(whole)
    ways: dict[str, Callable[[int], float]] = {
        "numpy memory-map slice": lambda turn: take_slices(memory_map, turn),
        "loader": lambda turn: take_batches(one, 2, turn),
        "loader without workers": lambda turn: take_batches(one, 0, turn),
        "loader of a blend of 10": lambda turn: take_batches(blend, 2, turn),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            took = way(turn)
            if turn:  # the first brings the files into memory
                seconds[name].append(took)
    reference = seconds["numpy memory-map slice"]
    return {
        name: {
            "samples_per_second": 1 / statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(reference, taken)),
        }
        for name, taken in seconds.items()
    }


def resident_bytes() -> int:
    """Memory of this process, memory maps included as far as they were touched."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def first_batch(prefix: str) -> dict[str, float]:
    """Opens a corpus and reads its first global batch, in a process that has read nothing yet."""
    before, start = resident_bytes(), time.perf_counter()
    with Loader(opened(prefix), Share(MICRO_BATCH, constant(GLOBAL_BATCH)), vocab_size=VOCAB, seed=1) as loader:
        loader.global_batch(0, 1)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "megabytes": (resident_bytes() - before) / 1e6}


def measure_first_batch(folder: Path, documents: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds and growth in MB until the first batch of a corpus of so many documents is there, medians."""
    prefix = str(folder / "sparse")
    write_sparse_corpus(prefix, documents=documents, length=DOCUMENT)
    command = [sys.executable, __file__, "--first-batch", prefix]
    runs = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(rounds)]
    return {f"{documents:,} documents": {key: statistics.median(run[key] for run in runs) for key in runs[0]}}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=float, default=1e8, help="of the corpus that samples are taken from; default: 1e8")
    add("--documents", type=float, default=1e8, help="of the corpus whose first batch is read; default: 1e8")
    add("--rounds", type=int, default=11, help="of which medians are taken; default: 11")
    add("--only", choices=("samples", "preprocessing"), help="measure that alone")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    add("--first-batch", metavar="PREFIX", help="read the first batch of PREFIX and print what it took")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Mapping[str, Mapping[str, float]]]:
    """All that is asked for: by what is measured, then by what it was measured of."""
    found: dict[str, Mapping[str, Mapping[str, float]]] = {}
    if args.only != "preprocessing":
        found["samples"] = measure_samples(folder, int(args.tokens), args.rounds)
        found["first batch"] = measure_first_batch(folder, int(args.documents), min(args.rounds, 5))
    if args.only != "samples":
        found |= preprocessing.measure(preprocessing.parse([]), folder)
    return found


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.first_batch:
        print(json.dumps(first_batch(args.first_batch)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    for title, things in found.items():
        for thing, numbers in things.items():
            print(f"{title}, {thing}")
            print("\n".join(f"  {name:30}{value:14.3f}" for name, value in numbers.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
