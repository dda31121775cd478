"""Tells what is in a token file: its counts, a checksum, the text of a document, and the samples that a run gets of it.

inspect_data.py PREFIX describes one corpus. inspect_data.py --data-path [W1] PREFIX1 [W2 PREFIX2 ...] --samples K ...
prints what the loader feeds as samples K, ..., with the flags of pretrain_gpt.py and their defaults.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from data_tools.command import command  # noqa: E402
from megazero.config import DataConfig  # noqa: E402
from megazero.data.corpora import open_samples  # noqa: E402
from megazero.data.indexed import IndexedReader  # noqa: E402
from megazero.data.samples import SampleSource  # noqa: E402
from megazero.data.tokenizer import TYPES, Tokenizer, build_tokenizer  # noqa: E402

CHUNK = 1 << 20
ARGUMENT = "PREFIX"  # what messages call the corpus that is named without a flag
ANY_VOCABULARY = 1 << 31  # without a tokenizer every id is as good as another


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prefix", nargs="?", help="of the .bin and .idx files")
    add("--json", action="store_true", help="print one JSON object")
    add("--document", type=int, metavar="N", help="show document N, from 0")
    add = parser.add_argument_group("samples").add_argument
    add(
        "--sample",
        "--samples",
        dest="samples",
        type=int,
        nargs="+",
        default=[],
        metavar="K",
        help="show samples K, ...",
    )
    add("--seq-length", type=int, help="of a sample, which has one token more")
    add("--part", default="train", help="train, valid, test or the name of a --valid-set; default: train")
    add("--split", default="969,30,1", help="weights of training, validation and test; default: 969,30,1")
    add("--seed", type=int, default=1234, help="of the run; default: 1234")
    add("--sample-order", choices=("keyed", "megatron"), default="keyed", help="as for pretrain_gpt.py; default: keyed")
    add("--num-samples", type=int, help="that the run takes of this part; the order of megatron depends on it")
    for name in ("data", "train-data", "valid-data", "test-data"):
        add(f"--{name}-path", nargs="+", default=[], help="[W1] PREFIX1 [W2 PREFIX2 ...], as for pretrain_gpt.py")
    add("--valid-set", nargs="+", action="extend", default=[], help="NAME=[W1] PREFIX1 ..., as for pretrain_gpt.py")
    add = parser.add_argument_group("tokenizer, to show text").add_argument
    add("--tokenizer-type", help=f"one of {', '.join(TYPES)}; default: found out")
    add("--tokenizer-model", help="model file of SentencePiece and Hugging Face tokenizers")
    add("--vocab-file", help="vocab.json of a GPT-2 tokenizer")
    add("--merge-file", help="merges.txt of a GPT-2 tokenizer")
    args = parser.parse_args(argv)
    if (args.prefix is None) != bool(args.data_path or args.train_data_path):
        parser.error("give either the PREFIX of a corpus, or --data-path (or --train-data-path) with --samples")
    if args.prefix is None and (args.document is not None or not args.samples):
        parser.error("--data-path goes with --samples K ...; for a --document give the PREFIX of its corpus alone")
    if args.samples and args.seq_length is None:
        parser.error("--samples needs --seq-length")
    if args.samples and args.sample_order == "megatron" and args.num_samples is None:
        parser.error("--sample-order megatron needs --num-samples, for the order depends on it")
    return args


def make_tokenizer(args: argparse.Namespace, fingerprint: str | None) -> Tokenizer | None:
    """The tokenizer that is named, its type found out if need be; None: none is. ValueError: not that of the corpus."""
    kind = args.tokenizer_type
    if kind is None and args.tokenizer_model is not None:
        model = Path(args.tokenizer_model)
        kind = "HuggingFaceTokenizer" if model.is_dir() or model.suffix == ".json" else "SentencePieceTokenizer"
    if kind is None and args.vocab_file is None:
        if fingerprint != "bytes":
            return None
        kind = "ByteTokenizer"
    data = DataConfig(
        tokenizer_type=kind,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
    )
    tokenizer = build_tokenizer(data, ANY_VOCABULARY)
    if fingerprint and tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{args.prefix} was made with the tokenizer {fingerprint}, not with {tokenizer.fingerprint}")
    return tokenizer


def describe(reader: IndexedReader) -> dict[str, object]:
    """The counts of a corpus and the sha256 of its tokens as they lie in the .bin file."""
    digest = hashlib.sha256()
    with open(reader.prefix + ".bin", "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return {
        "prefix": reader.prefix,
        "dtype": reader.dtype.name,
        "sequences": len(reader),
        "documents": reader.num_documents,
        "tokens": reader.num_tokens,
        "bytes": reader.num_tokens * reader.dtype.itemsize,
        "vocabulary": reader.sidecar.vocab_size if reader.sidecar else None,
        "tokenizer": reader.sidecar.fingerprint if reader.sidecar else None,
        "tokens_sha256": digest.hexdigest(),
    }


def source(args: argparse.Namespace, fingerprint: str | None) -> SampleSource:
    """The part of the data whose samples are shown."""
    data = DataConfig(
        data_path=(args.prefix,) if args.prefix else tuple(args.data_path),
        train_data_path=tuple(args.train_data_path),
        valid_data_path=tuple(args.valid_data_path),
        test_data_path=tuple(args.test_data_path),
        valid_set=tuple(args.valid_set),
        split=args.split,
        sample_order=args.sample_order,
    )
    names = ("train", "valid", "test", *data.valid_sets)
    if args.part not in names:
        raise ValueError(f"--part {args.part}: give one of {', '.join(names)}")
    counts = dict.fromkeys(names, 0) | {args.part: args.num_samples}
    flag = ARGUMENT if args.prefix else "--data-path"
    parts = open_samples(
        data,
        seq_length=args.seq_length,
        vocab_size=ANY_VOCABULARY,
        seed=args.seed,
        fingerprint=fingerprint,
        counts=counts,
        flag=flag,
    )
    if args.part not in parts:
        if data.data_path and args.part not in data.valid_sets:
            raise ValueError(f"--part {args.part} is empty: --split {args.split} leaves it no document")
        own = "--valid-set" if args.part in data.valid_sets else f"--{args.part}-data-path"
        raise ValueError(f"--part {args.part} is empty: {own} gives it no token")
    return parts[args.part]


def report(args: argparse.Namespace) -> dict[str, Any]:
    """All that is asked for, as one JSON object."""
    found: dict[str, Any] = {}
    fingerprint = None
    if args.prefix is not None:
        reader = IndexedReader(args.prefix, flag=ARGUMENT)
        fingerprint = reader.sidecar.fingerprint if reader.sidecar else None
        found |= describe(reader)
    tokenizer = make_tokenizer(args, fingerprint)
    if args.document is not None:
        if not 0 <= args.document < reader.num_documents:
            raise ValueError(f"--document {args.document}: {args.prefix} has documents 0 to {reader.num_documents - 1}")
        ids = reader.document(args.document).tolist()
        found |= {"document": args.document, "ids": ids}
        if tokenizer is not None:
            found["text"] = tokenizer.decode(ids)
    if args.samples:
        samples = source(args, tokenizer.fingerprint if tokenizer else None)
        if min(args.samples) < 0:
            raise ValueError(f"--samples {min(args.samples)}: must be at least 0")
        try:
            rows = [samples.rows([k])[0].tolist() for k in args.samples]
        except IndexError as error:
            raise ValueError(f"--samples: {error}") from error
        found["samples"] = rows
        if tokenizer is not None:
            found["texts"] = [tokenizer.decode(row) for row in rows]
    return found


def lines(args: argparse.Namespace, found: dict[str, Any]) -> Iterator[str]:
    """A report for a reader."""
    shown = ("document", "ids", "text", "samples", "texts")
    yield from (f"{name:14}{value}" for name, value in found.items() if name not in shown)
    if "document" in found:
        yield f"\ndocument {found['document']}, {len(found['ids'])} tokens:"
        yield found.get("text") or " ".join(map(str, found["ids"]))
    for number, k in enumerate(args.samples):
        yield f"\nsample {k} of the {args.part} part:"
        yield found["texts"][number] if "texts" in found else " ".join(map(str, found["samples"][number]))


def run(args: argparse.Namespace) -> Iterator[object]:
    found = report(args)
    yield from [found] if args.json else lines(args, found)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    command("inspect_data.py", lambda: run(args))


if __name__ == "__main__":
    main()
