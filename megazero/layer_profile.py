"""What each kind of layer costs in a step of a run: parameters, floating-point operations of the forward, time.

Two steps are looked at: the time of the first, and the operations of the next, for counting slows a step down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.hooks import RemovableHandle

from .parallel.collectives import gather_objects
from .parallel.groups import Mesh
from .parallel.params import collect
from .pipe.stage import Stage

ATEN = torch.ops.aten

# Ops that torch does not count of itself, and what they are counted as: products that add into their result, and
# attention on a CPU, which has the products of that on a GPU.
COUNTED_AS = {
    ATEN.addmm_: ATEN.addmm,
    ATEN.baddbmm_: ATEN.baddbmm,
    ATEN._scaled_dot_product_flash_attention_for_cpu: ATEN._scaled_dot_product_flash_attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: ATEN._scaled_dot_product_flash_attention_backward,
}
FORMULAS = {op: flop_registry[like].__wrapped__ for op, like in COUNTED_AS.items()}


@dataclass
class Cost:
    """What one kind of layer, or one part of it, costs: how many there are and their parameters in the whole model, and
    of a step, in the forward of this rank, calls, seconds and operations (a multiply-add is two)."""

    layers: int = 0
    parameters: int = 0
    calls: int = 0
    seconds: float = 0.0
    flops: int = 0


@dataclass
class _Part:
    """A module that is looked at."""

    kind: str
    module: nn.Module
    parameters: int
    begun: list[tuple[Any, int]] = field(default_factory=list)      # moment and operations so far of calls under way


class LayerProfile:
    """`begin` and `end` around each step, `lines` after it, by all ranks together."""

    def __init__(self, step: int, stages: Mapping[int, Stage], mesh: Mesh) -> None:
        self.step, self.mesh = step, mesh
        self.parts = [part for stage in stages.values() for part in parts_of(stage)]
        self._spans: list[tuple[str, Any, Any]] = []
        self._costs = {part.kind: Cost() for part in self.parts}
        self._hooks: list[RemovableHandle] = []
        self._counter: FlopCounterMode | None = None
        self._all_flops = 0

    def begin(self, iteration: int) -> None:
        """Before a step."""
        if iteration not in (self.step, self.step + 1):
            return
        if iteration == self.step + 1:
            self._counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
            self._counter.__enter__()
        for part in self.parts:
            before = part.module.register_forward_pre_hook(partial(self._before, part))
            after = part.module.register_forward_hook(partial(self._after, part))
            self._hooks += [before, after]

    def end(self) -> None:
        """After it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._counter is not None:
            self._all_flops = self._counter.get_total_flops()
            self._counter.__exit__(None, None, None)
            self._counter = None

    def _before(self, part: _Part, module: nn.Module, inputs: object) -> None:
        if self.mesh.watch.phase == "forward":                          # and not when it is computed again
            flops = self._counter.get_total_flops() if self._counter is not None else 0
            part.begun.append((self.mesh.watch.clock.now(), flops))

    def _after(self, part: _Part, module: nn.Module, inputs: object, output: object) -> None:
        if not part.begun:
            return
        moment, flops = part.begun.pop()
        if self._counter is None:
            self._spans.append((part.kind, moment, self.mesh.watch.clock.now()))
        else:
            self._costs[part.kind].flops += self._counter.get_total_flops() - flops

    def lines(self, iteration: int) -> list[str]:
        """A table, once it is complete."""
        if iteration != self.step + 1:
            return []
        for kind, start, end in self._spans:
            cost = self._costs[kind]
            cost.calls += 1
            cost.seconds += self.mesh.watch.clock.between(start, end)
        for part in self.parts if self.mesh.data.index == self.mesh.tensor.index == 0 else ():
            cost = self._costs[part.kind]
            cost.layers += 1
            cost.parameters += part.parameters
        told = gather_objects((self._costs, self._all_flops), self.mesh.world)
        return table([costs for costs, _ in told], sum(flops for _, flops in told))


def parts_of(stage: Stage) -> list[_Part]:
    """The layers of a stage, each followed by the modules that it consists of."""
    found = []
    for name, layer in stage.named_layers():
        infos, kind = collect([(name, layer)]), type(layer).__name__
        found.append(_Part(kind, layer, sum(info.spec.numel for info in infos)))
        for child, module in layer.named_children():
            own = [info for info in infos if info.name.startswith(f"{name}.{child}.")]
            found.append(_Part(f"{kind}.{child}", module, sum(info.spec.numel for info in own)))
    return found


def table(ranks: Sequence[Mapping[str, Cost]], all_flops: int) -> list[str]:
    """The costs of all ranks together, for people: operations of the whole global batch, time of one call."""
    kinds = list(dict.fromkeys(kind for costs in ranks for kind in costs))
    lines = [
        f"{'kind of layer':<28}{'layers':>7}{'parameters':>16}{'forward GFLOP':>16}{'of all':>8}{'ms a call':>11}"
        f"{'calls':>8}{'GFLOP/s a rank':>16}"
    ]
    sums = {kind: Cost() for kind in kinds}
    for kind in kinds:
        for cost in (costs[kind] for costs in ranks if kind in costs):
            whole = sums[kind]
            whole.layers, whole.parameters = whole.layers + cost.layers, whole.parameters + cost.parameters
            whole.calls, whole.seconds = whole.calls + cost.calls, whole.seconds + cost.seconds
            whole.flops += cost.flops
    forward = sum(cost.flops for kind, cost in sums.items() if "." not in kind)
    for kind, cost in sums.items():
        shown = "  " + kind.partition(".")[2] if "." in kind else kind
        lines.append(
            f"{shown:<28}{cost.layers:>7}{cost.parameters:>16,}{cost.flops / 1e9:>16.3f}"
            f"{cost.flops / max(forward, 1):>8.1%}{1e3 * cost.seconds / max(cost.calls, 1):>11.3f}{cost.calls:>8}"
            f"{cost.flops / 1e9 / cost.seconds if cost.seconds else 0:>16.1f}"
        )
    lines.append(
        f"matrix products of a step on all ranks: {forward / 1e9:.3f} GFLOP forward, {(all_flops - forward) / 1e9:.3f} "
        "backward with what is computed again"
    )
    return lines
