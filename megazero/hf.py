"""Hugging Face folders, in and out: weights, config.json, and the files of the tokenizer.

Both directions stream: one tensor is read, put into the other house's form, and written. Neither needs a GPU, a
process group, the network, or the transformers library. What belongs where is said in hf_names.py and hf_config.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import Reader, finish, folder_of, new_save_id
from .checkpoint_index import INDEX, TensorEntry
from .config import Config
from .config_data import BatchConfig, DataConfig
from .config_precision import PrecisionConfig
from .data.tokenizer import HUGGING_FACE_TYPES, SENTENCEPIECE_TYPES, build_tokenizer
from .hf_config import DTYPE_WORDS, Described, describe, experts_of, family_of, moe_of, to_values
from .hf_names import Part, Row, rows_of
from .parallel.shard import ShardSpec, owned_boxes
from .parallel.topology import Topology
from .tensor_file import BITS, DTYPE_NAMES, DTYPES, Entry, TensorFile
from .tensor_stream import Lazy, write_lazily
from .weights_only import write_weights

CONFIG, GENERATION = "config.json", "generation_config.json"
ONE_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
SIDE_FOLDER = "huggingface"             # beside the iterations of an imported model: what is no weight
SIDE_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", GENERATION,
)  # fmt: skip
# Buffers that some versions saved among the weights, by the end of their names.
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
WORD_TABLE = "embedding.word.weight"
COMPARED = 2**20                        # elements of two tensors that are compared at a time


class Weights:
    """The tensors of a Hugging Face folder by name, over all its files. Only headers are read at first.

    Raises ValueError with one line where a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._homes: dict[str, TensorFile] = {}
        for path in self._paths():
            try:
                file = TensorFile(path)
            except FileNotFoundError as error:
                raise ValueError(f"{path}: missing, but {WEIGHTS_INDEX} names it") from error
            for name in file.entries:
                if name in self._homes:
                    raise ValueError(f"{path}: holds {name}, which {self._homes[name].path.name} holds too")
                self._homes[name] = file

    def _paths(self) -> list[Path]:
        index = self.folder / WEIGHTS_INDEX
        if index.is_file():
            homes = read_json(index).get("weight_map")
            names = sorted(set(homes.values())) if isinstance(homes, dict) else []
            if not names or not all(isinstance(name, str) and PurePosixPath(name).name == name for name in names):
                raise ValueError(f"{index}: has no weight_map from tensors to files of this folder")
            return [self.folder / name for name in names]
        if (self.folder / ONE_FILE).is_file():
            return [self.folder / ONE_FILE]
        raise ValueError(f"{self.folder}: has neither {ONE_FILE} nor {WEIGHTS_INDEX}; other formats are not read")

    @property
    def names(self) -> set[str]:
        return set(self._homes)

    def entry(self, name: str) -> Entry:
        return self._homes[name].entries[name]

    def bits(self, name: str) -> np.ndarray:
        """A tensor as flat integers of its elements' width: a view of the file."""
        return self._homes[name].bits(name)


