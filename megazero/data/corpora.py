"""Opens the corpora that the flags name: splits them, blends them, checks that they belong to the vocabulary.

A blend without weights is one by size: each corpus counts as many samples as it has in an epoch, so that one pass
through the blend is one pass through every corpus of it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..config_data import PARTS, Corpus, DataConfig, read_blend
from .blend import Blend, KeyedOrder
from .indexed import IndexedReader
from .legacy import MegatronSamples, exhaustive_order, samples_of_corpora, weighted_order
from .samples import MockSamples, Samples, SampleSource, Stream, hash_words

FILES_EACH = 4  # file descriptors of one corpus: its tokens, memory maps, and one while it is opened
FILES_BESIDES = 256  # of everything else in the process
SHOWN = 3  # corpora that a message names before it counts the others
LOOKED_AT = 4096  # tokens of a corpus without sidecar that are checked when it is opened


def open_samples(
    data: DataConfig, *, seq_length: int, vocab_size: int, seed: int, fingerprint: str | None = None,
    counts: Mapping[str, int] | None = None, flag: str = "--data-path",
) -> dict[str, SampleSource]:  # fmt: skip
    """The samples of "train", "valid", each named validation set and "test"; a part without a document is left out.

    vocab_size and fingerprint are the tokenizer's. `counts` says how many samples the run takes of each part: only
    --sample-order megatron depends on it. `flag` is what gave data.data_path, for messages. Raises ValueError for a
    missing or damaged file, one of another vocabulary, and where some corpora of a blend have nothing for training.
    """
    if not (data.mock_data or data.data_path or data.train_data_path):
        raise ValueError("no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data")
    sources: dict[str, SampleSource] = {}
    if data.mock_data:
        sources = {
            part: MockSamples(vocab_size, seq_length, hash_words(seed, number)) for number, part in enumerate(PARTS)
        }
    parts = parts_of(data, seed, flag=flag)
    readers = open_readers((part.flag, prefix) for part in parts for _, prefix in part.corpora)
    for reader in readers.values():
        check_vocabulary(reader, vocab_size, fingerprint)
    for part in parts:
        if data.sample_order == "megatron":
            source = megatron_samples(part, readers, seq_length, seed=seed, samples=(counts or {})[part.name])
        else:
            source = keyed_samples(part, readers, seq_length)
        if source is not None:
            sources[part.name] = source
    order = ("train", "valid", *data.valid_sets, "test")
    return {name: sources[name] for name in order if name in sources}


def left_out(data: DataConfig, sources: Mapping[str, SampleSource], *, flag: str = "--data-path") -> list[str]:
    """One line for each part that `open_samples` gave nothing, or not all of its corpora, though the flags ask for it.

    A part of weight 0 in --split is not asked for, nor is one without a path of its own beside --train-data-path.
    """
    lines, unit = [], "sequence" if data.sample_order == "megatron" else "document"
    for part in parts_of(data, seed=0, flag=flag):
        source = sources.get(part.name)
        given = source.sources if isinstance(source, Blend) else [source] if source is not None else []
        names = {each.name for each in given}
        lost = [prefix for _, prefix in part.corpora if part.name_of(prefix) not in names]
        share = part.split[part.number] / sum(part.split)
        if not lost or not share:
            continue
        what = {"train": "training", "valid": "validation"}.get(part.name, part.name)
        what = f"validation set {what}" if part.name in data.valid_sets else what
        if len(part.split) > 1:
            why = f"no {unit} of {shortened(lost)} falls into its {100 * share:.3g}% of --split {data.split}"
        else:
            why = f"{part.flag} {shortened(lost)} holds no {unit} with tokens"
        lines.append(f"{what} is without {shortened(lost)}: {why}" if names else f"no {what}: {why}")
    return lines


def shortened(prefixes: Sequence[str]) -> str:
    """The first of them, and how many there are besides."""
    rest = len(prefixes) - SHOWN
    return ", ".join(prefixes[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True)
class Part:
    """What `flag` says of one part of the data. Of each corpus it takes the share `number` of `split`."""

    name: str
    flag: str
    corpora: Sequence[Corpus]
    split: tuple[float, ...]
    number: int
    seed: int

    def name_of(self, prefix: str) -> str:
        """One corpus of this part, for messages."""
        return f"the {self.name} part of {prefix}"


def parts_of(data: DataConfig, seed: int, *, flag: str = "--data-path") -> list[Part]:
    """The parts that the flags name, with a seed for each. `flag` is what gave data.data_path, for messages."""
    parts, seeds = [], [hash_words(seed, number) for number in range(len(PARTS))]
    for number, (name, words) in enumerate(data.own_paths.items()):
        if data.data_path:
            corpora = read_blend(flag, data.data_path)
            parts.append(Part(name, flag, corpora, data.split_weights, number, seeds[number]))
        elif words:
            own = f"--{name}-data-path"
            parts.append(Part(name, own, read_blend(own, words), (1.0,), 0, seeds[number]))
    for name, words in data.valid_sets.items():
        own, own_seed = f"--valid-set {name}:", hash_words(seed, PARTS.index("valid"), *name.encode())
        parts.append(Part(name, own, read_blend(own, words), (1.0,), 0, own_seed))
    return parts


def split_documents(weights: Sequence[float], documents: int) -> list[tuple[int, int]]:
    """For each weight the first document of its part and the one after its last.

    The borders are Megatron's: the weights so far, as a share of all, times the documents, rounded half to even.
    """
    borders, total = [0.0], sum(weights)
    for weight in weights:
        borders.append(borders[-1] + weight / total)
    ends = [min(round(border * documents), documents) for border in borders]
    return list(zip(ends[:-1], ends[1:]))


def open_readers(named: Iterable[tuple[str, str]]) -> dict[str, IndexedReader]:
    """A reader of each (flag, prefix), opened once. Raises the limit on open files where hundreds need it."""
    wanted: dict[str, str] = {}  # prefix -> the flag that names it first
    for flag, prefix in named:
        wanted.setdefault(prefix, flag)
    needed = FILES_EACH * len(wanted) + FILES_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ValueError(f"{len(wanted)} corpora need {needed} open files, the system allows {hard} (ulimit -Hn)")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return {prefix: IndexedReader(prefix, flag=flag) for prefix, flag in wanted.items()}


def keyed_samples(part: Part, readers: Mapping[str, IndexedReader], seq_length: int) -> SampleSource | None:
    """The samples of a part in keyed order; None: no document fell into it."""
    found: list[tuple[Corpus, Samples]] = []
    for number, corpus in enumerate(part.corpora):
        reader = readers[corpus[1]]
        first, last = split_documents(part.split, reader.num_documents)[part.number]
        start, stop = (reader.first_token(int(reader.document_index[document])) for document in (first, last))
        if start < stop:
            seed = part.seed if len(part.corpora) == 1 else hash_words(part.seed, number)
            stream = Stream(reader, first, last)
            found.append((corpus, Samples(stream, seq_length, seed=seed, name=part.name_of(reader.prefix))))
    check_none_is_left_out(part, [prefix for (_, prefix), _ in found])
    if len(found) <= 1:
        return found[0][1] if found else None
    weights = [len(samples) if weight is None else weight for (weight, _), samples in found]
    sources = [samples for _, samples in found]
    return Blend(sources, KeyedOrder(weights, seed=part.seed), name=f"the {part.name} part of a blend")


def megatron_samples(
    part: Part, readers: Mapping[str, IndexedReader], seq_length: int, *, seed: int, samples: int
) -> SampleSource | None:
    """The samples of a part in Megatron's order, for a run that takes `samples` of them; None: it has no sequence."""
    cut = {prefix: split_documents(part.split, len(readers[prefix]))[part.number] for _, prefix in part.corpora}
    found = [(weight, prefix) for weight, prefix in part.corpora if cut[prefix][0] < cut[prefix][1]]
    check_none_is_left_out(part, [prefix for _, prefix in found])
    weights = [float(weight) for weight, _ in found if weight is not None]
    if weights:
        wanted: list[int | None] = [*samples_of_corpora(samples, weights)]
    else:
        wanted = [samples if len(part.corpora) == 1 else None] * len(found)
    sources = [
        MegatronSamples(readers[prefix], cut[prefix], seq_length, samples=count, seed=seed, name=part.name_of(prefix))
        for (_, prefix), count in zip(found, wanted, strict=True)
    ]
    if not sources:
        return None
    name = f"the {part.name} part of a blend"
    if weights:
        return Blend(sources, weighted_order(samples, weights), name=name)
    if len(part.corpora) == 1:
        return sources[0]
    sizes = [len(source) for source in sources]
    if sum(sizes) < samples:
        raise ValueError(
            f"--sample-order megatron reads corpora without weights once: {name} has {sum(sizes)} samples, the run "
            f"takes {samples}; give weights"
        )
    return Blend(sources, exhaustive_order(sizes), name=name) if any(sizes) else None


