"""All kernels and a GPT step on one GPU, measured within minutes: `bash scripts/gpu_check.sh [--json FILE]`.

Every part runs in a process of its own until one fails; the failure is reported by its last line, and the rest goes on
in a fresh process, so that a kernel that breaks the device takes nothing with it. Only torch and triton are needed.
`--device cpu` runs everything in small (the kernels in Triton's interpreter): a check of this program.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also run from a checkout that is not installed
if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"        # before triton is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from megazero.config import ModelConfig, OptimizerConfig  # noqa: E402
from megazero.data.batch import MicroBatch  # noqa: E402
from megazero.flops import device_peak, model_flops  # noqa: E402
from megazero.gpt import GPTSetup, gpt_layers  # noqa: E402
from megazero.kernels.adam import AdamStep, adam_, adam_reference_  # noqa: E402
from megazero.kernels.bias_gelu import bias_gelu, bias_gelu_reference  # noqa: E402
from megazero.kernels.dispatch import Kernels, triton  # noqa: E402
from megazero.kernels.dropout_add import dropout_add, dropout_add_reference  # noqa: E402
from megazero.kernels.layer_norm import layer_norm, layer_norm_reference  # noqa: E402
from megazero.kernels.rms_norm import rms_norm, rms_norm_reference  # noqa: E402
from megazero.kernels.rotary import rotary_, rotary_reference  # noqa: E402
from megazero.kernels.softmax import softmax, softmax_reference  # noqa: E402
from megazero.kernels.squared_norm import squared_norm, squared_norm_reference  # noqa: E402
from megazero.kernels.swiglu import swiglu, swiglu_reference  # noqa: E402
from megazero.machine import Setup, assemble  # noqa: E402
from megazero.parallel.groups import Group, open_mesh  # noqa: E402
from megazero.parallel.loss import Vocabulary, vocab_parallel_cross_entropy  # noqa: E402
from megazero.parallel.topology import Topology  # noqa: E402
from megazero.parallel.zero import Rates, Zero  # noqa: E402
from megazero.precision import Dtypes  # noqa: E402

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}     # of the largest element; sums over 70,000 in fp32
GPTS = {"350M": (24, 1024, 16, 8), "1.3B": (24, 2048, 16, 4)}       # layers, hidden, heads, micro-batch
VOCAB, SEQ, STEPS = 50304, 2048, 10
PART_SECONDS = 80.0         # after which a part is given up
NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class Op:
    """A kernel's entry, how to call it, and the bytes of bf16 that each element of the given shape must move.

    An op of the optimizer has no backward (no bytes), takes fp32 tensors and may change them.

    leaves     (rows, width) -> the inputs that have gradients
    run        (impl, leaves) -> the result
    reference  leaves -> the same by plain formulas
    """

    leaves: Callable[[int, int], list[Tensor]]
    run: Callable[[str, list[Tensor]], Tensor]
    reference: Callable[[list[Tensor]], Tensor]
    forward_bytes: float
    backward_bytes: float = 0.0


@functools.cache
def _angles(seq: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angle = torch.arange(seq * half, device=device).view(-1, 1, 1, 1, half) * 0.01
    return angle.cos(), angle.sin()


def _projection(rows: int, width: int) -> Tensor:
    """A fused projection [seq, batch, groups * 3 * head_dim] of about rows x width elements."""
    batch, head_dim = 16 if rows % 16 == 0 else 1, 128 if width >= 384 else 6
    return torch.randn(rows // batch, batch, max(width // (3 * head_dim), 1) * 3 * head_dim)


def _rotary(impl: str, x: Tensor) -> Tensor:
    head_dim = 128 if x.shape[-1] >= 384 else 6
    heads, (cos, sin) = (-1, 3, head_dim), _angles(x.shape[0], head_dim // 2, x.device)
    product = x * 1.0 if x.requires_grad else x
    if impl == "reference":
        return rotary_reference(product, cos, sin, heads, False)
    return rotary_(product, cos, sin, heads=heads, interleaved=False, impl=impl)


def _loss(impl: str, x: Tensor) -> Tensor:
    """[rows, vocab] -> [rows]."""
    labels = torch.arange(len(x), device=x.device) * 7 % x.shape[1]
    if impl == "reference":
        return F.cross_entropy(x.float(), labels, reduction="none")
    vocabulary = Vocabulary(x.shape[1], Group("tensor"), impl=impl)
    return vocab_parallel_cross_entropy(x.unsqueeze(1), labels.unsqueeze(1), vocabulary).squeeze(1)


def _step(impl: str, tensors: list[Tensor]) -> Tensor:
    """Adam's step on weight, gradient and moments, with a bf16 copy of the weight."""
    weight, grad, exp_avg, exp_avg_sq = (t.view(-1) for t in tensors)
    copy = torch.empty_like(weight, dtype=torch.bfloat16)
    numbers, how = AdamStep(1e-2, (0.9, 0.95), 1e-8, 0.1, True, 3), {"factor": torch.ones_like(weight[0]), "copy": copy}
    if impl == "reference":
        adam_reference_(weight, grad, exp_avg, exp_avg_sq, numbers, **how)
    else:
        adam_(weight, grad, exp_avg, exp_avg_sq, numbers, **how, impl=impl)
    return weight


