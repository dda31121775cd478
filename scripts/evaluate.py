"""The loss of a checkpoint over a corpus or over texts, in any layout of tensor, pipeline and data ranks.

    python scripts/evaluate.py --load runs/a --data-path corpus_text_document --part valid test
    torchrun --nproc-per-node 4 scripts/evaluate.py --tensor-model-parallel-size 2 --load runs/a --jsonl texts.jsonl
    python scripts/evaluate.py --hf Qwen3-0.6B --jsonl lambada.jsonl --last-word --json

The loss is the mean over tokens, in nats, and ppl its exponential. A corpus is cut into consecutive windows of
--seq-length tokens, the last one shorter: every token but the first is scored once. Texts are windowed one by one, so
that a long text's tokens see what its window holds. What processes are left over by tensor and pipeline share the
windows.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from megazero.checkpoint import Reader  # noqa: E402
from megazero.config import Config, PrecisionConfig  # noqa: E402
from megazero.config_data import PARTS, DataConfig, read_blend  # noqa: E402
from megazero.data.corpora import Part, check_vocabulary, open_readers, parts_of, split_documents  # noqa: E402
from megazero.data.loader import DocumentRules  # noqa: E402
from megazero.data.samples import Stream  # noqa: E402
from megazero.data.tokenizer import Tokenizer  # noqa: E402
from megazero.evaluation import EvaluationSetup, Evaluator, Score, StreamWindows, TextWindows, Windows  # noqa: E402
from megazero.forward import Weights  # noqa: E402
from megazero.gpt import WORD_TABLE  # noqa: E402
from megazero.hf import FolderReader  # noqa: E402
from megazero.parallel.collectives import AgreedError, gather_objects  # noqa: E402
from megazero.parallel.groups import World, choose_device, connect, disconnect, open_mesh  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.pipe.stage import LayerSpec  # noqa: E402
from megazero.plan import plan_stages  # noqa: E402
from megazero.products import products_of  # noqa: E402
from scripts.generate import checkpoint_of, layers_of, open_tokenizer  # noqa: E402


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "evaluate.py", usage=argparse.SUPPRESS, description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--load", metavar="DIR", help="folder of checkpoints (--save in training), or one of them")
    which.add_argument("--hf", metavar="HF_DIR", help="a Hugging Face folder as it is")
    add("--ckpt-step", type=int, metavar="N", help="the checkpoint of iteration N; default: newest")
    data = made.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-path", nargs="+", metavar="PREFIX", help="token files, read once whatever their weights")
    data.add_argument("--jsonl", metavar="FILE", help='lines of {"text": ...}, each a text for itself')
    add("--part", nargs="+", choices=(*PARTS, "all"), default=["valid"], help="of the corpus, by --split [valid]")
    add("--split", help="weights of training, validation and test; default: the checkpoint's")
    add("--last-word", action="store_true", help="with --jsonl: score the last word of each text (LAMBADA) after as "
        "much of the text as a window holds; accuracy is the share whose tokens are all the likeliest ones")
    add("--seq-length", type=int, metavar="S", help="tokens of a window; default: the checkpoint's")
    add("--micro-batch-size", type=int, metavar="B", help="windows of one forward pass; default: the checkpoint's")
    add("--json", action="store_true", help="one object a part, with lm_loss, ppl, tokens (and accuracy, examples)")
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="processes that share each layer [1]")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="processes that share the depth [1]")
    add("--distributed-backend", choices=("auto", "gloo", "nccl"), default="auto", help="gloo: on CPUs")
    numbers = made.add_mutually_exclusive_group()
    for name in ("fp32", "bf16", "fp64"):
        numbers.add_argument(f"--{name}", action="store_true", help=f"compute in {name}; default: as in training")
    ends = "what the end of a document does; default: as in training"
    for name in ("eod-mask-loss", "reset-position-ids", "reset-attention-mask"):
        add(f"--{name}", action=argparse.BooleanOptionalAction, help=ends)
    for name in ("tokenizer-type", "tokenizer-model", "vocab-file", "merge-file"):
        add(f"--{name}", help="instead of the one that the checkpoint names, where it has moved")
    return made


@dataclass(frozen=True)
class Plan:
    """All that is known before any process waits for another. `windows` has those of each part."""

    args: argparse.Namespace
    checkpoint: str
    weights: Weights
    topology: Topology
    layers: list[LayerSpec]
    setup: EvaluationSetup
    windows: Mapping[str, Windows]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on the standard error of one rank."""
    world = World.from_environment()
    with redirect_stderr(io.StringIO()) if world.local_rank else nullcontext():
        args = parser().parse_args(argv)
    try:
        found = run(prepare(args, world), world)
        if world.rank == 0:
            show(found, args)
    except (ValueError, OSError) as wrong:
        if world.rank == 0 or not (world.local_rank or isinstance(wrong, AgreedError)):
            print(f"evaluate.py: error: {wrong}", file=sys.stderr)
        return 2
    finally:
        disconnect()
    return 0


