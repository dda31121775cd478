"""MoELayer: a feed-forward whose weights are chosen token by token. It stands where the MLP of a block stands.

Beside the experts of the router's choice there may be a residual MLP, mixed in by a learned coefficient, or a shared
expert that every token passes; they run while tokens are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..config_moe import MoEConfig
from ..data.batch import MicroBatch
from ..kernels.dispatch import Kernels
from ..mlp import MLP
from ..parallel.collectives import all_reduce, gather_whole
from ..parallel.groups import Mesh
from ..parallel.params import declare_moving
from ..parallel.shard import ShardSpec
from ..pipe.output import Output, WithLoss
from .dispatch import Dispatch, Journey, Ranks, plan_journey
from .experts import Experts
from .router import Gate, Routing, Tokens, jittered, moved_bias, route
from .wide_linear import WideLinear, declare_wide, wide_linear


@dataclass(frozen=True)
class MoESetup:
    """One MoE layer: `layer` is its global number, `experts` how many it has."""

    model: ModelConfig
    moe: MoEConfig
    layer: int
    experts: int
    dtype: torch.dtype = torch.float32
    kernels: Kernels = Kernels()

    def degree(self, expert: int) -> int:
        """In how many parts its experts are dealt out, where the run's expert size is `expert`."""
        return gcd(self.experts, expert)


class Router(nn.Module):
    """Gate calls: each sees one micro-batch of one data rank as a whole, whatever the tensor size."""

    def __init__(self, setup: MoESetup, mesh: Mesh) -> None:
        super().__init__()
        moe = setup.moe
        self.gate, self.group, self.data, self.queue = (
            Gate(moe, setup.experts, setup.layer), mesh.tensor, mesh.data, mesh.weights
        )
        self.precision = torch.float64 if moe.moe_router_dtype == "fp64" else torch.float32
        model = setup.model
        declare_wide(self, mesh, setup.experts, model.hidden_size, std=model.init_method_std, dtype=setup.dtype)
        bias, counts = ShardSpec((setup.experts,), (None,)), report_name(setup.layer, "counts")
        self.expert_bias = None if not moe.moe_router_enable_expert_bias else declare_moving(
            self, "expert_bias", bias, mesh.topology, dtype=torch.promote_types(setup.dtype, torch.float32),
            movement=lambda bias, told: moved_bias(bias, told[counts], moe.moe_router_bias_update_rate),
        )
        self._seen: tuple[int, Tensor] | None = None        # iteration, counts of its gate calls so far

    def forward(self, x: Tensor, batch: MicroBatch) -> Routing:
        """x [padded seq / tensor, batch, hidden] -> the routing of all [batch * seq] tokens, batch-major, equal on all
        tensor ranks."""
        x = jittered(x, self.gate, batch.draw, self.group.index)
        logits = gather_whole(wide_linear(x, self.weight, None, self.precision, self.queue), self.group)
        logits = logits[: len(batch.tokens) or None]        # the rest is padding; a stage that reads none has none
        counted = None if batch.loss_mask is None else (batch.loss_mask > 0).T.flatten()
        used = None if batch.used is None else batch.used.T.flatten()
        return route(
            logits.transpose(0, 1).flatten(0, 1), self.gate, bias=self.expert_bias,
            tokens=Tokens(logits.shape[1], used, counted, batch.draw),
            widen=None if batch.draw is None else partial(self._widen, batch),
        )

    def _widen(self, batch: MicroBatch, counts: Tensor) -> Tensor:
        """Counts of a gate call [experts] -> those of all data ranks and of all gate calls of this global batch so far.
        A recomputation is told what the forward was told."""
        key = ("widened", self.gate.layer)
        if batch.kept is not None and key in batch.kept:
            return batch.kept[key]
        total = all_reduce(counts.clone(), self.data)
        iteration = batch.draw[1]
        if self._seen is not None and self._seen[0] == iteration:
            total = total + self._seen[1]
        self._seen = iteration, total
        if batch.kept is not None:
            batch.kept[key] = total
        return total


