"""Tokenizers: text to token ids and back. Special ids come from the tokenizer's own files, never from constants.

All have the same few members (see `Tokenizer`), so the rest of the house does not know which one it holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray

from ..config import DataConfig

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
HUGGING_FACE_TYPES = ("HuggingFaceTokenizer", "HFTokenizer", "PretrainedFromHF")
WORD_PIECE_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")
NULL_TYPES = ("NullTokenizer", "NullMultimodalTokenizer")
TYPES = (
    *SENTENCEPIECE_TYPES, "GPT2BPETokenizer", *HUGGING_FACE_TYPES, "TikTokenizer", *WORD_PIECE_TYPES, "ByteTokenizer",
    *NULL_TYPES,
)  # fmt: skip
PROMPT_TYPES = ("MultimodalTokenizer", "SFTTokenizer")  # Megatron's names for prompts around a Hugging Face tokenizer
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # looked for where no file names the eos token
Value = TypeVar("Value")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands in a decoded text for an id that is none
LARGEST_VOCABULARY = 1 << 31  # ids are stored in int32
LONGEST_WORD = 200  # characters of a word that BERT's tokenizer cuts into pieces
# What Megatron's TikTokenizer does where no flag says otherwise.
TIKTOKEN_VOCABULARY, NUM_SPECIAL_TOKENS, SPECIAL_TOKENS = 1 << 17, 1000, ("<unk>", "<s>", "</s>")
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
VISIBLE = (
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
)  # bytes that GPT-2 spells as the character of their number
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
SPELLING = {byte: chr(256 + number) for number, byte in enumerate(HIDDEN)}  # of the others


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

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """`encode` of each text, [length] each, as fast as the tokenizer's library can on one core."""
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
    elif kind == "TikTokenizer":
        model = _required(kind, "--tokenizer-model", data.tokenizer_model)
        tokenizer = TikTokenizer(model, vocab_size, pattern=data.tiktoken_pattern)
    elif kind in WORD_PIECE_TYPES:
        vocab_file = _required(kind, "--vocab-file", data.vocab_file)
        tokenizer = WordPieceTokenizer(vocab_file, lower_case=kind == "BertWordPieceLowerCase")
    elif kind == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    elif kind in NULL_TYPES:
        tokenizer = NullTokenizer(_required(kind, "--vocab-size", vocab_size))
    elif kind in PROMPT_TYPES:
        raise ValueError(f"--tokenizer-type {kind} makes prompts; for plain text give HuggingFaceTokenizer, same model")
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

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        return self._model.encode(texts, num_threads=1, return_type="numpy")

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
        model = _json(str(file), "--tokenizer-model", content).get("model")
        if not isinstance(model, dict):
            raise ValueError(f"--tokenizer-model {file} is not a tokenizer.json: it has no model")
        _check_merges(str(file), model)
        try:
            self._model = tokenizers.Tokenizer.from_buffer(content)
        except ValueError as error:
            raise ValueError(f"--tokenizer-model {file} is not a tokenizer.json: {error}") from error
        self._model.no_padding()
        self._model.no_truncation()
        self._model.encode_special_tokens = True
        self._ids: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = _vocab_size(str(file), "--tokenizer-model", self._ids)
        self.eod = self._find_eod(file)
        self.fingerprint = _fingerprint("huggingface", content)

    def _find_eod(self, file: Path) -> int | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            path = file.with_name(name)
            if not path.is_file():
                continue
            content = _read(str(path), "--tokenizer-model")
            token = _json(str(path), "--tokenizer-model", content).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                if not isinstance(token, str) or token not in self._ids:
                    raise ValueError(
                        f"--tokenizer-model: {path} names {token!r} as eos token, which {file} does not know"
                    )
                return self._ids[token]
        special = [token.content for token in self._model.get_added_tokens_decoder().values() if token.special]
        usual = [token for token in special if token in EOS_NAMES]
        return self._ids[usual[0]] if len(usual) == 1 else None

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        return _encode_batch(self._model, texts)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known(ids, self.vocab_size, self._model.decode)


class GPT2BPETokenizer:
    """Byte-level pair encoding from GPT-2's vocab.json and merges.txt. eod is <|endoftext|>, if the vocabulary has it.

    Spelt out in a text, <|endoftext|> is encoded as text.
    """

    def __init__(self, vocab_file: str, merge_file: str):
        vocab_content, merge_content = _read(vocab_file, "--vocab-file"), _read(merge_file, "--merge-file")
        vocab = _json(vocab_file, "--vocab-file", vocab_content)
        self.vocab_size = _vocab_size(vocab_file, "--vocab-file", vocab)
        try:
            lines = merge_content.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"--merge-file {merge_file} is not UTF-8: {error}") from error
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
        self._model.pre_tokenizer = _byte_level(use_regex=True)
        self._model.decoder = tokenizers.decoders.ByteLevel()
        self.eod: int | None = vocab.get("<|endoftext|>")
        self.fingerprint = _fingerprint("gpt2", vocab_content + merge_content)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text).ids

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        return _encode_batch(self._model, texts)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known([i for i in ids if i != self.eod], self.vocab_size, self._model.decode)


