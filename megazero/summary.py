"""What a run says of its optimizer: at the start parameter groups and bytes per rank, at the end how much of the
exchange ran beside the backward. Each is one line, the same on all ranks.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

import torch

from .parallel.buckets import Bucket
from .parallel.collectives import all_reduce, gather_objects
from .parallel.groups import Mesh
from .parallel.params import ParamInfo
from .parallel.zero import ZeroOptimizer

MIB = 2**20
KIB = 2**10


def decay_groups(infos: Iterable[ParamInfo], *, own_rate: bool) -> str:
    """How many tensors and elements of the whole model have weight decay, and where embeddings and head have a
    learning rate of their own, how many have that.

    The rule is that of params.declare: what has two dims or more decays.
    """
    infos = list(infos)
    parts = [
        f"weight decay on {_count(i for i in infos if i.decay)} (matrices, embeddings and head), none on "
        f"{_count(i for i in infos if not i.decay)} (biases and norms)"
    ]
    if own_rate:
        parts.append(
            f"--decoupled-lr for {_count(i for i in infos if i.spec.table)} (embeddings and head), --lr for "
            f"{_count(i for i in infos if not i.spec.table)}"
        )
    return "; ".join(parts)


def _count(infos: Iterable[ParamInfo]) -> str:
    sizes = [info.spec.numel for info in infos]
    return f"{len(sizes)} tensors of {sum(sizes):,} elements"


def rank_bytes(optimizer: ZeroOptimizer, mesh: Mesh) -> str:
    """What the fullest rank holds of each class, as allocated, beside the formula of Rajbhandari et al. (2020)."""
    held, buckets = optimizer.bytes(), optimizer.trained
    formulas = [bytes_per_element(bucket, optimizer.zero.stage) for bucket in buckets]
    counts = [sum(info.tensor.numel() for info in bucket.infos) for bucket in buckets]
    each = [all_of + cut / b.copies.size for (all_of, cut), b in zip(formulas, buckets, strict=True)]
    expected = sum(count * size for count, size in zip(counts, each, strict=True))
    figures = [*held.values(), sum(held.values()), expected, sum(counts)]
    told = torch.tensor(figures, dtype=torch.float64, device=mesh.device)
    *classes, total, expected, elements = all_reduce(told, mesh.world, "max").tolist()
    words = ", ".join(f"{name} {size / MIB:.1f}" for name, size in zip(held, classes, strict=True))
    terms = " or ".join(f"{all_of} + {cut} / {mesh.data.size}" for all_of, cut in dict.fromkeys(formulas))
    return (
        f"MiB per rank, of the fullest: {words}, in all {total / MIB:.1f}; by the formula of stage "
        f"{optimizer.zero.stage}, {terms} bytes for each of {elements:,.0f} parameters, {expected / MIB:.1f}"
    )


def bytes_per_element(bucket: Bucket, stage: int) -> tuple[int, int]:
    """Bytes of an element of a bucket that every data rank holds, and those that are cut over the data ranks.

    With bf16 parameters and Adam: (18, 0), (6, 12), (2, 16) at stages 0, 1, 2.
    """
    parameter, master = bucket.params.itemsize, bucket.weight.itemsize
    state = master * (len(bucket.slices) - (bucket.weight.dtype == bucket.params.dtype))
    cut = (0, state, state + master)[stage]
    return parameter + master + state - cut, cut


def stage_2_traffic(micro_batches: int) -> str:
    """What stage 2 costs: gradients are reduced after each backward and not once in a step."""
    return (
        f"--zero-stage 2: a step reduces gradients {micro_batches} times, once for each micro-batch, and gathers "
        f"parameters once: {(micro_batches + 1) / 2:g} times what stage 1 sends over the data ranks"
    )


def peak_memory(mesh: Mesh) -> str:
    """The most memory that a rank has held so far, and which one that was: what torch had allocated on its GPU, or the
    resident memory of its process on a CPU. All ranks call it together."""
    if mesh.device.type == "cuda":
        where, held = "allocated on the GPU", torch.cuda.max_memory_allocated(mesh.device)
    else:
        unit = 1 if sys.platform == "darwin" else KIB
        where, held = "resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    told = gather_objects(held, mesh.world)
    rank = max(range(len(told)), key=told.__getitem__)
    return f"peak memory of the first step: {told[rank] / MIB:,.0f} MiB {where}, on rank {rank}, which holds the most"


def early_buckets(optimizer: ZeroOptimizer, mesh: Mesh) -> tuple[int, int]:
    """Of all reductions of buckets so far, on all ranks: those that began before their backward ended, and all."""
    reducer = optimizer.reducer
    told = torch.tensor([reducer.early, reducer.started], dtype=torch.int64, device=mesh.device)
    early, started = all_reduce(told, mesh.world).tolist()
    return early, started
