"""The training loop, on parts that it is given: read a global batch, run the pipeline, update, tell, save.

Nothing here knows what a model is, how ranks lie or how numbers are cut: the assembly is in pretrain_gpt.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .batch_sizes import BatchSizes
from .config import BatchConfig, LoggingConfig
from .config_operations import OperationsConfig
from .data.batch import KD_LOSS, MicroBatch
from .data.loader import Loader, counted_tokens
from .faults import Fault, find
from .lr_curves import Done
from .lr_schedule import Schedule
from .machine import Machine
from .metrics import Metrics
from .moe.students import TAUGHT
from .parallel.collectives import AgreedError, all_reduce, gather_objects
from .parallel.groups import Mesh
from .parallel.replicas import first_difference
from .parallel.watch import OTHER, Recording
from .parallel.zero import Rates, Update
from .spikes import SpikeRule
from .stopping import Stopped
from .summary import peak_memory
from .watching import StepWatch


@dataclass(frozen=True)
class Progress:
    """How far a run is: what a checkpoint says of it."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped: int = 0                # of the iterations, how many made no update for overflow
    skipped_samples: int = 0
    skipped_tokens: int = 0
    earlier: int = 0                # updates before the iterations were counted from 0 again
    bad: int = 0                    # of the skipped, how many for numbers that were bad, and not for overflow
    bad_in_a_row: int = 0
    losses: tuple[float, ...] = ()  # the last ones, where spikes are skipped

    @property
    def done(self) -> Done:
        """What schedules count: steps that made an update."""
        return Done(
            self.earlier + self.iteration - self.skipped, self.consumed_samples - self.skipped_samples,
            self.consumed_tokens - self.skipped_tokens,
        )

    def recounted(self) -> Progress:
        """The same, but that iterations are counted from 0 again."""
        return replace(self, iteration=0, skipped=0, bad=0, earlier=self.done.updates)


@dataclass(frozen=True)
class Schedules:
    """The rates of the whole model, and those of embeddings and head where they have their own."""

    body: Schedule
    tables: Schedule | None = None

    def at(self, done: Done) -> Rates:
        """What the step after `done` updates with."""
        rates = self.body.at(done)
        tables = None if self.tables is None else self.tables.at(done).learning_rate
        return Rates(rates.learning_rate, rates.weight_decay, tables, rates.momentum)


@dataclass(frozen=True)
class Feed:
    """One part of the data as this rank takes it. Middle stages read nothing: they need only the roots of draws."""

    loader: Loader
    mesh: Mesh
    reads: bool                 # whether this rank's stages look at tokens, labels or masks
    counting: int               # the place along the pipeline where the loss is, whose ranks count its tokens

    @property
    def sizes(self) -> BatchSizes:
        """Samples of a global batch."""
        return self.loader.share.sizes

    def global_batch(
        self, consumed_samples: int, iteration: int | None, *, stop: bool = False
    ) -> tuple[list[MicroBatch], int]:
        """This rank's micro-batches, on its device, and how many tokens of the whole global batch count in the loss.

        Raises AgreedError on all ranks where the data of any is at fault, and Stopped where any is to `stop`.
        """
        batches, wrong = [], None
        try:
            batches = self._micro_batches(consumed_samples, iteration)
        except (ValueError, OSError) as error:
            wrong = error
        world, counts = self.mesh.world, self.mesh.stage == self.counting and self.mesh.tensor.index == 0
        told = torch.tensor(
            [float(counted_tokens(batches)) if counts else 0.0, float(wrong is not None), float(stop)],
            dtype=torch.float64, device=self.mesh.device,
        )
        tokens, faults, stops = all_reduce(told, world).tolist()
        if faults:
            told = enumerate(gather_objects(None if wrong is None else str(wrong), world))
            rank, first = next((rank, line) for rank, line in told if line)
            raise AgreedError(f"{first} (rank {rank} of {world.size})" if world.size > 1 else first)
        if stops:
            raise Stopped
        return batches, int(tokens)

    def _micro_batches(self, consumed_samples: int, iteration: int | None) -> list[MicroBatch]:
        if self.reads:
            return [b.to(self.mesh.device) for b in self.loader.global_batch(consumed_samples, iteration)]
        share, nothing = self.loader.share, torch.empty(self.loader.seq_length(iteration), 0, dtype=torch.int64)
        roots = [share.number(m) for m in range(share.micro_batches(consumed_samples))]
        draws = [None if iteration is None else (self.loader.seed, iteration, root) for root in roots]
        return [MicroBatch(nothing, draw=draw) for draw in draws]

    def example(self) -> MicroBatch:
        """A micro-batch to try layers with, whether this rank reads or not."""
        return self.loader.global_batch(0)[0].to(self.mesh.device)


