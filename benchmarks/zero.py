"""Training steps with ZeRO beside torch's own data parallelism: two processes on gloo, one model, tokens per second.

Each contender has two processes of its own, as its users start it (ours keep freed memory, as pretrain_gpt.py does);
they take turns, and medians of the ratios within a round are compared, so that a machine with other work is fair to
all. The peers train a GPT of torch's own layers with the weights of ours.

Then, in one process, the optimizer's step beside the time that its memory traffic takes at the speed of a plain copy.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed

from benchmarks.plain_gpt import PlainGPT, our_machine, plain_copy  # noqa: E402
from benchmarks.train_step import CLIP, LEARNING_RATE, WEIGHT_DECAY, Step, our_step  # noqa: E402
from benchmarks.turns import Contender, median_ratio, take_turns  # noqa: E402
from megazero.allocator import keep_freed_memory  # noqa: E402
from megazero.config import ModelConfig  # noqa: E402
from megazero.machine import Machine  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.parallel.zero import Rates, Zero  # noqa: E402

RANKS = 2
DATA = Topology(data=RANKS)
OURS = {
    "megazero stage 0": Zero(0, CLIP),
    "megazero stage 1": Zero(1, CLIP),
    "megazero stage 1, overlapped": Zero(1, CLIP, 2_000_000, overlap_reduce=True, overlap_gather=True),
    "megazero stage 2": Zero(2, CLIP),
}
PEERS = ("DDP + AdamW", "DDP + ZeroRedundancyOptimizer", "FSDP2", "DeepSpeed stage 1", "DeepSpeed stage 2")


# What of the memory after a step is optimizer state beside the weights.
State = Callable[[], Iterable[Tensor]]


def our_way(machine: Machine) -> tuple[Step, State]:
    """The engine and the optimizer as the trainer drives them."""
    def state() -> list[Tensor]:
        buckets = machine.optimizer.buckets
        return [data for bucket in buckets for kind, data in bucket.slices.items() if kind != "weight"]

    return our_step(machine), state


def torch_way(name: str, plain: PlainGPT) -> tuple[Step, State]:
    """DDP or FSDP2 around the model, with torch's fused AdamW."""
    options: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}
    wrapped: nn.Module = plain
    if name == "FSDP2":
        for block in plain.blocks:
            fully_shard(block)
        fully_shard(plain)
    else:
        wrapped = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    if name == "DDP + ZeroRedundancyOptimizer":
        sharded = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **options
        )
        optimizer, inner = sharded, sharded.optim
    else:
        optimizer = inner = torch.optim.AdamW(wrapped.parameters(), **options)

    def step(tokens: Tensor, labels: Tensor) -> float:
        loss = wrapped(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss(loss)

    return step, lambda: tensors_of(inner.state.values())


def deepspeed_way(stage: int, rank: int, batch: int, plain: PlainGPT) -> tuple[Step, State]:
    """DeepSpeed's engine around the model, with torch's fused AdamW."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}  # it asks for them
    deepspeed = importlib.import_module("deepspeed")
    inner = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": batch, "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine = deepspeed.initialize(model=plain, optimizer=inner, config=config)[0]

    def step(tokens: Tensor, labels: Tensor) -> float:
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        return mean_loss(loss)

    return step, lambda: tensors_of(inner.state.values())


def mean_loss(loss: Tensor) -> float:
    """The mean over the processes, as our own loop tells it."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / RANKS


def tensors_of(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    """The tensors in an optimizer's state, of a sharded one this process's part, without step counters."""
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return [t.to_local() if isinstance(t, dist.tensor.DTensor) else t for t in tensors]


def contender(name: str, rank: int, args: argparse.Namespace) -> Contender:
    """What runs in the processes of that name; its numbers are the losses of its first steps. The peers begin with our
    weights."""
    model = model_of(args)
    if name in OURS:
        keep_freed_memory()
        step, state = our_way(our_machine(model, args.vocab, OURS[name], topology=DATA))
    else:
        plain = plain_copy(our_machine(model, args.vocab, Zero(1, CLIP), topology=DATA), model, args.vocab)
        if name.startswith("DeepSpeed"):
            step, state = deepspeed_way(int(name[-1]), rank, args.batch, plain)
        else:
            step, state = torch_way(name, plain)
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(args.vocab, (args.batch, args.seq + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    losses = [step(tokens, labels) for _ in range(3)]
    steps = range(args.steps)
    return Contender(lambda: [step(tokens, labels) for _ in steps], losses, sum(t.nbytes for t in state()))


def model_of(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.hidden // 64, seq_length=args.seq,
        attention_dropout=0.0, hidden_dropout=0.0, untie_embeddings_and_output_weights=True,
    )


def step_over_traffic(args: argparse.Namespace) -> dict[str, float]:
    """Processor time of the step of one process (norm, clip, AdamW, clearing), over that of the traffic it must do.

    That is 36 bytes per element in fp32: the norm reads the gradient, the update reads it, the weight and two moments
    and writes the last three, and the gradient is written once more, to zero. Bandwidth is that of copying a moment
    over the gradient, 8 bytes per element, in turn with the steps.
    """
    torch.set_num_threads(1)
    machine = our_machine(model_of(args), args.vocab, Zero(1, CLIP))
    buckets, times = machine.optimizer.buckets, []
    for _ in range(args.rounds):
        for bucket in buckets:
            bucket.gradient(0)
        start = time.process_time()
        for bucket in buckets:
            bucket.grads.copy_(bucket.slices["exp_avg"])
        copied = time.process_time()
        for bucket in buckets:
            bucket.grads.fill_(0.01)
        filled = time.process_time()
        machine.optimizer.step(Rates(LEARNING_RATE, WEIGHT_DECAY))
        times.append((copied - start, time.process_time() - filled))
    elements = sum(bucket.params.numel() for bucket in buckets)
    copy, step = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "step_seconds": step, "copy_bytes_per_second": 8 * elements / copy, "traffic_bytes": 36 * elements,
        "step_over_traffic": statistics.median(own / (36 / 8 * base) for base, own in times),
    }


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By contender: tokens per second, the median ratio to the fastest peer in the same round, the seconds that a
    processor worked on a step in one process (which other work on the machine does not change much), bytes of state.
    """
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    if not has_deepspeed:
        print("DeepSpeed: left out, for the package deepspeed is not installed", flush=True)
    peers = [name for name in PEERS if has_deepspeed or not name.startswith("DeepSpeed")]
    found = take_turns(contender, [*OURS, *peers], args, ranks=RANKS, threads=1, rounds=args.rounds)
    losses = {name: turns.numbers for name, turns in found.items()}
    first = next(iter(losses.values()))
    for name, own in losses.items():
        off = max(abs(a - b) / b for a, b in zip(own, first, strict=True))
        assert off < 1e-4, f"{name} trains another model: losses {own} instead of {first}"
    fastest = min((found[name] for name in peers), key=lambda turns: turns.median)
    return {
        name: {
            "tokens_per_second": args.steps * RANKS * args.batch * args.seq / turns.median,
            "ratio_to_the_fastest_peer": median_ratio(fastest.seconds, turns.seconds),
            "processor_seconds": statistics.median(turns.worked) / args.steps,
            "optimizer_state_bytes": turns.bytes,
        }
        for name, turns in found.items()
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--seq", type=int, default=128)
    add("--vocab", type=int, default=4096)
    add("--batch", type=int, default=4, help="samples of each process in a step; default: 4")
    add("--steps", type=int, default=1, help="of a contender in a round; default: 1")
    add("--rounds", type=int, default=41, help="of which medians are taken; default: 41")
    add("--json", metavar="FILE", help="write the numbers to FILE as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    step = step_over_traffic(args)
    print(
        f"step of one process: {1e3 * step['step_seconds']:.1f} ms, {step['step_over_traffic']:.2f} times its "
        f"{step['traffic_bytes'] / 2**20:.0f} MiB at {step['copy_bytes_per_second'] / 1e9:.1f} GB/s of a copy"
    )
    found = measure(args)
    print(f"{'':32}{'tokens/s':>10}{'ratio':>8}{'processor s':>13}{'MiB of state':>14}")
    for name, told in found.items():
        rate, ratio, processor, state = told.values()
        print(f"{name:32}{rate:10.0f}{ratio:8.3f}{processor:13.3f}{state / 2**20:14.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"step": step, "contenders": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
