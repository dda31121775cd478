"""The section of the configuration about mixtures of experts: which layers, how many experts, who chooses them and how.

Both Megatron families are spoken here. Where they mean different things by silence (which layers, how many choices,
whether tokens are dropped) the flags that were given tell which of them is meant, and --moe-family says it outright.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from .settings import at_most_one, check_fields, flag

Balancing = Literal["aux_loss", "deepspeed", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
DropOrder = Literal["probs", "position", "choice", "random"]
JITTER = 0.01       # of the noisy gate policy "Jitter", as in DeepSpeed
MAX_LAYERS = 1_000_000      # a pattern longer than this is a slip of the pen


@dataclass(frozen=True)
class Capacity:
    """How many choices an expert takes of one gate call: ceil(tokens * topk / experts * factor), at least `minimum`.

    factor  None: every choice is taken
    order   who stays where there are too many: "probs" the largest weights, "position" the first tokens, "choice"
            first choices before second ones, each in token order, "random" any
    """

    factor: float | None = None
    minimum: int = 0
    order: DropOrder = "probs"


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: where, how many, and the rules of the router."""

    moe_family: Literal["megatron-lm", "megatron-deepspeed"] | None = flag(
        None, "whose defaults and gate; default: Megatron-DeepSpeed's where one of its own MoE flags is given"
    )
    num_experts: tuple[int, ...] = flag((1,), "experts of each MoE layer: one number, or one per MoE layer", at_least=0)
    moe_layer_freq: str | None = flag(
        None, "Megatron-LM: layers 0, N, 2N, ... have experts; or a pattern such as ([0]*1+[1]*1)*12; default: 1"
    )
    expert_interval: int | None = flag(
        None, "Megatron-DeepSpeed: layers N, 2N, ... counted from 1 have experts; default: 2", at_least=1
    )
    mlp_type: Literal["standard", "residual"] = flag("standard", "residual: an MLP beside the experts, mixed by a gate")
    moe_ffn_hidden_size: int | None = flag(None, "inner width of an expert; default: --ffn-hidden-size", at_least=1)
    moe_shared_expert_intermediate_size: int | None = flag(None, "inner width of the expert of all tokens", at_least=1)
    moe_shared_expert_gate: bool = flag(False, "a learned gate on the shared expert")

    moe_router_topk: int | None = flag(None, "experts per token; default: 2, in Megatron-DeepSpeed 1", at_least=1)
    moe_router_score_function: Literal["softmax", "sigmoid"] = flag("softmax", "from logits to scores")
    moe_router_pre_softmax: bool = flag(False, "Megatron-LM: softmax over all experts, not over the chosen ones")
    moe_router_topk_scaling_factor: float | None = flag(None, "factor on the weights", above=0)
    moe_router_dtype: Literal["fp32", "fp64"] = flag("fp32", "precision of the router")
    moe_router_num_groups: int | None = flag(None, "groups of experts, of which a token sees few", at_least=1)
    moe_router_group_topk: int | None = flag(None, "groups that a token sees", at_least=1)
    moe_router_enable_expert_bias: bool = flag(False, "balance by a bias on the choice, moved once per global batch")
    moe_router_bias_update_rate: float = flag(1e-3, "how far that bias moves", at_least=0)
    moe_input_jitter_eps: float | None = flag(None, "router input times 1 +- this in training", at_least=0, below=1)
    moe_noisy_gate_policy: Literal["Jitter", "RSample"] | None = flag(
        None, "DeepSpeed: Jitter is an eps of 0.01; RSample samples the only choice of a token in training"
    )
    disable_moe_top2_2nd_expert_sampling: bool = flag(
        False, "Megatron-DeepSpeed: the second of two experts is the next best in training too, not sampled"
    )

    moe_router_load_balancing_type: tuple[Balancing, ...] = flag(
        (), "kinds of balancing; default: aux_loss, or deepspeed, where of two choices only the first counts; "
        "global_aux_loss takes the choices of all data ranks so far, and so depends on how many there are"
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        (), "weight of each balancing loss; default: 0, in Megatron-DeepSpeed 0.1", at_least=0
    )
    moe_z_loss_coeff: float | None = flag(None, "weight of the z-loss of router logits", at_least=0)

    moe_expert_capacity_factor: float | None = flag(None, "Megatron-LM: drop above this; default: no drops", above=0)
    moe_train_capacity_factor: float | None = flag(
        None, "Megatron-DeepSpeed: in training drop above this; default: 1", above=0
    )
    moe_eval_capacity_factor: float | None = flag(
        None, "Megatron-DeepSpeed: in evaluation drop above this; default: 1", above=0
    )
    moe_min_capacity: int | None = flag(None, "Megatron-DeepSpeed: an expert takes so many; default: 4", at_least=0)
    moe_token_drop_policy: Literal["probs", "position"] | None = flag(
        None, "who stays; default: probs, in Megatron-DeepSpeed any of one choice, the first of two, probs of more"
    )
    moe_use_rts: bool = flag(True, "Megatron-DeepSpeed: a full expert of single choices takes any of them in training")
    disable_moe_token_dropping: bool = flag(False, "Megatron-DeepSpeed: no drops")
    disable_moe_token_dropping_in_eval: bool = flag(False, "no drops in evaluation, whatever training does")

    def __post_init__(self) -> None:
        check_fields(self)
        at_most_one({"--moe-layer-freq": self.moe_layer_freq, "--expert-interval": self.expert_interval})
        for name in ("moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity"):
            flags = {"--moe-expert-capacity-factor": self.moe_expert_capacity_factor}
            at_most_one(flags | {"--" + name.replace("_", "-"): vars(self)[name]})
        at_most_one(
            {
                "--moe-expert-capacity-factor": self.moe_expert_capacity_factor,
                "--disable-moe-token-dropping": self.disable_moe_token_dropping,
            }
        )
        self._check_choices()
        self._check_balancing()
        self._check_groups()

    def _check_choices(self) -> None:
        fewest = min((n for n in self.num_experts if n > 1), default=None)
        if fewest is None:
            return
        if self.topk > fewest:
            raise ValueError(f"--moe-router-topk {self.topk} is above the {fewest} experts of a layer (--num-experts)")
        plain = self.family == "megatron-lm" and not self.moe_router_pre_softmax and "sinkhorn" not in self.balancing
        if plain and self.topk == 1 and self.moe_router_score_function == "softmax":
            raise ValueError(
                "--moe-router-topk 1 with --moe-router-score-function softmax needs --moe-router-pre-softmax: "
                "the softmax over one choice is always 1, and the router would learn nothing"
            )
        if self.moe_router_pre_softmax and self.family == "megatron-deepspeed" and self.topk > 1:
            raise ValueError(
                f"--moe-router-pre-softmax and --moe-router-topk {self.topk} with Megatron-DeepSpeed's gate contradict "
                "each other: it divides the weights by their sum; give --moe-family megatron-lm"
            )
        if self.moe_noisy_gate_policy == "RSample" and self.topk > 1:
            raise ValueError(
                f"--moe-noisy-gate-policy RSample samples one choice, and --moe-router-topk is {self.topk}"
            )
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError("--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size")
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            raise ValueError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid")

    def _check_balancing(self) -> None:
        kinds, given = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if given and len(given) != max(1, len(kinds)):
            raise ValueError(
                f"--moe-aux-loss-coeff has {len(given)} numbers, and --moe-router-load-balancing-type "
                f"{max(1, len(kinds))} kinds"
            )
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"--moe-router-load-balancing-type {' '.join(kinds)}: names a kind twice")
        for kind in {"sinkhorn", "none"} & set(kinds):
            if len(kinds) > 1:
                raise ValueError(f"--moe-router-load-balancing-type {' '.join(kinds)}: {kind} stands alone")
            if any(given):
                raise ValueError(
                    f"--moe-router-load-balancing-type {kind} has no loss for --moe-aux-loss-coeff {given[0]}"
                )
        if "sinkhorn" in kinds and self.capacity(training=True).factor is not None:
            raise ValueError("--moe-router-load-balancing-type sinkhorn goes without dropping tokens")
        if "sinkhorn" in kinds and (self.moe_router_enable_expert_bias or self.moe_router_num_groups):
            raise ValueError("--moe-router-load-balancing-type sinkhorn goes with neither an expert bias nor groups")

    def _check_groups(self) -> None:
        groups, seen = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (seen is None):
            raise ValueError("--moe-router-num-groups and --moe-router-group-topk go together")
        if groups is None:
            return
        if seen > groups:
            raise ValueError(f"--moe-router-group-topk {seen} is above --moe-router-num-groups {groups}")
        if self.topk % seen:
            raise ValueError(f"--moe-router-topk {self.topk} is not divisible by --moe-router-group-topk {seen}")
        for experts in self.num_experts:
            if experts > 1 and experts % groups:
                raise ValueError(f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}")
            if experts > 1 and self.topk // seen > experts // groups:
                raise ValueError(
                    f"--moe-router-topk {self.topk} takes {self.topk // seen} experts of each of "
                    f"--moe-router-group-topk {seen} groups, and a group has {experts // groups}"
                )

    @property
    def any(self) -> bool:
        """Whether there are experts at all."""
        return max(self.num_experts, default=1) > 1

    @property
    def family(self) -> str:
        """Whose defaults and whose gate."""
        own = (
            self.expert_interval is not None, self.mlp_type == "residual", len(self.num_experts) > 1,
            self.moe_train_capacity_factor is not None, self.moe_eval_capacity_factor is not None,
            self.moe_min_capacity is not None, self.disable_moe_token_dropping,
            self.disable_moe_top2_2nd_expert_sampling, self.moe_noisy_gate_policy is not None,
        )  # fmt: skip
        return self.moe_family or ("megatron-deepspeed" if any(own) else "megatron-lm")

    @property
    def deepspeed(self) -> bool:
        """Whether it is DeepSpeed's gate."""
        return self.family == "megatron-deepspeed"

    @property
    def topk(self) -> int:
        """Experts per token."""
        return self.moe_router_topk or (1 if self.deepspeed else 2)

    @property
    def balancing(self) -> dict[str, float]:
        """Kind of balancing -> its coefficient."""
        kinds = self.moe_router_load_balancing_type or ("deepspeed" if self.deepspeed else "aux_loss",)
        default = 0.1 if self.deepspeed and not {"sinkhorn", "none"} & set(kinds) else 0.0
        return dict(zip(kinds, self.moe_aux_loss_coeff or (default,) * len(kinds)))

    @property
    def jitter(self) -> float:
        """The router's input is multiplied by 1 +- this in training."""
        if self.moe_input_jitter_eps is not None:
            return self.moe_input_jitter_eps
        return JITTER if self.moe_noisy_gate_policy == "Jitter" else 0.0

    def capacity(self, *, training: bool) -> Capacity:
        """What an expert takes of one gate call, and whom."""
        order = self._drop_order(training)
        if self.disable_moe_token_dropping or (self.disable_moe_token_dropping_in_eval and not training):
            return Capacity(None, 0, order)
        if not self.deepspeed or self.moe_expert_capacity_factor is not None:
            return Capacity(self.moe_expert_capacity_factor, 0, order)
        factor = self.moe_train_capacity_factor if training else self.moe_eval_capacity_factor
        return Capacity(factor or 1.0, 4 if self.moe_min_capacity is None else self.moe_min_capacity, order)

    def _drop_order(self, training: bool) -> DropOrder:
        """DeepSpeed's two choices of a token queue one after the other, so its "position" is by choice there."""
        if self.moe_token_drop_policy == "probs" or not self.deepspeed:
            return self.moe_token_drop_policy or "probs"
        if self.topk == 2:
            return "choice"
        if self.moe_token_drop_policy == "position":
            return "position"
        if self.topk > 2:
            return "probs"
        return "random" if self.moe_use_rts and training else "position"

    def moe_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Which of the layers have experts, as the flags place them. ValueError where a pattern has another length."""
        if self.moe_layer_freq is not None:
            return layer_pattern(self.moe_layer_freq, num_layers)
        if self.expert_interval is None and not self.deepspeed:
            return (True,) * num_layers
        interval = self.expert_interval or 2
        return tuple((layer + 1) % interval == 0 for layer in range(num_layers))

    def experts_of_layers(self, num_layers: int) -> tuple[int, ...]:
        """Experts of each layer, 1 where it is dense. ValueError where the list does not fit the MoE layers."""
        if not self.any:
            return (1,) * num_layers
        with_experts, numbers = self.moe_layers(num_layers), self.num_experts
        count = sum(with_experts)
        placed = "--moe-layer-freq" if self.expert_interval is None and not self.deepspeed else "--expert-interval"
        if not count:
            raise ValueError(f"--num-experts {_words(numbers)}: none of {num_layers} layers has experts ({placed})")
        if len(numbers) not in (1, count):
            raise ValueError(
                f"--num-experts {_words(numbers)} has {len(numbers)} numbers, and {count} of {num_layers} layers have "
                f"experts ({placed}): give one number, or {count}"
            )
        each = iter(numbers * count if len(numbers) == 1 else numbers)
        return tuple(max(1, next(each)) if has else 1 for has in with_experts)


def layer_pattern(text: str, num_layers: int, flag: str = "--moe-layer-freq") -> tuple[bool, ...]:
    """Megatron-LM's patterns: N, every N-th layer from the first on, or a list of 0 and 1 in Python's notation with +
    and * between lists."""
    wrong = ValueError(f"{flag} {text}: must be a number of at least 1, or a list such as ([0]*1+[1]*1)*12")
    try:
        value = _pattern_value(ast.parse(text.strip(" '\""), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as cause:
        raise wrong from cause
    if isinstance(value, int):
        if value < 1:
            raise wrong
        return tuple(layer % value == 0 for layer in range(num_layers))
    if len(value) != num_layers:
        raise ValueError(f"{flag} {text} has {len(value)} entries, and --num-layers is {num_layers}")
    return tuple(entry == 1 for entry in value)


def _pattern_value(node: ast.expr) -> int | list[int]:
    """What a term of a pattern stands for. ValueError or TypeError where it is none."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            numbers = [_pattern_value(entry) for entry in entries]
            if any(number not in (0, 1) for number in numbers):
                raise ValueError(numbers)
            return numbers
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _pattern_value(left), _pattern_value(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _pattern_value(left), _pattern_value(right)
            entries, times = (first, second) if isinstance(first, list) else (second, first)
            if isinstance(entries, list) and isinstance(times, int) and len(entries) * times <= MAX_LAYERS:
                return entries * times
    raise ValueError(ast.dump(node))


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
