"""What a run tells of itself, from rank 0: a line per log interval, TensorBoard events, one JSON object per iteration.

Every figure is defined without reference to the layout, but for TFLOP/s, which is per rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .config import LoggingConfig
from .config_watching import WatchingConfig
from .flops import Flops
from .screen import Screen

Record = Mapping[str, float]

# One training iteration, as --metrics-jsonl writes it. lm_loss: mean over the unmasked tokens of the global batch;
# grad_norm: L2 norm of the whole gradient before clipping, clipped: 1 where that was above --clip-grad;
# learning_rate: what this iteration updated with; seconds: wall time of the iteration; skipped: 1 where it made no
# update.
TRAIN_KEYS = (
    "iteration", "consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "clipped", "learning_rate",
    "loss_scale", "skipped", "seconds", "tokens_per_second",
)  # fmt: skip

# Figures that an iteration may have beside those. kd_loss: while there is a teacher, what it adds to the loss, beta T^2
# times the mean divergence over the unmasked tokens of the global batch; the whole loss is alpha lm_loss + kd_loss.
# Where they were asked for and it has a line on the console, params_norm: L2 norm of all parameters after the
# iteration; num_zeros: elements of the whole gradient that are zero; exp_avg_norm, exp_avg_sq_norm: L2 norms of all
# first moments (or momenta) and of all second ones. Under a curriculum, seq_length: tokens of a sample.
EXTRA_KEYS = ("kd_loss", "params_norm", "num_zeros", "exp_avg_norm", "exp_avg_sq_norm", "seq_length")

# What is added where layers have experts, as moe/statistics.py has it: losses of the router, without
# coefficient; load: choices of the fullest expert over the mean of its layer; dropped: share of choices without place;
# experts: of each such layer its number, losses, choices by expert, and how many of them were dropped.
EXPERT_KEYS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss", "load", "dropped", "experts")

# What a run measures of itself on some steps, as watching.py has it.
WATCHED_KEYS = ("timers", "comms", "memory_classes")

# TensorBoard's tags, plotted over iterations. A named validation set has its name after the tag of "valid".
TAGS = {
    "lm_loss": "lm loss",
    "kd_loss": "kd loss",
    "grad_norm": "grad-norm",
    "clipped": "clipped",
    "learning_rate": "learning-rate",
    "loss_scale": "loss-scale",
    "skipped": "skipped",
    "consumed_tokens": "consumed-tokens",
    "tokens_per_second": "tokens-per-second",
    "mfu": "mfu",                           # where the peak of the device is known: see --peak-tflops
    "seconds": "iteration-time",            # --log-timers-to-tensorboard
    "batch_size": "batch-size",             # --log-batch-size-to-tensorboard
    "tflops": "throughput",                 # --log-throughput: TFLOP/s per rank that the model needs,
    "hardware_tflops": "throughput sc21",   # and by SC'21's formula, with recomputation
    "params_norm": "params-norm",           # --log-params-norm
    "num_zeros": "num-zeros",               # --log-num-zeros-in-grad
    "exp_avg_norm": "first-moments-norm",   # --log-optimizer-states-to-tensorboard
    "exp_avg_sq_norm": "second-moments-norm",
    "memory": "memory-bytes",               # --log-memory-to-tensorboard: allocated, or resident at most
    "memory_peak": "memory-peak-bytes",
    "seq_length": "seq-length",             # --curriculum-schedule-type
    "aux_loss": "load balancing loss",
    "seq_aux_loss": "seq load balancing loss",
    "global_aux_loss": "global load balancing loss",
    "z_loss": "z loss",
    "load": "fullest expert over mean",
    "dropped": "share of choices dropped",
    "valid": "lm loss validation",
    "test": "lm loss test",
    "valid_ppl": "lm loss validation ppl",  # --log-validation-ppl-to-tensorboard
    "test_ppl": "lm loss test ppl",
}
LOAD_TAG = "fullest expert over mean/layer {}"              # of each layer with experts
TIMER_TAG = "timers/{}"                                     # --log-timers-to-tensorboard, seconds, as watching.py says
MEMORY_TAG = "memory/{}"                                    # --log-memory, bytes, as memory.py says
FLUSH_SECONDS = 2       # an event is on the disk after this time at the latest


class Metrics:
    """Tells what happens to console and files. On ranks that do not write it is silent and makes no file.

    iterations  of the whole run, for the console
    world       ranks that share the work
    writes      whether this is the rank that speaks
    flops       operations of one token, all ranks together, given the tokens of a sample; None: as many as configured
    peak        operations that a device could do in a second, for MFU; None: that is not known

    Raises ValueError, naming the flag, where a file or folder cannot be written.
    """

    def __init__(
        self, logging: LoggingConfig, *, iterations: int, world: int, writes: bool,
        flops: Callable[[int | None], Flops],
        watching: WatchingConfig | None = None, peak: float | None = None,
    ) -> None:
        watching = watching or WatchingConfig()
        self.writes = writes
        self._sinks: list[_Console | _Events | _Lines | _Wandb] = []
        self._failing: set[str] = set()                 # sinks that could not write
        self._screen = Screen(iterations, bar=writes and watching.progress_bar)
        if writes:
            speed = _Speed(flops, world, peak)
            self._sinks.append(_Console(logging, iterations, speed, self._screen))
            if logging.tensorboard_dir is not None:
                self._sinks.append(_Events(logging, _Points(logging, speed)))
            if watching.wandb_project is not None:
                self._sinks.append(_Wandb(watching, _Points(logging, speed)))
            if logging.metrics_jsonl is not None:
                self._sinks.append(_Lines(Path(logging.metrics_jsonl)))

    def say(self, line: str) -> None:
        """Print one line, at once."""
        if self.writes:
            self._screen.print(line)

    def train(self, record: Record) -> None:
        """One finished iteration, with the keys TRAIN_KEYS, any of EXTRA_KEYS and WATCHED_KEYS, and some of EXPERT_KEYS
        where there are experts."""
        more = {*EXTRA_KEYS, *WATCHED_KEYS, *EXPERT_KEYS}
        assert set(record) - more == set(TRAIN_KEYS), sorted(set(record) ^ set(TRAIN_KEYS))
        self._tell(lambda sink: sink.train(record))

    def evaluation(self, split: str, iteration: int, loss: float) -> None:
        """The token-mean loss of "valid", "test" or a named validation set after an iteration."""
        self._tell(lambda sink: sink.evaluation(split, iteration, loss))

    def took(self, what: str, iteration: int, seconds: float) -> None:
        """What stands between steps, a checkpoint or an evaluation, and stops training for so long."""
        self._tell(lambda sink: sink.took(what, iteration, seconds))

    def overlap(self, iteration: int, early: int, started: int) -> None:
        """At the end of a run: of the reductions of gradient buckets, how many began before the backward's end."""
        self._tell(lambda sink: sink.overlap(iteration, early, started))

    def flush(self) -> None:
        """Training has ended, perhaps by an error: write what is still held back, and take the bar away."""
        self._tell(lambda sink: sink.flush())
        self._screen.close()

    def close(self) -> None:
        """The run is over."""
        self._tell(lambda sink: sink.close())
        self._screen.close()

    def _tell(self, what: Callable[[Any], None]) -> None:
        """Tell every sink. No log is worth the run: of one whose disk is full only a warning is given, once."""
        for sink in self._sinks:
            try:
                what(sink)
            except OSError as error:
                if sink.name is None:                       # the console, where a warning would be given
                    raise
                if sink.name not in self._failing:
                    self._failing.add(sink.name)
                    self.say(f"warning: {sink.name}: {error.strerror or error}: what the run tells there is lost")


