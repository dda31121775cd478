"""Cutting a model's list of layers into pipeline stages: arithmetic over their names, costs and weights.

`Split` is what a user asks for; its `ranges` are the slices of the list, one per stage. Stages are numbered as the
depth runs; layers without cost (embedding, norm, head) stay with a neighbour unless they are asked to count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..layout_string import expand_layout

METHODS = ("uniform", "parameters", "cost", "measured", "deepspeed-parameters", "type:REGEX", "deepspeed-type:REGEX")
SIZE_FLAGS = "--pipeline-model-parallel-size, --num-virtual-stages-per-pipeline-rank"


@dataclass(frozen=True)
class Split:
    """How the layers are cut. At most one of a method other than uniform, a layout, and first or last may be given.

    method     --pipeline-split:
               uniform       equal numbers of costly layers; earlier stages take the remainder
               parameters    the largest number of parameters of a stage is as small as can be
               cost          the same with the relative costs that the layers declare
               measured      the same with the seconds that each layer took in one step
               type:REGEX    equal numbers of the layers whose name matches (searched for, in any case)
               deepspeed-parameters, deepspeed-type:REGEX   by DeepSpeed's rule, which see: `max_min`
    layout     --pipeline-model-parallel-layout: the stages letter by letter, as "E|(t|)*3,L"
    first      --decoder-first-pipeline-num-layers: costly layers of the rank that holds the first stage
    last       --decoder-last-pipeline-num-layers: of the rank that holds the last stage; the others share the rest.
               Where that is one rank, as in zb-v, `first` and `last` count the layers of those two stages
    embedding  --account-for-embedding-in-pipeline-split: what stands before the costly layers counts as one of them
    loss       --account-for-loss-in-pipeline-split: so does what stands after them

    Raises ValueError for an unknown method, a pattern or layout that cannot be read, or what goes not together.
    """

    method: str = "uniform"
    layout: str | None = None
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS[:5] and self.pattern is None:
            raise ValueError(f"--pipeline-split {self.method}: must be one of {', '.join(METHODS)}")
        asked = {
            f"--pipeline-split {self.method}": self.method != "uniform",
            "--pipeline-model-parallel-layout": self.layout is not None,
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers": self._has_ends,
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split":
                self.embedding or self.loss,
        }
        ways = [flags for flags, given in asked.items() if given]
        if len(ways) > 1:
            raise ValueError(f"{'; '.join(ways)}: each says how the layers are cut, so only one may be given")
        for flag, count in (("first", self.first), ("last", self.last)):
            if count is not None and count < 1:
                raise ValueError(f"--decoder-{flag}-pipeline-num-layers {count}: must be at least 1")
        if self.layout is not None:
            expand_layout(self.layout)

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """The expression of type:REGEX. Raises ValueError where it is none."""
        kind, colon, text = self.method.removeprefix("deepspeed-").partition(":")
        if kind != "type" or not colon:
            return None
        try:
            return re.compile(text, re.IGNORECASE)
        except re.error as wrong:
            raise ValueError(f"--pipeline-split {self.method}: not a regular expression: {wrong}") from wrong

    @property
    def weighs(self) -> str | None:
        """What `ranges` needs one number of for each layer: "parameters", "seconds" or nothing."""
        return {"measured": "seconds"}.get(self.method, "parameters" if self.method.endswith("parameters") else None)

    @property
    def _has_ends(self) -> bool:
        return self.first is not None or self.last is not None

    def ranges(
        self, names: Sequence[str], costs: Sequence[float], homes: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> list[range]:
        """The slice of each stage; together they are the whole list.

        names, costs  of the layers; a cost of 0 says that the layer is negligible
        homes         the rank of each stage
        weights       of the layers, as `weighs` asks

        Raises ValueError where a stage would get no layer that counts (a layout may leave one empty).
        """
        stages = len(homes)
        if self.layout is not None:
            return _by_layout(self.layout, costs, stages)
        if self._has_ends:
            return _by_count(costs, self._counts(sum(cost > 0 for cost in costs), homes))
        if self.weighs is not None:
            assert weights is not None and len(weights) == len(costs), f"--pipeline-split {self.method} needs weights"
        elif self.pattern is not None:
            weights = [float(self.pattern.search(name) is not None) for name in names]
            if not any(weights):
                kinds = dict.fromkeys(re.sub(r"\d+", "N", name) for name in names)
                raise ValueError(
                    f"--pipeline-split {self.method}: no layer's name matches; they are called {', '.join(kinds)}"
                )
        if self.method.startswith("deepspeed-"):
            self._check_fill(len(weights), stages)
            return _slices(max_min(weights, stages))
        if weights is None:
            weights = self._with_ends(costs) if self.method == "uniform" else costs
        weighty = [weight for weight in weights if weight > 0]
        self._check_fill(len(weighty), stages)
        if self.method == "uniform" or self.pattern is not None:
            return _by_count(weights, _differences(even(len(weighty), stages)))
        return _by_count(weights, _differences(balanced(weighty, stages)))

    def _check_fill(self, layers: int, stages: int) -> None:
        """Raises ValueError where so many layers that count are fewer than the stages."""
        if layers < stages:
            by = "" if self.method == "uniform" else f" by --pipeline-split {self.method}"
            raise ValueError(f"{layers} layers cannot fill {stages} pipeline stages{by} ({SIZE_FLAGS})")

    def _with_ends(self, costs: Sequence[float]) -> list[float]:
        """Costs in which what stands before and after the costly layers counts, where that is asked for."""
        before, after = _ends(costs)
        counted = list(costs)
        if self.embedding and before:
            counted[0] = 1.0
        if self.loss and after < len(costs):
            counted[after] = 1.0
        return counted

    def _counts(self, layers: int, homes: Sequence[int]) -> list[int]:
        """Costly layers of each stage where the first or last rank's are given."""
        flags = " and ".join(
            f"--decoder-{end}-pipeline-num-layers {count}"
            for end, count in (("first", self.first), ("last", self.last)) if count is not None
        )
        stages = range(len(homes))
        at_first, at_last = ([s for s in stages if homes[s] == homes[end]] for end in (0, -1))
        if homes[0] == homes[-1]:
            at_first, at_last = [0], [len(homes) - 1]
        counts: dict[int, int] = {}
        for given, where in ((self.first, at_first), (self.last, at_last)):
            if given is not None:
                if not counts.keys().isdisjoint(where):
                    raise ValueError(f"{flags}: there is only one stage (--pipeline-model-parallel-size)")
                counts |= dict(zip(where, _differences(even(given, len(where))), strict=True))
        others = [stage for stage in stages if stage not in counts]
        left = layers - sum(counts.values())
        if left < 0 or not others and left:
            raise ValueError(f"{flags}: they do not add up to the {layers} layers of the model")
        if others:
            counts |= dict(zip(others, _differences(even(left, len(others))), strict=True))
        if not all(counts.values()):
            raise ValueError(f"{flags}: stage {min(s for s in stages if not counts[s])} of {len(homes)} gets no layer")
        return [counts[stage] for stage in stages]


