"""Pretrain a GPT: `torchrun --nproc-per-node N pretrain_gpt.py --num-layers 24 ...`, or plain `python` for one process.

Every part of a run is built here, in order, and handed to those that need it: read from `main` downwards.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megazero import snapshot
from megazero.checkpoint import folder_of
from megazero.checkpoint_index import read_index
from megazero.config import Config, check_world
from megazero.data.loader import DocumentRules, Loader, Share
from megazero.data.samples import Parts, open_samples
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.flags import parse
from megazero.gpt import GPTSetup, gpt_layers
from megazero.kernels.dispatch import Kernels, use_triton
from megazero.lr_schedule import make_schedule, print_lr_lines
from megazero.metrics import Metrics, check_folder, check_places, model_flops
from megazero.parallel.collectives import AgreedError
from megazero.parallel.groups import Mesh, World, choose_device, connect, disconnect, open_mesh
from megazero.parallel.params import collect, initialize
from megazero.parallel.topology import Topology
from megazero.parallel.zero import ZeroAdamW
from megazero.pipe.engine import PipeEngine
from megazero.pipe.lower import add_communication
from megazero.pipe.p2p import Wires, edges_of
from megazero.pipe.schedule import SCHEDULES, forward_only
from megazero.pipe.stage import LayerSpec, Recompute, build_stages
from megazero.plan import describe_layout, plan_stages
from megazero.precision import dtypes
from megazero.resume import check_same_model, differences, with_saved_schedule
from megazero.trainer import Feed, Machine, Progress, Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """The run that the flags ask for. Returns the exit code: 0, or 2 where the flags or files are wrong."""
    world = World.from_environment()
    speaks = world.local_rank == 0
    try:
        config, notices = parse(sys.argv[1:] if argv is None else argv)
        if answer(config, world):
            return 0
        plan = prepare(config, world)
    except ValueError as wrong:
        if speaks:
            print(f"pretrain_gpt.py: error: {wrong}", file=sys.stderr)
        return 2
    try:
        run(plan, world, notices)
    except ValueError as wrong:
        if world.rank == 0 or not isinstance(wrong, AgreedError):
            print(f"pretrain_gpt.py: error: {wrong}", file=sys.stderr, flush=True)
        return 1
    finally:
        disconnect()
    return 0


def answer(config: Config, world: World) -> bool:
    """Print what the flags only ask to see, on one rank. Whether that was all there is to do."""
    asked = config.run
    lines: list[str] = []
    size = asked.world_size or world.size
    if asked.print_config:
        lines.append(config.to_json())
    if asked.print_lr:
        data_size = config.parallel.data_size(size)
        batch = config.batch.global_batch(data_size)
        lines += print_lr_lines(make_schedule(config.schedule, config.batch, batch), batch, asked.print_lr)
    if asked.print_layout:
        check_world(config, size)
        vocab = config.model.vocab_size or build_tokenizer(config.data).vocab_size
        lines.append(describe_layout(layers_of(config, vocab), topology_of(config, size)))
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
    checkpoint: Path | None         # to start from
    changed: tuple[str, ...]        # settings that differ from the checkpoint's


def prepare(config: Config, world: World) -> Plan:
    """Check sizes, files and settings. Raises ValueError with one line for the first thing that is wrong."""
    check_world(config, world.size)
    make_schedule(config.schedule, config.batch, 1)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    vocab = config.model.vocab_size or tokenizer.vocab_size
    open_parts(config, tokenizer, vocab)
    document_rules(config, tokenizer)
    check_places(config.logging)
    check_save(config)
    checkpoint = checkpoint_to_load(config, speaks=world.rank == 0)
    changed: tuple[str, ...] = ()
    if checkpoint is not None:
        saved = Config.from_json(json.dumps(read_index(checkpoint)[0].config))
        check_same_model(saved, config)
        if not config.checkpoint.finetune:
            config = with_saved_schedule(saved, config)
        changed = tuple(str(d) for d in differences(saved, config) if d.section not in ("checkpoint", "logging"))
    device, _ = choose_device(config.parallel.distributed_backend, world.local_rank)
    use_triton(torch.empty(0, device=device), norm_impl(config))
    return Plan(
        config, topology_of(config, world.size), tokenizer, vocab, layers_of(config, vocab), checkpoint, changed
    )


def run(plan: Plan, world: World, notices: Sequence[str]) -> Progress:
    """Meet the other processes, build this rank's part of everything, and train."""
    config = plan.config
    device, backend = choose_device(config.parallel.distributed_backend, world.local_rank)
    connect(world, device, backend, timeout_minutes=config.parallel.distributed_timeout_minutes)
    mesh = open_mesh(plan.topology, device)
    samples = config.batch.global_batch(mesh.data.size)
    iterations = config.batch.iterations(samples)
    metrics = Metrics(
        config.logging, iterations=iterations, world=mesh.world.size, writes=mesh.rank == 0,
        flops=model_flops(config.model, vocab=plan.vocab, batch=samples),
    )
    for line in (*notices, describe(plan)):
        metrics.say(line)
    trainer, progress = build(plan, mesh, metrics)
    if progress.iteration >= iterations:
        metrics.say(f"nothing to do: the checkpoint is at iteration {progress.iteration} of {iterations}")
    else:
        progress = trainer.train(progress, iterations, config.checkpoint.save_interval)
    metrics.close()
    for feed in trainer.feeds.values():
        feed.loader.close()
    return progress