def read_json(path: Path) -> dict[str, Any]:
    """An object. ValueError with one line where it cannot be read."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return values


# ----------------------------------------------------------------------------------------------------------------- in


@dataclass(frozen=True)
class Source:
    """A Hugging Face folder that fits: each row of the table has its tensors there, in the right shapes.

    `bare` says that the names lack the first word that the table has ("model.", "transformer.").
    """

    weights: Weights
    described: Described
    rows: list[Row]
    bare: bool

    def theirs(self, name: str) -> str:
        """The name of a tensor in this folder."""
        return name.partition(".")[2] if self.bare and not name.startswith("lm_head.") else name

    def dtype(self, row: Row) -> torch.dtype:
        return self.weights.entry(self.theirs(row.parts[0].name)).dtype

    def read(self, row: Row) -> Tensor:
        """A parameter of ours [*row.shape], in the dtype of the folder."""
        dtype = self.dtype(row)
        out = np.empty(row.shape, BITS[dtype.itemsize])
        for part in row.parts:
            bits = self.weights.bits(self.theirs(part.name))
            bits = bits.reshape([part.box.shape[dim] for dim in part.order]).transpose(np.argsort(part.order))
            out[part.box.slices()] = bits
        return torch.from_numpy(out).view(dtype)


def open_source(folder: Path) -> Source:
    """Read config.json and the headers of all weights. Raises ValueError with one line for what does not fit."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    described = describe(read_json(folder / CONFIG), str(folder / CONFIG))
    weights = Weights(folder)
    assert described.model.vocab_size is not None
    rows = rows_of(described.family, described.model, described.model.vocab_size, described.experts)
    prefix = rows[0].parts[0].name.partition(".")[0] + "."
    source = Source(weights, described, rows, bare=not any(name.startswith(prefix) for name in weights.names))
    wanted = {source.theirs(part.name): part for row in rows for part in row.parts}
    for name, part in wanted.items():
        if name not in weights.names:
            raise ValueError(f"{folder}: lacks the tensor {name}")
        shape = weights.entry(name).shape
        if shape != part.shape:
            raise ValueError(f"{folder}: {name} has shape {list(shape)}, {CONFIG} asks for {list(part.shape)}")
    for row in rows:
        kinds = {weights.entry(source.theirs(part.name)).dtype for part in row.parts}
        if len(kinds) > 1 or not source.dtype(row).is_floating_point:
            shown = ", ".join(sorted(DTYPE_NAMES[kind] for kind in kinds))
            raise ValueError(f"{folder}: {source.theirs(row.parts[0].name)} and what goes with it are of type {shown}")
    _check_rest(source, sorted(weights.names - set(wanted)))
    return source


def _check_rest(source: Source, names: Sequence[str]) -> None:
    """What the table does not name may be a buffer, or the embedding once more as the head of a tied model."""
    for name in names:
        if name.endswith(NO_WEIGHTS):
            continue
        if name == "lm_head.weight" and source.described.model.tied:
            if not _equal(source.weights, name, source.theirs(source.rows[0].parts[0].name)):
                raise ValueError(f"{source.weights.folder}: {name} is not the embedding, but {CONFIG} ties the two")
            continue
        raise ValueError(f"{source.weights.folder}: holds the tensor {name}, for which this model has no place")


def _equal(weights: Weights, name: str, other: str) -> bool:
    one, two = weights.entry(name), weights.entry(other)
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    a, b = weights.bits(name), weights.bits(other)
    return all(np.array_equal(a[at : at + COMPARED], b[at : at + COMPARED]) for at in range(0, a.size, COMPARED))


class FolderReader:
    """A Hugging Face folder, read as a checkpoint's Reader reads one. Raises as open_source does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._source = folder, open_source(folder)
        self.config = json.loads(config_of(self._source, folder).to_json())
        self.tensors = entries_of(self._source)
        self._rows = {row.name: row for row in self._source.rows}

    def read_flat(
        self, name: str, kind: str, spec: ShardSpec, *, topology: Topology, rank: int, start: int, stop: int,
    ) -> Tensor:
        """Flat elements [start, stop) of the shard that `rank` of `topology` holds, padding zero, [stop - start]."""
        if kind != "weight" or name not in self._rows:
            raise ValueError(f"{self.folder}: has no {kind} of {name}")
        if spec.shape != self._rows[name].shape:
            shape = list(self._rows[name].shape)
            raise ValueError(f"{self.folder}: {name} has shape {shape}, the model wants {list(spec.shape)}")
        whole = self._source.read(self._rows[name])
        out = whole.new_zeros(stop - start)
        at = 0
        for box in owned_boxes(spec, topology, rank, start, stop):
            out[at : at + box.numel] = whole[box.slices()].flatten()
            at += box.numel
        return out


def entries_of(source: Source) -> dict[str, TensorEntry]:
    """Our parameters, whole and without moments, by name."""
    specs = {row: ShardSpec(row.shape, (None,) * len(row.shape)) for row in source.rows}
    return {row.name: TensorEntry(spec, {"weight": DTYPE_NAMES[source.dtype(row)]}) for row, spec in specs.items()}


@dataclass(frozen=True)
class Imported:
    """A checkpoint that was made from a Hugging Face folder."""

    folder: Path
    config: Config
    tensors: int
    bytes: int


def import_folder(hf: Path, root: Path, *, iteration: int = 0) -> Imported:
    """Make checkpoint `root`/iter_... of a Hugging Face folder: weights only, in the folder's dtype.

    Raises ValueError with one line for what does not fit, before anything is written, and OSError where it cannot
    write; then there is no checkpoint.
    """
    if iteration < 0:
        raise ValueError(f"--iteration {iteration}: must be at least 0")
    source = open_source(hf)
    if (folder_of(root, iteration) / INDEX).exists():
        raise ValueError(f"--save {root}: holds a checkpoint of iteration {iteration} already")
    config = config_of(source, root / SIDE_FOLDER)
    folder, written = write_checkpoint(source, root, config=config, iteration=iteration)
    finish(root, iteration)
    return Imported(folder, config, len(source.rows), written)


def write_checkpoint(source: Source, root: Path, *, config: Config, iteration: int) -> tuple[Path, int]:
    """Write the weights, and what lies beside them; the checkpoint's folder, and the bytes of its file."""
    here = source.weights.folder
    copy_files({name: here / name for name in SIDE_FILES if (here / name).is_file()}, root / SIDE_FOLDER)
    tensors = {row.name: Lazy(source.dtype(row), row.shape, partial(source.read, row)) for row in source.rows}
    return write_weights(root, tensors, config=config, iteration=iteration)


