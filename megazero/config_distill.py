"""The section of the configuration about distillation: who teaches, how much that counts, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import check_fields, flag


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation: a step minimizes alpha LM + beta T^2 KL(teacher || student), each a mean over unmasked tokens."""

    mos: bool = flag(False, "distil a student that has experts (Mixture-of-Students)")
    kd: bool = flag(False, "distil a dense student; both train alike")
    load_teacher: str | None = flag(None, "folder of the teacher's checkpoints, of any layout; the newest counts")
    num_layers_teacher: int | None = flag(None, "blocks that the teacher's checkpoint must have", at_least=1)
    hidden_size_teacher: int | None = flag(None, "width that it must have", at_least=1)
    num_attention_heads_teacher: int | None = flag(None, "query heads that it must have", at_least=1)
    num_experts_teacher: tuple[int, ...] = flag((), "its experts: one number, or one per MoE layer", at_least=0)
    kd_alpha_ce: float = flag(1.0, "alpha: weight of the LM loss", at_least=0)
    kd_beta_ce: float = flag(1.0, "beta: weight of the divergence from the teacher", at_least=0)
    kd_temp: float = flag(1.0, "T: what both logits are divided by", above=0)
    kd_stop_iteration: int | None = flag(None, "last distilled iteration; the teacher is freed after it", at_least=1)
    kd_stop_tokens: int | None = flag(None, "the same in consumed tokens; the first to come counts", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.asked and self.load_teacher is None:
            raise ValueError(f"--{'mos' if self.mos else 'kd'} needs --load-teacher")

    @property
    def asked(self) -> bool:
        """Whether the run is a distillation at all."""
        return self.mos or self.kd

    def teaches(self, iteration: int, tokens: int) -> bool:
        """Whether the step after so many iterations and consumed tokens is distilled."""
        ends = ((self.kd_stop_iteration, iteration), (self.kd_stop_tokens, tokens))
        return self.asked and all(end is None or done < end for end, done in ends)
