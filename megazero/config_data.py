"""The sections of the configuration that say which samples a run takes: batches and corpora."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from fractions import Fraction
from typing import Literal

from .batch_sizes import BatchSizes, SeqLengths, constant, lengths_of, ramp, samples_of, staircase, steps_to, tokens_of
from .settings import at_most_one, check_fields, flag, flag_name

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
SET_NAME = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
PARTS = ("train", "valid", "test")

# A corpus by its prefix, and its weight in the blend; None: by its size.
Corpus = tuple[Fraction | None, str]


def read_blend(flag_name: str, words: Sequence[str]) -> list[Corpus]:
    """The corpora of `W1 P1 W2 P2 ...` or `P1 P2 ...`, those of weight 0 left out.

    Raises ValueError where only some have a weight, one is negative, or none is above 0.
    """
    shown = f"{flag_name} {' '.join(words)}"
    numbers = [NUMBER.fullmatch(word) is not None for word in words]
    if not any(numbers):
        return [(None, word) for word in words]
    if len(words) % 2 or not all(numbers[::2]):
        raise ValueError(f"{shown}: give a weight before each prefix, or before none")
    weights = [Fraction(word) for word in words[::2]]
    if min(weights) < 0 or not any(weights):
        raise ValueError(f"{shown}: no weight may be below 0, and one must be above")
    return [(weight, prefix) for weight, prefix in zip(weights, words[1::2]) if weight]


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many samples a step takes and how long training goes on."""

    micro_batch_size: int = flag(MISSING, "samples of one forward pass of one replica", at_least=1)
    global_batch_size: int | None = flag(
        None, "samples of a step; default: micro-batch x accumulation x data size", at_least=1
    )
    gradient_accumulation_steps: int | None = flag(None, "micro-batches of a step of one replica", at_least=1)
    rampup_batch_size: tuple[int, ...] = flag((), "START INCREMENT SAMPLES: grow to the global batch by steps")
    step_batch_size_schedule: tuple[str, ...] = flag((), "TOKENS:SIZE ...: global batch by tokens, as 0:768 250B:1536")
    decrease_batch_size_if_needed: bool = flag(False, "round a global batch down to whole micro-batches of all ranks")
    train_iters: int | None = flag(None, "stop after this many optimizer steps", at_least=1)
    train_samples: int | None = flag(None, "stop after this many samples, the last batch whole", at_least=1)
    train_tokens: int | None = flag(None, "stop after this many tokens, if that comes before the end", at_least=1)
    eval_interval: int | None = flag(None, "steps between evaluations; default: never", at_least=1)
    eval_iters: int = flag(100, "global batches of one evaluation", at_least=0)
    eval_global_batch_size: int | None = flag(None, "samples of a step of evaluation; default: as trained", at_least=1)
    eval_micro_batch_size: int | None = flag(None, "the same of a forward pass; default: as trained", at_least=1)
    skip_train: bool = flag(False, "evaluate once on all that is held out, and leave")
    exit_interval: int | None = flag(None, "save and leave at a multiple of this many steps", at_least=1)
    exit_duration_in_mins: float | None = flag(None, "save and leave after this many minutes", at_least=0)

    def __post_init__(self) -> None:
        check_fields(self)
        at_most_one({"--train-iters": self.train_iters, "--train-samples": self.train_samples})
        ramped, stepped = self.rampup_batch_size, self.step_batch_size_schedule
        at_most_one({"--step-batch-size-schedule": stepped, "--rampup-batch-size": ramped})
        for name in ("global_batch_size", "gradient_accumulation_steps"):
            at_most_one({"--step-batch-size-schedule": stepped, flag_name(name): vars(self)[name]})
        if ramped and (len(ramped) != 3 or self.global_batch_size is None):
            shown = " ".join(map(str, ramped))
            raise ValueError(f"--rampup-batch-size {shown}: needs START INCREMENT SAMPLES, and --global-batch-size")
        self.sizes(1, 1)

    def sizes(self, data_size: int, seq_length: int | SeqLengths) -> BatchSizes:
        """Samples of a global batch, as a function of the samples consumed before. ValueError if that is none."""
        last = self.global_batch_size or self.micro_batch_size * (self.gradient_accumulation_steps or 1) * data_size
        if self.step_batch_size_schedule:
            sizes = staircase(self.step_batch_size_schedule, seq_length)
        else:
            sizes = ramp(*self.rampup_batch_size, last) if self.rampup_batch_size else constant(last)
        return sizes.rounded(self.micro_batch_size * data_size) if self.decrease_batch_size_if_needed else sizes

    def global_batch(self, data_size: int) -> int:
        """Samples of one optimizer step, when they no longer grow."""
        return self.sizes(data_size, 1).last

    def micro_batches(self, data_size: int, size: int | None = None) -> int:
        """Micro-batches of one replica in a global batch of `size` samples; default: when it no longer grows.

        ValueError, with the equation, if they do not fill the batch.
        """
        batch, each = self.global_batch(data_size) if size is None else size, self.micro_batch_size * data_size
        if batch % each:
            growing = self.step_batch_size_schedule or (batch != self.global_batch_size and self.rampup_batch_size)
            name = "a growing global batch of" if growing else "--global-batch-size"
            raise ValueError(
                f"{name} {batch} must be --micro-batch-size {self.micro_batch_size} x accumulation x "
                f"data size {data_size}, but {batch} / ({self.micro_batch_size} x {data_size}) = {batch / each:g}"
            )
        return batch // each

    def evaluation(self, data_size: int) -> tuple[int, int]:
        """Samples of a micro-batch and of a global batch of evaluation; as training has them in the end, but for flags.

        ValueError, with the equation, if the one does not fill the other.
        """
        micro, size = self.eval_micro_batch_size or self.micro_batch_size, self.eval_global_batch_size
        batch = self.global_batch(data_size) if size is None else size
        if batch % (micro * data_size):
            name = "evaluation by --global-batch-size" if size is None else "--eval-global-batch-size"
            own = "--micro-batch-size" if self.eval_micro_batch_size is None else "--eval-micro-batch-size"
            raise ValueError(
                f"{name} {batch} must be {own} {micro} x micro-batches x data size {data_size}, but "
                f"{batch} / ({micro} x {data_size}) = {batch / (micro * data_size):g}"
            )
        return micro, batch

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated."""
        return bool(self.eval_interval or self.skip_train) and self.eval_iters > 0

    def check_accumulation(self, data_size: int) -> None:
        """ValueError, with the equation, where a global batch is not what --gradient-accumulation-steps make it."""
        micro, steps, batch = self.micro_batch_size, self.gradient_accumulation_steps, self.global_batch(data_size)
        if steps is not None and batch != micro * steps * data_size:
            raise ValueError(
                f"--global-batch-size {batch} (train_batch_size) must be --micro-batch-size {micro} x "
                f"--gradient-accumulation-steps {steps} x data size {data_size} = {micro * steps * data_size}"
            )

    def iterations(
        self, sizes: BatchSizes | int, *, seq_length: int | SeqLengths | None = None, done: int = 0,
        consumed_samples: int = 0, consumed_tokens: int = 0,
    ) -> int:
        """Optimizer steps of the whole run, of which `done` have consumed so many samples and tokens.

        --train-iters, or as many as consume --train-samples, the last batch whole; fewer where --train-tokens is
        reached before. `sizes` is the one size of the global batch, or what it is when; `seq_length`, the tokens of a
        sample, or what they are when, is asked for only by --train-tokens.
        """
        lengths = [] if self.train_iters is None else [self.train_iters]
        sizes = constant(sizes) if isinstance(sizes, int) else sizes
        if self.train_samples is not None:
            lengths.append(done + sizes.steps(self.train_samples, consumed_samples))
        if self.train_tokens is not None:
            assert seq_length is not None, "--train-tokens is given, so the tokens of a sample must be"
            reached = {"done": done, "samples": consumed_samples, "consumed": consumed_tokens}
            lengths.append(done + steps_to(self.train_tokens, sizes, lengths_of(seq_length), **reached))
        if not lengths:
            raise ValueError("the length of the run is missing: give --train-iters or --train-samples, or in tokens")
        return min(lengths)

    def samples_of_tokens(self, sizes: BatchSizes, seq_length: int | SeqLengths | None) -> int | None:
        """Samples that hold --train-tokens, the last one whole; None where that is not given."""
        if self.train_tokens is None:
            return None
        assert seq_length is not None, "--train-tokens is given, so the tokens of a sample must be"
        lengths = lengths_of(seq_length)
        whole = samples_of(self.train_tokens, sizes, lengths)
        return whole + (tokens_of(whole, sizes, lengths) < self.train_tokens)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from. PREFIX is that of a .bin and .idx pair; several are blended by weight, or by size."""

    data_path: tuple[str, ...] = flag((), "[W1] PREFIX1 [W2 PREFIX2 ...]: corpora, cut by --split")
    split: str = flag("969,30,1", "weights of training, validation and test")
    train_data_path: tuple[str, ...] = flag((), "[W1] PREFIX1 ...: for training, instead of --data-path")
    valid_data_path: tuple[str, ...] = flag((), "[W1] PREFIX1 ...: for validation, beside --train-data-path")
    test_data_path: tuple[str, ...] = flag((), "[W1] PREFIX1 ...: for the test, beside --train-data-path")
    valid_set: tuple[str, ...] = flag((), "NAME=PREFIX or NAME=W1 PREFIX1 ..., repeatable: one more validation set")
    mock_data: bool = flag(False, "made-up tokens below --vocab-size")
    sample_order: Literal["keyed", "megatron"] = flag("keyed", "megatron: the order of Megatron core, built in memory")
    tokenizer_type: str | None = flag(None, "which tokenizer; default: GPT2BPETokenizer where --vocab-file is given")
    tokenizer_model: str | None = flag(None, "file of the tokenizer's model")
    tiktoken_pattern: Literal["v1", "v2"] = flag("v2", "how TikTokenizer cuts words: v1 whatever their case, v2 by it")
    vocab_file: str | None = flag(None, "vocabulary of a GPT-2 tokenizer, JSON")
    merge_file: str | None = flag(None, "merges of a GPT-2 tokenizer")
    num_workers: int = flag(2, "threads that read ahead; 0: read in the step", at_least=0)
    reset_position_ids: bool = flag(False, "positions start again after the end of a document")
    reset_attention_mask: bool = flag(False, "no attention across the end of a document")
    eod_mask_loss: bool = flag(False, "no loss where the end of a document is the input")

    def __post_init__(self) -> None:
        check_fields(self)
        own = {f"--{part}-data-path": words for part, words in self.own_paths.items()}
        for name, words in own.items():
            at_most_one({"--mock-data": self.mock_data, "--data-path": self.data_path, name: words})
            if words and not self.train_data_path:
                raise ValueError(f"{name} {' '.join(words)} needs --train-data-path")
        for name, words in ({"--data-path": self.data_path} | own).items():
            read_blend(name, words)
        for name, words in self.valid_sets.items():
            if name in PARTS:
                raise ValueError(f"--valid-set {name}={' '.join(words)}: the name is taken, as are {', '.join(PARTS)}")
            if not words[0]:
                raise ValueError(f"--valid-set {name}=: must be NAME=PREFIX")
            read_blend(f"--valid-set {name}:", words)
        if self.sample_order == "megatron" and self.mock_data:
            raise ValueError("--sample-order megatron goes with token files, not with --mock-data")
        weights, below = self.split_weights, re.search(r"(?:^|[\s,;/])-\s*[\d.]", self.split)
        if len(weights) != 3 or sum(weights) <= 0 or below:
            raise ValueError(f"--split {self.split}: must be up to three weights of at least 0 with a sum above 0")

    @property
    def split_weights(self) -> tuple[float, ...]:
        """Weights of training, validation and test: the numbers in `split`, missing ones 0."""
        numbers = re.findall(r"\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+", self.split)
        return tuple(float(number) for number in numbers) + (0.0,) * (3 - len(numbers))

    @property
    def own_paths(self) -> dict[str, tuple[str, ...]]:
        """The words of --train-data-path, --valid-data-path and --test-data-path by part."""
        return dict(zip(PARTS, (self.train_data_path, self.valid_data_path, self.test_data_path)))

    @property
    def valid_sets(self) -> dict[str, list[str]]:
        """The words of each named validation set. ValueError where a name lacks or comes twice."""
        sets: dict[str, list[str]] = {}
        for word in self.valid_set:
            named = SET_NAME.fullmatch(word)
            if named is not None:
                if named[1] in sets:
                    raise ValueError(f"--valid-set {word}: there is another set of this name")
                sets[named[1]] = [named[2]]
            elif not sets:
                raise ValueError(f"--valid-set {word}: must be NAME=PREFIX")
            else:
                list(sets.values())[-1].append(word)
        return sets
