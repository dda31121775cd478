"""Distillation (Mixture-of-Students): a frozen teacher runs beside the student, stage by stage, until it has taught
enough.

The teacher is a second list of layers, cut over the stages of the student's pipeline. A stage runs its slice of the
teacher without gradient and in evaluation mode, then the student's, and hands both hidden states on; at the last one
the teacher's logits reach the student's head with the micro-batch. So every schedule runs it as it is, no logits wait
for another micro-batch, and recomputation never runs the teacher again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoint import Reader
from ..config_distill import DistillConfig
from ..data.batch import Lesson, MicroBatch
from ..parallel.collectives import together
from ..parallel.groups import Mesh
from ..parallel.params import ParamInfo, collect
from ..pipe.engine import PipeEngine
from ..pipe.output import Hidden, Output, hidden_of, with_losses_of
from ..pipe.split import Split
from ..pipe.stage import Cut, LayerSpec, Recompute, Stage, build_stages, cut_layers

TAUGHT = "taught"       # the engine's key of distilled steps, whose hidden states are the student's and the teacher's


@dataclass(frozen=True)
class Teacher:
    """A teacher on paper: its layers, the checkpoint that has its weights, and how many experts each layer has."""

    layers: list[LayerSpec]
    folder: Path
    experts: tuple[int, ...]


class TaughtStage:
    """A stage of the student beside one of the teacher: ((student's, teacher's) hidden states or None, MicroBatch) ->
    the same two of the next stage, or the student's loss. In evaluation the student is alone."""

    def __init__(self, student: Stage, teacher: Stage, config: DistillConfig, *, last: bool) -> None:
        self.student, self.teacher, self.config, self.last = student, teacher, config, last

    def __call__(self, x: Hidden | None, batch: MicroBatch) -> Output:
        if batch.draw is None:
            return self.student(x, batch)
        own, its = (None, None) if x is None else x
        with torch.no_grad():
            its = hidden_of(self.teacher(its, replace(batch, draw=None, labels=None, kept=None)))
        if self.last:
            how = self.config
            lesson = Lesson(its, how.kd_alpha_ce, how.kd_beta_ce, how.kd_temp)
            return self.student(own, replace(batch, lesson=lesson))
        out = self.student(own, batch)
        return with_losses_of((hidden_of(out), its), out)


class Distillation:
    """Lets an engine's stages be taught until `end`. All ranks do it alike."""

    def __init__(self, engine: PipeEngine, teachers: Mapping[int, Stage], config: DistillConfig) -> None:
        self.config = config
        self._engine, self._students = engine, engine.stages
        engine.stages = {
            number: TaughtStage(student, teachers[number], config, last=number == engine.last_stage)
            for number, student in engine.stages.items()
        }

    @property
    def is_on(self) -> bool:
        """Whether the stages are taught."""
        return self._engine.stages is not self._students

    def end(self) -> None:
        """The student is alone from now on: nothing holds the teacher's weights any more."""
        self._engine.stages = self._students


def cut_teacher(layers: Sequence[LayerSpec], homes: Sequence[int]) -> Cut:
    """A teacher evenly over the stages of its student. Of one with fewer blocks the later stages have nothing, and only
    hand on its hidden states; the last has its head."""
    blocks = sum(layer.cost > 0 for layer in layers)
    empty = len(homes) - blocks - 1
    return cut_layers(layers, homes, Split() if empty < 0 else Split(layout=f"E{'t|' * blocks}{'|' * empty}L"))


def load_teacher(
    teacher: Teacher, mesh: Mesh, homes: Sequence[int], *, dtype: torch.dtype, verify: bool = True
) -> dict[int, Stage]:
    """This rank's stages of the teacher with the checkpoint's weights in `dtype`, frozen; what no gradient ever trained
    is in fp32 or wider, as beside an optimizer. All ranks call it together.

    Raises AgreedError where any of them cannot read.
    """
    with mesh.device:
        stages = build_stages(teacher.layers, mesh, cut_teacher(teacher.layers, homes), Recompute())
    for stage in stages.values():
        stage.to(dtype).requires_grad_(False).eval()
    infos = collect([named for stage in stages.values() for named in stage.named_layers()])
    for info in infos:
        if info.movement is not None:
            info.tensor.data = info.tensor.data.to(torch.promote_types(dtype, torch.float32))
    together(mesh.world, lambda: _fill(infos, Reader(teacher.folder, verify=verify), mesh))
    return stages


def _fill(infos: Iterable[ParamInfo], reader: Reader, mesh: Mesh) -> None:
    """Read this rank's shards; padding is zero."""
    for info in infos:
        box, shard = info.spec.box(mesh.topology, mesh.rank), info.tensor.data
        shard.zero_()
        if box.numel:
            shard[box.slices(box.start)] = reader.read(info.name, "weight", box).to(shard)
