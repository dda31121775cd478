"""A training step in one process beside a GPT of torch's own layers and transformers' GPT-2: tokens per second.

All train with torch's fused AdamW and clip the gradient. They take turns in one process, and medians of the ratios
within a round are compared, so that a machine with other work is fair to all. A product of large matrices in each round
says what the machine could do. Then the same at a small width, where a step is what stands around the products.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from benchmarks.plain_gpt import our_machine, plain_copy  # noqa: E402
from megazero.config import ModelConfig  # noqa: E402
from megazero.data.batch import MicroBatch  # noqa: E402
from megazero.machine import Machine  # noqa: E402
from megazero.parallel.zero import Rates, Zero  # noqa: E402

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0
OURS, PLAIN, GPT2, PEAK = "megazero", "plain torch", "transformers GPT-2", "product"
PEAK_SIZE = 1536        # of the square matrices whose product is the measure
OVERHEAD_HIDDEN, OVERHEAD_HEADS = 32, 2

Step = Callable[[Tensor, Tensor], float]  # on tokens and labels [batch, seq]; returns the loss it had
Times = dict[str, list[float]]  # by contender, seconds in each round


def our_step(machine: Machine) -> Step:
    """The engine and the optimizer as the trainer drives them."""

    def step(tokens: Tensor, labels: Tensor) -> float:
        scale = 1.0 / tokens.numel()
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


def contenders(model: ModelConfig, vocab: int) -> dict[str, Step]:
    """All that can run here, by name."""
    machine = our_machine(model, vocab, Zero(1, CLIP), ranks=1)
    plain = plain_copy(machine, model, vocab)
    found = {OURS: our_step(machine), PLAIN: torch_step(plain, plain)}
    if importlib.util.find_spec("transformers") is None:
        print(f"{GPT2}: left out, for the package transformers is not installed", flush=True)
    else:
        found[GPT2] = gpt2_step(model, vocab)
    return found


def race(found: Mapping[str, Step], model: ModelConfig, args: argparse.Namespace) -> tuple[Times, Times]:
    """Seconds of a step of each contender, and of the product, in each round; and seconds that processors worked on it,
    all threads together."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(args.vocab, (args.batch, model.seq_length + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    losses = {name: [step(tokens, labels) for _ in range(3)] for name, step in found.items()}
    off = max(abs(a - b) / b for a, b in zip(losses[OURS], losses[PLAIN], strict=True))
    assert off < 1e-4, f"not the same model: {losses}"
    square = torch.randn(PEAK_SIZE, PEAK_SIZE, generator=generator)
    out = torch.empty_like(square)
    seconds: Times = {name: [] for name in (*found, PEAK)}
    worked: Times = {name: [] for name in seconds}
    for turn in range(args.rounds):
        gc.collect()
        names = list(seconds)[turn % len(seconds) :] + list(seconds)[: turn % len(seconds)]
        for name in names:
            start, cpu_start = time.perf_counter(), time.process_time()
            if name == PEAK:
                torch.mm(square, square, out=out)
            else:
                found[name](tokens, labels)
            seconds[name].append(time.perf_counter() - start)
            worked[name].append(time.process_time() - cpu_start)
    return seconds, worked


def step_flops(model: ModelConfig, vocab: int, tokens: int) -> float:
    """Of the matrix products of a forward and a backward; of attention's the half that a causal mask leaves."""
    hidden = model.hidden_size
    weights = model.num_layers * (4 * hidden**2 + 2 * hidden * model.ffn) + hidden * vocab
    return tokens * (6.0 * weights + 6.0 * model.num_layers * hidden * model.seq_length)


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def measure(model: ModelConfig, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By contender: seconds of a step, tokens per second, the ratio to the faster peer, the same in processor time
    (which other work on the machine changes less), and FLOP/s over those of the product."""
    seconds, worked = race(contenders(model, args.vocab), model, args)
    peak, tokens = seconds.pop(PEAK), args.batch * model.seq_length
    share = step_flops(model, args.vocab, tokens) / (2.0 * PEAK_SIZE**3)
    fastest = min((name for name in seconds if name != OURS), key=lambda name: statistics.median(seconds[name]))
    return {
        name: {
            "seconds": statistics.median(taken),
            "tokens_per_second": tokens / statistics.median(taken),
            "ratio_to_the_faster_peer": ratio(seconds[fastest], taken),
            "processor_ratio": ratio(worked[fastest], worked[name]),
            "flops_over_peak": share * ratio(peak, taken),
        }
        for name, taken in seconds.items()
    }


def show(found: Mapping[str, dict[str, float]]) -> None:
    print(f"{'':20}{'ms a step':>10}{'tokens/s':>10}{'ratio':>8}{'processor':>11}{'of peak':>9}")
    for name, told in found.items():
        seconds, rate, over_peer, worked, over_peak = told.values()
        print(f"{name:20}{1e3 * seconds:10.1f}{rate:10.0f}{over_peer:8.3f}{worked:11.3f}{over_peak:9.2f}", flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=6)
    add("--hidden", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--seq", type=int, default=256)
    add("--vocab", type=int, default=8192)
    add("--batch", type=int, default=8, help="samples of a step; default: 8")
    add("--threads", type=int, default=2, help="default: 2")
    add("--rounds", type=int, default=15, help="of which medians are taken; default: 15")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    model = ModelConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads, seq_length=args.seq,
        attention_dropout=0.0, hidden_dropout=0.0, untie_embeddings_and_output_weights=True,
    )
    step = measure(model, args)
    show(step)
    narrow = replace(model, hidden_size=OVERHEAD_HIDDEN, num_attention_heads=OVERHEAD_HEADS)
    overhead = measure(narrow, args)
    print(f"at hidden {OVERHEAD_HIDDEN}:")
    show(overhead)
    over_plain = 1 / overhead[OURS]["ratio_to_the_faster_peer"] * overhead[PLAIN]["ratio_to_the_faster_peer"]
    print(f"there, {over_plain:.2f} times the step of the plain GPT")
    if args.json:
        told = {"step": step, "overhead": overhead, "overhead_over_plain": over_plain}
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