def memory() -> dict[str, int]:
    """Bytes that torch has allocated on this rank's GPU, now and at most; on a CPU what its process had at most."""
    if torch.cuda.is_available():
        return {"memory": torch.cuda.memory_allocated(), "memory_peak": torch.cuda.max_memory_allocated()}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that exceeds the largest float."""
    return math.exp(loss) if loss < 709.0 else math.inf


class _Speed:
    """TFLOP that a rank computes, and those that it could do in a second."""

    def __init__(self, flops: Callable[[int | None], Flops], world: int, peak: float | None) -> None:
        self.peak = peak and peak / 1e12
        self._per_token = cache(lambda seq_length: Flops(*(n and n / world / 1e12 for n in flops(seq_length))))
        self.has_hardware = self._per_token(None).hardware is not None

    def tflops(self, record: Record) -> Flops:
        """TFLOP/s of a step."""
        per_token = self._per_token(record.get("seq_length"))
        return Flops(*(n and n * record["tokens_per_second"] for n in per_token))

    def mfu(self, tflops: float) -> dict[str, float]:
        """The share of the peak, under the name "mfu"; nothing where that is not known."""
        return {} if self.peak is None else {"mfu": tflops / self.peak}


@dataclass
class _Sums:
    """Of some steps; TFLOP of one rank."""

    count: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    tflop: float = 0.0
    hardware_tflop: float = 0.0

    def add(self, record: Record, tflops: Flops) -> None:
        """Count a step in."""
        seconds = record["seconds"]
        self.count, self.seconds = self.count + 1, self.seconds + seconds
        self.tokens += seconds * record["tokens_per_second"]
        self.tflop += seconds * tflops.model
        self.hardware_tflop += seconds * (tflops.hardware or 0.0)


class _Console:
    """A line every --log-interval iterations and after the last: figures of that iteration, times since the last
    line."""

    name = None

    def __init__(self, logging: LoggingConfig, iterations: int, speed: _Speed, screen: Screen) -> None:
        self.logging, self.iterations, self.speed, self.screen = logging, iterations, speed, screen
        self.shows_hardware = logging.log_throughput and speed.has_hardware
        self._since = _Sums()                           # the last line

    def train(self, record: Record) -> None:
        self._since.add(record, self.speed.tflops(record))
        done = int(record["iteration"])
        if self.logging.shows(done, self.iterations):
            self.screen.print(self._line(record, done))
            self._since = _Sums()
        self.screen.advance(done, f"lm loss {record['lm_loss']:.4f}")

    def _line(self, record: Record, done: int) -> str:
        since, seconds = self._since, self._since.seconds
        fields = (
            f"iteration {done:>{len(str(self.iterations))}}/{self.iterations}",
            f"consumed samples {record['consumed_samples']}",
            f"consumed tokens {record['consumed_tokens']}",
            *([f"seq length {record['seq_length']}"] if "seq_length" in record else []),
            f"lm loss {record['lm_loss']:.6f}",
            *([f"kd loss {record['kd_loss']:.6f}"] if "kd_loss" in record else []),
            f"grad norm {record['grad_norm']:.4f}",
            *([f"params norm {record['params_norm']:.4f}"] if "params_norm" in record else []),
            *([f"zeros in grad {record['num_zeros']}"] if "num_zeros" in record else []),
            f"learning rate {record['learning_rate']:.4e}",
            *(f"{TAGS[key]} {record[key]:.4f}" for key in EXPERT_KEYS if key in record and key in TAGS),
            *([f"loss scale {record['loss_scale']:g}"] if record["loss_scale"] != 1 else []),
            *(["skipped"] if record["skipped"] else []),
            f"{seconds / since.count:.3f} s/iteration",
            f"{since.tokens / seconds:.0f} tokens/s",
            f"{since.tflop / seconds:.3g} TFLOP/s per rank",
            *([f"{since.hardware_tflop / seconds:.3g} by SC'21"] if self.shows_hardware else []),
            *(f"MFU {share:.1%}" for share in self.speed.mfu(since.tflop / seconds).values()),
        )
        return " | ".join(fields)

    def evaluation(self, split: str, iteration: int, loss: float) -> None:
        self.screen.print(f"{split} at iteration {iteration} | lm loss {loss:.6f} | ppl {perplexity(loss):.4f}")

    def took(self, what: str, iteration: int, seconds: float) -> None:
        """What was done has its own line."""

    def overlap(self, iteration: int, early: int, started: int) -> None:
        share = f"{early / max(started, 1):.1%}"
        self.screen.print(f"{share} of gradient buckets started before the end of backward: {early} of {started}")

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is left to do."""