@dataclass(frozen=True)
class Asked:
    """How to train, in the sections of the configuration that say it.

    patience  steps skipped in a row, for numbers that are bad, that end the run; 0: no number does
    """

    batch: BatchConfig
    logging: LoggingConfig = LoggingConfig()
    operations: OperationsConfig = OperationsConfig()
    patience: int = 0


class Saver(Protocol):
    """Saves the state of a run, perhaps beside the training."""

    def save(self, progress: Progress) -> object:
        """Save what the state is now."""

    def poll(self) -> None:
        """Called after every step: go on with a save that is under way, and raise AgreedError where it failed."""

    def finish(self) -> None:
        """Wait for a save that is under way."""


@dataclass(frozen=True)
class _Step:
    """One finished step whose numbers may still be on their way from the device."""

    progress: Progress
    loss: Tensor
    update: Update
    extra: Mapping[str, Tensor]     # figures that are measured on request
    learning_rate: float
    loss_scale: float
    seconds: float
    tokens: int
    reports: Mapping[str, Tensor]
    micro_batches: int
    watched: Recording | None       # where its time went


class Trainer:
    """Trains from any progress to a number of iterations, evaluating and saving on the way.

    `feeds` has "train", and where there is data for them "valid", named validation sets, and "test" at last.
    """

    def __init__(
        self, machine: Machine, feeds: Mapping[str, Feed], schedules: Schedules, *,
        asked: Asked, watching: StepWatch, metrics: Metrics, saver: Saver,
    ) -> None:
        self.machine, self.feeds, self.schedules, self.asked = machine, feeds, schedules, asked
        self.batch, self.logging, self.metrics, self.saver = asked.batch, asked.logging, metrics, saver
        self.watching = watching
        self.spikes = SpikeRule(asked.operations.spike_threshold, asked.operations.spike_window)
        self._losses: tuple[float, ...] = ()                # the last ones, to compare the next with
        self.around: Callable[[int], AbstractContextManager] = nullcontext   # of the step of an iteration
        self._last = 0                                      # iteration after which training ends
        self._late = math.inf                               # when the time is up (--exit-duration-in-mins)
        self._unread: _Step | None = None

    def train(self, progress: Progress, iterations: int, save_interval: int | None) -> Progress:
        """Run to iteration `iterations`, or to where it is asked to stop, with a save at the end where any are asked
        for.

        Raises AgreedError where the loss or the gradient is no longer a finite number; nothing is saved then.
        """
        started, start, saved, reason, self._last = time.monotonic(), progress, progress.iteration, None, iterations
        for line in self.watching.starts(progress.iteration, iterations):
            self.metrics.say(line)
        limit = self.batch.exit_duration_in_mins
        try:
            while progress.iteration < iterations and reason is None:
                is_first = progress is start
                with self.around(progress.iteration + 1):
                    progress = self._step(progress)
                if is_first:
                    self.metrics.say(peak_memory(self.machine.mesh))
                self._late = math.inf if limit is None else started + 60 * limit
                self.saver.poll()
                done = progress.iteration
                if self._is_due(self.asked.operations.check_replicas, done):
                    self._check_replicas(done)
                if self._is_due(self.batch.exit_interval, done) and done < iterations:
                    reason = "--exit-interval"
                elif self._is_due(self.batch.eval_interval, done) and done < iterations:
                    for part in self.feeds:
                        if part not in ("train", "test"):
                            self.evaluate(part, progress)
                if save_interval and (self._is_due(save_interval, done) or reason or done == iterations):
                    self._read()
                    self._save(progress)
                    saved = done
            self._read()
            if self.batch.eval_interval and reason is None:
                self.evaluate_all(progress)
        except AgreedError:
            self._read()                                    # the step before was made
            raise
        except Stopped:
            self._read()
            reason = self._reason()
            if save_interval and progress.iteration != saved:
                self._save(progress)
        if reason is not None:
            self.metrics.say(f"left after iteration {progress.iteration}, as asked: {reason}")
        self.saver.finish()
        return progress

    def _reason(self) -> str:
        """Why the run stops, in the words of the first rank that knows."""
        own = self.machine.engine.stop.reason or ("--exit-duration-in-mins" if self._is_asked_to_stop() else None)
        return next(told for told in gather_objects(own, self.machine.mesh.world) if told is not None)

    def _save(self, progress: Progress) -> None:
        begun = time.monotonic()
        self.saver.save(progress)
        self.metrics.took("checkpoint", progress.iteration, time.monotonic() - begun)

    def evaluate_all(self, progress: Progress) -> None:
        """Every part of the data that is not trained on."""
        for part in self.feeds:
            if part != "train":
                self.evaluate(part, progress)

    def _step(self, progress: Progress) -> Progress:
        """One optimizer step. Its numbers are read a step later, so that a device never waits for the log."""
        start = time.monotonic()
        feed, machine, iteration = self.feeds["train"], self.machine, progress.iteration + 1
        self.watching.begin(iteration)
        self.watching.enter("data")
        size, seq_length = feed.sizes.at(progress.consumed_samples), feed.loader.seq_length(iteration)
        machine.engine.stop.enter(iteration)
        machine.mesh.activity.enter(f"iteration {iteration}")
        batches, counted = feed.global_batch(progress.consumed_samples, iteration, stop=self._is_asked_to_stop())
        loss_scale = machine.optimizer.loss_scale
        micro_batches = len(batches) * machine.mesh.data.size
        batches = [
            replace(b, scale=loss_scale / max(counted, 1), auxiliary=loss_scale / micro_batches) for b in batches
        ]
        self.watching.enter(OTHER)
        loss, is_taught = self._loss(batches, progress)
        self.watching.enter("optimizer")
        loss = loss / loss_scale
        rates, reports = self.schedules.at(progress.done), machine.reports()
        update, extra = self._update(
            rates, self._veto(loss, progress), measured=self.logging.shows(iteration, self._last)
        )
        if is_taught:
            extra[KD_LOSS] = reports[KD_LOSS] / loss_scale
        if feed.loader.is_growing:
            extra["seq_length"] = torch.tensor(seq_length)
        tokens = size * seq_length
        progress = replace(
            progress, iteration=iteration, consumed_samples=progress.consumed_samples + size,
            consumed_tokens=progress.consumed_tokens + tokens,
        )
        if not update.skipped:
            machine.optimizer.move(reports)
            progress = self._made(progress, loss)
        else:
            if machine.optimizer.scale is not None and not update.norm.isfinite():
                self._say_overflow(progress, update)
            else:
                progress = self._pass_over(progress, loss, update, partial(
                    find, machine, batches, machine.train_program(len(batches)), self._key(batches, is_taught)
                ))
            progress = replace(
                progress, skipped=progress.skipped + 1, skipped_samples=progress.skipped_samples + size,
                skipped_tokens=progress.skipped_tokens + tokens,
            )
        self.watching.enter(OTHER)
        self._read()
        self._unread = _Step(
            progress, loss, update, extra, rates.learning_rate, loss_scale, time.monotonic() - start, tokens, reports,
            micro_batches, self.watching.end(),
        )
        return progress

    def _loss(self, batches: list[MicroBatch], progress: Progress) -> tuple[Tensor, bool]:
        """Forwards and backwards of the step after `progress`: the scaled LM loss, and whether there was a teacher, who
        goes when the time is over."""
        machine, distillation = self.machine, self.machine.distillation
        program = machine.train_program(len(batches))
        if distillation is not None and distillation.is_on:
            if distillation.config.teaches(progress.iteration, progress.consumed_tokens):
                return machine.loss(batches, program, key=self._key(batches, True)), True
            self._read()
            distillation.end()
            self.metrics.say(f"distillation ended after iteration {progress.iteration}, and the teacher is freed")
        return machine.loss(batches, program, key=self._key(batches, False)), False

    def _key(self, batches: list[MicroBatch], is_taught: bool) -> Hashable:
        """What the shapes of hidden states depend on."""
        length = len(batches[0].tokens)
        return (TAUGHT, length) if is_taught else length

    def _update(self, rates: Rates, veto: Tensor | None, *, measured: bool) -> tuple[Update, dict[str, Tensor]]:
        """The optimizer's step, and on steps that are shown the figures that were asked for."""
        optimizer, extra = self.machine.optimizer, {}
        if measured and self.logging.log_num_zeros_in_grad:
            extra["num_zeros"] = optimizer.zero_count()
        update = optimizer.step(rates, veto)
        if measured and self.logging.log_params_norm:
            extra["params_norm"] = optimizer.parameter_norm()
        if measured and self.logging.log_optimizer_states_to_tensorboard:
            extra["exp_avg_norm"], extra["exp_avg_sq_norm"] = optimizer.moment_norms()
        return update, extra

    def _veto(self, loss: Tensor, progress: Progress) -> Tensor | None:
        """Whether the step is not to be made for its loss, bool scalar; None: nobody asks for that."""
        asked = self.asked.operations
        if not asked.check_for_nan_in_loss_and_grad:
            return None
        veto = ~loss.isfinite()
        if asked.spike_action == "skip" and self.spikes.describes(progress.losses, loss.item()) is not None:
            veto = torch.ones_like(veto)
        return veto

    def _made(self, progress: Progress, loss: Tensor) -> Progress:
        """After a step that made its update."""
        if self.asked.operations.spike_action == "skip":
            progress = replace(progress, losses=self.spikes.keep(progress.losses, loss.item()))
        return replace(progress, bad_in_a_row=0)

    def _pass_over(
        self, progress: Progress, loss: Tensor, update: Update, look: Callable[[], Fault | None]
    ) -> Progress:
        """A step made no update for numbers that are bad: say which, where they began, and stop or count it."""
        self._read()
        value, norm, asked = loss.item(), update.norm.item(), self.asked.operations
        if math.isfinite(value) and math.isfinite(norm):
            action, what = asked.spike_action, self.spikes.describes(progress.losses, value)
        else:
            fault = look()
            where = f"first in {fault}" if fault is not None else (
                f"first in the gradient of {update.first}, but not when the step is run again, which points to the "
                "hardware"
            )
            action, what = asked.nonfinite_action, f"loss {value}, gradient norm {norm}: not finite, {where}"
        row = progress.bad_in_a_row + 1
        if action == "stop":
            raise AgreedError(
                f"iteration {progress.iteration}: {what}: training stops here without saving; the last checkpoint is "
                "good"
            )
        if self.asked.patience and row >= self.asked.patience:
            raise AgreedError(
                f"iteration {progress.iteration}: {what}: {row} steps in a row were skipped, and so many end the run "
                "(--max-consecutive-skips)"
            )
        self.metrics.say(
            f"iteration {progress.iteration} skipped: {what}; {progress.bad + 1} steps were skipped for such numbers"
        )
        return replace(progress, bad=progress.bad + 1, bad_in_a_row=row)

    def _check_replicas(self, iteration: int) -> None:
        """Raises AgreedError where ranks that should hold the same do not."""
        differing = first_difference(self.machine.optimizer, self.machine.mesh)
        if differing is not None:
            raise AgreedError(
                f"iteration {iteration}: replicas are no longer alike: {differing} (--check-replicas): training stops "
                "here without saving"
            )

    def _say_overflow(self, progress: Progress, update: Update) -> None:
        """A step made no update for overflow: say so, and stop where that goes on for too long."""
        optimizer = self.machine.optimizer
        reason = optimizer.zero.scaler.reason_to_stop(optimizer.scale, str(update.first))
        if reason is not None:
            raise AgreedError(f"iteration {progress.iteration}: {reason}")
        self.metrics.say(
            f"iteration {progress.iteration} skipped: the gradient of {update.first} overflows; "
            f"the loss scale is {optimizer.loss_scale:g} now, {optimizer.scale.skipped} steps were skipped in all"
        )

    def _read(self) -> None:
        """Bring the last step's numbers to the host, check and tell them."""
        step, self._unread = self._unread, None
        if step is None:
            return
        loss, grad_norm = step.loss.item(), step.update.norm.item()
        if not step.update.skipped and not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise AgreedError(
                f"iteration {step.progress.iteration}: loss {loss}, gradient norm {grad_norm}: not finite, so training "
                "stops here without saving; the last checkpoint is good"
            )
        if not step.update.skipped:
            self._judge(step.progress.iteration, loss)
        watched, lines = self.watching.figures(step.progress.iteration, step.watched)
        self.metrics.train(
            {
                "iteration": step.progress.iteration,
                "consumed_samples": step.progress.consumed_samples,
                "consumed_tokens": step.progress.consumed_tokens,
                "lm_loss": loss,
                "grad_norm": grad_norm,
                "clipped": int(step.update.clipped.item() and not step.update.skipped),
                "learning_rate": step.learning_rate,
                "loss_scale": step.loss_scale,
                "skipped": int(step.update.skipped),
                "seconds": step.seconds,
                "tokens_per_second": step.tokens / step.seconds,
                **{name: figure.item() for name, figure in step.extra.items()},
            }
            | self.machine.figures(step.reports, step.micro_batches) | watched
        )
        for line in lines:
            self.metrics.say(line)

    def _judge(self, iteration: int, loss: float) -> None:
        """Speak of a loss that jumps, or raise AgreedError, before anything is saved."""
        action = self.asked.operations.spike_action
        if action not in ("warn", "stop"):
            return
        spike = self.spikes.describes(self._losses, loss)
        if spike is not None and action == "stop":
            raise AgreedError(f"iteration {iteration}: {spike}: training stops here without saving (--spike-action)")
        if spike is not None:
            self.metrics.say(f"warning: iteration {iteration}: {spike}")
        self._losses = self.spikes.keep(self._losses, loss)

    def evaluate(self, part: str, progress: Progress) -> float | None:
        """Token-mean loss over the first --eval-iters global batches of a part; None where it has no data. Its batches
        and micro-batches have sizes of their own."""
        self._read()
        feed = self.feeds.get(part)
        if feed is None or self.batch.eval_iters == 0:
            return None
        machine, begun = self.machine, time.monotonic()
        machine.mesh.activity.enter(f"evaluation of {part}")
        total = torch.zeros((), dtype=torch.float64, device=machine.mesh.device)
        tokens = 0
        for number in range(self.batch.eval_iters):
            batches, counted = feed.global_batch(number * feed.sizes.last, None, stop=self._is_asked_to_stop())
            tokens += counted
            total += machine.loss(batches, machine.evaluate_program(len(batches)))
        loss = (total / max(tokens, 1)).item()
        self.metrics.evaluation(part, progress.iteration, loss)
        self.metrics.took("evaluation", progress.iteration, time.monotonic() - begun)
        return loss

    def _is_due(self, interval: int | None, iteration: int) -> bool:
        return interval is not None and iteration % interval == 0

    def _is_asked_to_stop(self) -> bool:
        """Whether this rank would stop at the next step or batch of an evaluation, where all ranks agree on it."""
        return self.machine.engine.stop.reason is not None or time.monotonic() >= self._late
