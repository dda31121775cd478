"""The command line: argv -> Config, in the spellings of Megatron-LM and of Megatron-DeepSpeed.

A flag is one of four kinds. Honoured: every field of the configuration's sections, by its name. Alias: another
spelling that sets fields (RENAMED, SETS). Accepted: it changes nothing here, for a stated reason (ACCEPTED). Refused:
a capability that is missing (REFUSED), unless its value asks for nothing (HARMLESS). Everything else is unknown.
A new flag is a field or one word in a table.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

from .config import SECTIONS, Config
from .config_data import NUMBER
from .config_schedule import needs_lr
from .settings import Setting, flag_name, section_settings

# Another family's or an older name of a field.
RENAMED = {
    "num-key-value-heads": "num_query_groups",
    "layernorm-epsilon": "norm_epsilon",
    "rotary-position-embeddings-theta": "rotary_base",
    "moe-expert-parallel-size": "expert_model_parallel_size",
    "topk": "moe_router_topk",
    "moe-loss-coeff": "moe_aux_loss_coeff",
    "checkpoint-num-layers": "recompute_num_layers",
    "activations-checkpoint-num-layers": "recompute_num_layers",
    "activations-checkpoint-method": "recompute_method",
    "lr-schedule": "lr_scheduler",
}

# Flags that set fields: those of the first dict always, those of the second where no other flag does.
SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "use-rotary-position-embeddings": ({"position_embedding_type": "rope"}, {}),
    "no-position-embedding": ({}, {"position_embedding_type": "none"}),
    "swiglu": ({"activation": "swiglu"}, {}),
    "squared-relu": ({"activation": "squared_relu"}, {}),
    "openai-gelu": ({"activation": "gelu_tanh"}, {}),
    "no-bias-gelu-fusion": ({}, {"activation": "gelu"}),  # unfused, both families compute the exact GELU
    "checkpoint-activations": (
        {"recompute_granularity": "full"},
        {"recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "activations-checkpoint-method": ({}, {"recompute_granularity": "full", "recompute_num_layers": 1}),
    "enable-zbh1-pipeline": ({"pipeline_schedule": "zb-h1"}, {}),
    "use-flash-attn": ({}, {"attention_backend": "sdpa"}),
    "use-flash-attn-v2": ({}, {"attention_backend": "sdpa"}),
    "use-flash-attn-triton": ({}, {"attention_backend": "sdpa"}),
    "no-query-key-layer-scaling": ({"apply_query_key_layer_scaling": False}, {}),
    "recompute-activations": ({"recompute_granularity": "selective"}, {}),
    **dict.fromkeys(
        ("topk", "moe-loss-coeff", "moe-expert-parallel-size"), ({}, {"moe_family": "megatron-deepspeed"})
    ),
}

# Fields whose flag may come several times, each time adding its words.
REPEATABLE = ("kernel", "valid_set")

# Reason -> flags that change nothing. "name=" takes one value, "name*" any number of them.
ACCEPTED = {
    "there is one implementation of each part": """use-mcore-models transformer-impl= DDP-impl= data-impl=
        no-mmap-bin-files dataloader-num-threads=
        no-create-attention-mask-in-dataloader deepspeed-activation-checkpointing""",
    "fusing or not changes speed only": """no-bias-dropout-fusion no-bias-swiglu-fusion
        no-rope-fusion no-gradient-accumulation-fusion no-persist-layer-norm cross-entropy-loss-fusion
        cross-entropy-fusion-impl=""",
    "overlap changes speed only": """tp-comm-overlap
        no-async-tensor-model-parallel-allreduce""",
    "the sequence is always cut over the tensor ranks between layers": """sequence-parallel
        distribute-saved-activations partition-activations""",
    "optimizer states are cut over the data ranks, but with --zero-stage 0": "use-distributed-optimizer",
    "gradients are always accumulated in fp32 or wider": "accumulate-allreduce-grads-in-fp32",
    "softmax and loss are always computed in fp32 or wider": "attention-softmax-in-fp32 fp16-lm-cross-entropy",
    "a stored scale minus one trains alike": "apply-layernorm-1p",
    "the loss is always the mean over all tokens of the global batch": "calculate-per-token-loss",
    "weights never depend on the layout": "use-cpu-initialization",
    "every gradient is checked": "no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad",
    "there is no index to cache": "data-cache-path=",
    "there is no generator state to save": "no-load-rng no-save-rng",
    "there is one checkpoint format, which any layout reads": """ckpt-format= dist-ckpt-format= auto-detect-ckpt-format
        dist-ckpt-strictness= ckpt-fully-parallel-save ckpt-fully-parallel-load no-ckpt-fully-parallel-save""",
    "a save in the background has a thread of its own": "use-persistent-ckpt-worker",
    "a checkpoint that is asked for and missing is always an error": "exit-on-missing-checkpoint",
    "these figures are not measured yet": """log-memory-to-tensorboard log-optimizer-states-to-tensorboard
        timing-log-level= timing-log-option= no-barrier-with-level-1-timing logging-level=""",
    "memory is left to Python and torch": "manual-gc manual-gc-interval= empty-unused-memory-level=",
    "the launcher's environment says it": "local-rank=",
    "there is one engine for any pipeline size": "no-pipeline-parallel",
    "every schedule computes exactly the same": "enable-zbh1-exact-semantics",
    "experts are always multiplied as a group, and their rows moved by an uneven all-to-all": """moe-grouped-gemm
        moe-token-dispatcher-type= moe-flex-dispatcher-backend= moe-permute-fusion use-tutel moe-router-fusion
        moe-use-legacy-grouped-gemm moe-pad-expert-input-to-capacity""",
    "what every token passes is always computed while rows travel": "moe-shared-expert-overlap",
    "experts always have optimizer states of their own": "create-moe-param-group",
    "every layer's balance is always reported": "moe-per-layer-logging",
}

# Missing capability -> flags that ask for it.
REFUSED = {
    "fp8 and fp4": """fp8-format fp8 fp4-format fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather fp8-margin
        fp8-recipe""",
    "products of bf16 without its own rounding of partial sums": "disable-bf16-reduced-precision-matmul",
    "reading a DeepSpeed configuration": "deepspeed deepspeed-config deepscale deepscale-config",
    "DeepSpeed checkpoints": "load-tag universal-checkpoint no-load-lr-state",
    "rounding the global batch down": "decrease-batch-size-if-needed",
    "context parallelism": """context-parallel-size cp-comm-type hierarchical-context-parallel-sizes
        ds-sequence-parallel-size ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size
        ds-sequence-parallel-fpdt-offloading""",
    "cutting gradients and parameters over the data ranks": """use-megatron-fsdp use-torch-fsdp2 fsdp-double-buffer
        data-parallel-sharding-strategy init-model-with-meta-device use-nccl-ub fsdp-manual-registration
        megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype remote-device""",
    "another order of ranks": "use-tp-pp-dp-mapping num-distributed-optimizer-instances",
    "MegaBlocks' own spellings (see --num-experts, --moe-router-topk)": """moe-num-experts moe-top-k moe-capacity-factor
        moe-loss-weight moe-expert-model-parallelism""",
    "random routing for benchmarks": "moe-router-force-load-balancing",
    "Megatron's old Switch layers": "num-experts-switch",
    "other attention": """multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
        rotary-scaling-factor mscale mscale-all-dim rope-type softmax-type window-size window-attn-skip-freq""",
    "other feed-forward layers": "quick-geglu glu-linear-offset activation-func-clamp-value",
    "multi-token prediction": "mtp-num-layers mtp-loss-scaling-factor",
    "another initialisation": "init-method-xavier-uniform",
    "an optimizer on the host": "cpu-optimizer",
    "keeping activations on the host, or recomputing other parts": "checkpoint-in-cpu recompute-modules",
    "other orders of samples": """dataloader-type data-efficiency-curriculum-learning random-ltd
        train-data-exact-num-epochs return-data-index train-doc-idx-path train-sample-idx-path
        train-shuffle-idx-path aml-data-download-path""",
    "tiktoken": "tiktoken-pattern",
    "leaving on a signal": "exit-signal-handler",
    "Weights & Biases": "wandb-project wandb-exp-name wandb-save-dir wandb-entity",
    "profiling": "profile profile-step-start profile-step-end profile-ranks use-pytorch-profiler",
    "another interval for TensorBoard": "tensorboard-log-interval",
}

# Fields that say something only of the loss scale, which is 1 without --fp16.
LOSS_SCALE_FIELDS = (
    "loss_scaler", "loss_scale", "initial_loss_scale", "initial_scale_power", "min_loss_scale", "loss_scale_window",
    "hysteresis", "consecutive_hysteresis", "loss_scale_floor",
)  # fmt: skip

# Fields that say something only where there is a teacher.
TEACHER_FIELDS = (
    "load_teacher", "num_layers_teacher", "hidden_size_teacher", "num_attention_heads_teacher", "num_experts_teacher",
    "kd_alpha_ce", "kd_beta_ce", "kd_temp", "kd_stop_iteration", "kd_stop_tokens",
)  # fmt: skip

# Values with which a flag of REFUSED asks for nothing.
HARMLESS = {
    "context-parallel-size": ("1",),
    "ds-sequence-parallel-size": ("1",),
    "num-distributed-optimizer-instances": ("1",),
    "rope-type": ("rope",),
    "softmax-type": ("vanilla",),
    "recompute-modules": ("core_attn",),
    "dataloader-type": ("single",),
    "remote-device": ("none",),
    "tensorboard-log-interval": ("1",),
}


def flags_of(table: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Flag -> (reason, "" or "=" or "*") of a table written by reasons."""
    found = {}
    for reason, words in table.items():
        for word in words.split():
            name = word.rstrip("=*")
            found[name] = (reason, word[len(name) :])
    return found