class _Points:
    """What a board plots of an iteration, by tag."""

    def __init__(self, logging: LoggingConfig, speed: _Speed) -> None:
        self.logging, self.speed = logging, speed
        self._consumed: float | None = None

    def train(self, record: Record) -> dict[str, float] | None:
        """None: --tensorboard-log-interval passes this iteration over."""
        logging, before = self.logging, self._consumed
        self._consumed = record["consumed_samples"]
        if int(record["iteration"]) % logging.tensorboard_log_interval:
            return None
        tflops = self.speed.tflops(record)
        values = {key: value for key, value in record.items() if key in TAGS and key != "seconds"}
        values |= self.speed.mfu(tflops.model)
        if logging.log_timers_to_tensorboard:
            values["seconds"] = record["seconds"]
        if logging.log_batch_size_to_tensorboard and before is not None:
            values["batch_size"] = self._consumed - before
        if logging.log_throughput:
            values["tflops"] = tflops.model
            if tflops.hardware is not None:
                values["hardware_tflops"] = tflops.hardware
        if logging.log_memory_to_tensorboard:
            values |= memory()
        points = {TAGS[key]: value for key, value in values.items()}
        for layer in record.get("experts", ()):
            counts = layer["counts"]
            points[LOAD_TAG.format(layer["layer"])] = max(counts) * len(counts) / max(sum(counts), 1)
        if logging.log_timers_to_tensorboard:
            points |= {TIMER_TAG.format(name): seconds for name, seconds in record.get("timers", {}).items()}
        return points | {MEMORY_TAG.format(name): size for name, size in record.get("memory_classes", {}).items()}

    def evaluation(self, split: str, loss: float) -> dict[str, float]:
        points = {TAGS.get(split, f"{TAGS['valid']} {split}"): loss}
        if self.logging.log_validation_ppl_to_tensorboard:
            points[TAGS.get(f"{split}_ppl", f"{TAGS['valid_ppl']} {split}")] = perplexity(loss)
        return points

    def took(self, what: str, seconds: float) -> dict[str, float]:
        return {TIMER_TAG.format(what): seconds} if self.logging.log_timers_to_tensorboard else {}


