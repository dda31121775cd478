"""bf16 matrix products as torch takes them beside those through fp32, on this CPU: milliseconds, and a training step.

A run takes the second way where the processor has no bf16 instructions (megazero/products.py). What another processor
would do, torch can be told: ONEDNN_MAX_CPU_ISA=AVX512_CORE or =AVX2 in the environment.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from benchmarks.plain_gpt import our_machine  # noqa: E402
from benchmarks.train_step import our_step  # noqa: E402
from megazero.config import ModelConfig  # noqa: E402
from megazero.parallel.zero import Zero  # noqa: E402
from megazero.products import BF16_INSTRUCTIONS, Products, products_of  # noqa: E402

OWN, WIDE = Products(), Products(through=torch.float32)
Way = Callable[[Products], object]


def products(rows: int, size_in: int, out: int) -> dict[str, Way]:
    """The three products of a linear layer."""
    x, weight, grad = (torch.randn(*shape).bfloat16() for shape in ((rows, size_in), (out, size_in), (rows, out)))
    return {
        f"forward {rows} x {size_in} x {out}": lambda how: how.of(x, weight.T),
        "gradient of the input": lambda how: how.of(grad, weight),
        "gradient of the weight": lambda how: how.of(grad.T, x),
    }


def attention(batch: int, model: ModelConfig) -> Way:
    """Forward and backward of fused attention."""
    shape = (batch, model.num_attention_heads, model.seq_length, model.head_dim)
    q, k, v = (torch.randn(shape).bfloat16().requires_grad_() for _ in range(3))

    def run(how: Products) -> None:
        def core(*parts: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*parts, is_causal=True)

        how.call(core, q, k, v).sum().backward()

    return run


def step(model: ModelConfig, vocab: int, batch: int) -> Way:
    """A whole training step."""
    tokens, labels = torch.randint(vocab, (2, batch, model.seq_length))
    ways = {
        how: our_step(our_machine(model, vocab, Zero(1, 1.0), dtype=torch.bfloat16, products=how))
        for how in (OWN, WIDE)
    }
    return lambda how: ways[how](tokens, labels)


def measure(ways: Mapping[str, Way], rounds: int) -> None:
    """Print the processor's milliseconds of each, both ways in turns, and the median of the ratios."""
    print(f"{'':32}{'bf16':>10}{'through fp32':>14}{'ratio':>8}")
    for name, way in ways.items():
        spent: dict[Products, list[float]] = {OWN: [], WIDE: []}
        for turn in range(rounds + 1):
            for how, times in spent.items():
                start = time.process_time()
                way(how)
                if turn:        # the first is for warming up
                    times.append(1e3 * (time.process_time() - start))
        own, wide = (statistics.median(times) for times in spent.values())
        ratio = statistics.median(a / b for a, b in zip(*spent.values(), strict=True))
        print(f"{name:32}{own:10.2f}{wide:14.2f}{ratio:8.2f}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("hidden", 384), ("heads", 6), ("seq", 256), ("vocab", 8192), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model = ModelConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads, seq_length=args.seq,
        attention_dropout=0.0, hidden_dropout=0.0,
    )
    has = torch.cpu.get_capabilities()
    found = [name for name in BF16_INSTRUCTIONS if has.get(name)]
    chosen = "through fp32" if products_of(torch.device("cpu")).through else "as they are"
    print(f"bf16 instructions: {', '.join(found) or 'none'}; a run takes bf16 products {chosen}")
    ways = products(args.batch * args.seq, args.hidden, model.ffn)
    ways["attention, forward and backward"] = attention(args.batch, model)
    ways["training step"] = step(model, args.vocab, args.batch)
    measure(ways, args.rounds)


if __name__ == "__main__":
    main()