def prepare(args: argparse.Namespace, world: World) -> Plan:
    """Read the checkpoint's index, open the data and check everything that is asked. ValueError with one line."""
    topology = topology_of(args, world)
    reader = reader_of(args, speaks=world.rank == 0)
    if WORD_TABLE not in reader.tensors:
        raise ValueError(f"{reader.folder}: has no {WORD_TABLE}, so it is not a checkpoint of a GPT")
    vocab = reader.tensors[WORD_TABLE].spec.shape[0]
    config = with_flags(Config.from_json(json.dumps(reader.config)), args)
    tokenizer = open_tokenizer(args, config, vocab)
    model, data, micro_batch = config.model, config.data, args.micro_batch_size or config.batch.micro_batch_size
    seq_length = args.seq_length or model.seq_length
    if model.position_embedding_type == "learned_absolute" and seq_length > model.positions:
        raise ValueError(f"--seq-length {seq_length}: the model has learned positions up to {model.positions} only")
    layers = layers_of(config, vocab)
    try:
        plan_stages(layers, topology)
    except ValueError as wrong:
        sizes = f"--tensor-model-parallel-size {topology.tensor} --pipeline-model-parallel-size {topology.pipeline}"
        raise ValueError(f"{sizes}: {wrong}") from wrong
    choose_device(args.distributed_backend, world.local_rank)
    rules = DocumentRules(tokenizer.eod, data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)
    setup = EvaluationSetup(vocab, rules, micro_batch)
    if args.jsonl:
        windows = open_texts(args, tokenizer, seq_length)
    else:
        windows = open_corpora(args, config, tokenizer, vocab=vocab, seq_length=seq_length)
    return Plan(args, reader.folder.name, reader, topology, layers, setup, windows)


def reader_of(args: argparse.Namespace, *, speaks: bool) -> Reader | FolderReader:
    """Where settings and weights come from."""
    if args.hf is None:
        return Reader(checkpoint_of(args.load, args.ckpt_step, speaks=speaks))
    if args.ckpt_step is not None:
        raise ValueError(f"--ckpt-step {args.ckpt_step} goes with --load: a Hugging Face folder holds one model")
    return FolderReader(Path(args.hf))


def topology_of(args: argparse.Namespace, world: World) -> Topology:
    """What tensor and pipeline leave over is the data axis. Raises ValueError for sizes and flags that do not fit."""
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "seq_length", "micro_batch_size"):
        if vars(args)[name] is not None and vars(args)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {vars(args)[name]}: must be at least 1")
    if world.size % (tensor * pipeline):
        raise ValueError(
            f"world size {world.size} is not a multiple of --tensor-model-parallel-size {tensor} x "
            f"--pipeline-model-parallel-size {pipeline}"
        )
    if args.last_word and not args.jsonl:
        raise ValueError("--last-word goes with --jsonl")
    return Topology(pipeline, world.size // (tensor * pipeline), tensor)


def with_flags(config: Config, args: argparse.Namespace) -> Config:
    """The checkpoint's configuration with the precision and the data that the flags name."""
    rules = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "split")
    given = {name: vars(args)[name] for name in rules if vars(args)[name] is not None}
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", *rules)
    kept = {name: vars(config.data)[name] for name in names}
    config = replace(config, data=DataConfig(**kept | given, data_path=tuple(args.data_path or ())))
    if args.fp32 or args.bf16 or args.fp64:
        config = replace(config, precision=PrecisionConfig(bf16=args.bf16, fp64=args.fp64))
    return config