class _Events:
    """TensorBoard. After a resume, what an earlier process wrote of later iterations is struck out."""

    def __init__(self, logging: LoggingConfig, points: _Points) -> None:
        self.points = points
        self._begun = False
        folder = logging.tensorboard_dir
        self.name = f"--tensorboard-dir {folder}"
        try:
            self._writer = EventFileWriter(folder, logging.tensorboard_queue_size, FLUSH_SECONDS)
        except OSError as error:
            raise ValueError(f"{self.name}: cannot be written: {error.strerror}") from error

    def train(self, record: Record) -> None:
        done = int(record["iteration"])
        if not self._begun:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=done, session_log=start))
            self._begun = True
        self._add(self.points.train(record), done)

    def evaluation(self, split: str, iteration: int, loss: float) -> None:
        self._add(self.points.evaluation(split, loss), iteration)

    def took(self, what: str, iteration: int, seconds: float) -> None:
        self._add(self.points.took(what, seconds), iteration)

    def overlap(self, iteration: int, early: int, started: int) -> None:
        """A figure of the whole run is no curve."""

    def _add(self, values: Mapping[str, float] | None, step: int) -> None:
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in (values or {}).items()]
        if points:
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Weights & Biases, with TensorBoard's tags."""

    def __init__(self, watching: WatchingConfig, points: _Points) -> None:
        self.points, self.name = points, f"--wandb-project {watching.wandb_project}"
        self._run: Any = importlib.import_module("wandb").init(
            project=watching.wandb_project, name=watching.wandb_exp_name, entity=watching.wandb_entity,
            dir=watching.wandb_save_dir,
        )

    def train(self, record: Record) -> None:
        self._add(self.points.train(record), int(record["iteration"]))

    def evaluation(self, split: str, iteration: int, loss: float) -> None:
        self._add(self.points.evaluation(split, loss), iteration)

    def took(self, what: str, iteration: int, seconds: float) -> None:
        self._add(self.points.took(what, seconds), iteration)

    def overlap(self, iteration: int, early: int, started: int) -> None:
        self._run.summary["early_share"] = early / max(started, 1)

    def _add(self, values: Mapping[str, float] | None, step: int) -> None:
        if values:
            self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """It sends what it has by itself."""

    def close(self) -> None:
        self._run.finish()


