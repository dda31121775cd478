"""A training step in one process beside a GPT of torch's own layers and transformers' GPT-2: tokens per second.

All train with torch's fused AdamW and clip the gradient. Each has a process of its own, as its users start it (ours
keeps freed memory, as pretrain_gpt.py does); they take turns, and medians of the ratios within a round are compared, so
that a machine with other work is fair to all. A product of large matrices in each round says what the machine could do:
by torch's matmul, and as ours takes it (megazero/products.py), which may be quicker.
Then the same at a small width, where a step is what stands around the products.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from benchmarks.plain_gpt import our_machine, plain_copy  # noqa: E402
from benchmarks.turns import Contender, median_ratio, take_turns  # noqa: E402
from megazero.allocator import keep_freed_memory  # noqa: E402
from megazero.config import ModelConfig  # noqa: E402
from megazero.data.batch import MicroBatch  # noqa: E402
from megazero.kernels.dispatch import Kernels  # noqa: E402
from megazero.machine import Machine  # noqa: E402
from megazero.parallel.zero import Rates, Zero  # noqa: E402
from megazero.products import products_of  # noqa: E402

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0
OURS, PLAIN, GPT2, PEAK, OUR_PEAK = "megazero", "plain torch", "transformers GPT-2", "product", "our product"
PEAK_SIZE, PRODUCTS = 1536, 5       # of the square matrices whose product is the measure; how many in a turn
OVERHEAD_HIDDEN, OVERHEAD_HEADS = 32, 2

Step = Callable[[Tensor, Tensor], float]  # on tokens and labels [batch, seq]; returns the loss it had


def our_step(machine: Machine) -> Step:
    """The engine and the optimizer as the trainer drives them."""

    def step(tokens: Tensor, labels: Tensor) -> float:
        scale = 1.0 / (machine.mesh.data.size * tokens.numel())
        micro_batch = MicroBatch(tokens.T.contiguous(), labels=labels.T.contiguous(), scale=scale)
        loss = machine.loss([micro_batch], machine.train_program(1))
        machine.optimizer.step(Rates(LEARNING_RATE, WEIGHT_DECAY))
        return loss.item()

    return step


def torch_step(model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Any module with torch's fused AdamW."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step(tokens: Tensor, labels: Tensor) -> float:
        loss = loss_of(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def gpt2_step(model: ModelConfig, vocab: int) -> Step:
    """transformers' GPT-2 of the same shape, untied as ours, with torch's attention and activation."""
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=vocab, n_positions=model.seq_length, n_embd=model.hidden_size, n_layer=model.num_layers,
        n_head=model.num_attention_heads, activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    gpt2 = transformers.GPT2LMHeadModel(config).train()
    return torch_step(gpt2, lambda x, y: F.cross_entropy(gpt2(input_ids=x).logits.flatten(0, 1), y.flatten()))


def contender(name: str, rank: int, args: argparse.Namespace) -> Contender:
    """What runs in the process of that name; its numbers are the losses of its first steps."""
    generator = torch.Generator().manual_seed(0)
    if name in (PEAK, OUR_PEAK):
        square = torch.randn(PEAK_SIZE, PEAK_SIZE, generator=generator)
        multiply = torch.mm if name == PEAK else products_of(square.device).of
        return Contender(lambda: [multiply(square, square) for _ in range(PRODUCTS)])
    model = model_of(args)
    if name == OURS:
        keep_freed_memory()
        kernels = Kernels("compiled" if args.compile else "auto")
        step = our_step(our_machine(model, args.vocab, Zero(1, CLIP), kernels=kernels))
    elif name == PLAIN:
        plain = plain_copy(our_machine(model, args.vocab, Zero(1, CLIP)), model, args.vocab)
        step = torch_step(plain, plain)
    else:
        step = gpt2_step(model, args.vocab)
    text = torch.randint(args.vocab, (args.batch, model.seq_length + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Contender(lambda: step(tokens, labels), [step(tokens, labels) for _ in range(3)])


def model_of(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads, seq_length=args.seq,
        attention_dropout=0.0, hidden_dropout=0.0, untie_embeddings_and_output_weights=True,
    )


def step_flops(model: ModelConfig, vocab: int, tokens: int) -> float:
    """Of the matrix products of a forward and a backward; of attention's the half that a causal mask leaves."""
    hidden = model.hidden_size
    weights = model.num_layers * (4 * hidden**2 + 2 * hidden * model.ffn) + hidden * vocab
    return tokens * (6.0 * weights + 6.0 * model.num_layers * hidden * model.seq_length)


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By contender: seconds of a step, tokens per second, the ratio to the faster peer, the same in processor time
    (which other work on the machine changes less), and FLOP/s over those of the products."""
    names = [OURS, PLAIN, *((GPT2,) if importlib.util.find_spec("transformers") else ()), PEAK, OUR_PEAK]
    found = take_turns(contender, names, args, threads=args.threads, rounds=args.rounds)
    peak, our_peak, tokens = found.pop(PEAK), found.pop(OUR_PEAK), args.batch * args.seq
    off = max(abs(a - b) / b for a, b in zip(found[OURS].numbers, found[PLAIN].numbers, strict=True))
    assert off < 1e-4, f"not the same model: {[turns.numbers for turns in found.values()]}"
    share = step_flops(model_of(args), args.vocab, tokens) / (PRODUCTS * 2.0 * PEAK_SIZE**3)
    fastest = min((turns for name, turns in found.items() if name != OURS), key=lambda turns: turns.median)
    return {
        name: {
            "seconds": turns.median,
            "tokens_per_second": tokens / turns.median,
            "ratio_to_the_faster_peer": median_ratio(fastest.seconds, turns.seconds),
            "processor_ratio": median_ratio(fastest.worked, turns.worked),
            "flops_over_peak": share * median_ratio(peak.seconds, turns.seconds),
            "flops_over_our_peak": share * median_ratio(our_peak.seconds, turns.seconds),
        }
        for name, turns in found.items()
    }


def show(found: Mapping[str, dict[str, float]]) -> None:
    print(f"{'':20}{'ms a step':>10}{'tokens/s':>10}{'ratio':>8}{'processor':>11}{'of peak':>9}{'of ours':>9}")
    for name, told in found.items():
        seconds, rate, over_peer, worked, *over_peaks = told.values()
        shares = "".join(f"{share:9.2f}" for share in over_peaks)
        print(f"{name:20}{1e3 * seconds:10.1f}{rate:10.0f}{over_peer:8.3f}{worked:11.3f}{shares}", flush=True)


def parser_of(description: str) -> argparse.ArgumentParser:
    """Flags of the model, the batch and the rounds, and where the numbers go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=6)
    add("--hidden", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--seq", type=int, default=256)
    add("--vocab", type=int, default=8192)
    add("--batch", type=int, default=8, help="samples of a step; default: 8")
    add("--rounds", type=int, default=15, help="of which medians are taken; default: 15")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--threads", type=int, default=2, help="default: 2")
    add("--compile", action="store_true", help="ours as with pretrain_gpt.py --compile; its peers stay eager")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if importlib.util.find_spec("transformers") is None:
        print(f"{GPT2}: left out, for the package transformers is not installed", flush=True)
    step = measure(args)
    show(step)
    narrow = {"hidden": OVERHEAD_HIDDEN, "heads": OVERHEAD_HEADS}
    overhead = measure(argparse.Namespace(**{**vars(args), **narrow}))
    print(f"at hidden {OVERHEAD_HIDDEN}:")
    show(overhead)
    over_plain = 1 / overhead[OURS]["ratio_to_the_faster_peer"] * overhead[PLAIN]["ratio_to_the_faster_peer"]
    print(f"there, {over_plain:.2f} times the step of the plain GPT")
    if args.json:
        told = {"step": step, "overhead": overhead, "overhead_over_plain": over_plain}
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