class TikTokenizer:
    """A tiktoken vocabulary in the JSON form that Megatron reads: a list of {"rank", "token_bytes", "token_str"}.

    Its first ids are special tokens, SPECIAL_TOKENS and nameless ones; the file's entries follow, as many as there is
    room for in --vocab-size. eod is </s>. Special tokens spelt out in a text are encoded as text.
    """

    def __init__(self, path: str, vocab_size: int | None = None, *, pattern: str = "v2"):
        content = _read(path, "--tokenizer-model")
        room = (vocab_size or TIKTOKEN_VOCABULARY) - NUM_SPECIAL_TOKENS
        try:
            entries = json.loads(content)[: max(0, room)]
            tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
            ranks = [entry["rank"] for entry in entries]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--tokenizer-model {path} is not a tiktoken vocabulary in JSON: {error!r}") from error
        if ranks != [*range(len(tokens))] or tokens[:256] != [bytes([byte]) for byte in range(256)]:
            raise ValueError(f"--tokenizer-model {path}: ranks must count from 0, and the first 256 be the bytes")
        rank_of = {token: rank for rank, token in enumerate(tokens)}
        spelt = [token.decode("latin-1").translate(SPELLING) for token in tokens]
        vocab = {token: NUM_SPECIAL_TOKENS + rank for rank, token in enumerate(spelt)}
        merges = []  # the pair of lowest rank is merged first; of several pairs that make one token, the oldest
        for token, spelling in zip(tokens, spelt):
            cuts = ((token[:cut], token[cut:], cut) for cut in range(1, len(token)))
            known = [(rank_of[a], rank_of[b], cut) for a, b, cut in cuts if a in rank_of and b in rank_of]
            merges += [(spelling[:cut], spelling[cut:]) for _, _, cut in sorted(known)]
        self._model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=True))
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(TIKTOKEN_PATTERNS[pattern]), "isolated")
        self._model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])
        self._model.decoder = tokenizers.decoders.ByteLevel()
        self.vocab_size = NUM_SPECIAL_TOKENS + len(tokens)
        self.eod: int | None = SPECIAL_TOKENS.index("</s>")
        own = "" if pattern == "v2" else pattern      # files made before there was a choice keep their fingerprint
        self.fingerprint = _fingerprint("tiktoken", content + f"{len(tokens)}{own}".encode())

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text).ids

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        return _encode_batch(self._model, texts)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known([i for i in ids if i >= NUM_SPECIAL_TOKENS], self.vocab_size, self._model.decode)


class WordPieceTokenizer:
    """BERT's word pieces, from its vocab.txt. eod is [EOS], which gets an id behind the file's, as in Megatron, where
    the file lacks it. Text does not come back unchanged: white space is lost, and case with `lower_case`.
    """

    def __init__(self, vocab_file: str, *, lower_case: bool):
        content = _read(vocab_file, "--vocab-file")
        words = content.decode("utf-8", "replace").splitlines()
        vocab = {word.strip(): number for number, word in enumerate(words)}
        if "[UNK]" not in vocab:
            raise ValueError(f"--vocab-file {vocab_file} is not a vocab.txt of BERT: it has no line [UNK]")
        for token in ("[BOS]", "[EOS]"):
            vocab.setdefault(token, len(vocab))
        model = tokenizers.models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
        self._model = tokenizers.Tokenizer(model)
        self._model.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
        self._model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._model.decoder = tokenizers.decoders.WordPiece(cleanup=False)
        self.vocab_size = max(vocab.values()) + 1
        self.eod: int | None = vocab["[EOS]"]
        self.fingerprint = _fingerprint("wordpiece-lower" if lower_case else "wordpiece", content)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text).ids

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        return _encode_batch(self._model, texts)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode_known([i for i in ids if i != self.eod], self.vocab_size, self._model.decode)


class ByteTokenizer:
    """The bytes of the text in UTF-8, and 256 as eod."""

    def __init__(self) -> None:
        self.vocab_size, self.eod, self.fingerprint = 257, 256, "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

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

    def encode_batch(self, texts: list[str]) -> list[NDArray[np.int32]]:
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


def _byte_level(*, use_regex: bool) -> tokenizers.pre_tokenizers.ByteLevel:
    """Spells bytes as characters that can be seen, as GPT-2 does; with `use_regex` it also cuts words as GPT-2 does."""
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _encode_batch(model: tokenizers.Tokenizer, texts: list[str]) -> list[NDArray[np.int32]]:
    """Without the offsets of tokens in the text, which nobody asks for: half as fast again."""
    return [np.array(text.ids, np.int32) for text in model.encode_batch_fast(texts, add_special_tokens=False)]


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


def _json(path: str, flag: str, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{flag} {path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{flag} {path} is not a JSON object")
    return parsed


def _vocab_size(path: str, flag: str, ids: dict[str, Any]) -> int:
    """One more than the largest id. ValueError: there is none, or an entry that no tokenizer can have."""
    if not ids:
        raise ValueError(f"{flag} {path}: the vocabulary is empty")
    for token, number in ids.items():
        if type(number) is not int or not 0 <= number < LARGEST_VOCABULARY:  # true and false are ints as well
            raise ValueError(f"{flag} {path}: the id of {token!r} must be a number from 0 to 2^31 - 1, not {number!r}")
        if not _is_unicode(token):
            raise ValueError(f"{flag} {path}: the token {token!r} holds half a character")
    return max(ids.values()) + 1


def _is_unicode(text: str) -> bool:
    """False where JSON spelt half of a surrogate pair, which no UTF-8 can hold."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _check_merges(path: str, model: dict[str, Any]) -> None:
    """ValueError: a merge of a tokenizer.json is not of its vocabulary. The library would not survive some of these.

    What has another shape than a model of merges is left to the library, which tells what it finds.
    """
    vocab, merges, prefix = model.get("vocab"), model.get("merges"), model.get("continuing_subword_prefix") or ""
    if not (isinstance(vocab, dict) and isinstance(merges, list) and isinstance(prefix, str)):
        return
    for number, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        known = isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        if not known or not {*pair, pair[0] + pair[1][len(prefix) :]} <= vocab.keys():
            raise ValueError(f"--tokenizer-model {path}: merge {number}, {merge!r}, is none of its vocabulary")


def _fingerprint(kind: str, content: bytes) -> str:
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}"
