"""Reducer: sums gradients over the data ranks, bucket by bucket, while the backward still runs.

The program, not a hook, says that a gradient is complete. Before a stage's last backward its parameters are armed;
what hooks and the weight queue report from then on only lets a bucket start earlier. `finish` makes certain: a
gradient that never comes is zero and not a hang. Buckets start in one fixed order on all ranks, never in order of
arrival, so ranks whose graphs differ cannot wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .buckets import Bucket, place_of
from .collectives import Pending, start_all_reduce, start_reduce_scatter
from .weights import WeightQueue


class Reducer:
    """Owns the flat gradients of buckets between a step's first backward and its update.

    overlap     whether buckets may start before `finish`
    every       whether a stage is reduced after each of its backwards (ZeRO stage 2), and not after the last alone
    wire_dtype  in which gradients travel; None: as they are kept
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, overlap: bool = False, every: bool = False,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.buckets, self.overlap, self.every, self.wire_dtype = list(buckets), overlap, every, wire_dtype
        self.early = 0                                      # buckets that started before `finish`, in all
        self.started = 0
        self._place = place_of(buckets)
        self._pending: dict[int, Pending] = {}              # bucket number -> its reduction under way
        self._shards: dict[int, Tensor] = {}                # bucket number -> this rank's summed slice
        self._number = {id(bucket): number for number, bucket in enumerate(self.buckets)}
        self._usual: Counter[nn.Parameter] = Counter()      # the most reports of a parameter in one backward so far
        self._armed: int | None = None
        self._reports: Counter[nn.Parameter] = Counter()
        self._incomplete: dict[int, int] = {}               # bucket number -> parameters that are still awaited
        self._queue: list[int] = []                         # buckets of the armed stage that have not started, in order
        self._finished: dict[int, set[int]] = {}            # bucket number -> stages that are done with it
        self.queues: Sequence[WeightQueue] = ()             # of this rank's stages
        # Where several stages of this rank use a bucket, what the first one's queue adds and what the others' add are
        # summed apart, as on ranks of their own: so both are rounded alike under every schedule. Stage 2 holds no
        # buffer before the step needs it.
        self._shared = {number for number, bucket in enumerate(self.buckets) if len(bucket.homes) > 1}
        self._beside = {number: self._zeros(number) for number in self._shared if not every}
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def gradient(self, parameter: nn.Parameter, stage: int | None = None) -> Tensor:
        """Where the gradient of a parameter is added up, by a stage (None: by any)."""
        if not self.every and not self._shared:
            return parameter.grad                           # always the view of its bucket
        bucket, place = self._place[parameter]
        number = self._number[id(bucket)]
        if number in self._shared and stage not in (None, bucket.homes[0]):
            if number not in self._beside:
                self._beside[number] = self._zeros(number)
            return bucket.view(place, self._beside[number])
        if self.every:
            self._absorb(number)                            # the buffer may still be read by a reduction
        return bucket.gradient(place)

    def _zeros(self, number: int) -> Tensor:
        """A second gradient of a bucket."""
        bucket = self.buckets[number]
        return torch.zeros(bucket.params.numel(), dtype=bucket.weight.dtype, device=bucket.params.device)

    @property
    def bytes_beside(self) -> int:
        """Bytes of gradients that are held beside those of the buckets."""
        return sum(grads.nbytes for grads in self._beside.values())

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Autograd has added to `.grad`. At stage 2 that is a tensor of its own, which goes into the flat buffer: with
        the weight gradients of its micro-batch where these are put off, for what is reduced together is rounded
        together.

        The hook also fires for a weight whose gradient the queue adds, after a backward that gave autograd none.
        """
        if not self.every or parameter.grad is None:
            self.arrived(parameter)
            return
        grad, parameter.grad = parameter.grad, None
        queue = next((queue for queue in self.queues if queue.is_deferring), None)
        if queue is None:
            self._add(parameter, grad)
        else:
            queue.put(partial(self._add, parameter, grad))

    def _add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        self.gradient(parameter).add_(grad)
        self.arrived(parameter)

    def arm(self, stage: int) -> None:
        """The last backward of `stage` (at stage 2 of ZeRO: the next one) begins."""
        self._armed, self._reports = stage, Counter()
        self._queue = self._own(stage)
        self._incomplete = {n: len(self.buckets[n].infos) for n in self._queue}

    def _own(self, stage: int) -> list[int]:
        """The buckets that a backward of `stage` alone completes. At stage 2 one that other pipeline ranks share is not
        among them: waiting for those between micro-batches would stop the pipeline, so it is reduced at the end."""
        own = [n for n, bucket in enumerate(self.buckets) if bucket.homes == (stage,)]
        return [n for n in own if self.buckets[n].axis != "tied_data"] if self.every else own

    def arrived(self, parameter: nn.Parameter) -> None:
        """One use of `parameter` has added its gradient."""
        bucket, _ = self._place[parameter]
        if self._armed is None or bucket.homes != (self._armed,):
            return
        number = self._number[id(bucket)]
        if not self.overlap or number not in self._incomplete:
            return
        assert number in self._queue, "a gradient came after its bucket was reduced"
        self._reports[parameter] += 1
        if self._reports[parameter] == self._usual[parameter]:
            self._incomplete[number] -= 1
            while self._queue and not self._incomplete[self._queue[0]]:
                self.early += 1
                self._start(self._queue.pop(0))

    def reduce(self, stage: int) -> None:
        """The armed backward of `stage` has ended: what has not started starts now, in order."""
        assert self._armed == stage
        self._usual |= self._reports
        for number in self._queue:
            self._start(number)
        self._armed, self._queue = None, []

    def finish(self, stage: int) -> None:
        """All gradients of `stage` are complete, also those that it shares with others."""
        if self._armed == stage:
            self.reduce(stage)
        for number, bucket in enumerate(self.buckets):
            if stage in bucket.homes and number not in self._own(stage):
                done = self._finished.setdefault(number, set())
                done.add(stage)
                if done == set(bucket.homes):
                    done.clear()
                    self._start(number)

    def owned(self) -> list[Tensor]:
        """This rank's slice of every bucket's gradient, summed over the data axis; waits for what is under way."""
        for number, bucket in enumerate(self.buckets):
            is_fresh = number not in self._shards or (self.every and bucket.grads is not None)
            if is_fresh and number not in self._pending:
                self._start(number)
        for number in range(len(self.buckets)):
            self._absorb(number)
        return [self._shards[number] for number in range(len(self.buckets))]

    def clear(self) -> None:
        """Forget the gradients of the step."""
        self._shards.clear()
        for bucket in self.buckets:
            if bucket.grads is not None:
                bucket.grads.zero_()

    def abandon(self) -> None:
        """Forget what a step has added up that is not finished. All ranks are between the same micro-batches."""
        for number in list(self._pending):
            self._absorb(number)
        for number in list(self._beside):
            self._forget_beside(number)
        self._armed, self._queue = None, []
        self._finished.clear()
        self.clear()
        for bucket in self.buckets if self.every else ():
            bucket.grads = None

    def _start(self, number: int) -> None:
        bucket = self.buckets[number]
        self._absorb(number)
        self.started += 1
        if not self.every:
            bucket.check_views()
        bucket.gradient(0)                                  # a gradient that never came is zero
        if number in self._beside:
            bucket.grads += self._beside[number]
            self._forget_beside(number)
        grads = bucket.grads if self.wire_dtype is None else bucket.grads.to(self.wire_dtype)
        if bucket.owners.size == bucket.copies.size:        # into its own place, unless the buffer is given up
            self._pending[number] = start_reduce_scatter(
                grads, bucket.owners, None if self.every else grads[bucket.slice]
            )
        else:
            self._pending[number] = start_all_reduce(grads, bucket.copies)

    def _forget_beside(self, number: int) -> None:
        if self.every:
            del self._beside[number]
        else:
            self._beside[number].zero_()

    def _absorb(self, number: int) -> None:
        """Wait for a bucket's reduction, if one is under way, and keep its result."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        bucket, result = self.buckets[number], pending.wait()
        if not self.every:
            mine = bucket.grads[bucket.slice]
            self._shards[number] = mine if result.dtype == mine.dtype else mine.copy_(result)
            return
        result = result.to(bucket.weight.dtype)
        if number in self._shards:
            self._shards[number] += result
        else:
            self._shards[number] = result.clone() if result.data_ptr() == bucket.grads.data_ptr() else result
        bucket.grads = None
