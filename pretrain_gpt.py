"""Pretrain a GPT: `torchrun --nproc-per-node N pretrain_gpt.py --num-layers 24 ...`, or plain `python` for one process.

Every part of a run is built here, in order, and handed to those that need it: read from `main` downwards.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path

import torch

from megazero import snapshot
from megazero.allocator import keep_freed_memory
from megazero.batch_sizes import BatchSizes, constant, tokens_of
from megazero.checkpoint import Writing
from megazero.checkpoint_index import read_index
from megazero.config import Config, check_world
from megazero.data.corpora import left_out
from megazero.data.loader import DocumentRules, Loader, Share
from megazero.data.samples import SampleSource
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.flags import in_words_of, parse
from megazero.flops import device_peak, flops_per_token
from megazero.gpt import GPTSetup, gpt_layers
from megazero.kernels.dispatch import OPS, Kernels, check_compiler, use_triton
from megazero.lookout import Lookout, Watched
from megazero.loss_scale import make_loss_scaler
from megazero.lr_curves import Done
from megazero.lr_schedule import Schedule, decoupled, make_schedule, print_lr_lines
from megazero.machine import Machine, Pipelining, Setup, assemble
from megazero.metrics import Metrics, check_places
from megazero.moe.pyramid import describe_experts
from megazero.moe.statistics import statistics_of
from megazero.moe.students import Teacher
from megazero.parallel.collectives import AgreedError, barrier
from megazero.parallel.groups import Mesh, World, choose_device, connect, disconnect, open_mesh, speaks_for_host
from megazero.parallel.topology import Topology
from megazero.parallel.zero import Zero
from megazero.parts import open_parts, rules_of
from megazero.pipe.stage import LayerSpec, Recompute
from megazero.pipe.trace import seconds_to_epoch, write_trace
from megazero.plan import StagePlan, describe_layout, plan_stages
from megazero.planner.layout import layout_of, split_of
from megazero.precision import dtypes, residual_dtype
from megazero.products import describe_products, products_of
from megazero.profiling import Profile
from megazero.resume import as_resumed, check_same_model, differences, with_agreed_schedule
from megazero.retention import Retention
from megazero.saver import Saver, Saving
from megazero.starting import check_same_everywhere, check_save, checkpoint_to_load, fingerprints
from megazero.summary import decay_groups, early_buckets, rank_bytes, stage_2_traffic
from megazero.teacher import find_teacher, taught
from megazero.trainer import Asked, Feed, Progress, Schedules, Trainer
from megazero.watching import StepWatch

TRACED_STEPS = 10       # of --trace-pipeline: the last ones of a run
QUIET = ("checkpoint", "logging", "operations", "watching")     # sections whose changes a resumed run does not speak of


def main(argv: Sequence[str] | None = None) -> int:
    """The run that the flags ask for. Returns the exit code: 0, or 2 where the flags or files are wrong."""
    world, words = World(), sys.argv[1:] if argv is None else argv
    try:
        world = World.from_environment()
        config, notices = parse(words, shape=snapshot.shape_in_checkpoint)
        if answer(config, world):
            return 0
        plan = prepare(config, world)
    except (ValueError, OSError) as wrong:
        if speaks_for_host(world):
            which = f" (rank {world.rank} of {world.size})" if world.local_rank else ""
            print(f"pretrain_gpt.py: error: {in_words_of(words, str(wrong))}{which}", file=sys.stderr)
        return 2
    with Lookout(world, watched(config)) as lookout:
        run(plan, world, notices, lookout)
    disconnect()
    lookout.linger()
    return lookout.code


def answer(config: Config, world: World) -> bool:
    """Print what the flags only ask to see, on one rank. Whether that was all there is to do."""
    asked = config.run
    lines: list[str] = []
    size = asked.world_size or world.size
    if asked.print_config:
        lines.append(replace(config, run=asked.without_printing()).to_json())
    if asked.print_lr:
        sizes = config.batch.sizes(config.parallel.data_size(size), config.seq_lengths)
        schedule = schedule_of(config, sizes)
        for line in schedule.warnings(asked.print_lr) if world.rank == 0 else ():
            print(f"warning: {line}", file=sys.stderr)
        samples, lengths = map(sizes.consumed, range(asked.print_lr)), config.seq_lengths
        lines += print_lr_lines(schedule, (Done(k, n, tokens_of(n, sizes, lengths)) for k, n in enumerate(samples)))
    if asked.print_layout:
        check_world(config, size)
        vocab = config.model.vocab_size or build_tokenizer(config.data).vocab_size
        layers, layout = layers_of(config, vocab), layout_of(config, vocab, size)
        lines.append(describe_layout(
            layers, topology_of(config, size), layout, pipelining_of(config), memory_gb=asked.device_memory_gb,
            as_json=asked.json,
        ))
    if world.rank == 0 and lines:
        print("\n".join(lines))
    return bool(lines)


@dataclass(frozen=True)
class Plan:
    """All that can be known and checked before any process waits for another."""

    config: Config
    topology: Topology
    tokenizer: Tokenizer
    vocab: int
    layers: list[LayerSpec]
    pipelining: Pipelining
    sizes: BatchSizes               # of the global batch
    iterations: int                 # of the whole run
    samples: Mapping[str, SampleSource]     # of each part of the data
    rules: DocumentRules
    checkpoint: Path | None         # to start from
    reached: Mapping[str, object]   # how far the checkpoint is
    start: Progress                 # where the run starts
    teacher: Teacher | None         # from the start on
    changed: tuple[str, ...]        # settings that differ from the checkpoint's
    stages: list[StagePlan]         # what each pipeline rank holds, on paper

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return sum(stage.recorded for stage in self.stages)


def prepare(config: Config, world: World) -> Plan:
    """Check sizes, files and settings. Raises ValueError with one line for the first thing that is wrong."""
    check_world(config, world.size)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    vocab = config.model.vocab_size or tokenizer.vocab_size
    sizes = config.batch.sizes(config.parallel.data_size(world.size), config.seq_lengths)
    schedule_of(config, sizes)
    samples, rules = open_parts(config, tokenizer, vocab, sizes), rules_of(config, tokenizer)
    check_places(config.logging, config.watching)
    checkpoint = checkpoint_to_load(config, speaks=world.rank == 0)
    index = None if checkpoint is None else read_index(checkpoint)[0]
    reached = {} if index is None else index.progress
    if index is not None and snapshot.is_own(config.checkpoint, checkpoint) and snapshot.holds_moments(index):
        config = as_resumed(config)
    start = snapshot.start_of(config.checkpoint, checkpoint, reached)
    check_save(config, checkpoint, start)
    changed: tuple[str, ...] = ()
    iterations = config.batch.iterations(sizes, seq_length=config.seq_lengths)
    if index is not None:
        if not (config.checkpoint.finetune or config.checkpoint.no_load_optim or config.batch.skip_train):
            snapshot.check_moments(checkpoint, index)
        saved = Config.from_json(json.dumps(index.config))
        check_same_model(saved, config)
        if not (config.checkpoint.finetune or config.batch.skip_train):
            config = with_agreed_schedule(saved, config)
            schedule_of(config, sizes)
            iterations = config.batch.iterations(
                sizes, seq_length=config.seq_lengths, done=start.iteration, consumed_samples=start.consumed_samples,
                consumed_tokens=start.consumed_tokens,
            )
        changed = tuple(str(d) for d in differences(saved, config) if d.section not in QUIET)
    device, _ = choose_device(config.parallel.distributed_backend, world.local_rank)
    if config.run.compile:
        check_compiler(device, os.environ.get("CXX"))
    for op in OPS:
        use_triton(torch.empty(0, device=device), kernels_of(config).impl(op))
    layers, how = layers_of(config, vocab), pipelining_of(config)
    teacher = find_teacher(
        config, gpt_of(config, vocab), how.homes(config.parallel.pipeline_model_parallel_size), start,
        speaks=world.rank == 0,
    )
    topology = topology_of(config, world.size, () if teacher is None else teacher.experts)
    return Plan(
        config, topology, tokenizer, vocab, layers, how, sizes, iterations, samples, rules, checkpoint, reached,
        start, teacher, changed, plan_stages(layers, topology, how),
    )


def run(plan: Plan, world: World, notices: Sequence[str], lookout: Lookout) -> Progress:
    """Meet the other processes, build this rank's part of everything, and train."""
    config = plan.config
    if config.run.deterministic_mode:
        compute_alike()
    device, backend = choose_device(config.parallel.distributed_backend, world.local_rank)
    if device.type == "cpu" and not config.watching.log_memory:     # which tells by the system's count of pages
        keep_freed_memory()
    minutes, products = config.parallel.distributed_timeout_minutes, products_of(device, config.run.cpu_matmul)
    minutes += lookout.how.hang_seconds is not None             # the lookout comes first, and says more
    store = connect(world, device, backend, timeout_minutes=minutes)
    lookout.connect(store)
    if store is not None:                   # before any group is made, which would wait where layouts differ
        check_same_everywhere(config, seen_by(plan), world, store.clone())
    mesh = open_mesh(plan.topology, device, products, timeout_minutes=minutes)
    lookout.activity = mesh.activity
    iterations = plan.iterations
    metrics = Metrics(
        config.logging, iterations=iterations, world=mesh.world.size, writes=mesh.rank == 0,
        flops=partial(flops_per_token, config, plan.vocab), watching=config.watching, peak=peak_of(config, device),
    )
    silent = left_out(config.data, plan.samples) if config.batch.evaluates and not config.data.mock_data else ()
    multiplied = describe_products(products, dtypes(config.precision).compute)
    lengths = config.curriculum.describe(config.model.seq_length)
    for line in (*notices, describe(plan), *multiplied, *describe_experts(config), *lengths, *silent):
        metrics.say(line)
    trainer, progress = build(plan, mesh, metrics)
    trace = trainer.machine.engine.trace = None if config.logging.trace_pipeline is None else deque(maxlen=TRACED_STEPS)
    profile = Profile(config.logging, mesh.rank, metrics.say)
    if profile.chosen:
        trainer.around = profile.around
    if config.batch.skip_train:
        trainer.evaluate_all(progress)
    elif progress.iteration >= iterations:
        metrics.say(f"nothing to do: the checkpoint is at iteration {progress.iteration} of {iterations}")
    else:
        trainer.machine.engine.stop = lookout.stop
        barrier(mesh.world)
        lookout.train()
        progress = train(trainer, progress, iterations, config)
    if trace is not None:
        folder = Path(config.logging.trace_pipeline)
        write_trace(folder, mesh.rank, list(trace), progress.iteration, shift=seconds_to_epoch())
    profile.close(progress.iteration)
    if config.optimizer.overlap_grad_reduce and not config.batch.skip_train:
        metrics.overlap(progress.iteration, *early_buckets(trainer.machine.optimizer, mesh))
    metrics.close()
    for feed in trainer.feeds.values():
        feed.loader.close()
    barrier(mesh.world)                     # nobody's lookout ends while another's may need its answer
    return progress


