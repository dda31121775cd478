"""A checkpoint and a prompt in, text out, in any layout of tensor and pipeline ranks.

    python scripts/generate.py --load runs/a --prompt "Once upon" --num-tokens 80 --temperature 0.7 --top-k 40
    torchrun --nproc-per-node 2 scripts/generate.py --tensor-model-parallel-size 2 --load runs/a --prompt-file - < poem

Experts drop nothing here, whatever their capacity was in training, so a sample does not depend on how many there are.
Standard output holds the prompt and its continuation and nothing else; with --json one object per sample, with the
prompt, the text that follows it and the ids of that text.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from megazero import snapshot  # noqa: E402
from megazero.checkpoint import Reader  # noqa: E402
from megazero.config import Config, PrecisionConfig  # noqa: E402
from megazero.data.loader import DocumentRules  # noqa: E402
from megazero.data.tokenizer import Tokenizer, build_tokenizer  # noqa: E402
from megazero.generation import Sampling, Shape, Writer  # noqa: E402
from megazero.gpt import WORD_TABLE, GPTSetup, gpt_layers  # noqa: E402
from megazero.parallel.collectives import AgreedError, together  # noqa: E402
from megazero.parallel.groups import World, choose_device, connect, disconnect, open_mesh  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.pipe.stage import LayerSpec  # noqa: E402
from megazero.plan import plan_stages  # noqa: E402
from megazero.precision import dtypes, residual_dtype  # noqa: E402
from megazero.products import products_of  # noqa: E402


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "generate.py", usage=argparse.SUPPRESS, description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--load", required=True, metavar="DIR", help="folder of checkpoints (--save in training), or one of them")
    add("--ckpt-step", type=int, metavar="N", help="the checkpoint of iteration N; default: the newest complete one")
    prompt = made.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help='what to continue; "" begins a document')
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same from a file, taken as it is; -: standard input")
    add("--num-tokens", "--max-new-tokens", type=int, default=64, metavar="N", help="at most so many tokens [64]")
    add("--num-samples", type=int, default=1, metavar="N", help="so many continuations [1]")
    add("--temperature", type=float, default=1.0, help="above 0; below 1 the likely gets likelier [1.0]")
    add("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="among the likeliest that reach P together [1.0]")
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--seed", type=int, default=1234, help="another seed, another text [1234]")
    add("--stop-at-eod", action=argparse.BooleanOptionalAction, default=True, help="end with the document [on]")
    add("--json", action="store_true", help="print objects with prompt, text (what follows it) and tokens (its ids)")
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="processes that share each layer [1]")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="processes that share the depth [1]")
    add("--distributed-backend", choices=("auto", "gloo", "nccl"), default="auto", help="gloo: on CPUs")
    numbers = made.add_mutually_exclusive_group()
    for name in ("fp32", "bf16", "fp64"):
        numbers.add_argument(f"--{name}", action="store_true", help=f"compute in {name}; default: as in training")
    for name in ("tokenizer-type", "tokenizer-model", "vocab-file", "merge-file"):
        add(f"--{name}", help="instead of the one that the checkpoint names, where it has moved")
    return made


@dataclass(frozen=True)
class Plan:
    """All that is known before any process waits for another."""

    args: argparse.Namespace
    how: Sampling
    reader: Reader
    topology: Topology
    tokenizer: Tokenizer
    rules: DocumentRules
    layers: list[LayerSpec]
    shape: Shape


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on the standard error of one rank."""
    world = World.from_environment()
    with redirect_stderr(io.StringIO()) if world.local_rank else nullcontext():
        args = parser().parse_args(argv)
    try:
        run(prepare(args, world), world)
    except ValueError as wrong:
        if world.rank == 0 or not (world.local_rank or isinstance(wrong, AgreedError)):
            print(f"generate.py: error: {wrong}", file=sys.stderr)
        return 2
    finally:
        disconnect()
    return 0


