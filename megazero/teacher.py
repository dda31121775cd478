"""Who teaches a student: a saved GPT, found and checked before any rank waits for another.

Its shape is that of its checkpoint; flags that name it only have to agree. megazero/moe/students.py runs it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path

import torch

from .checkpoint_index import Index, read_index
from .config import Config, ModelConfig, check_attention, check_widths
from .gpt import WORD_TABLE, GPTSetup, gpt_layers
from .machine import Machine
from .moe.students import Distillation, Teacher, cut_teacher, load_teacher
from .parallel.groups import mesh_on_paper
from .parallel.params import collect
from .parallel.topology import Topology
from .precision import dtypes
from .snapshot import find
from .trainer import Progress


def find_teacher(
    config: Config, student: GPTSetup, homes: Sequence[int], start: Progress, *, speaks: bool
) -> Teacher | None:
    """Who teaches a run from `start` on: the newest model in --load-teacher, as it is built beside `student` on stages
    with these homes; None: nobody, or no longer.

    Raises ValueError where there is none, or one that cannot teach this student on these ranks.
    """
    if config.batch.skip_train or not config.distill.teaches(start.iteration, start.consumed_tokens):
        return None
    root = Path(config.distill.load_teacher)
    folder = find(root, None, say=print if speaks else lambda line: None)
    if folder is None:
        raise ValueError(f"--load-teacher {root}: there is no complete checkpoint in it")
    index = read_index(folder)[0]
    try:
        saved = Config.from_json(json.dumps(index.config))
        model = teachers_model(saved, config, student.vocab)
        check_widths(model, config.parallel)
        check_attention(model, config.run)
        setup = replace(
            student, model=model, moe=saved.moe, experts=teachers_experts(saved, config),
            dtype=dtypes(config.precision).compute,
        )
        teacher = Teacher(gpt_layers(setup), folder, setup.experts)
        cut_teacher(teacher.layers, homes)
        check_tensors(teacher, index, student.vocab)
    except ValueError as wrong:
        raise ValueError(f"--load-teacher {root}: {wrong}") from wrong
    return teacher


def taught(machine: Machine, teacher: Teacher, config: Config, homes: Sequence[int]) -> Machine:
    """The machine with the teacher beside its student. All ranks call it together."""
    dtype, verify = dtypes(config.precision).compute, config.checkpoint.verify_checkpoint
    stages = load_teacher(teacher, machine.mesh, homes, dtype=dtype, verify=verify)
    return replace(machine, distillation=Distillation(machine.engine, stages, config.distill))


def teachers_model(saved: Config, config: Config, vocab: int) -> ModelConfig:
    """The saved model on this run's samples.

    Raises ValueError, with both values, where the flags say another shape, and where samples are too long for it.
    """
    model, asked = saved.model, config.distill
    for name, given, has in (
        ("--num-layers-teacher", asked.num_layers_teacher, model.num_layers),
        ("--hidden-size-teacher", asked.hidden_size_teacher, model.hidden_size),
        ("--num-attention-heads-teacher", asked.num_attention_heads_teacher, model.num_attention_heads),
    ):
        if given not in (None, has):
            raise ValueError(f"the teacher has {has}, not {name} {given}")
    seq, positions = config.model.seq_length, model.positions
    if model.position_embedding_type == "learned_absolute" and seq > positions:
        raise ValueError(f"the teacher knows {positions} positions, and --seq-length is {seq}")
    return replace(
        model, seq_length=seq, max_position_embeddings=max(seq, positions), vocab_size=vocab,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
    )


def teachers_experts(saved: Config, config: Config) -> tuple[int, ...]:
    """How many experts each layer of the teacher has, 1 where it is dense.

    Raises ValueError where the flags say other numbers, and where the ranks that share experts cannot share these.
    """
    given, degree = config.distill.num_experts_teacher, config.parallel.expert_model_parallel_size
    has = tuple(experts for experts in saved.experts if experts > 1) or (1,)
    if given and given not in (has, has[:1] * (len(set(has)) == 1)):
        raise ValueError(f"the teacher has {_words(has)} experts, not --num-experts-teacher {_words(given)}")
    for experts in has:
        if experts > 1 and degree > 1 and gcd(experts, degree) == 1:
            raise ValueError(
                f"--expert-model-parallel-size {degree} has no common divisor with {experts} experts of the teacher"
            )
    return saved.experts


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def check_tensors(teacher: Teacher, index: Index, vocab: int) -> None:
    """Raises ValueError where the checkpoint does not hold exactly the tensors of these layers."""
    stored = {name: entry.spec.shape for stage in index.stages for name, entry in stage.tensors.items()}
    if WORD_TABLE in stored and stored[WORD_TABLE][0] != vocab:
        raise ValueError(f"the teacher knows {stored[WORD_TABLE][0]} tokens, and the student {vocab} (--vocab-size)")
    mesh = mesh_on_paper(Topology(), 0)
    with torch.device("meta"):
        infos = collect([(layer.name, layer.build(mesh)) for layer in teacher.layers])
    wanted = {info.name: info.spec.shape for info in infos}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            its, ours = ("nothing" if table.get(name) is None else list(table[name]) for table in (stored, wanted))
            raise ValueError(f"{teacher.folder}: {name}: {its} in the file, {ours} in a model of its settings")