def config_of(source: Source, side: Path) -> Config:
    """The configuration of an imported model, whose tokenizer's files will lie in `side`."""
    folder = source.weights.folder
    model, experts = source.described.model, source.described.experts
    try:
        moe = moe_of(experts, model)
    except ValueError as wrong:
        raise ValueError(f"{folder / CONFIG}: {wrong}") from wrong
    here = {name for name in SIDE_FILES if (folder / name).is_file()}
    if "tokenizer.json" in here:
        data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(side / "tokenizer.json"))
    elif "tokenizer.model" in here:
        data = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(side / "tokenizer.model"))
    elif {"vocab.json", "merges.txt"} <= here:
        data = DataConfig(vocab_file=str(side / "vocab.json"), merge_file=str(side / "merges.txt"))
    else:
        data = DataConfig(tokenizer_type="NullTokenizer")
    half = source.dtype(source.rows[0]) == torch.bfloat16
    return Config(
        model=model, moe=moe, batch=BatchConfig(micro_batch_size=1), data=data,
        precision=PrecisionConfig(bf16=half),
    )


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy each file to its name in `folder`, which is made if there is anything to copy."""
    for name, path in files.items():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


# ---------------------------------------------------------------------------------------------------------------- out


@dataclass(frozen=True)
class Exported:
    """A Hugging Face folder that was made from a checkpoint; `notes` are lines for the user."""

    folder: Path
    family: str
    files: int
    bytes: int
    notes: tuple[str, ...]


def export_folder(checkpoint: Path, out: Path, *, dtype: torch.dtype | None = None, shard_bytes: int) -> Exported:
    """Make Hugging Face folder `out` of a checkpoint's folder; `dtype` None: as stored.

    A file holds at most `shard_bytes`, or one tensor. Raises ValueError with one line, or OSError; then there is no
    `out`.
    """
    if out.exists():
        raise ValueError(f"--out {out}: is there already")
    reader = Reader(checkpoint)
    config = Config.from_json(json.dumps(reader.config))
    if WORD_TABLE not in reader.tensors:
        raise ValueError(f"{reader.folder}: has no {WORD_TABLE}, so it is not a checkpoint of a GPT")
    vocab = reader.tensors[WORD_TABLE].spec.shape[0]
    experts = experts_of(config)
    rows = rows_of(family_of(config.model, experts), config.model, vocab, experts)
    check_rows(reader, rows)
    tensors = [(part.name, _lazy_part(reader, row, part, dtype)) for row in rows for part in row.parts]
    draft = out.with_name(f"{out.name}.{new_save_id()}.tmp")
    draft.mkdir(parents=True)
    try:
        files = write_shards(draft, tensors, shard_bytes)
        notes = write_side_files(draft, config, vocab=vocab, side=checkpoint.parent / SIDE_FOLDER)
        values = to_values(config.model, vocab, experts, DTYPE_NAMES[tensors[0][1].dtype])
        ids = read_json(draft / GENERATION) if (draft / GENERATION).is_file() else {}
        values |= {name: ids.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(draft / CONFIG, values)
        os.rename(draft, out)
    except BaseException:
        shutil.rmtree(draft)
        raise
    total = sum(lazy.nbytes for _, lazy in tensors)
    return Exported(out, values["model_type"], files, total, tuple(notes))


def check_rows(reader: Reader, rows: Sequence[Row]) -> None:
    """ValueError for the first tensor that the checkpoint lacks, has too many, or has in another shape."""
    wanted = {row.name: row.shape for row in rows}
    for name, entry in reader.tensors.items():
        if name not in wanted:
            raise ValueError(f"{reader.folder}: holds {name}, for which Hugging Face's model has no place")
        if entry.spec.shape != wanted[name]:
            shape = list(entry.spec.shape)
            raise ValueError(f"{reader.folder}: {name} has shape {shape}, its settings ask for {list(wanted[name])}")
    for name in wanted:
        if name not in reader.tensors:
            raise ValueError(f"{reader.folder}: lacks the tensor {name}")


def _lazy_part(reader: Reader, row: Row, part: Part, dtype: torch.dtype | None) -> Lazy:
    stored = DTYPES[reader.tensors[row.name].dtypes["weight"]]
    return Lazy(dtype or stored, part.shape, partial(read_part, reader, row.name, part, dtype or stored))


def read_part(reader: Reader, name: str, part: Part, dtype: torch.dtype) -> Tensor:
    """A tensor of theirs [*part.shape] in `dtype`. ValueError where a finite number would become infinite."""
    block = reader.read(name, "weight", part.box)
    theirs = block.permute(part.order).reshape(part.shape)
    if theirs.dtype == dtype:
        return theirs
    turned = theirs.to(dtype)
    if not torch.equal(turned.isfinite(), theirs.isfinite()):
        word = DTYPE_WORDS[DTYPE_NAMES[dtype]]
        raise ValueError(f"{reader.folder}: {name} holds numbers that are too large for {word}")
    return turned


def write_shards(folder: Path, tensors: Sequence[tuple[str, Lazy]], shard_bytes: int) -> int:
    """Write the weights in files of at most `shard_bytes`, or one tensor, each; returns their number."""
    shards: list[list[tuple[str, Lazy]]] = []
    filled = 0
    for name, lazy in tensors:
        size = lazy.nbytes
        if not shards or filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, lazy))
        filled += size
    metadata = {"format": "pt"}                     # the transformers library asks for it
    if len(shards) == 1:
        write_lazily(folder / ONE_FILE, shards[0], metadata=metadata)
        return 1
    homes = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_lazily(folder / file, shard, metadata=metadata)
        homes |= {name: file for name, _ in shard}
    total = sum(lazy.nbytes for _, lazy in tensors)
    write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": homes})
    return len(shards)


def write_side_files(folder: Path, config: Config, *, vocab: int, side: Path) -> list[str]:
    """Copy the tokenizer's files and what lies beside them, and say how generation ends; returns lines for the user.

    They are looked for where the run's settings say, then in `side`, where an import has put them.
    """
    named = tokenizer_files(config.data)
    there = {name: path for name, path in named.items() if path.is_file()}
    place = next(iter(there.values())).parent if there else side
    files = {name: place / name for name in SIDE_FILES if (place / name).is_file()} | there
    copy_files(files, folder)
    if GENERATION not in files:
        known = named and len(there) == len(named)
        eod = build_tokenizer(config.data, vocab).eod if known else None
        write_json(folder / GENERATION, {} if eod is None else {"eos_token_id": eod})
    if files.keys() - {GENERATION}:
        return []
    missing = ", ".join(str(path) for path in named.values())
    return [f"no tokenizer is copied: {f'{missing} is not there' if named else 'the run has none with a file'}"]


def tokenizer_files(data: DataConfig) -> dict[str, Path]:
    """The files of a run's tokenizer, by the names that Hugging Face gives to such; none of another kind."""
    kind = data.tokenizer_type or "GPT2BPETokenizer"
    if kind == "GPT2BPETokenizer" and data.vocab_file and data.merge_file:
        return {"vocab.json": Path(data.vocab_file), "merges.txt": Path(data.merge_file)}
    if data.tokenizer_model is None or kind not in (*HUGGING_FACE_TYPES, *SENTENCEPIECE_TYPES):
        return {}
    path = Path(data.tokenizer_model)
    if kind in SENTENCEPIECE_TYPES:
        return {"tokenizer.model": path}
    return {"tokenizer.json": path / "tokenizer.json" if path.is_dir() else path}


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