def build(plan: Plan, mesh: Mesh, metrics: Metrics) -> tuple[Trainer, Progress]:
    """The trainer of this rank, and the progress it starts from."""
    config, topology = plan.config, plan.topology
    types, model = dtypes(config.precision), config.model
    how = Recompute()
    if config.recompute.recompute_granularity == "full":
        how = Recompute(config.recompute.recompute_method, config.recompute.layers)
    with mesh.device:
        stages = build_stages(plan.layers, mesh, how)
    infos = collect([named for stage in stages.values() for named in stage.named_layers()])
    initialize(infos, topology, mesh.rank, seed=config.run.seed)

    adam = config.optimizer
    optimizer = ZeroAdamW(
        infos, mesh, dtype=types.compute, betas=(adam.adam_beta1, adam.adam_beta2), eps=adam.adam_eps,
        clip=adam.clip_grad,
    )
    micro_batches = config.batch.micro_batches(topology.data)
    train = add_communication(
        SCHEDULES[config.parallel.pipeline_schedule](topology.pipeline, micro_batches, 1), topology.pipeline
    )
    evaluate = add_communication(forward_only(topology.pipeline, micro_batches, 1), topology.pipeline)
    engine = PipeEngine(
        stages, topology.pipeline - 1, Wires(mesh.pipeline, edges_of(train)), dtype=types.compute, device=mesh.device
    )
    wire_shape = (model.seq_length // topology.tensor, config.batch.micro_batch_size, model.hidden_size)
    machine = Machine(mesh, engine, optimizer, train[mesh.stage], evaluate[mesh.stage], wire_shape)

    feeds = open_feeds(plan, mesh)
    schedule = make_schedule(config.schedule, config.batch, feeds["train"].samples)
    progress = load(plan, machine, metrics)
    trainer = Trainer(
        machine, feeds, schedule, batch=config.batch, seq_length=model.seq_length, metrics=metrics,
        save=partial(save, plan, machine, metrics),
    )
    return trainer, progress


def topology_of(config: Config, world_size: int) -> Topology:
    """What tensor and pipeline leave over is the data axis."""
    parallel = config.parallel
    return Topology(
        parallel.pipeline_model_parallel_size, parallel.data_size(world_size), parallel.tensor_model_parallel_size
    )


def layers_of(config: Config, vocab: int) -> list[LayerSpec]:
    """The model as a list of layers, which every layout cuts into stages."""
    return gpt_layers(
        GPTSetup(
            config.model, vocab, dtypes(config.precision).master,
            selective=config.recompute.recompute_granularity == "selective",
            norm_impl=norm_impl(config),
        )
    )


def norm_impl(config: Config) -> str:
    """Which implementation of the norm the flags ask for."""
    norm = "layer_norm" if config.model.normalization == "LayerNorm" else "rms_norm"
    return Kernels(config.run.kernels, config.run.kernel).impl(norm)


def document_rules(config: Config, tokenizer: Tokenizer) -> DocumentRules:
    """What the end of a document does. Raises ValueError where the tokenizer has no token for it."""
    data = config.data
    return DocumentRules(tokenizer.eod, data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)


def open_parts(config: Config, tokenizer: Tokenizer, vocab: int) -> Parts:
    """The training, validation and test samples. Raises ValueError for a missing or unfit file."""
    parts = open_samples(
        config.data, seq_length=config.model.seq_length, vocab_size=vocab, seed=config.run.seed,
        fingerprint=tokenizer.fingerprint,
    )
    if parts.train is None:
        raise ValueError(f"--split {config.data.split}: no document of {config.data.data_path[0]} is left for training")
    return parts


def open_feeds(plan: Plan, mesh: Mesh) -> dict[str, Feed]:
    """What this rank reads of each part. Evaluation takes as many samples at a time as training does."""
    config, data = plan.config, plan.config.data
    rules = document_rules(config, plan.tokenizer)
    share = Share(
        config.batch.micro_batch_size, config.batch.micro_batches(mesh.data.size), mesh.data.index, mesh.data.size
    )
    at_an_end = mesh.stage in (0, mesh.pipeline.size - 1)
    reads = at_an_end or data.reset_position_ids or data.reset_attention_mask
    parts = open_parts(config, plan.tokenizer, plan.vocab)
    feeds = {}
    for name, samples in (("train", parts.train), ("valid", parts.valid), ("test", parts.test)):
        if samples is not None:
            loader = Loader(
                samples, share, vocab_size=plan.vocab, seed=config.run.seed, rules=rules,
                num_workers=data.num_workers if reads else 0,
            )
            feeds[name] = Feed(loader, mesh, reads)
    return feeds


def check_save(config: Config) -> None:
    """Raises ValueError where --save could not be made or written to. Makes nothing."""
    if config.checkpoint.save is not None:
        check_folder("--save", Path(config.checkpoint.save))


def checkpoint_to_load(config: Config, *, speaks: bool) -> Path | None:
    """The folder to start from; None: start anew. Raises ValueError where --load names nothing."""
    wanted = config.checkpoint
    found = None
    if wanted.auto_resume:
        found = snapshot.find(Path(wanted.save), wanted.ckpt_step, speaks=speaks)
    if found is None and wanted.load is not None:
        found = snapshot.find(Path(wanted.load), wanted.ckpt_step, speaks=speaks)
        if found is None:
            where = Path(wanted.load) if wanted.ckpt_step is None else folder_of(Path(wanted.load), wanted.ckpt_step)
            raise ValueError(f"--load {wanted.load}: there is no complete checkpoint in {where}")
    return found


def load(plan: Plan, machine: Machine, metrics: Metrics) -> Progress:
    """Start from the plan's checkpoint, or at zero."""
    config = plan.config
    if plan.checkpoint is None:
        if config.checkpoint.auto_resume:
            metrics.say(f"--auto-resume: nothing to resume in {config.checkpoint.save}, starting anew")
        return Progress()
    weights_only = config.checkpoint.finetune or config.checkpoint.no_load_optim
    progress = snapshot.load(plan.checkpoint, machine.optimizer, machine.mesh, moments=not weights_only)
    if config.checkpoint.finetune:
        progress = Progress()
    if plan.changed:
        metrics.say(f"changed since the checkpoint: {'; '.join(plan.changed)}")
    metrics.say(f"loaded {plan.checkpoint}, going on after iteration {progress.iteration}")
    return progress


def save(plan: Plan, machine: Machine, metrics: Metrics, progress: Progress) -> None:
    """Save everything that a run needs to go on, in any layout."""
    root = Path(plan.config.checkpoint.save)
    folder = snapshot.save(root, machine.optimizer, machine.mesh, config=plan.config, progress=progress)
    metrics.say(f"saved {folder}")


def describe(plan: Plan) -> str:
    """The layout in one line."""
    t, count = plan.topology, sum(stage.recorded for stage in plan_stages(plan.layers, plan.topology))
    return f"{t.world} ranks: tensor {t.tensor} x pipeline {t.pipeline} x data {t.data}, {count:,} parameters"


if __name__ == "__main__":
    sys.exit(main())
