"""Every choice of a run, read once and never changed. One field is one flag: num_layers is --num-layers.

A part of the house is given its own section (ModelConfig, ParallelConfig, ...), never the whole. What follows
from other fields is a property; what follows from the world is asked of a function of the world's size.
A broken rule is a ValueError that names the value, the bound and the flag, long before any rank waits for another.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, asdict, dataclass, field, replace
from math import gcd
from typing import Literal, get_type_hints

from .batch_sizes import SeqLengths
from .config_checkpoint import CheckpointConfig
from .config_curriculum import CurriculumConfig
from .config_data import BatchConfig, DataConfig
from .config_distill import DistillConfig
from .config_moe import MoEConfig, layer_pattern
from .config_operations import OperationsConfig
from .config_parallel import ParallelConfig
from .config_precision import PrecisionConfig
from .config_schedule import DeepSpeedScheduleConfig, ScheduleConfig, check_schedule
from .config_watching import WatchingConfig
from .settings import check_fields, flag, sections_from_dict


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model and what it computes."""

    num_layers: int = flag(MISSING, "transformer blocks", at_least=1)
    hidden_size: int = flag(MISSING, "width of the residual stream", at_least=1)
    num_attention_heads: int = flag(MISSING, "query heads", at_least=1)
    seq_length: int = flag(MISSING, "tokens in a training sample", at_least=1)
    max_position_embeddings: int | None = flag(None, "positions the model knows; default: --seq-length", at_least=1)
    ffn_hidden_size: int | None = flag(None, "inner width; default: 4 h, with swiglu int(h / 24) * 64", at_least=1)
    kv_channels: int | None = flag(None, "size of one head; default: hidden / heads", at_least=1)
    num_query_groups: int | None = flag(None, "key and value heads; default: as the query heads", at_least=1)
    group_query_attention: bool = flag(False, "grouped-query attention; without --num-query-groups one group")
    vocab_size: int | None = flag(None, "tokens before padding; default: the tokenizer's", at_least=2)
    make_vocab_size_divisible_by: int = flag(128, "times the tensor size: unit of the padded vocabulary", at_least=1)
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "which norm, in any case")
    norm_epsilon: float = flag(1e-5, "epsilon of the norms", above=0)
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = flag("learned_absolute", "kind of positions")
    rotary_base: float = flag(10000.0, "base of the rotary frequencies (theta)", above=0)
    rotary_percent: float = flag(1.0, "share of a head that is rotated", above=0, at_most=1)
    rotary_interleaved: bool = flag(False, "rotate neighbouring elements instead of the two halves of a head")
    use_rope_scaling: bool = flag(False, "stretch the rotary frequencies as Llama 3 does")
    rope_scaling_factor: float = flag(8.0, "Llama 3: how far low frequencies are stretched", at_least=1)
    rope_low_freq_factor: float = flag(1.0, "Llama 3: waves above original / this are stretched", above=0)
    rope_high_freq_factor: float = flag(4.0, "Llama 3: waves below original / this are kept", above=0)
    rope_original_max_positions: int = flag(8192, "Llama 3: positions of the model before stretching", at_least=1)
    activation: Literal["gelu_tanh", "gelu", "squared_relu", "swiglu"] = flag("gelu_tanh", "non-linearity of the MLP")
    disable_bias_linear: bool = flag(False, "no bias in linear layers")
    add_qkv_bias: bool = flag(False, "a bias on queries, keys and values even with --disable-bias-linear")
    qk_layernorm: bool = flag(False, "a norm on each query and key head")
    untie_embeddings_and_output_weights: bool = flag(False, "the head has a weight of its own")
    attention_dropout: float = flag(0.1, "dropout of attention probabilities", at_least=0, below=1)
    hidden_dropout: float = flag(0.1, "dropout of the embedding and of the residual branches", at_least=0, below=1)
    apply_query_key_layer_scaling: bool = flag(False, "divide scores by the layer's number until the softmax, for fp16")
    window_size: str | None = flag(None, "L,R: a query sees L keys before its own (-1: all) and none after it, R 0")
    window_attn_skip_freq: str | None = flag(None, "N: every N-th layer sees all; or a list, 1: window, 0: all")
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = flag(
        "vanilla", "a head may attend to nothing: off-by-one: by a score of 0; learnable: by a learned one"
    )
    init_method_std: float = flag(0.02, "standard deviation of initial weights", at_least=0)
    label_smoothing: float = flag(0.0, "probability spread over the whole vocabulary in the loss", at_least=0, below=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                f"{self.num_attention_heads}: give the size of a head by --kv-channels"
            )
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is not divisible by "
                f"--num-query-groups {self.query_groups}"
            )
        if self.seq_length > self.positions:
            raise ValueError(
                f"--seq-length {self.seq_length} is above --max-position-embeddings {self.max_position_embeddings}"
            )
        if self.ffn < 1:
            raise ValueError(
                f"--hidden-size {self.hidden_size} is too small for the default width of swiglu: give --ffn-hidden-size"
            )
        self._check_positions()
        self._check_window()

    def _check_positions(self) -> None:
        if self.position_embedding_type == "rope" and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(
                f"--rotary-percent {self.rotary_percent} of a head of {self.head_dim} is {self.rotary_dim} elements: "
                "rotary positions need an even number of at least 2"
            )
        if self.use_rope_scaling and self.position_embedding_type != "rope":
            raise ValueError(
                f"--use-rope-scaling needs --position-embedding-type rope, not {self.position_embedding_type}"
            )
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise ValueError(
                f"--rope-high-freq-factor {self.rope_high_freq_factor} must be above "
                f"--rope-low-freq-factor {self.rope_low_freq_factor}"
            )

    def _check_window(self) -> None:
        if self.window_size is not None:
            sides = re.fullmatch(r"[\[(]?\s*(-?\d+)\s*,\s*(-?\d+)\s*[\])]?", self.window_size.strip(" '\""))
            if sides is None or int(sides[1]) < -1:
                raise ValueError(f"--window-size {self.window_size}: must be two whole numbers L,R of at least -1")
            if int(sides[2]) not in (-1, 0):
                raise ValueError(f"--window-size {self.window_size}: R must be 0 (or -1), for no query looks ahead")
        elif self.window_attn_skip_freq is not None:
            raise ValueError(f"--window-attn-skip-freq {self.window_attn_skip_freq} needs --window-size")
        self.windows  # noqa: B018

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer the keys before its own that a query sees; None: all of them."""
        left = -1 if self.window_size is None else int(self.window_size.strip(" '\"[(").partition(",")[0])
        if self.window_attn_skip_freq is None:
            windowed = (True,) * self.num_layers
        elif self.window_attn_skip_freq.isdecimal() and int(self.window_attn_skip_freq):
            windowed = tuple((layer + 1) % int(self.window_attn_skip_freq) > 0 for layer in range(self.num_layers))
        else:
            windowed = layer_pattern(self.window_attn_skip_freq, self.num_layers, "--window-attn-skip-freq")
        return tuple(left if here and left >= 0 else None for here in windowed)

    @property
    def sinks(self) -> bool:
        """Whether a head may attend to nothing."""
        return self.softmax_type != "vanilla"

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Elements of one head that rotary positions turn."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or (1 if self.group_query_attention else self.num_attention_heads)

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.query_groups

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation == "swiglu"

    @property
    def ffn(self) -> int:
        """Inner width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return self.hidden_size // 24 * 64 if self.gated else 4 * self.hidden_size

    @property
    def bias(self) -> bool:
        """Whether linear layers have a bias."""
        return not self.disable_bias_linear

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projection has a bias."""
        return self.bias or self.add_qkv_bias

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one weight."""
        return not self.untie_embeddings_and_output_weights

    @property
    def positions(self) -> int:
        """Positions the model knows."""
        return self.max_position_embeddings or self.seq_length

    def padded_vocab(self, vocab_size: int, tensor_size: int) -> int:
        """Rows of the embedding over all tensor ranks, padding included."""
        unit = self.make_vocab_size_divisible_by * tensor_size
        return -(-vocab_size // unit) * unit


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, or another rule. Learning rate and weight decay are the schedule's."""

    optimizer: Literal["adam", "sgd", "lamb", "muon"] = flag("adam", "which optimizer; muon: Adam but for matrices")
    decoupled_weight_decay: bool = flag(True, "AdamW; --no-decoupled-weight-decay: decay as an L2 term, as Adam had it")
    sgd_momentum: float = flag(0.9, "momentum of sgd", at_least=0, below=1)
    adam_beta1: float = flag(0.9, "decay of the first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.999, "decay of the second moment", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "epsilon of the denominator", at_least=0)
    lamb_min_coeff: float = flag(0.01, "smallest trust ratio of lamb", above=0)
    lamb_max_coeff: float = flag(10.0, "largest trust ratio of lamb", above=0)
    muon_momentum: float = flag(0.95, "momentum of muon", at_least=0, below=1)
    muon_num_ns_steps: int = flag(5, "steps of muon's Newton-Schulz iteration", at_least=1)
    muon_bf16: bool = flag(False, "that iteration in bf16; else in the dtype of the master weights")
    clip_grad: float = flag(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    zero_stage: int = flag(1, "cut over the data ranks: 0 nothing, 1 optimizer states, 2 gradients too", at_least=0)
    bucket_size: int = flag(40_000_000, "elements that are reduced together", at_least=1)
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the last backward runs")
    overlap_param_gather: bool = flag(False, "gather parameters while the next forward runs")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lamb_min_coeff > self.lamb_max_coeff:
            raise ValueError(
                f"--lamb-min-coeff {self.lamb_min_coeff}: must be at most --lamb-max-coeff {self.lamb_max_coeff}"
            )
        if self.zero_stage > 2:
            raise ValueError(
                f"--zero-stage {self.zero_stage}: must be 0, 1 or 2, for cutting parameters over the data ranks is not "
                "available yet"
            )


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Which activations are computed again in the backward pass instead of being kept."""

    recompute_granularity: Literal["selective", "full"] | None = flag(None, "the attention core, or whole blocks")
    recompute_method: Literal["uniform", "block"] | None = flag(None, "groups of N blocks, or the first N of a stage")
    recompute_num_layers: int | None = flag(None, "the N of --recompute-method; default: 1", at_least=1)
    loss_chunk_size: int | None = flag(
        None, "tokens whose logits exist at once, computed again in the backward; default: all of a micro-batch",
        at_least=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        method, number = self.recompute_method, self.recompute_num_layers
        if self.recompute_granularity == "full" and method is None:
            raise ValueError("--recompute-granularity full needs --recompute-method uniform or block")
        for name, value in (("--recompute-method", method), ("--recompute-num-layers", number)):
            if self.recompute_granularity != "full" and value is not None:
                raise ValueError(f"{name} {value} goes only with --recompute-granularity full")

    @property
    def layers(self) -> int:
        """Blocks of one group (uniform) or of each stage (block)."""
        return self.recompute_num_layers or 1


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run tells about itself."""

    log_interval: int = flag(100, "steps between lines on the console", at_least=1)
    tensorboard_dir: str | None = flag(None, "folder of TensorBoard events")
    tensorboard_queue_size: int = flag(1000, "events kept back before they are written", at_least=1)
    tensorboard_log_interval: int = flag(1, "steps between points in TensorBoard", at_least=1)
    log_memory_to_tensorboard: bool = flag(False, "memory of rank 0 to TensorBoard: its GPU's, or its process's")
    log_optimizer_states_to_tensorboard: bool = flag(False, "L2 norms of all moments, on steps that are printed")
    metrics_jsonl: str | None = flag(None, "file that gets one JSON object per iteration")
    trace_pipeline: str | None = flag(None, "folder for what each rank's pipeline did in the last ten steps")
    log_validation_ppl_to_tensorboard: bool = flag(False, "perplexity of evaluations to TensorBoard")
    log_timers_to_tensorboard: bool = flag(False, "seconds of a step to TensorBoard")
    log_batch_size_to_tensorboard: bool = flag(False, "global batch size to TensorBoard")
    log_throughput: bool = flag(False, "TFLOP/s per rank to TensorBoard; those by SC'21's formula there and here")
    log_params_norm: bool = flag(False, "L2 norm of all parameters, on steps that --log-interval prints")
    log_num_zeros_in_grad: bool = flag(False, "how many elements of the gradient are zero, on such steps")
    profile: bool = flag(False, "trace some steps with torch's profiler, and print their ten costliest ops")
    profile_step_start: int = flag(10, "first iteration that --profile traces", at_least=1)
    profile_step_end: int = flag(12, "last iteration that it traces", at_least=1)
    profile_ranks: tuple[int, ...] = flag((), "ranks that it traces; default: 0", at_least=0)
    profile_dir: str = flag("profile", "folder of its Chrome traces, one per rank")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.profile and self.profile_step_end < self.profile_step_start:
            raise ValueError(
                f"--profile-step-end {self.profile_step_end} is below --profile-step-start {self.profile_step_start}"
            )

    def shows(self, iteration: int, last: int) -> bool:
        """Whether the console has a line for an iteration of a run that ends after `last`."""
        return iteration % self.log_interval == 0 or iteration == last


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run itself: its seed, its kernels, and commands that print and leave."""

    seed: int = flag(1234, "seed of weights, order of samples and dropout", at_least=0)
    print_layout: bool = flag(False, "print ranks, groups, layers, memory of --world-size ranks, and leave")
    deterministic_mode: bool = flag(False, "the same run gives the same bits again, on GPUs too; see docs/watching.md")
    world_size: int | None = flag(None, "ranks of the layout to print; a run takes its launcher's", at_least=1)
    device_memory_gb: float | None = flag(None, "memory of a device: say whether the layout to print fits", above=0)
    json: bool = flag(False, "print the layout as JSON")
    print_lr: int | None = flag(None, "print the rates of the first N steps, and leave", at_least=1)
    print_config: bool = flag(False, "print every setting as JSON, and leave")
    deepspeed: bool = flag(False, "a run as --deepspeed_config says")
    deepspeed_config: str | None = flag(None, "DeepSpeed's JSON file, which flags must not contradict")
    kernels: Literal["auto", "triton", "torch"] = flag("auto", "auto: triton on GPUs where it is installed")
    kernel: tuple[str, ...] = flag((), "OP=IMPL, repeatable: one operation by triton or torch whatever --kernels says")
    attention_backend: Literal["auto", "sdpa", "unfused", "flash", "fused", "local"] = flag(
        "auto", "unfused (or local): products around a softmax; sdpa (or flash, fused): torch's fused attention"
    )
    cpu_matmul: Literal["auto", "torch", "onednn"] = flag(
        "auto", "fp32 products on a CPU; auto: oneDNN on AMD's processors with AVX-512, which MKL does not use there"
    )
    compile: bool = flag(False, "torch.compile what stands between the products, draws and exchanges of a block")
    masked_softmax_fusion: bool = flag(True, "a softmax kernel in unfused attention; --no-...: torch's softmax")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.print_layout and (self.json or self.device_memory_gb is not None):
            raise ValueError(f"{'--json' if self.json else '--device-memory-gb'} goes with --print-layout")
        for entry in self.kernel:
            operation, _, implementation = entry.partition("=")
            if not operation or implementation not in ("triton", "torch"):
                raise ValueError(f"--kernel {entry}: must be OP=triton or OP=torch")
        if self.compile and self.kernels != "auto":
            raise ValueError(f"--compile and --kernels {self.kernels}: give one of them, not both")

    def without_printing(self) -> RunConfig:
        """The same for a run, which prints nothing and leaves."""
        return replace(
            self, print_layout=False, world_size=None, device_memory_gb=None, json=False, print_lr=None,
            print_config=False,
        )

    @property
    def attention(self) -> str:
        """auto, sdpa or unfused."""
        ours = {"flash": "sdpa", "fused": "sdpa", "local": "unfused"}
        return ours.get(self.attention_backend, self.attention_backend)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections of a run, and the rules between them that need no world."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    batch: BatchConfig
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    deepspeed_schedule: DeepSpeedScheduleConfig = field(default_factory=DeepSpeedScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    watching: WatchingConfig = field(default_factory=WatchingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_widths(self.model, self.parallel)
        check_depth(self.model, self.parallel)
        check_experts(self)
        self.parallel.chunks(self.model.num_layers)
        check_schedule(self.batch, self.schedule, self.deepspeed_schedule)
        self.batch.sizes(1, self.seq_lengths)
        chunk, layers = self.recompute.recompute_num_layers, self.model.num_layers
        if self.recompute.loss_chunk_size and self.distill.asked:
            raise ValueError(
                f"--loss-chunk-size {self.recompute.loss_chunk_size} goes without --kd and --mos: the teacher's logits "
                "are whole, and the student's are compared with them"
            )
        check_attention(self.model, self.run)
        if chunk is not None and chunk > layers:
            raise ValueError(f"--recompute-num-layers {chunk} is above --num-layers {layers}")

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share one expert: 1 or the tensor size."""
        parallel = self.parallel
        if parallel.expert_tensor_parallel_size is not None:
            return parallel.expert_tensor_parallel_size
        own = self.moe.deepspeed and not parallel.enable_expert_tensor_parallelism
        return 1 if own else parallel.tensor_model_parallel_size

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts of each layer, 1 where it is dense."""
        return self.moe.experts_of_layers(self.model.num_layers)

    @property
    def seq_lengths(self) -> SeqLengths:
        """Tokens of a training sample in each step. ValueError where the curriculum begins above --seq-length."""
        return self.curriculum.lengths(self.model.seq_length)

    def to_json(self) -> str:
        """A JSON object of sections, each an object of its fields."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Config:
        """The inverse of to_json. A setting that an older version did not know takes its default."""
        return Config(**sections_from_dict(json.loads(text), SECTIONS))


SECTIONS: dict[str, type] = get_type_hints(Config)


def check_attention(model: ModelConfig, run: RunConfig) -> None:
    """torch's fused attention, where it is asked for by name, has all that the model needs."""
    beyond = {
        "--apply-query-key-layer-scaling": model.apply_query_key_layer_scaling,
        f"--softmax-type {model.softmax_type}": model.sinks,
    }
    for name, is_asked in beyond.items():
        if is_asked and run.attention == "sdpa":
            raise ValueError(f"--attention-backend {run.attention_backend} has no {name}: auto and unfused have")


def check_depth(model: ModelConfig, parallel: ParallelConfig) -> None:
    """The pipeline ranks can share the layers. Stages may be of unequal depth."""
    pipeline = parallel.pipeline_model_parallel_size
    if model.num_layers < pipeline and parallel.needs_blocks:
        raise ValueError(
            f"--num-layers {model.num_layers} is below --pipeline-model-parallel-size {pipeline}: "
            "each stage needs a layer"
        )


def check_widths(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Sizes that the tensor axis must be able to cut."""
    tensor = parallel.tensor_model_parallel_size
    for name, size in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.query_groups),
        ("--ffn-hidden-size", model.ffn),
        ("--seq-length", model.seq_length),
    ):
        if size % tensor:
            raise ValueError(f"{name} {size} is not divisible by --tensor-model-parallel-size {tensor}")


def check_experts(config: Config) -> None:
    """The experts fit the layers, and every layer's experts can be cut over some of the ranks that share experts."""
    degree, tensor = config.parallel.expert_model_parallel_size, config.expert_tensor_size
    if degree > 1 and not config.moe.any:
        raise ValueError(f"--expert-model-parallel-size {degree} needs --num-experts above 1")
    for layer, experts in enumerate(config.experts):
        if experts > 1 and degree > 1 and gcd(experts, degree) == 1:
            raise ValueError(
                f"--expert-model-parallel-size {degree} has no common divisor with the {experts} experts of layer "
                f"{layer} (--num-experts)"
            )
    widths = (
        ("--moe-ffn-hidden-size", config.moe.moe_ffn_hidden_size, tensor),
        (
            "--moe-shared-expert-intermediate-size", config.moe.moe_shared_expert_intermediate_size,
            config.parallel.tensor_model_parallel_size,
        ),
    )
    for name, width, ranks in widths:
        if (width or 0) % ranks:
            raise ValueError(f"{name} {width} is not divisible by --tensor-model-parallel-size {ranks}")


def check_world(config: Config, world_size: int) -> None:
    """What depends on the number of ranks: the layout fills them evenly and every global batch is cut evenly."""
    data_size = config.parallel.data_size(world_size)
    tensor, degree = config.parallel.tensor_model_parallel_size, config.parallel.expert_model_parallel_size
    sharing = data_size * tensor // config.expert_tensor_size
    if sharing % degree:
        raise ValueError(
            f"--expert-model-parallel-size {degree} does not divide the {sharing} ranks of a stage that can share "
            f"experts (data {data_size}, tensor {tensor}, --expert-tensor-parallel-size {config.expert_tensor_size})"
        )
    for rank in config.logging.profile_ranks:
        if rank >= world_size:
            raise ValueError(f"--profile-ranks {rank}: there are {world_size} ranks, counted from 0")
    config.batch.check_accumulation(data_size)
    for size in config.batch.sizes(data_size, config.seq_lengths).sizes:
        config.batch.micro_batches(data_size, size)
    config.batch.evaluation(data_size)