ACCEPTED_FLAGS = flags_of(ACCEPTED)
REFUSED_FLAGS = flags_of(REFUSED)


class UsageError(ValueError):
    """The command line asks for something that cannot be; the message is one line."""


@dataclass(frozen=True)
class Given:
    """One flag as it was typed and the words that follow it."""

    typed: str
    words: list[str]

    @property
    def name(self) -> str:
        """The flag without dashes in front, underscores read as dashes."""
        return self.typed[2:].replace("_", "-")

    def one_word(self) -> str:
        if len(self.words) != 1:
            got = f"got {' '.join(self.words)}" if self.words else "got none"
            raise UsageError(f"{self.typed} takes one value, but {got}")
        return self.words[0]

    def no_word(self) -> None:
        if self.words:
            raise UsageError(f"{self.typed} is a switch and takes no value, but got {' '.join(self.words)}")


@dataclass
class Reading:
    """What the flags read so far say: field -> value, and the flag that said so."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    weak: dict[str, Any] = field(default_factory=dict)
    accepted: dict[str, list[str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, source: str) -> None:
        """The last of several equal flags counts; two different flags must agree."""
        before = self.sources.get(name)
        if before not in (None, source) and self.values[name] != value:
            raise UsageError(f"{before} and {source} contradict each other about {flag_name(name)}")
        self.values[name], self.sources[name] = value, source


def parse(
    argv: Sequence[str], base: Config | None = None, *, shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
) -> tuple[Config, list[str]]:
    """The configuration that a command line asks for, and notices to be printed once.

    With `base` (a checkpoint's configuration, say) the flags change that one, and none is required. Where
    --use-checkpoint-args is given, `shape` is called with the fields that are, and gives more. Raises UsageError.
    `--help` prints the flags and raises SystemExit.
    """
    settings = all_settings()
    given = split_words(argv)
    if any(flag.name == "help" for flag in given):
        print(help_text())
        raise SystemExit(0)
    reading = Reading()
    for flag in given:
        read_flag(flag, settings, reading)
    if reading.unknown:
        raise UsageError("; ".join(reading.unknown))
    if reading.refused:
        raise UsageError("; ".join(reading.refused))
    values = reading.weak | reading.values
    if values.get("use_checkpoint_args"):
        values = {**shape(values), **values}
    check_combinations(values, [flag.name for flag in given])
    if base is None:
        require(values, settings)
    sections = {}
    try:
        for section, kind in SECTIONS.items():
            start = vars(vars(base)[section]) if base is not None else {}
            own = {name: values[name] for name in values if settings[name].section == section}
            sections[section] = kind(**(start | own))
        return Config(**sections), notices(reading)
    except ValueError as wrong:
        raise UsageError(in_typed_words(str(wrong), reading.sources)) from wrong


def split_words(argv: Sequence[str]) -> list[Given]:
    """Flags with the words up to the next flag. A word after `=` belongs to its flag alone."""
    found: list[Given] = []
    for word in argv:
        if word == "-h":
            found.append(Given("--help", []))
        elif word.startswith("--") and len(word) > 2:
            typed, equals, value = word.partition("=")
            found.append(Given(typed, [value] if equals else []))
        elif found:
            found[-1].words.append(word)
        else:
            raise UsageError(f"unexpected word {word!r} before the first flag")
    return found


def read_flag(flag: Given, settings: dict[str, Setting], reading: Reading) -> None:
    """Put what one flag says into `reading`."""
    name, renamed = flag.name, RENAMED.get(flag.name)
    target = renamed or name.replace("-", "_")
    negated = target.removeprefix("no_")
    if target in settings:
        value = field_value(flag, settings[target])
        if target in REPEATABLE:
            value = reading.values.get(target, ()) + value
        reading.set(target, value, f"--{name}")
    elif negated in settings and settings[negated].kind is bool:
        flag.no_word()
        reading.set(negated, False, flag_name(negated))
    elif name in ACCEPTED_FLAGS:
        reason, arity = ACCEPTED_FLAGS[name]
        if arity == "":
            flag.no_word()
        elif arity == "=":
            flag.one_word()
        reading.accepted.setdefault(reason, []).append(flag.typed)
    elif name in REFUSED_FLAGS:
        if " ".join(flag.words) in HARMLESS.get(name, ()):
            reading.accepted.setdefault("this value asks for nothing", []).append(flag.typed)
        else:
            shown = " ".join([flag.typed, *flag.words])
            reading.refused.append(f"{shown}: not available yet: {REFUSED_FLAGS[name][0]}")
    elif name not in SETS:
        near = difflib.get_close_matches(name, all_names(settings), n=1)
        reading.unknown.append(f"unknown flag {flag.typed}" + (f"; did you mean --{near[0]}?" if near else ""))
    if name in SETS:
        if not renamed:
            flag.no_word()
        strong, weak = SETS[name]
        for target, value in strong.items():
            reading.set(target, value, f"--{name}")
        reading.weak |= weak


def field_value(flag: Given, setting: Setting) -> Any:
    """The value of a field from the words after its flag."""
    if setting.kind is bool:
        flag.no_word()
        return True
    if setting.many:
        if not flag.words:
            raise UsageError(f"{flag.typed} takes values, but got none")
        return tuple(one_value(flag, word, setting) for word in flag.words)
    return one_value(flag, flag.one_word(), setting)


def one_value(flag: Given, word: str, setting: Setting) -> Any:
    """The value that one word gives to a field, or to one item of it."""
    if setting.choices:
        same = [choice for choice in setting.choices if choice.casefold() == word.casefold()]
        value: Any = same[0] if same else word
    elif setting.kind in (int, float):
        if not is_number(word) or (setting.kind is int and not float(word).is_integer()):
            kind = "a whole number" if setting.kind is int else "a number"
            raise UsageError(f"{flag.typed} {word}: must be {kind}")
        whole = re.fullmatch(r"[-+]?\d+", word)
        value = int(word) if whole and setting.kind is int else setting.kind(float(word))
    else:
        value = word.strip(" '\"") if setting.name == "split" else word
    try:
        setting.check((value,) if setting.many else value)
    except ValueError as wrong:
        raise UsageError(in_typed_words(str(wrong), {setting.name: f"--{flag.name}"})) from wrong
    return value


def is_number(word: str) -> bool:
    return NUMBER.fullmatch(word) is not None


def check_combinations(values: dict[str, Any], names: list[str]) -> None:
    """Flags that a Config no longer shows."""
    if "no-position-embedding" in names and values["position_embedding_type"] == "learned_absolute":
        raise UsageError("--no-position-embedding and --position-embedding-type learned_absolute contradict each other")
    stages = values.get("pipeline_model_parallel_size", 1)
    if "no-pipeline-parallel" in names and stages > 1:
        raise UsageError(f"--no-pipeline-parallel and --pipeline-model-parallel-size {stages} contradict each other")
    if values.get("grad_reduce_in_bf16") and "accumulate-allreduce-grads-in-fp32" in names:
        raise UsageError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other")
    printing = {"print_layout", "print_lr", "print_config"} & set(values)
    if "world_size" in values and not printing:
        raise UsageError("--world-size goes with --print-layout or --print-lr: a run takes its size from its launcher")


def require(values: dict[str, Any], settings: dict[str, Setting]) -> None:
    """UsageError that lists every flag that is missing. A command that only prints needs less."""
    layout, lr, config = (bool(values.get(name)) for name in ("print_layout", "print_lr", "print_config"))
    if layout:
        values.setdefault("micro_batch_size", 1)  # no layout depends on it
    required = [name for name, setting in settings.items() if setting.default is MISSING]
    missing = [flag_name(name) for name in required if name not in values]
    if not layout and not config:
        if "lr" not in values and needs_lr(values.get("lr_scheduler"), values.get("warmup_max_lr")):
            missing.append("--lr")
        if not {"train_iters", "train_samples", "train_tokens"} & set(values):
            missing.append("--train-iters (or --train-samples)")
        if not lr and not any(values.get(name) for name in ("data_path", "train_data_path", "mock_data")):
            missing.append("--data-path (or --mock-data)")
    if not lr and not config and "vocab_size" not in values:
        null = values.get("tokenizer_type", "").casefold().startswith("null")
        sources = {"data_path", "train_data_path", "tokenizer_type", "tokenizer_model", "vocab_file"}
        if null or not sources & set(values):
            missing.append("--vocab-size")
    if missing:
        raise UsageError(f"missing: {', '.join(missing)}")


def notices(reading: Reading) -> list[str]:
    """One line about all flags that were accepted and change nothing."""
    words = [f"{', '.join(dict.fromkeys(flags))} ({reason})" for reason, flags in reading.accepted.items()]
    scaling = [reading.sources[name] for name in LOSS_SCALE_FIELDS if name in reading.values]
    if scaling and not reading.values.get("fp16"):
        words.append(f"{', '.join(scaling)} (the loss is scaled only with --fp16)")
    teaching = [reading.sources[name] for name in TEACHER_FIELDS if name in reading.values]
    if teaching and not (reading.values.get("mos") or reading.values.get("kd")):
        words.append(f"{', '.join(teaching)} (there is no teacher without --mos or --kd)")
    values, settings = reading.values, all_settings().values()
    routing = [
        reading.sources[s.name] for s in settings
        if s.section == "moe" and s.name != "num_experts" and s.name in values
    ]
    if routing and max(values.get("num_experts", ()), default=1) <= 1:
        words.append(f"{', '.join(dict.fromkeys(routing))} (no layer has experts without --num-experts above 1)")
    return [f"accepted without effect: {'; '.join(words)}"] if words else []


def in_typed_words(message: str, sources: dict[str, str]) -> str:
    """The message with the names of RENAMED, where the user typed those, in place of the fields' own."""
    for name, typed in sources.items():
        if typed[2:] in RENAMED:
            message = re.sub(rf"{flag_name(name)}(?![\w-])", typed, message)
    return message


def all_settings() -> dict[str, Setting]:
    """Every field of every section by name."""
    return {setting.name: setting for name, kind in SECTIONS.items() for setting in section_settings(name, kind)}


def all_names(settings: dict[str, Setting]) -> list[str]:
    """Every known flag without its dashes, honoured ones first."""
    own = [name.replace("_", "-") for name in settings]
    return [*own, *RENAMED, *SETS, *ACCEPTED_FLAGS, *REFUSED_FLAGS]


def help_text() -> str:
    """Every flag by section, and what is accepted, another spelling, or not available yet."""
    told = textwrap.TextWrapper(120, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False)
    lines = ["Flags, with _ for - as you like, and = or a space before a value. A switch FLAG has its --no-FLAG."]
    for section, kind in SECTIONS.items():
        lines += ["", f"{section}: {kind.__doc__}"]
        for setting in section_settings(section, kind):
            value = "" if setting.kind is bool else "{" + ",".join(setting.choices) + "}"
            if value == "{}":
                value = setting.name.upper() if setting.kind is str else setting.kind.__name__.upper()
            shown = "" if setting.default in (None, False, ()) or setting.kind is bool else f" [{setting.default}]"
            shown = " [required]" if setting.default is MISSING else shown
            lines += [f"  {flag_name(setting.name)} {value}".rstrip(), told.fill(setting.help + shown)]
    lines += ["", "other spellings:"]
    lines += [f"  --{name} = {flag_name(target)}" for name, target in RENAMED.items()]
    for name, (strong, weak) in SETS.items():
        lines.append(f"  --{name}: " + ", ".join(f"{flag_name(k)} {v}" for k, v in (strong | weak).items()))
    for title, table in (("accepted without effect:", ACCEPTED), ("not available yet:", REFUSED)):
        lines += ["", title]
        for reason, words in table.items():
            names = " ".join("--" + word.rstrip("=*") for word in words.split())
            text = textwrap.TextWrapper(100, initial_indent="  ", subsequent_indent="        ", break_on_hyphens=False)
            lines.append(text.fill(f"{reason}: {names}"))
    return "\n".join(lines)