OPS = {
    "layer_norm": Op(
        lambda n, h: [torch.randn(n, h), torch.randn(h), torch.randn(h)],
        lambda impl, t: layer_norm(*t, 1e-5, impl), lambda t: layer_norm_reference(*t, 1e-5), 4, 6,
    ),
    "rms_norm": Op(
        lambda n, h: [torch.randn(n, h), torch.randn(h)],
        lambda impl, t: rms_norm(*t, 1e-5, impl), lambda t: rms_norm_reference(*t, 1e-5), 4, 6,
    ),
    "swiglu": Op(
        lambda n, h: [torch.randn(n, 2 * max(h // 2, 1))],
        lambda impl, t: swiglu(*t, impl), lambda t: swiglu_reference(*t), 3, 5,
    ),
    "bias_gelu": Op(
        lambda n, h: [torch.randn(n, h), torch.randn(h)],
        lambda impl, t: bias_gelu(*t, "tanh", impl), lambda t: bias_gelu_reference(*t, "tanh"), 4, 6,
    ),
    "rotary": Op(
        lambda n, h: [_projection(n, h)],
        lambda impl, t: _rotary(impl, *t), lambda t: _rotary("reference", *t), 4 * 2 / 3, 4,
    ),
    "dropout_add": Op(
        lambda n, h: [torch.randn(n, h), torch.randn(n, h), torch.randn(h)],
        lambda impl, t: dropout_add(*t, 0.1, 7, impl), lambda t: dropout_add_reference(*t, 0.1, 7), 6, 4,
    ),
    "softmax": Op(
        lambda n, h: [torch.randn(n, h)],
        lambda impl, t: softmax(*t, 0.7, impl=impl), lambda t: softmax_reference(*t, 0.7), 4, 6,
    ),
    "cross_entropy": Op(lambda n, h: [torch.randn(n, h)], lambda impl, t: _loss(impl, *t),
                        lambda t: _loss("reference", *t), 2, 4),
    "adam": Op(lambda n, h: [*torch.randn(3, n, h), torch.rand(n, h)], _step, lambda t: _step("reference", t), 30),
    "squared_norm": Op(
        lambda n, h: [torch.randn(n, h)],
        lambda impl, t: squared_norm(t[0].view(-1), impl), lambda t: squared_norm_reference(*t), 4,
    ),
}


# --------------------------------------------------------------------------------------------- in the process of a part


@dataclass(frozen=True)
class Bench:
    """The device, and how large the problems are."""

    device: torch.device

    @property
    def small(self) -> bool:
        return self.device.type == "cpu"

    def seconds(self, run: Callable[[], Any]) -> float:
        """Median time of `run` on the device."""
        repeats = 2 if self.small else 20
        if self.small:
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            return statistics.median(times)
        for _ in range(3):
            run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        torch.cuda.synchronize()
        for start, stop in events:
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3

    def made(self, op: Op, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
        """An op's inputs, the same for all implementations."""
        torch.manual_seed(0)
        if not op.backward_bytes:
            return [t.to(self.device) for t in op.leaves(rows, width)]
        return [t.to(self.device, dtype).requires_grad_() for t in op.leaves(rows, width)]


def machine_part(bench: Bench) -> dict[str, Any]:
    """What this machine is, and what it reaches: bytes per second of a copy, operations per second of a product."""
    size, side = (2**12, 64) if bench.small else (2**30, 8192)
    source, target = torch.empty(2, size, dtype=torch.uint8, device=bench.device)
    a, b = torch.randn(2, side, side, device=bench.device).bfloat16()
    name = "cpu" if bench.small else torch.cuda.get_device_name()
    stated = device_peak(name, half=True)
    return {
        "device": name, "torch": torch.__version__, "triton": triton.__version__ if triton else None,
        "copy_gbs": 2 * size / bench.seconds(lambda: target.copy_(source)) / 1e9,
        "matmul_tflops": 2 * side**3 / bench.seconds(lambda: a @ b) / 1e12,
        "stated_tflops": None if stated is None else stated / 1e12,
    }


def check_part(bench: Bench, name: str) -> dict[str, Any]:
    """A kernel beside its reference: the largest difference of result and gradients over its tolerance."""
    shapes = [(3, 33), (2, 70)] if bench.small else [(5, 1), (5, 33), (64, 1000), (700, 4096), (7, 4097), (3, 70000)]
    worst = differences(bench, name, "triton", shapes)
    return {"worst": max(worst.values()), "equal": max(worst.values()) <= 1.0, "differences": worst}


def differences(bench: Bench, name: str, impl: str, shapes: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Of an implementation of an op, for each shape (rows, width) and dtype: the largest difference of result and
    gradients from the reference, over its tolerance."""
    op, worst = OPS[name], {}
    for rows, width in shapes:
        for dtype, tolerance in TOLERANCE.items():
            leaves = bench.made(op, rows, width, dtype)
            reference = dropout_reference(leaves) if name == "dropout_add" else op.reference(leaves)
            if not op.backward_bytes:
                leaves = bench.made(op, rows, width, dtype)
            y = op.run(impl, leaves)
            dy = torch.randn_like(y)
            pairs = [(y, reference)]
            if op.backward_bytes:
                got, wanted = (torch.autograd.grad(found, leaves, dy) for found in (y, reference))
                pairs += zip(got, wanted, strict=True)
            off = max(((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item() for a, b in pairs)
            worst[f"{rows} x {width} {str(dtype).removeprefix('torch.')}"] = off / tolerance
    return worst


def dropout_reference(leaves: list[Tensor]) -> Tensor:
    """Its mask is drawn on the CPU."""
    return OPS["dropout_add"].reference([t.cpu() for t in leaves]).to(leaves[0].device)


def time_part(bench: Bench, name: str, how: str) -> dict[str, Any]:
    """GB/s of an op's forward and backward by an implementation: triton, torch, or torch's path compiled."""
    op = OPS[name]
    leaves = bench.made(op, *((4, 36) if bench.small else (32768, 4096)), torch.bfloat16)
    run = op.run
    if how == "compile":
        run = torch.compile(op.run, backend="eager" if bench.small else "inductor", dynamic=False)
    impl = "triton" if how == "triton" else "torch"
    still = [t.detach() for t in leaves]
    forward = bench.seconds(lambda: run(impl, still))
    forward_gbs = op.forward_bytes * leaves[0].numel() / forward / 1e9
    if not op.backward_bytes:
        return {"forward_gbs": forward_gbs}
    y = run(impl, leaves)
    dy = torch.randn_like(y)
    backward = bench.seconds(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))
    return {"forward_gbs": forward_gbs, "backward_gbs": op.backward_bytes * leaves[0].numel() / backward / 1e9}


def gpt_part(bench: Bench, name: str, impl: str) -> dict[str, Any]:
    """Tokens per second of training steps in bf16, and the model's operations per second."""
    layers, hidden, heads, batch = (1, 16, 2, 1) if bench.small else GPTS[name]
    seq, vocab = (8, 64) if bench.small else (SEQ, VOCAB)
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=seq,
        attention_dropout=0.0, hidden_dropout=0.1,
    )
    setup = Setup(
        Dtypes(torch.bfloat16, torch.float32), OptimizerConfig(), Zero(1, 1.0, norm_impl=impl), adam_impl=impl
    )
    specs = gpt_layers(GPTSetup(model, vocab, torch.float32, kernels=Kernels(impl)))
    machine = assemble(specs, open_mesh(Topology(), bench.device), setup)
    tokens = torch.randint(vocab, (seq + 1, batch), device=bench.device)
    program, scale = machine.train_program(1), 1.0 / (seq * batch)
    losses: list[Tensor] = []

    def step() -> None:
        one = MicroBatch(tokens[:-1], labels=tokens[1:], scale=scale, draw=(1, len(losses), 0))
        losses.append(machine.loss([one], program))
        machine.optimizer.step(Rates(1e-4, 0.1))

    step()
    step()
    times = []
    for _ in range(2 if bench.small else STEPS):
        start = time.perf_counter()
        step()
        losses[-1].item()       # waits for the loss; the update overlaps the next step's start at most
        times.append(time.perf_counter() - start)
    speed = seq * batch / statistics.median(times)
    flops = model_flops(model, vocab=vocab, batch=1) / seq          # of a token
    peak = 0 if bench.small else torch.cuda.max_memory_allocated()
    return {
        "tokens_per_second": speed, "tflops": flops * speed / 1e12, "peak_gib": peak / 2**30,
        "first_loss": losses[0].item(), "last_loss": losses[-1].item(),
    }


def run_part(bench: Bench, part: str) -> dict[str, Any]:
    """A part by its name."""
    kind, *rest = part.split()
    return {"machine": machine_part, "check": check_part, "time": time_part, "gpt": gpt_part}[kind](bench, *rest)


# ------------------------------------------------------------------------------------------------------ the conductor


def all_parts() -> list[str]:
    """Names of the parts, what matters most first."""
    return [
        "machine",
        *(f"check {op}" for op in OPS),
        *(f"time {op} {how}" for op in OPS for how in ("triton", "torch")),
        *(f"gpt {name} {impl}" for name in GPTS for impl in ("triton", "torch")),
        *(f"time {op} compile" for op in OPS),
    ]


def conduct(parts: Sequence[str], device: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Run the parts one after the other within `seconds`; {part: its numbers, or "error": the last line it said}."""
    results: dict[str, dict[str, Any]] = {}
    left, deadline = list(parts), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        command = [sys.executable, __file__, "--device", device, "--part", *left]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        watch, said = _stop_after(PART_SECONDS, deadline, child), []
        listen = threading.Thread(target=lambda child=child, said=said: said.extend(child.stderr))
        listen.start()
        for line in child.stdout:
            if line.startswith("{"):
                told = json.loads(line)
                results[told["part"]] = told
                left.remove(told["part"])
                watch.cancel()
                watch = _stop_after(PART_SECONDS, deadline, child)
                print(f"   {told['part']}", file=sys.stderr, flush=True)
        child.wait()
        watch.cancel()
        listen.join()
        if left and time.monotonic() < deadline:
            results[left[0]] = {"part": left[0], "error": _reason(said, child.returncode)}
            left.pop(0)
    for part in left:
        results[part] = {"part": part, "error": f"no time was left of {seconds:.0f} s"}
    return results


def _stop_after(seconds: float, deadline: float, child: subprocess.Popen) -> threading.Timer:
    watch = threading.Timer(max(0.0, min(seconds, deadline - time.monotonic())), child.kill)
    watch.start()
    return watch


def _reason(said: Sequence[str], code: int) -> str:
    """Why a process ended, in a line: the exception's, which on a GPU is not the last."""
    if code == -signal.SIGKILL:
        return f"took more than {PART_SECONDS:.0f} s, or was killed"
    lines = [line.strip() for line in said if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return (raised or lines or [f"ended with code {code} and said nothing"])[-1][:300]


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """The lines that a person reads."""
    machine = results["machine"]
    copy, peak = machine.get("copy_gbs"), machine.get("stated_tflops") or machine.get("matmul_tflops")
    facts = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in machine.items()}
    lines = [", ".join(f"{key} {value}" for key, value in facts.items() if key != "part")]
    lines.append(f"{'GB/s over copy: forward, backward':36}{'triton':>14}{'torch':>14}{'compiled':>14}  equal")
    for op in OPS:
        cells = []
        for how in ("triton", "torch", "compile"):
            found = results[f"time {op} {how}"]
            known = "error" not in found and copy
            pair = known and " ".join(f"{value / copy:.2f}" for key, value in found.items() if key.endswith("_gbs"))
            cells.append(f"{pair or '-':>14}")
        equal = results[f"check {op}"].get("equal")
        lines.append(f"{op:36}{''.join(cells)}  {'-' if equal is None else 'yes' if equal else 'NO'}")
    for name in GPTS:
        for impl in ("triton", "torch"):
            found = results[f"gpt {name} {impl}"]
            if "error" in found:
                lines.append(f"GPT {name}, {impl}: -")
                continue
            mfu = f"MFU {found['tflops'] / peak:.2f}" if peak else "MFU unknown"
            speed = f"{found['tokens_per_second']:.0f} tokens/s, {found['tflops']:.4g} TFLOP/s"
            lines.append(f"GPT {name}, {impl}: {speed}, {mfu}, {found['peak_gib']:.1f} GiB")
    failed = [found for found in results.values() if found.get("error", NOT_ASKED) != NOT_ASKED]
    return [*lines, *(f"failed: {found['part']}: {found['error']}" for found in failed)]


def main(argv: Sequence[str] | None = None) -> int:
    """0 where there is a GPU, whatever the parts say: what failed is told in the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--seconds", type=float, default=285.0, help="that all parts may take together")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts whose names begin so")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)        # in a child: run these here
    asked = parser.parse_args(argv)
    if asked.part:
        for part in asked.part:
            print(json.dumps({"part": part, **run_part(Bench(torch.device(asked.device)), part)}), flush=True)
        return 0
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu_check.py: error: torch {torch.__version__} sees no GPU here", file=sys.stderr)
        return 2
    wanted = [p for p in all_parts() if asked.only is None or p.startswith(tuple(asked.only))]
    results = {part: {"part": part, "error": NOT_ASKED} for part in all_parts()}
    results |= conduct(wanted, asked.device, asked.seconds)
    print("\n".join(table(results)))
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