class _Lines:
    """JSON lines at full precision, each on the disk as soon as it is known; a resumed run adds to the file."""

    def __init__(self, path: Path) -> None:
        self.name = f"--metrics-jsonl {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and _is_torn(path)
            self._out = open(path, "a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{self.name}: cannot be written: {error.strerror}") from error
        if torn:
            self._out.write("\n")

    def train(self, record: Record) -> None:
        order = (*TRAIN_KEYS, *EXTRA_KEYS, *EXPERT_KEYS, *WATCHED_KEYS)
        self._write({key: record[key] for key in order if key in record})

    def evaluation(self, split: str, iteration: int, loss: float) -> None:
        self._write({"split": split, "iteration": iteration, "lm_loss": loss, "ppl": perplexity(loss)})

    def took(self, what: str, iteration: int, seconds: float) -> None:
        """A line is an iteration or what was found, not how long that took."""

    def overlap(self, iteration: int, early: int, started: int) -> None:
        told = {"buckets_started": started, "buckets_started_early": early, "early_share": early / max(started, 1)}
        self._write({"split": "train", "iteration": iteration, **told})

    def _write(self, record: Mapping[str, object]) -> None:
        self._out.write(json.dumps(_finite(record)) + "\n")

    def flush(self) -> None:
        """Each line is on the disk already."""

    def close(self) -> None:
        self._out.close()


def _finite(value: object) -> object:
    """None for what is not finite, wherever it stands: JSON has no infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_torn(path: Path) -> bool:
    """Whether the file ends in the middle of a line, as a killed process may leave it."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def check_places(logging: LoggingConfig, watching: WatchingConfig | None = None) -> None:
    """Raises ValueError where what is told could not be written. Makes nothing, so that every rank may ask."""
    if watching is not None and watching.wandb_project is not None:
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"--wandb-project {watching.wandb_project}: the package wandb is not installed here (pip install wandb)"
            )
        check_folder("--wandb-save-dir", Path(watching.wandb_save_dir or "."))
    if logging.tensorboard_dir is not None:
        check_folder("--tensorboard-dir", Path(logging.tensorboard_dir))
    if logging.trace_pipeline is not None:
        check_folder("--trace-pipeline", Path(logging.trace_pipeline))
    if logging.profile:
        check_folder("--profile-dir", Path(logging.profile_dir))
    if logging.metrics_jsonl is not None:
        path = Path(logging.metrics_jsonl)
        if path.is_dir():
            raise ValueError(f"--metrics-jsonl {path}: is a folder, not a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"--metrics-jsonl {path}: cannot be written by this user")
        check_folder("--metrics-jsonl", path.parent)


def check_folder(flag: str, folder: Path) -> None:
    """Raises ValueError, naming the flag, where `folder` is not one and could not become one. Makes nothing."""
    found = next(part for part in (folder, *folder.resolve().parents) if part.exists())
    if not found.is_dir() or not os.access(found, os.W_OK):
        raise ValueError(f"{flag} {folder}: cannot be written: {found} is not a folder that this user may write to")
