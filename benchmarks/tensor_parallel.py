"""A training step over two tensor ranks of one thread each, beside one process with two threads and torch's DTensor.

    python benchmarks/tensor_parallel.py --json tensor_parallel.json

All train one GPT on one batch, the peers with our weights. Each has processes of its own and they take turns; medians
of the ratios within a round are compared, so that a machine with other work is fair to all. DTensor's plan is that of
torch's tutorial: ColwiseParallel and RowwiseParallel in every block, the vocabulary cut in embedding and head; once
with logits that are gathered for the loss, once with torch's loss over cut logits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from benchmarks.plain_gpt import PlainGPT, our_machine, plain_copy  # noqa: E402
from benchmarks.train_step import (  # noqa: E402
    CLIP,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Step,
    model_of,
    our_step,
    parser_of,
    torch_step,
)
from benchmarks.turns import Contender, median_ratio, take_turns  # noqa: E402
from megazero.allocator import keep_freed_memory  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.parallel.zero import Zero  # noqa: E402

RANKS = 2
OURS, ALONE, PLAIN = "megazero, 2 ranks", "megazero, one process", "plain torch, one process"
DTENSOR, LOSS_CUT = "DTensor, 2 ranks", "DTensor, its loss cut"
CONTENDERS = (OURS, ALONE, PLAIN, DTENSOR, LOSS_CUT)
# Threads that wait give their core away: spinning, two threads on busy cores take many times as long as one.
THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}


def cut_plain(plain: PlainGPT, *, cuts_loss: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Cut a plain GPT over the ranks as torch's tutorial does; its loss of tokens and labels [batch, seq]."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in plain.blocks:
        block.heads //= RANKS
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    logits = Shard(-1) if cuts_loss else Replicate()
    head = ColwiseParallel(output_layouts=logits, use_local_output=not cuts_loss)
    parallelize_module(plain, mesh, {"word": RowwiseParallel(input_layouts=Replicate()), "head": head})

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(plain.logits(tokens).flatten(0, 1), labels.flatten())

    return loss_of


def dtensor_step(plain: PlainGPT, *, cuts_loss: bool) -> Step:
    """As `torch_step`; what is cut and what is whole go to AdamW and into the norm apart, which take no mixture."""
    loss_of = cut_plain(plain, cuts_loss=cuts_loss)
    every = list(plain.parameters())
    parts = [[p for p in every if isinstance(p, DTensor) is is_cut] for is_cut in (True, False)]
    groups = [{"params": part} for part in parts]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step(tokens: Tensor, labels: Tensor) -> float:
        with loss_parallel() if cuts_loss else nullcontext():
            loss = loss_of(tokens, labels)
            loss.backward()
        cut, whole = (nn.utils.get_total_norm([p.grad for p in part]) for part in parts)
        norm = torch.linalg.vector_norm(torch.stack([cut.full_tensor(), whole]))
        for part in parts:
            nn.utils.clip_grads_with_norm_(part, CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return step


def contender(name: str, rank: int, args: argparse.Namespace) -> Contender:
    """One of CONTENDERS, which tells the losses of its first steps."""
    model = model_of(args)
    if name in (OURS, ALONE):
        keep_freed_memory()
    topology = Topology(tensor=RANKS if name == OURS else 1)
    machine = our_machine(model, args.vocab, Zero(1, CLIP), topology=topology)
    if name in (OURS, ALONE):
        step = our_step(machine)
    else:
        plain = plain_copy(machine, model, args.vocab)
        step = torch_step(plain, plain) if name == PLAIN else dtensor_step(plain, cuts_loss=name == LOSS_CUT)
    text = torch.randint(args.vocab, (args.batch, args.seq + 1), generator=torch.Generator().manual_seed(0))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return Contender(lambda: step(tokens, labels), [step(tokens, labels) for _ in range(3)])


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By contender: seconds of a step, tokens per second, the speed of our tensor ranks over it, and the seconds that
    processors worked in all its processes (which other work on the machine changes less)."""
    os.environ |= THREADS
    shared = (OURS, DTENSOR, LOSS_CUT)
    found = take_turns(
        contender, CONTENDERS, args, threads=RANKS, rounds=args.rounds, own=dict.fromkeys(shared, (RANKS, 1))
    )
    losses = {name: turns.numbers for name, turns in found.items()}
    off = max(abs(a - b) / b for own in losses.values() for a, b in zip(own, losses[ALONE], strict=True))
    assert off < 1e-4, f"not the same model: {losses}"
    return {
        name: {
            "seconds": turns.median,
            "tokens_per_second": args.batch * args.seq / turns.median,
            "ours_over_it": median_ratio(turns.seconds, found[OURS].seconds),
            "processor_seconds": statistics.median(turns.worked) * (RANKS if name in shared else 1),
        }
        for name, turns in found.items()
    }


def main(argv: list[str] | None = None) -> None:
    args = parser_of(__doc__).parse_args(argv)
    found = measure(args)
    print(f"{'':26}{'ms a step':>10}{'tokens/s':>10}{'ours over it':>14}{'processor ms':>14}")
    for name, told in found.items():
        seconds, rate, over, worked = told.values()
        print(f"{name:26}{1e3 * seconds:10.1f}{rate:10.0f}{over:14.3f}{1e3 * worked:14.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