def check_none_is_left_out(part: Part, found: Sequence[str]) -> None:
    """ValueError where only some corpora have anything for training, so that their shares would not be as asked."""
    lost = [prefix for _, prefix in part.corpora if prefix not in found]
    if part.name == "train" and found and lost:
        hint = " (see --split)" if len(part.split) > 1 else ""
        raise ValueError(f"{part.flag} {shortened(lost)}: no document is left for training{hint}")


def check_vocabulary(reader: IndexedReader, vocab_size: int, fingerprint: str | None) -> None:
    """ValueError where a corpus was made for another vocabulary.

    One without sidecar cannot tell: its first tokens are looked at here, all others when they are read.
    """
    told = reader.sidecar
    if told is None:
        tokens = reader.read(0, min(LOOKED_AT, reader.num_tokens))
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(wrong):
            raise ValueError(
                f"{reader.flag} {reader.prefix} has token id {wrong[0]}, the vocabulary (--vocab-size or the "
                f"tokenizer's) has {vocab_size} entries"
            )
        return
    if told.vocab_size > vocab_size:
        raise ValueError(
            f"{reader.flag} {reader.prefix} was made with a vocabulary of {told.vocab_size}, "
            f"the tokenizer (--tokenizer-type, --vocab-size) has {vocab_size}"
        )
    if told.fingerprint and fingerprint and told.fingerprint != fingerprint:
        raise ValueError(
            f"{reader.flag} {reader.prefix} was made with the tokenizer {told.fingerprint}, "
            f"--tokenizer-type and --tokenizer-model give {fingerprint}"
        )