def watched(config: Config) -> Watched:
    """What the lookout of a run looks for."""
    asked, limit = config.operations, config.parallel.distributed_timeout_minutes
    minutes = limit if asked.hang_timeout_minutes is None else asked.hang_timeout_minutes
    path = None if asked.kill_switch_path is None else Path(asked.kill_switch_path)
    return Watched(asked.exit_signal_handler, path, 60 * minutes or None)


def train(trainer: Trainer, progress: Progress, iterations: int, config: Config) -> Progress:
    """Train and save, alone in the folder of saves. A save under way is finished, unless this rank fails alone."""
    try:
        if config.checkpoint.interval is not None:
            trainer.saver.lock()
        return trainer.train(progress, iterations, config.checkpoint.interval)
    except AgreedError as error:
        try:
            trainer.saver.finish()
        except AgreedError as second:
            raise AgreedError(f"{error}; and {second}") from error
        raise
    finally:
        trainer.saver.close()
        trainer.metrics.flush()


def compute_alike() -> None:
    """Let torch use only what gives the same bits again, and let it raise where there is no such thing."""
    for name, value in {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False     # nothing reads what it has not written


def seen_by(plan: Plan) -> dict[str, object]:
    """What must not differ between ranks, as files of their hosts say it."""
    teacher = None if plan.teacher is None else plan.teacher.folder.name
    checkpoint = None if plan.checkpoint is None else plan.checkpoint.name
    return {
        "the checkpoint to start from (--load and --save must be one folder for all hosts)": checkpoint,
        "what it says of the progress": dict(plan.reached),
        "the teacher (--load-teacher)": teacher,
        "tokens of the vocabulary (the tokenizer's files)": plan.vocab,
        "the samples (the corpora must be equal on all hosts)": fingerprints(plan.samples, plan.config.data),
    }


def build(plan: Plan, mesh: Mesh, metrics: Metrics) -> tuple[Trainer, Progress]:
    """The trainer of this rank, and the progress it starts from."""
    config = plan.config
    how = Recompute()
    if config.recompute.recompute_granularity == "full":
        how = Recompute(config.recompute.recompute_method, config.recompute.layers)
    feeds = open_feeds(plan, mesh)
    setup = Setup(
        dtypes(config.precision), config.optimizer, zero_of(config), plan.pipelining, how, config.run.seed,
        statistics_of, kernels_of(config).impl("adam"),
    )
    example = feeds["train"].example() if plan.pipelining.split.weighs == "seconds" else None
    machine = assemble(plan.layers, mesh, setup, example)
    schedule = schedule_of(config, plan.sizes)
    for line in (*optimizer_lines(plan, machine), *(f"warning: {w}" for w in schedule.warnings(plan.iterations))):
        metrics.say(line)
    progress = load(plan, machine, metrics)
    if plan.teacher is not None:
        machine = taught(machine, plan.teacher, config, plan.pipelining.homes(mesh.pipeline.size))
        metrics.say(f"loaded {plan.teacher.folder} as the teacher")
    schedules = Schedules(schedule, decoupled(schedule, config.schedule))
    trainer = Trainer(
        machine, feeds, schedules, metrics=metrics, saver=saver_of(config, machine, metrics),
        asked=Asked(config.batch, config.logging, config.operations, config.precision.skips_allowed),
        watching=StepWatch(mesh, config.logging, config.watching, machine.optimizer.bytes, machine.engine.stages),
    )
    return trainer, progress


def optimizer_lines(plan: Plan, machine: Machine) -> list[str]:
    """Which parameters are treated how, and what the optimizer costs. All ranks call it together."""
    config, data = plan.config, plan.topology.data
    infos = [info for stage in plan.stages for info in stage.infos]
    lines = [
        decay_groups(infos, own_rate=config.schedule.decoupled_lr is not None),
        rank_bytes(machine.optimizer, machine.mesh),
    ]
    if config.optimizer.zero_stage == 2 and data > 1:
        lines.append(stage_2_traffic(config.batch.micro_batches(data)))
    return lines


def schedule_of(config: Config, sizes: BatchSizes) -> Schedule:
    """What each step updates with. Raises ValueError where the flags do not say it, or not all of them can be."""
    return make_schedule(
        config.schedule, config.batch, sizes, seq_length=config.seq_lengths, named=config.deepspeed_schedule
    )


def topology_of(config: Config, world_size: int, teachers: tuple[int, ...] = ()) -> Topology:
    """What tensor and pipeline leave over is the data axis. Experts, of each layer of the model and of its teacher, are
    cut in parts where there are any."""
    parallel = config.parallel
    dense = Topology(
        parallel.pipeline_model_parallel_size, parallel.data_size(world_size), parallel.tensor_model_parallel_size
    )
    if not config.moe.any:
        return dense
    expert = parallel.expert_model_parallel_size
    degrees = {gcd(experts, expert) for experts in config.experts + teachers if experts > 1} - {expert}
    return replace(
        dense, expert=expert, expert_tensor=config.expert_tensor_size, degrees=tuple(sorted(degrees))
    )


def zero_of(config: Config) -> Zero:
    """What is cut over the data ranks, and what runs beside the computation."""
    asked = config.optimizer
    return Zero(
        asked.zero_stage, asked.clip_grad, asked.bucket_size, asked.overlap_grad_reduce, asked.overlap_param_gather,
        torch.bfloat16 if config.precision.grad_reduce_in_bf16 else None,
        make_loss_scaler(config.precision) if config.precision.fp16 else None, kernels_of(config).impl("squared_norm"),
        config.operations.check_for_nan_in_loss_and_grad,
    )


def pipelining_of(config: Config) -> Pipelining:
    """Schedule, stages per rank and the rule of the split. Raises ValueError where they do not go together."""
    parallel, layers = config.parallel, config.model.num_layers
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    how = Pipelining(parallel.schedule(layers), parallel.chunks(layers), split_of(parallel), group)
    how.order.check(parallel.pipeline_model_parallel_size, 1, how.chunks)
    return how


def layers_of(config: Config, vocab: int) -> list[LayerSpec]:
    """The model as a list of layers, which every layout cuts into stages."""
    return gpt_layers(gpt_of(config, vocab))


def gpt_of(config: Config, vocab: int) -> GPTSetup:
    """What the layers have in common."""
    homes = pipelining_of(config).homes(config.parallel.pipeline_model_parallel_size)
    return GPTSetup(
        config.model, vocab, dtypes(config.precision).master, apart=homes[0] != homes[-1],
        selective=config.recompute.recompute_granularity == "selective",
        kernels=kernels_of(config), residual=residual_dtype(config.precision), moe=config.moe, experts=config.experts,
        loss_chunk=config.recompute.loss_chunk_size,
    )


def kernels_of(config: Config) -> Kernels:
    """Which implementation of each op the flags ask for."""
    run = config.run
    unfused = () if run.masked_softmax_fusion else ("softmax=torch",)
    return Kernels("compiled" if run.compile else run.kernels, (*unfused, *run.kernel), run.attention)


def open_feeds(plan: Plan, mesh: Mesh) -> dict[str, Feed]:
    """What this rank reads of each part."""
    config, rules = plan.config, plan.rules
    evaluated, evaluation = config.batch.evaluation(mesh.data.size)
    homes = plan.pipelining.homes(mesh.pipeline.size)
    at_an_end = mesh.stage in (homes[0], homes[-1])
    masked = config.moe.any and rules.mask_loss             # what is masked does not count in the balance
    reads = at_an_end or rules.reset_positions or rules.reset_attention or masked
    feeds = {}
    for name, samples in plan.samples.items():
        micro, sizes, lengths = evaluated, constant(evaluation), None
        if name == "train":
            micro, sizes, lengths = config.batch.micro_batch_size, plan.sizes, config.seq_lengths
        loader = Loader(
            samples, Share(micro, sizes, mesh.data.index, mesh.data.size),
            vocab_size=plan.vocab, seed=config.run.seed, rules=rules,
            num_workers=config.data.num_workers if reads else 0, lengths=lengths,
        )
        feeds[name] = Feed(loader, mesh, reads, homes[-1])
    return feeds


def load(plan: Plan, machine: Machine, metrics: Metrics) -> Progress:
    """Start from the plan's checkpoint, or at zero."""
    config = plan.config
    if plan.checkpoint is None:
        if config.checkpoint.auto_resume:
            metrics.say(f"--auto-resume: nothing to resume in {config.checkpoint.save}, starting anew")
        return Progress()
    weights_only = config.checkpoint.finetune or config.checkpoint.no_load_optim or config.batch.skip_train
    snapshot.load(
        plan.checkpoint, machine.optimizer, machine.mesh, moments=not weights_only,
        verify=config.checkpoint.verify_checkpoint,
    )
    if plan.changed:
        metrics.say(f"changed since the checkpoint: {'; '.join(plan.changed)}")
    metrics.say(f"loaded {plan.checkpoint}, going on after iteration {plan.start.iteration}")
    return plan.start


def saver_of(config: Config, machine: Machine, metrics: Metrics) -> Saver:
    """What saves everything that a run needs to go on, in any layout."""
    asked = config.checkpoint
    how = Saving(
        asked.async_save, not asked.no_save_optim, Retention(asked.keep_last, asked.save_retain_interval),
        Writing(asked.checkpoint_file_mib * 2**20),
    )
    root = Path(asked.save or "")
    return Saver(root, machine.optimizer, machine.mesh, config=config, how=how, say=metrics.say)


def peak_of(config: Config, device: torch.device) -> float | None:
    """Operations that a device could do in a second, as the flags say or its name does; None: neither does."""
    if config.watching.peak_tflops is not None:
        return 1e12 * config.watching.peak_tflops
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return device_peak(name, half=config.precision.bf16 or config.precision.fp16)


def describe(plan: Plan) -> str:
    """The layout in one line."""
    t, count = plan.topology, plan.parameters
    ranks = "1 rank" if t.world == 1 else f"{t.world} ranks"
    schedule = f" ({plan.pipelining.schedule})" if t.pipeline > 1 else ""
    expert = f" (expert {t.expert} x expert tensor {t.size('expert_tensor')})" if plan.config.moe.any else ""
    return (
        f"{ranks}: tensor {t.tensor} x pipeline {t.pipeline}{schedule} x data {t.data}{expert}, "
        f"{count:,} parameters"
    )


if __name__ == "__main__":
    sys.exit(main())
