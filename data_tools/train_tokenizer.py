"""Trains a SentencePiece tokenizer on JSONL or plain text, such that any text comes back from its ids unchanged.

Nothing is normalised, no blank is added or removed, line breaks are a token of their own, and what the vocabulary lacks
is spelt in bytes. (One exception lies in SentencePiece itself: the character U+2581 comes back as a blank.)
"""

from __future__ import annotations

import argparse
import io
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from data_tools.command import command, make_folder_of  # noqa: E402
from data_tools.inputs import COMPRESSED, expand, numbered_lines  # noqa: E402
from data_tools.jsonl import texts  # noqa: E402
from megazero.data.tokenizer import SentencePieceTokenizer  # noqa: E402

MAX_SENTENCE_BYTES = 4096  # SentencePiece drops longer ones: they are cut instead


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help="files or glob patterns, .gz, .bz2 and .zst too; .jsonl and .json hold JSON lines, others text",
    )
    add("--json-keys", nargs="+", default=["text"], help="keys of the texts in JSON lines; default: text")
    add("--model-prefix", "--output", dest="model_prefix", required=True, help="PREFIX.model is written")
    add("--vocab-size", type=int, required=True, help="entries, special ones included")
    add("--model-type", choices=("bpe", "unigram"), default="bpe", help="default: bpe")
    add(
        "--character-coverage",
        type=float,
        default=0.9995,
        help="share of characters that get an entry; default: 0.9995",
    )
    add(
        "--max-sentences",
        type=int,
        default=1_000_000,
        help="train on that many lines, drawn by --seed; default: a million",
    )
    add("--seed", type=int, default=1234, help="for the draw of lines")
    return parser.parse_args(argv)


def sentences(files: list[str], keys: list[str]) -> Iterator[str]:
    """The lines of all texts, without their ends; long ones in parts, empty ones left out."""
    for path in files:
        plain = next((path.removesuffix(ending) for ending in COMPRESSED if path.endswith(ending)), path)
        is_json = plain.endswith((".jsonl", ".json"))
        for number, line in numbered_lines(path):
            try:
                found = texts(line, keys) if is_json else [[line.decode("utf-8")]]
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            for sentence in (part for document in found for text in document for part in text.split("\n")):
                width = MAX_SENTENCE_BYTES if sentence.isascii() else MAX_SENTENCE_BYTES // 4
                yield from (sentence[i : i + width] for i in range(0, len(sentence), width))


def draw(items: Iterator[str], number: int, seed: int) -> list[str]:
    """At most `number` of the items, each as likely as any other, in their order (reservoir sampling)."""
    generator, chosen = random.Random(seed), []
    for index, item in enumerate(items):
        if index < number:
            chosen.append((index, item))
        elif (place := generator.randrange(index + 1)) < number:
            chosen[place] = (index, item)
    return [item for _, item in sorted(chosen)]


def train(lines: list[str], args: argparse.Namespace) -> bytes:
    """The content of the model file. The same lines and arguments give the same bytes."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=args.model_type,
            vocab_size=args.vocab_size,
            character_coverage=args.character_coverage,
            max_sentence_length=MAX_SENTENCE_BYTES,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n"],
            pad_id=-1,
            num_threads=16,  # a fixed number: sums of unigram training depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).split("] ")[-1]
        raise ValueError(f"--vocab-size {args.vocab_size} cannot be trained on {len(lines)} lines: {reason}") from error
    return model.getvalue()


def run(args: argparse.Namespace) -> dict[str, object]:
    """Trains, writes the model, and returns the summary."""
    start = time.monotonic()
    lines = draw(sentences(expand(args.input), args.json_keys), args.max_sentences, args.seed)
    if not lines:
        raise ValueError(f"--input {' '.join(args.input)}: there is no text in it")
    path = Path(args.model_prefix.removesuffix(".model") + ".model")
    make_folder_of("--model-prefix", path)
    content = train(lines, args)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
    tokenizer = SentencePieceTokenizer(str(path))
    return {
        "model": str(path),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "fingerprint": tokenizer.fingerprint,
        "sentences": len(lines),
        "seconds": round(time.monotonic() - start, 2),
    }


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    command("train_tokenizer.py", lambda: [run(args)])


if __name__ == "__main__":
    main()