def open_corpora(
    args: argparse.Namespace, config: Config, tokenizer: Tokenizer, *, vocab: int, seq_length: int
) -> dict[str, Windows]:
    """The windows of each part that is asked for. Raises ValueError where one holds nothing to score."""
    data = config.data
    known = {part.name: part for part in parts_of(data, seed=0)}
    whole = Part("all", "--data-path", read_blend("--data-path", data.data_path), (1.0,), 0, 0)
    parts = [whole if name == "all" else known[name] for name in dict.fromkeys(args.part)]
    readers = open_readers(("--data-path", prefix) for _, prefix in whole.corpora)
    for reader in readers.values():
        check_vocabulary(reader, vocab, tokenizer.fingerprint)
    found: dict[str, Windows] = {}
    for part in parts:
        streams = []
        for reader in (readers[prefix] for _, prefix in part.corpora):
            first, last = split_documents(part.split, reader.num_documents)[part.number]
            start, stop = (reader.first_token(int(reader.document_index[document])) for document in (first, last))
            if start < stop:
                streams.append(Stream(reader, first, last))
        found[part.name] = StreamWindows(streams, seq_length)
        if not len(found[part.name]):
            where = f"of --split {data.split}" if len(part.split) > 1 else f"of {' '.join(data.data_path)}"
            raise ValueError(f"--part {part.name}: its share {where} holds no two tokens to score")
    return found


def open_texts(args: argparse.Namespace, tokenizer: Tokenizer, seq_length: int) -> dict[str, Windows]:
    """The windows of the texts. Raises ValueError with the line for one that cannot be read or has no last word."""
    texts, words = [], []
    for number, text in read_texts(args.jsonl):
        ids = tokenizer.encode(text)
        if args.last_word:
            word = len(ids) - shared_tokens(ids, tokenizer.encode(before_last_word(text)))
            if not 0 < word <= min(len(ids) - 1, seq_length):
                raise ValueError(
                    f"--jsonl {args.jsonl} line {number}: --last-word needs words before the last one, which may have "
                    f"up to {seq_length} tokens; it has {word} of {len(ids)}"
                )
            words.append(word)
        texts.append(np.array(ids, np.int64))
    windows = TextWindows(texts, seq_length, words if args.last_word else None)
    if not len(windows):
        raise ValueError(f"--jsonl {args.jsonl}: holds no text of two tokens")
    return {args.jsonl: windows}


def read_texts(path: str) -> list[tuple[int, str]]:
    """Line numbers and texts, empty lines left out."""
    found = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as wrong:
        raise ValueError(f"--jsonl {path} cannot be read: {wrong.strerror}") from wrong
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as wrong:
            raise ValueError(f"--jsonl {path} line {number}: {wrong}") from wrong
        if not (isinstance(value, dict) and isinstance(value.get("text"), str)):
            raise ValueError(f'--jsonl {path} line {number}: is not an object with a string "text"')
        found.append((number, value["text"].rstrip()))
    return found


def before_last_word(text: str) -> str:
    """What stands before the last word of a text, without the blanks between them."""
    return "".join(text.rsplit(None, 1)[:-1]).rstrip()


def shared_tokens(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two lists have in common at their beginning."""
    return next((at for at, (a, b) in enumerate(zip(ids, others)) if a != b), min(len(ids), len(others)))


def run(plan: Plan, world: World) -> dict[str, Score]:
    """Meet the other processes, load, and score each part; the same on all ranks."""
    device, backend = choose_device(plan.args.distributed_backend, world.local_rank)
    connect(world, device, backend)
    mesh = open_mesh(plan.topology, device, products_of(device))
    told = gather_objects((plan.checkpoint, vars(plan.args), [len(w) for w in plan.windows.values()]), mesh.world)
    for rank, other in enumerate(told):
        if other != told[0]:
            raise AgreedError(f"rank {rank} has other flags than rank 0, or sees another checkpoint or other data")
    evaluator, found = Evaluator(plan.layers, mesh, plan.setup, plan.weights), {}
    for part, windows in plan.windows.items():
        with tqdm(total=len(windows), desc=part, unit="window", disable=None if mesh.rank == 0 else True) as bar:
            found[part] = evaluator.score(windows, bar.update)
    return found


def show(found: Mapping[str, Score], args: argparse.Namespace) -> None:
    """Print an object of each part, or a table with a line of each."""
    rows: list[tuple[str, ...]] = []
    for part, score in found.items():
        figures: dict[str, float] = {"lm_loss": score.lm_loss, "ppl": score.ppl, "tokens": score.tokens}
        if args.last_word:
            figures |= {"accuracy": score.accuracy, "examples": score.windows}
        if args.json:
            finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
            print(json.dumps({"part": part} | finite))
            continue
        if not rows:
            rows.append(("part", *figures))
        rows.append((part, *(f"{value:,}" if isinstance(value, int) else f"{value:.6f}" for value in figures.values())))
    for row in rows:
        print("  ".join(f"{cell:>12}" for cell in row))


if __name__ == "__main__":
    sys.exit(main())