class MoELayer(nn.Module):
    """[seq / tensor, batch, hidden] -> the same, with the router's loss and reports where it is training."""

    def __init__(self, setup: MoESetup, mesh: Mesh) -> None:
        super().__init__()
        model, moe, hidden = setup.model, setup.moe, setup.model.hidden_size
        self.layer, self.total, self.group = setup.layer, setup.experts, mesh.tensor
        axis = mesh.topology.expert_axis(setup.degree(mesh.topology.expert))
        self.ranks = Ranks(mesh.along(axis), mesh.expert_tensor)
        self.router = Router(setup, mesh)
        self.experts = Experts(
            model, mesh, experts=setup.experts, ffn=moe.moe_ffn_hidden_size or model.ffn, axis=axis, dtype=setup.dtype,
            kernels=setup.kernels,
        )
        dense = partial(MLP, mesh=mesh, dtype=setup.dtype, kernels=setup.kernels)
        gate = partial(WideLinear, hidden, mesh=mesh, std=model.init_method_std, dtype=setup.dtype)
        self.residual = self.coefficient = self.shared = self.shared_gate = None
        if moe.mlp_type == "residual":
            self.residual, self.coefficient = dense(model), gate(2, bias=True)
        if moe.moe_shared_expert_intermediate_size is not None:
            width = replace(
                model, ffn_hidden_size=moe.moe_shared_expert_intermediate_size, disable_bias_linear=True
            )
            self.shared = dense(width)
            self.shared_gate = gate(1, bias=False) if moe.moe_shared_expert_gate else None

    def forward(self, x: Tensor, batch: MicroBatch) -> Output:
        routing = self.router(x, batch)
        dispatch = Dispatch(self._journey(routing, batch, x), self.ranks)
        sent = dispatch.send(x.flatten(0, 1))
        mixing = None if self.coefficient is None else self.coefficient(x).softmax(-1).to(x.dtype)  # [.., batch, 2]
        beside = self._beside(x, batch, mixing)
        weights = self._own(routing.weights, x).to(x.dtype)
        y = dispatch.apply(sent, self.experts, weights).view_as(x)
        if mixing is not None:
            y = y * mixing[..., :1]
        if beside is not None:
            y = y + beside
        if batch.draw is None:
            return y
        return WithLoss(y, routing.loss * batch.auxiliary, reports_of(self.layer, routing))

    def _beside(self, x: Tensor, batch: MicroBatch, mixing: Tensor | None) -> Tensor | None:
        """What every token passes, whatever the router says: DeepSpeed's residual MLP, with the second of its two
        weights, or Megatron's shared expert."""
        parts = []
        if self.residual is not None:
            parts.append(self.residual(x, batch) * mixing[..., 1:])
        if self.shared is not None:
            y = self.shared(x, batch)
            parts.append(y if self.shared_gate is None else y * self.shared_gate(x).sigmoid().to(y.dtype))
        return sum(parts[1:], parts[0]) if parts else None

    def _journey(self, routing: Routing, batch: MicroBatch, x: Tensor) -> Journey:
        """Where the rows of this tensor rank go. A recomputation goes where the forward went, and exchanges no counts
        again."""
        if batch.kept is not None and self.layer in batch.kept:
            return batch.kept[self.layer]
        journey = plan_journey(self._own(routing.experts, x), self._own(routing.kept, x), self.total, self.ranks)
        if batch.kept is not None:
            batch.kept[self.layer] = journey
        return journey

    def _own(self, whole: Tensor, x: Tensor) -> Tensor:
        """[batch * seq, topk] of the gate call -> [rows of x, topk], the tokens of this rank in their order; 0 (False)
        for padding."""
        by_sequence = whole.unflatten(0, (x.shape[1], -1))
        padded = F.pad(by_sequence, (0, 0, 0, len(x) * self.group.size - by_sequence.shape[1]))
        return padded.chunk(self.group.size, 1)[self.group.index].transpose(0, 1).flatten(0, 1)


def report_name(layer: int, what: str) -> str:
    """What an MoE layer calls its reports."""
    return f"moe.{layer}.{what}"


def reports_of(layer: int, routing: Routing) -> Mapping[str, Tensor]:
    """What is told of a gate call. Sums over micro-batches and data ranks mean something for each of it."""
    told = {"counts": routing.counts, "dropped": routing.dropped, "z": routing.z}
    told |= {f"balance.{kind}": value for kind, value in routing.balance.items()}
    return {report_name(layer, what): value.double() for what, value in told.items()}
