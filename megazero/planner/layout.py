"""A layout on paper: what each pipeline stage has of the model, which schedule runs it, what is kept and recomputed.

A Layout is a handful of numbers, so that thousands can be weighed; `layout_of` takes them from a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ..config import Config, ModelConfig
from ..config_moe import MoEConfig
from ..config_parallel import ParallelConfig
from ..config_precision import PrecisionConfig
from ..moe.pyramid import layer_parameters, norm_parameters
from ..pipe.instructions import Backward, BackwardWeight, Forward
from ..pipe.schedule import SCHEDULES, Schedule
from ..pipe.split import Split

FILLED, FILLED_V = 2, 6     # times the pipeline ranks: with so many micro-batches a schedule (zb-v) is in its rhythm


@dataclass(frozen=True)
class StageSlice:
    """What one pipeline stage has of the model.

    home      the pipeline rank that holds it
    experts   of each of its blocks, 1: a dense one
    windows   how far back each of its blocks sees, None: all the way
    """

    home: int
    embedding: bool
    experts: tuple[int, ...]
    norm: bool
    head: bool
    windows: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A model, how it is cut over ranks, and how a step goes through it.

    together        micro-batches that an interleaved rank takes through a stage in one go; None: as many as ranks
    vocab           rows of the token table, before padding
    whole_experts   whether experts are not cut over tensor ranks
    micro_batches   of each replica in a step
    compute, master bytes of an element of parameters and activations; of gradients, master weights and moments
    sent            of a gradient on its way to the other replicas
    recompute       None, "selective" or "full"; of the latter `method` and `group` (the N of --recompute-method)
    zero            stage of ZeRO
    fused           whether attention keeps no probabilities
    loss_chunk      tokens whose loss is taken at once, 0: all
    overlaps        whether gradients are reduced beside the backward, and parameters gathered beside the forward
    """

    model: ModelConfig
    vocab: int
    moe: MoEConfig = MoEConfig()
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    whole_experts: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    split: Split = Split()
    micro_batch: int = 1
    micro_batches: int = 1
    compute: int = 2
    master: int = 4
    residual: int = 2
    sent: int = 4
    recompute: str | None = None
    method: str = "uniform"
    group: int = 1
    zero: int = 1
    optimizer: str = "adam"
    fused: bool = True
    loss_chunk: int = 0
    overlaps: tuple[bool, bool] = (False, False)
    together: int | None = None

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_tensor(self) -> int:
        """Ranks that share one expert."""
        return 1 if self.whole_experts else self.tensor

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.micro_batch * self.micro_batches * self.data

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.model.seq_length

    @property
    def rows(self) -> float:
        """Tokens of a micro-batch that a rank holds where the sequence is cut."""
        return self.tokens / self.tensor

    @property
    def table(self) -> int:
        """Elements of the token table on a rank."""
        return self.model.padded_vocab(self.vocab, self.tensor) // self.tensor * self.model.hidden_size

    @property
    def order(self) -> Schedule:
        return SCHEDULES[self.schedule].in_groups(self.together)

    @cached_property
    def homes(self) -> list[int]:
        """The pipeline rank of each stage."""
        return self.order.homes(self.pipeline, self.chunks)

    @property
    def tied_apart(self) -> bool:
        """Whether two pipeline ranks hold the token table."""
        return self.model.tied and self.homes[0] != self.homes[-1]

    def degree(self, experts: int) -> int:
        """Ranks over which a layer with so many experts cuts them."""
        return gcd(experts, self.expert)

    @cached_property
    def stages(self) -> tuple[StageSlice, ...]:
        """The model, stage by stage. Raises ValueError where a stage would get no layer."""
        experts = self.moe.experts_of_layers(self.model.num_layers)
        blocks = [layer_parameters(self.model, self.moe, n) for n in experts]
        dense = layer_parameters(self.model, self.moe, 1).active
        names = ["embedding", *(f"layers.{i}" for i in range(len(experts))), "final_norm", "head"]
        costs = [0.0, *(block.active / dense for block in blocks), 0.0, 0.0]
        h = self.model.hidden_size
        positions = self.model.positions * (self.model.position_embedding_type == "learned_absolute")
        ends = ((self.vocab + positions) * h, norm_parameters(self.model, h), self.vocab * h)
        weights = [float(n) for n in (ends[0], *(block.total for block in blocks), *ends[1:])]
        split = Split() if self.split.weighs == "seconds" else self.split        # nothing is measured on paper
        slices = split.ranges(names, costs, self.homes, weights if split.weighs else None)
        last = len(names) - 1
        return tuple(
            StageSlice(
                home, 0 in part, tuple(experts[i] for i in blocks), last - 1 in part, last in part,
                tuple(self.model.windows[i] for i in blocks),
            )
            for home, part, blocks in zip(self.homes, slices, _blocks_of(slices, last - 2), strict=True)
        )

    def peaks(self, sizes: Sequence[float]) -> list[float]:
        """The most that each pipeline rank holds at once, where a forward of stage s keeps sizes[s] until the gradients
        of its weights are there."""
        return self.over_micro_batches(lambda count: self._peaks(sizes, count))

    def _peaks(self, sizes: Sequence[float], micro_batches: int) -> list[float]:
        peaks = []
        for order in self.order(self.pipeline, micro_batches, self.chunks):
            held = most = 0.0
            for op in order:
                if isinstance(op, Forward):
                    held += sizes[op.stage]
                    most = max(most, held)
                elif isinstance(op, (Backward, BackwardWeight)):
                    held -= sizes[op.stage]
            peaks.append(most)
        return peaks

    def over_micro_batches(self, figures: Callable[[int], list[float]]) -> list[float]:
        """figures(micro_batches). Of many they are found by two small numbers of them: once a pipeline is full, each
        further round of micro-batches adds the same."""
        few = (FILLED_V if self.schedule == "zb-v" else FILLED) * self.pipeline
        rounds, rest = divmod(self.micro_batches - few, self.pipeline)
        if rounds < 2:
            return figures(self.micro_batches)
        less, more = figures(few + rest), figures(few + rest + self.pipeline)
        return [a + (b - a) * rounds for a, b in zip(less, more, strict=True)]


