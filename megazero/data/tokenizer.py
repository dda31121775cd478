"""Tokenizers: text to token ids and back. Special ids come from the tokenizer's own files, never from constants.

All have the same few members (see `Tokenizer`), so the rest of the house does not know which one it holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import sentencepiece
import tokenizers

from ..config import DataConfig

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
HUGGING_FACE_TYPES = ("HuggingFaceTokenizer", "HFTokenizer")
TYPES = (*SENTENCEPIECE_TYPES, "GPT2BPETokenizer", *HUGGING_FACE_TYPES, "ByteTokenizer", "NullTokenizer")
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # looked for where no file names the eos token
Value = TypeVar("Value")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands in a decoded text for an id that is none


class Tokenizer(Protocol):
    """vocab_size: one more than the largest id, without padding. eod: the id that ends a document, or None.

    fingerprint: names the content of the model, so that two files can be told apart; "" where there is none.
    """

    vocab_size: int
    eod: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added at its beginning or end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids >= 0; one that is no token gives a replacement character."""
        ...


def build_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that --tokenizer-type names. vocab_size is --vocab-size, at least the tokenizer's if given.

    Raises ValueError for an unknown type, a flag that it lacks, and a missing or damaged file.
    """
    kind = data.tokenizer_type or ("GPT2BPETokenizer" if data.vocab_file else None)
    tokenizer: Tokenizer
    if kind in SENTENCEPIECE_TYPES:
        tokenizer = SentencePieceTokenizer(_required(kind, "--tokenizer-model", data.tokenizer_model))
    elif kind in HUGGING_FACE_TYPES:
        tokenizer = HuggingFaceTokenizer(_required(kind, "--tokenizer-model", data.tokenizer_model))
    elif kind == "GPT2BPETokenizer":
        files = _required(kind, "--vocab-file", data.vocab_file), _required(kind, "--merge-file", data.merge_file)
        tokenizer = GPT2BPETokenizer(*files)
    elif kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    elif kind == "NullTokenizer":
        tokenizer = NullTokenizer(_required(kind, "--vocab-size", vocab_size))
    else:
        raise ValueError(f"--tokenizer-type {kind}: give one of {', '.join(TYPES)}")
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ValueError(f"--vocab-size {vocab_size} is less than the {tokenizer.vocab_size} entries of the {kind}")
    return tokenizer


class SentencePieceTokenizer:
    """A SentencePiece model file. eod is its eos piece; a model without one (eos id -1) has no eod."""

    def __init__(self, path: str):
        content = _read(path, "--tokenizer-model")
        if not content:
            raise ValueError(f"--tokenizer-model {path} is empty")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(f"--tokenizer-model {path} is not a SentencePiece model: {error}") from error
        self.vocab_size: int = self._model.vocab_size()
        eos = self._model.eos_id()
        self.eod = eos if eos >= 0 else None
        self.fingerprint = _fingerprint("sentencepiece", content)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known(ids, self.vocab_size, self._model.decode)


class HuggingFaceTokenizer:
    """A tokenizer.json, given as the file or the folder that holds it.

    eod is the eos token that tokenizer_config.json or special_tokens_map.json beside it names, else the only special
    token with a usual name for it (EOS_NAMES), else None. Special tokens spelt out in a text are encoded as text.
    """

    def __init__(self, path: str):
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        content = _read(str(file), "--tokenizer-model")
        if not isinstance(_json(str(file), content).get("model"), dict):
            raise ValueError(f"--tokenizer-model {file} is not a tokenizer.json: it has no model")
        self._model = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        self._model.no_padding()
        self._model.no_truncation()
        self._model.encode_special_tokens = True
        self._ids: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values()) + 1
        self.eod = self._find_eod(file)
        self.fingerprint = _fingerprint("huggingface", content)

    def _find_eod(self, file: Path) -> int | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            path = file.with_name(name)
            token = _json(str(path), path.read_bytes()).get("eos_token") if path.is_file() else None
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                if token not in self._ids:
                    raise ValueError(f"{path} names {token!r} as eos token, which {file} does not know")
                return self._ids[token]
        special = [token.content for token in self._model.get_added_tokens_decoder().values() if token.special]
        usual = [token for token in special if token in EOS_NAMES]
        return self._ids[usual[0]] if len(usual) == 1 else None

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known(ids, self.vocab_size, self._model.decode)


class GPT2BPETokenizer:
    """Byte-level pair encoding from GPT-2's vocab.json and merges.txt. eod is <|endoftext|>, if the vocabulary has it.

    Spelt out in a text, <|endoftext|> is encoded as text.
    """

    def __init__(self, vocab_file: str, merge_file: str):
        vocab_content, merge_content = _read(vocab_file, "--vocab-file"), _read(merge_file, "--merge-file")
        vocab = _json(vocab_file, vocab_content)
        lines = merge_content.decode("utf-8").split("\n")
        merges = []
        for number, line in enumerate(lines, start=1):
            pair = tuple(line.split(" "))
            if not line.strip() or line.startswith("#version"):
                continue
            if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
                raise ValueError(
                    f"--merge-file {merge_file}, line {number}: {line!r} is no merge of --vocab-file {vocab_file}"
                )
            merges.append(pair)
        self._model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
        self._model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._model.decoder = tokenizers.decoders.ByteLevel()
        self.vocab_size: int = max(vocab.values()) + 1
        self.eod: int | None = vocab.get("<|endoftext|>")
        self.fingerprint = _fingerprint("gpt2", vocab_content + merge_content)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known([i for i in ids if i != self.eod], self.vocab_size, self._model.decode)


class ByteTokenizer:
    """The bytes of the text in UTF-8, and 256 as eod."""

    def __init__(self) -> None:
        self.vocab_size, self.eod, self.fingerprint = 257, 256, "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known(
            [i for i in ids if i != self.eod], 256, lambda part: bytes(part).decode("utf-8", "replace")
        )


class NullTokenizer:
    """No tokenizer: text is written as ids with spaces between them. There is no eod, for no file tells of one."""

    def __init__(self, vocab_size: int):
        self.vocab_size, self.eod, self.fingerprint = vocab_size, None, ""

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise ValueError(f"NullTokenizer: {word!r} is not an id from 0 to {self.vocab_size - 1} (--vocab-size)")
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


def _decode_known(ids: Sequence[int], known: int, decode: Callable[[list[int]], str]) -> str:
    """Decodes the stretches of ids below `known`, with a replacement character for every other id between them."""
    parts: list[list[int]] = [[]]
    for i in ids:
        if 0 <= i < known:
            parts[-1].append(int(i))
        else:  # such as a row of a padded vocabulary
            parts.append([])
    return REPLACEMENT.join(decode(part) for part in parts)


def _required(kind: str, flag: str, value: Value | None) -> Value:
    if value is None:
        raise ValueError(f"--tokenizer-type {kind} needs {flag}")
    return value


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _json(path: str, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} is not a JSON object")
    return parsed


def _fingerprint(kind: str, content: bytes) -> str:
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}"