def even(count: int, parts: int) -> list[int]:
    """Bounds of parts that differ by at most one; the first ones take the remainder: (10, 4) -> 0 3 6 8 10."""
    share, rest = divmod(count, parts)
    return [part * share + min(part, rest) for part in range(parts + 1)]


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Bounds of contiguous, non-empty parts whose largest sum is as small as it can be.

    Of several such cuts the one with the least sum of squares is taken, then the one with larger parts first. Needs at
    least `parts` weights, all above 0. Dynamic programming over (parts, prefix).
    """
    assert len(weights) >= parts and min(weights) > 0
    total = list(accumulate(weights, initial=0))
    ends = range(len(total))
    least = [0.0, *[math.inf] * len(weights)]           # of each prefix in so many parts: the least largest sum
    for part in range(parts):
        least = [_least_maximum(least, total, end, part) for end in ends]
    limit = least[-1]
    squares = [0.0, *[math.inf] * len(weights)]
    cuts: list[list[int]] = []
    for _ in range(parts):
        squares, cut = _least_squares(squares, total, limit)
        cuts.append(cut)
    bounds = [len(weights)]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return bounds[::-1]


def _least_maximum(least: list[float], total: list[float], end: int, before: int) -> float:
    """The least largest sum of the prefix up to `end` with one part more than the `before` that `least` is of.

    The later the last part starts, the smaller it is and the larger are those before it, so the best start is found by
    halving: where the one passes the other.
    """
    low, high = before, end                             # from low on every part before has a layer
    while low < high:
        middle = (low + high) // 2
        if total[end] - total[middle] > least[middle]:
            low = middle + 1
        else:
            high = middle
    starts = range(max(low - 1, before), min(low + 1, end))
    return min((max(total[end] - total[start], least[start]) for start in starts), default=math.inf)


def _least_squares(squares: list[float], total: list[float], limit: float) -> tuple[list[float], list[int]]:
    """With one part more, none above `limit`: each prefix's least sum of squares, and where its last part starts: never
    before that of a shorter prefix (squares of sums have the quadrangle inequality; Yao, STOC 1980)."""
    best, cut = [math.inf] * len(total), [0] * len(total)
    for end in range(1, len(total)):
        for start in range(end - 1, cut[end - 1] - 1, -1):
            last = total[end] - total[start]
            if last > limit:
                break
            if squares[start] + last * last < best[end]:
                best[end], cut[end] = squares[start] + last * last, start
    return best, cut


def max_min(weights: Sequence[float], parts: int) -> list[int]:
    """Bounds by DeepSpeed's rule (deepspeed/runtime/utils.py, partition_balanced): not the smallest largest part.

    It looks for the least difference between the largest and the smallest sum, prefix by prefix, and takes the later
    cut where two are alike. Up to `parts` weights give one part each, and the rest stay empty.
    """
    count = len(weights)
    if count <= parts:
        return even(count, parts)
    total = list(accumulate(weights, initial=0.0))
    states: list[tuple[float, float] | None] = [(0.0, math.inf), *[None] * count]     # (largest, smallest) of a prefix
    cuts: list[list[int]] = []
    for _ in range(parts):
        after, cut = [None] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            found = math.inf
            for start in range(end):
                if (state := states[start]) is not None:
                    part = total[end] - total[start]
                    largest, smallest = max(state[0], part), min(state[1], part)
                    if largest - smallest <= found:
                        found, after[end], cut[end] = largest - smallest, (largest, smallest), start
        states = after
        cuts.append(cut)
    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return bounds[::-1]


def _ends(costs: Sequence[float]) -> tuple[int, int]:
    """How many layers stand before the first costly one, and the place after the last costly one."""
    costly = [i for i, cost in enumerate(costs) if cost > 0]
    if not costly:
        raise ValueError("no layer of the model has a cost, so there is nothing to cut a pipeline by")
    return costly[0], costly[-1] + 1


def _slices(bounds: Sequence[int]) -> list[range]:
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _differences(bounds: Sequence[int]) -> list[int]:
    return [len(part) for part in _slices(bounds)]


def _by_count(weights: Sequence[float], counts: Sequence[int]) -> list[range]:
    """Slices with so many weighty layers each; the others go with the weighty layer before them, or with the first."""
    weighty = [i for i, weight in enumerate(weights) if weight > 0]
    firsts = accumulate(counts[:-1])
    return _slices([0, *(weighty[i] for i in firsts), len(weights)])


def _by_layout(text: str, costs: Sequence[float], stages: int) -> list[range]:
    """Slices as the letters say: E what stands before the costly layers, t a costly layer, L what stands after them."""
    flag = f'--pipeline-model-parallel-layout "{text}"'
    letters = expand_layout(text)
    before, after = _ends(costs)
    starts = [i for i, cost in enumerate(costs) if cost > 0 and i > before]
    wanted = "E" * (before > 0) + "t" * (len(starts) + 1) + "L" * (after < len(costs))
    if len(letters) != stages:
        raise ValueError(f"{flag}: it has {len(letters)} stages, but there are {stages} ({SIZE_FLAGS})")
    if (given := "".join(letters)) != wanted:
        raise ValueError(f"{flag}: the layers must be {_brief(wanted)}, in this order, not {_brief(given)}")
    if not letters[0] or not letters[-1]:
        raise ValueError(f"{flag}: the first and the last stage cannot be empty")
    # Where the layers of each letter begin.
    places = [0] * (before > 0) + [before, *starts] + [after] * (after < len(costs)) + [len(costs)]
    return _slices([places[i] for i in accumulate(map(len, letters), initial=0)])


def _brief(letters: str) -> str:
    """EttttL as "E t*4 L"."""
    runs = re.findall(r"E+|t+|L+", letters)
    return " ".join(run if len(run) == 1 else f"{run[0]}*{len(run)}" for run in runs) or "none"