def prepare(args: argparse.Namespace, world: World) -> Plan:
    """Read the checkpoint's index and check everything that is asked. Raises ValueError with one line."""
    how = Sampling(args.temperature, args.top_k, args.top_p, args.greedy, args.seed)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    for name in ("num_tokens", "num_samples", "tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if vars(args)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {vars(args)[name]}: must be at least 1")
    if world.size != tensor * pipeline:
        raise ValueError(
            f"world size {world.size} is not --tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size "
            f"{pipeline} = {tensor * pipeline}: generation has a data-parallel size of 1"
        )
    reader = Reader(checkpoint_of(args.load, args.ckpt_step, speaks=world.rank == 0))
    config = Config.from_json(json.dumps(reader.config))
    if args.fp32 or args.bf16 or args.fp64:
        config = replace(config, precision=PrecisionConfig(bf16=args.bf16, fp64=args.fp64))
    if WORD_TABLE not in reader.tensors:
        raise ValueError(f"{reader.folder}: has no {WORD_TABLE}, so it is not a checkpoint of a GPT")
    model, vocab = config.model, reader.tensors[WORD_TABLE].spec.shape[0]
    tokenizer = open_tokenizer(args, config, vocab)
    moe = replace(config.moe, disable_moe_token_dropping_in_eval=True)     # samples are not to crowd each other out
    layers, topology = layers_of(replace(config, moe=moe), vocab), Topology(pipeline, 1, tensor)
    try:
        plan_stages(layers, topology)
    except ValueError as wrong:
        raise ValueError(
            f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}: {wrong}"
        ) from wrong
    choose_device(args.distributed_backend, world.local_rank)
    data, eod = config.data, tokenizer.eod
    rules = DocumentRules(eod, reset_positions=data.reset_position_ids, reset_attention=data.reset_attention_mask)
    shape = Shape(min(vocab, tokenizer.vocab_size), model.positions)
    return Plan(args, how, reader, topology, tokenizer, rules, layers, shape)


def checkpoint_of(root: str, step: int | None, *, speaks: bool) -> Path:
    """The folder of the checkpoint to read."""
    found = snapshot.find(Path(root), step, say=lambda line: print(line, file=sys.stderr) if speaks else None)
    if found is None and step is None:
        raise ValueError(f"--load {root}: there is no complete checkpoint")
    if found is None:
        raise ValueError(f"--load {root} --ckpt-step {step}: there is no complete checkpoint of this iteration")
    return found


def layers_of(config: Config, vocab: int) -> list[LayerSpec]:
    """The layers of a checkpoint's model, in the dtypes that its configuration names."""
    residual = residual_dtype(config.precision)
    dtype = dtypes(config.precision).compute
    return gpt_layers(GPTSetup(config.model, vocab, dtype, residual=residual, moe=config.moe, experts=config.experts))


def open_tokenizer(args: argparse.Namespace, config: Config, vocab: int) -> Tokenizer:
    """The tokenizer that the checkpoint names, or that the flags name instead."""
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    tokenizer = build_tokenizer(replace(config.data, **given), config.model.vocab_size)
    if tokenizer.vocab_size > vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} entries and the model {vocab}: give the one that it was trained "
            "with (--tokenizer-model)"
        )
    return tokenizer


def run(plan: Plan, world: World) -> None:
    """Meet the other processes, load, write, and print on rank 0."""
    args = plan.args
    device, backend = choose_device(args.distributed_backend, world.local_rank)
    connect(world, device, backend)
    mesh = open_mesh(plan.topology, device, products_of(device))
    prompt, ids = together(mesh.world, lambda: read_prompt(plan) if mesh.rank == 0 else ("", []))[0]
    window = plan.shape.positions
    if mesh.rank == 0 and len(ids) + args.num_tokens - 1 > window:
        print(
            f"generate.py: {len(ids)} tokens of prompt and up to {args.num_tokens} new ones: the model looks back on "
            f"the last {window} only",
            file=sys.stderr,
        )
    writer = Writer(plan.layers, mesh, plan.shape, plan.rules)
    writer.load(plan.reader)
    stop = plan.tokenizer.eod if args.stop_at_eod else None
    samples = writer.write(ids, plan.how, tokens=args.num_tokens, samples=args.num_samples, stop=stop)
    for tokens in samples if mesh.rank == 0 else ():
        text = continuation(plan.tokenizer, ids, tokens)
        told = {"prompt": prompt, "text": text, "tokens": tokens}
        print(json.dumps(told) if args.json else prompt + text, flush=True)


def read_prompt(plan: Plan) -> tuple[str, list[int]]:
    """The prompt and its ids. An empty one begins a document, as a token does that follows an end of document."""
    text, source = plan.args.prompt, plan.args.prompt_file
    if text is None:
        try:
            text = (sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()).decode("utf-8")
        except OSError as wrong:
            raise ValueError(f"--prompt-file {source} cannot be read: {wrong.strerror}") from wrong
        except UnicodeDecodeError as wrong:
            raise ValueError(f"--prompt-file {source} is not text in UTF-8: {wrong.reason}") from wrong
    ids = plan.tokenizer.encode(text)
    if not ids and plan.tokenizer.eod is None:
        raise ValueError("the prompt is empty, and the tokenizer has no end-of-document token to begin with")
    return text, ids or [plan.tokenizer.eod]


def continuation(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """What the new ids add to the text of the prompt's: blanks between words depend on what stands before."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens)


if __name__ == "__main__":
    sys.exit(main())