def _blocks_of(slices: Sequence[range], count: int) -> list[list[int]]:
    """The numbers of the blocks in each slice of the list of layers, which has the embedding before them."""
    return [[i - 1 for i in part if 0 < i <= count] for part in slices]


def split_of(parallel: ParallelConfig) -> Split:
    """How the flags cut the layers into stages."""
    return Split(
        parallel.pipeline_split, parallel.pipeline_model_parallel_layout, parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers, parallel.account_for_embedding_in_pipeline_split,
        parallel.account_for_loss_in_pipeline_split,
    )


def element_bytes(precision: PrecisionConfig) -> tuple[int, int]:
    """Of parameters and activations, and of what is kept wider."""
    if precision.fp64:
        return 8, 8
    return (2 if precision.bf16 or precision.fp16 else 4), 4


def layout_of(config: Config, vocab: int, world: int) -> Layout:
    """The layout of a configuration on so many ranks. Raises ValueError where they do not fit."""
    parallel, layers = config.parallel, config.model.num_layers
    data = parallel.data_size(world)
    compute, master = element_bytes(config.precision)
    recompute, each = config.recompute, parallel.expert_tensor_parallel_size
    by_family = config.moe.deepspeed and not parallel.enable_expert_tensor_parallelism
    return Layout(
        config.model, vocab, config.moe, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
        data, parallel.expert_model_parallel_size if config.moe.any else 1, by_family if each is None else each == 1,
        parallel.schedule(layers), parallel.chunks(layers), split_of(parallel),
        config.batch.micro_batch_size, config.batch.micro_batches(data), compute, master,
        residual=4 if config.precision.fp32_residual_connection else compute,
        sent=2 if config.precision.grad_reduce_in_bf16 else master,
        recompute=recompute.recompute_granularity, method=recompute.recompute_method or "uniform",
        group=recompute.layers, zero=config.optimizer.zero_stage,
        optimizer=config.optimizer.optimizer,
        fused=config.run.attention != "unfused" and not (
            config.model.apply_query_key_layer_scaling or config.model.sinks
        ),
        loss_chunk=recompute.loss_chunk_size or 0,
        overlaps=(config.optimizer.overlap_grad_reduce, config.optimizer.overlap_param_gather),
        together=parallel.microbatch_group_size_per_virtual_pipeline_stage,
    )
