"""The section of the configuration that makes the samples of the first steps shorter, as the sequence-length curriculum
of DeepSpeed does: the same words, the same rounding.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from .batch_sizes import SeqLengths, lengths_of
from .settings import check_fields, flag, flag_name

# Which settings each schedule takes and needs, beside the schedule itself.
_ROOT = (
    "curriculum_min_difficulty", "curriculum_max_difficulty", "curriculum_total_step", "curriculum_difficulty_step",
)  # fmt: skip
TAKES = {
    "fixed_linear": _ROOT,
    "fixed_root": (*_ROOT, "curriculum_root_degree"),
    "fixed_discrete": (*_ROOT[:2], "curriculum_difficulty", "curriculum_max_step"),
}
NEEDS = {
    "fixed_linear": (_ROOT[0], _ROOT[2]),
    "fixed_root": (_ROOT[0], _ROOT[2], "curriculum_root_degree"),
    "fixed_discrete": ("curriculum_difficulty",),
}


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Short samples first (DeepSpeed's curriculum_learning of type seqlen). A difficulty is the tokens of a sample."""

    curriculum_schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] | None = flag(
        None, "how the tokens of a training sample grow with the steps; default: they are --seq-length"
    )
    curriculum_min_difficulty: int | None = flag(None, "tokens of a sample of the first step", at_least=1)
    curriculum_max_difficulty: int | None = flag(None, "tokens in the end; default: --seq-length", at_least=1)
    curriculum_total_step: int | None = flag(None, "fixed_linear, fixed_root: steps to get there", at_least=1)
    curriculum_difficulty_step: int = flag(8, "fixed_linear, fixed_root: tokens are a multiple of this", at_least=1)
    curriculum_root_degree: float | None = flag(
        None, "fixed_root: tokens are min + (step / total)^(1 / this) x (max - min)", above=0
    )
    curriculum_difficulty: tuple[int, ...] = flag((), "fixed_discrete: tokens, one after another", at_least=1)
    curriculum_max_step: tuple[int, ...] = flag((), "fixed_discrete: last step of all but the last", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self)
        kind, values = self.curriculum_schedule_type, vars(self)
        for field in fields(self)[1:]:
            given = values[field.name] != field.default
            if given and field.name not in TAKES.get(kind or "", ()):
                users = " or ".join(name for name, taken in TAKES.items() if field.name in taken)
                raise ValueError(f"{flag_name(field.name)} goes only with --curriculum-schedule-type {users}")
            if not given and field.name in NEEDS.get(kind or "", ()):
                raise ValueError(f"--curriculum-schedule-type {kind} needs {flag_name(field.name)}")
        if kind == "fixed_discrete":
            self._check_stairs()
        elif kind is not None:
            self._check_growth()

    def _check_stairs(self) -> None:
        lengths, ends = self.curriculum_difficulty, self.curriculum_max_step
        if len(lengths) != len(ends) + 1:
            raise ValueError(
                f"--curriculum-difficulty has {len(lengths)} numbers and --curriculum-max-step {len(ends)}: the last "
                "difficulty has no last step"
            )
        for name, numbers in (("--curriculum-difficulty", lengths), ("--curriculum-max-step", ends)):
            if any(a >= b for a, b in zip(numbers, numbers[1:])):
                raise ValueError(f"{name} {' '.join(map(str, numbers))}: must grow from number to number")

    def _check_growth(self) -> None:
        least, step, most = (
            self.curriculum_min_difficulty, self.curriculum_difficulty_step, self.curriculum_max_difficulty
        )
        if least < step:
            raise ValueError(
                f"--curriculum-min-difficulty {least} is below --curriculum-difficulty-step {step}: the first samples "
                "would be rounded down to nothing"
            )
        if most is not None and least > most:
            raise ValueError(f"--curriculum-min-difficulty {least} is above --curriculum-max-difficulty {most}")

    def lengths(self, seq_length: int) -> SeqLengths:
        """Tokens of a sample in each step, at most `seq_length`, which samples are read with. ValueError where it is
        too short for the first step."""
        kind, least = self.curriculum_schedule_type, self.curriculum_min_difficulty
        if kind is None:
            return lengths_of(seq_length)
        most = self.curriculum_max_difficulty or seq_length
        stairs = self.curriculum_difficulty or (least,)
        if stairs[0] > seq_length:
            name = "--curriculum-difficulty" if kind == "fixed_discrete" else "--curriculum-min-difficulty"
            raise ValueError(f"{name} {stairs[0]} is above --seq-length {seq_length}")
        if kind == "fixed_discrete":                    # the first that is not below the largest one stays
            kept = min(len(stairs), 1 + sum(length < min(most, seq_length) for length in stairs))
            starts = (1, *(end + 1 for end in self.curriculum_max_step))
            return SeqLengths(starts[:kept], tuple(min(length, seq_length) for length in stairs[:kept]))
        if least == most:
            return lengths_of(most)
        return grown(lambda step: min(self._difficulty(step, most), seq_length), min(most, seq_length))

    def _difficulty(self, step: int, most: int) -> int:
        """DeepSpeed's formula, where its rounding is, at a step counted from 1."""
        share = (step / self.curriculum_total_step) ** (1.0 / (self.curriculum_root_degree or 1))
        length = math.floor(share * (most - self.curriculum_min_difficulty) + self.curriculum_min_difficulty)
        return min(length - length % self.curriculum_difficulty_step, most)

    def describe(self, seq_length: int) -> list[str]:
        """What the curriculum does, in a line; none where there is none."""
        if self.curriculum_schedule_type is None:
            return []
        found, most = self.lengths(seq_length), self.curriculum_max_difficulty
        above = f", for longer ones than --seq-length {seq_length} are not read" if (most or 0) > seq_length else ""
        return [
            f"curriculum ({self.curriculum_schedule_type}): samples have {found.lengths[0]} tokens in step 1 and "
            f"{found.lengths[-1]} from step {found.starts[-1]} on{above}"
        ]


def grown(length_at: Callable[[int], int], last: int) -> SeqLengths:
    """The lengths of a rule that never falls, until it reaches `last`; each start is searched for by halves."""
    starts, lengths = [1], [length_at(1)]
    while lengths[-1] < last:
        first, width = starts[-1] + 1, 1
        while length_at(first + width) <= lengths[-1]:
            width *= 2
        steps = range(first, first + width + 1)
        starts.append(steps[bisect.bisect_right(steps, lengths[-1], key=length_at)])
        lengths.append(length_at(starts[-1]))
    return SeqLengths(tuple(starts), tuple(lengths))
