"""The training loop, on parts that it is given: read a global batch, run the pipeline, update, tell, save.

Nothing here knows what a model is, how ranks lie or how numbers are cut: the assembly is in pretrain_gpt.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch_sizes import BatchSizes
from .config import BatchConfig
from .data.batch import MicroBatch
from .data.loader import Loader, counted_tokens
from .lr_schedule import Schedule
from .machine import Machine
from .metrics import Metrics
from .parallel.collectives import AgreedError, all_reduce, broadcast
from .parallel.groups import Mesh


@dataclass(frozen=True)
class Progress:
    """How far a run is: what a checkpoint says of it."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0


@dataclass(frozen=True)
class Feed:
    """One part of the data as this rank takes it. Middle stages read nothing: they need only the roots of draws."""

    loader: Loader
    mesh: Mesh
    reads: bool                 # whether this rank's stages look at tokens, labels or masks

    @property
    def sizes(self) -> BatchSizes:
        """Samples of a global batch."""
        return self.loader.share.sizes

    def global_batch(self, consumed_samples: int, iteration: int | None) -> list[MicroBatch]:
        """This rank's micro-batches, on its device."""
        if self.reads:
            return [b.to(self.mesh.device) for b in self.loader.global_batch(consumed_samples, iteration)]
        share, nothing = self.loader.share, torch.empty(0, 0, dtype=torch.int64)
        roots = [share.number(m) for m in range(share.micro_batches(consumed_samples))]
        draws = [None if iteration is None else (self.loader.seed, iteration, root) for root in roots]
        return [MicroBatch(nothing, draw=draw) for draw in draws]

    def example(self) -> MicroBatch:
        """A micro-batch to try layers with, whether this rank reads or not."""
        return self.loader.global_batch(0)[0].to(self.mesh.device)

    def counted_tokens(self, batches: Sequence[MicroBatch]) -> int:
        """Tokens that count in the loss of the whole global batch; equal on all data ranks of a stage that reads."""
        count = torch.tensor(float(counted_tokens(batches)), dtype=torch.float64, device=self.mesh.device)
        return int(all_reduce(count, self.mesh.data).item())


@dataclass(frozen=True)
class _Step:
    """One finished step whose numbers may still be on their way from the device."""

    progress: Progress
    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    seconds: float
    tokens: int


class Trainer:
    """Trains from any progress to a number of iterations, evaluating and saving on the way.

    `feeds` has "train", and where there is data for them "valid", named validation sets, and "test" at last.
    """

    def __init__(
        self, machine: Machine, feeds: Mapping[str, Feed], schedule: Schedule, *,
        batch: BatchConfig, seq_length: int, metrics: Metrics, save: Callable[[Progress], None],
    ) -> None:
        self.machine, self.feeds, self.schedule = machine, feeds, schedule
        self.batch, self.seq_length, self.metrics, self.save = batch, seq_length, metrics, save
        self._unread: _Step | None = None

    def train(self, progress: Progress, iterations: int, save_interval: int | None) -> Progress:
        """Run to iteration `iterations`, or to an exit condition, with a save at the end where any are asked for.

        Raises AgreedError where the loss or the gradient is no longer a finite number; nothing is saved then.
        """
        started = time.monotonic()
        leaving = False
        while progress.iteration < iterations and not leaving:
            progress = self._step(progress)
            done = progress.iteration
            leaving = self._is_time_to_leave(done, started)
            if self._is_due(self.batch.eval_interval, done) and done < iterations and not leaving:
                for part in self.feeds:
                    if part not in ("train", "test"):
                        self.evaluate(part, progress)
            if save_interval and (self._is_due(save_interval, done) or leaving or done == iterations):
                self._read()
                self.save(progress)
        self._read()
        if leaving:
            self.metrics.say(f"left after iteration {progress.iteration}, as asked")
        elif self.batch.eval_interval:
            for part in self.feeds:
                if part != "train":
                    self.evaluate(part, progress)
        return progress

    def _step(self, progress: Progress) -> Progress:
        """One optimizer step. Its numbers are read a step later, so that a device never waits for the log."""
        start = time.monotonic()
        feed, machine, iteration = self.feeds["train"], self.machine, progress.iteration + 1
        size = feed.sizes.at(progress.consumed_samples)
        batches = feed.global_batch(progress.consumed_samples, iteration)
        scale = 1.0 / max(feed.counted_tokens(batches), 1)
        loss = machine.loss([replace(b, scale=scale) for b in batches], machine.train_program(len(batches)))
        learning_rate, weight_decay = self.schedule.at(progress.consumed_samples)
        grad_norm = machine.optimizer.step(learning_rate, weight_decay)
        tokens = size * self.seq_length
        progress = Progress(iteration, progress.consumed_samples + size, progress.consumed_tokens + tokens)
        self._read()
        self._unread = _Step(progress, loss, grad_norm, learning_rate, time.monotonic() - start, tokens)
        return progress

    def _read(self) -> None:
        """Bring the last step's numbers to the host, check and tell them."""
        step, self._unread = self._unread, None
        if step is None:
            return
        loss, grad_norm = step.loss.item(), step.grad_norm.item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise AgreedError(
                f"iteration {step.progress.iteration}: loss {loss}, gradient norm {grad_norm}: not finite, so training "
                "stops here without saving; the last checkpoint is good"
            )
        self.metrics.train(
            {
                "iteration": step.progress.iteration,
                "consumed_samples": step.progress.consumed_samples,
                "consumed_tokens": step.progress.consumed_tokens,
                "lm_loss": loss,
                "grad_norm": grad_norm,
                "learning_rate": step.learning_rate,
                "loss_scale": 1.0,
                "skipped": 0,
                "seconds": step.seconds,
                "tokens_per_second": step.tokens / step.seconds,
            }
        )

    def evaluate(self, part: str, progress: Progress) -> float | None:
        """Token-mean loss over the first --eval-iters global batches of a part; None where it has no data."""
        self._read()
        feed = self.feeds.get(part)
        if feed is None or self.batch.eval_iters == 0:
            return None
        machine = self.machine
        total = torch.zeros((), dtype=torch.float64, device=machine.mesh.device)
        tokens = 0
        for number in range(self.batch.eval_iters):
            batches = feed.global_batch(number * feed.sizes.last, None)
            tokens += feed.counted_tokens(batches)
            total += machine.loss(batches, machine.evaluate_program(len(batches)))
        count = broadcast(
            torch.tensor(float(tokens), dtype=torch.float64, device=machine.mesh.device),
            machine.mesh.pipeline, machine.last,
        )
        loss = (total / count.clamp(min=1.0)).item()
        self.metrics.evaluation(part, progress.iteration, loss)
        return loss

    def _is_due(self, interval: int | None, iteration: int) -> bool:
        return interval is not None and iteration % interval == 0

    def _is_time_to_leave(self, iteration: int, started: float) -> bool:
        """--exit-interval, or --exit-duration-in-mins on any rank's clock."""
        if self._is_due(self.batch.exit_interval, iteration):
            return True
        limit = self.batch.exit_duration_in_mins
        if limit is None:
            return False
        late = torch.tensor(float(time.monotonic() - started >= 60 * limit), device=self.machine.mesh.device)
        return bool(all_reduce(late, self.machine.mesh.world, "max").item())
