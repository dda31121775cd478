"""What a run reads: the samples of each part of its data, and what the end of a document does."""

from __future__ import annotations

from .batch_sizes import BatchSizes
from .config import Config
from .data.corpora import open_samples
from .data.loader import DocumentRules
from .data.samples import SampleSource
from .data.tokenizer import Tokenizer


def open_parts(config: Config, tokenizer: Tokenizer, vocab: int, sizes: BatchSizes) -> dict[str, SampleSource]:
    """The samples of each part of the data. Raises ValueError for a missing or unfit file."""
    data = config.data
    parts = open_samples(
        data, seq_length=config.model.seq_length, vocab_size=vocab, seed=config.run.seed,
        fingerprint=tokenizer.fingerprint, counts=samples_taken(config, sizes),
    )
    if "train" not in parts:
        asked = f"--split {data.split}" if data.data_path else f"--train-data-path {' '.join(data.train_data_path)}"
        raise ValueError(f"{asked}: no document of {(data.data_path or data.train_data_path)[-1]} is left for training")
    return parts


def samples_taken(config: Config, sizes: BatchSizes) -> dict[str, int]:
    """How many samples Megatron would say that the run takes of each part; its order of samples depends on it."""
    batch = config.batch
    steps = batch.iterations(sizes, seq_length=config.seq_lengths)
    if batch.train_samples is not None and sizes.consumed(steps) > batch.train_samples:
        steps -= 1      # it leaves out a batch that is not whole
    size = batch.eval_global_batch_size or sizes.last
    evaluation = batch.eval_iters * size if batch.evaluates else 0
    valid = evaluation * (1 + steps // (batch.eval_interval or 1))
    named = dict.fromkeys(config.data.valid_sets, valid)
    return {"train": batch.train_samples or steps * sizes.last, "valid": valid, **named, "test": evaluation}


def rules_of(config: Config, tokenizer: Tokenizer) -> DocumentRules:
    """What the end of a document does. Raises ValueError where made-up data would have to show one and cannot."""
    data = config.data
    rules = DocumentRules(tokenizer.eod, data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)
    if rules.any and rules.eod is None and data.mock_data:
        raise ValueError(
            "--mock-data and --eod-mask-loss, --reset-position-ids or --reset-attention-mask: the tokenizer has no "
            "end-of-document token (eos), so documents cannot be told apart"
        )
    return rules
