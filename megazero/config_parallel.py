"""The section of the configuration that says how the model is cut over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .layout_string import expand_layout
from .settings import at_most_one, check_fields, flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is cut over the ranks. What tensor and pipeline leave over is the data axis."""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "ranks that share the depth", at_least=1)
    expert_model_parallel_size: int = flag(1, "ranks that share the experts of a layer", at_least=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share one expert: as --tensor-model-parallel-size (default), or 1 (Megatron-DeepSpeed's)",
        at_least=1,
    )
    enable_expert_tensor_parallelism: bool = flag(False, "Megatron-DeepSpeed: tensor ranks share each expert")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] | None = flag(
        None, "order of forward and backward passes; default: 1f1b, or interleaved with several stages per rank"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "stages of each pipeline rank; default: 1, with zb-v 2", at_least=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "the same by layers per stage", at_least=1)
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None, "micro-batches that an interleaved rank takes through a stage in one go; default: as many as ranks",
        at_least=1,
    )
    pipeline_split: str = flag(
        "uniform", "how layers are cut into stages: uniform, parameters, cost, measured, type:REGEX, deepspeed-..."
    )
    pipeline_model_parallel_layout: str | None = flag(None, 'the stages letter by letter, such as "E|(t|)*3,L"')
    decoder_first_pipeline_num_layers: int | None = flag(None, "blocks of the first pipeline rank", at_least=1)
    decoder_last_pipeline_num_layers: int | None = flag(None, "blocks of the last pipeline rank", at_least=1)
    account_for_embedding_in_pipeline_split: bool = flag(False, "the embedding counts as a block in the split")
    account_for_loss_in_pipeline_split: bool = flag(False, "the head counts as a block in the split")
    distributed_backend: Literal["auto", "gloo", "nccl"] = flag("auto", "auto: nccl on GPUs, gloo on CPUs")
    distributed_timeout_minutes: int = flag(10, "how long a rank waits for the others", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self)
        each, tensor = self.expert_tensor_parallel_size, self.tensor_model_parallel_size
        if each not in (None, 1, tensor):
            raise ValueError(
                f"--expert-tensor-parallel-size {each}: must be 1 or --tensor-model-parallel-size {tensor}"
            )
        if each == 1 < tensor and self.enable_expert_tensor_parallelism:
            raise ValueError(
                "--enable-expert-tensor-parallelism and --expert-tensor-parallel-size 1 contradict each other"
            )
        group, ranks = self.microbatch_group_size_per_virtual_pipeline_stage, self.pipeline_model_parallel_size
        if group is not None and group < ranks:
            raise ValueError(
                f"--microbatch-group-size-per-virtual-pipeline-stage {group}: must be at least "
                f"--pipeline-model-parallel-size {ranks}, or ranks would wait"
            )
        at_most_one(
            {
                "--num-virtual-stages-per-pipeline-rank": self.num_virtual_stages_per_pipeline_rank,
                "--num-layers-per-virtual-pipeline-stage": self.num_layers_per_virtual_pipeline_stage,
                "--pipeline-model-parallel-layout": self.pipeline_model_parallel_layout,
            }
        )

    @property
    def ends_that_count(self) -> list[str]:
        """The flags by which the embedding, or the head, counts as a block in the split."""
        embedding, loss = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        counts = {"embedding": embedding, "loss": loss}
        return [f"--account-for-{end}-in-pipeline-split" for end in counts if counts[end]]

    @property
    def needs_blocks(self) -> bool:
        """Whether each pipeline rank needs a block: not where embedding or head may be all that one has."""
        cuts_blocks = self.pipeline_split in ("uniform", "cost", "measured")
        return cuts_blocks and self.pipeline_model_parallel_layout is None and not self.ends_that_count

    def chunks(self, num_layers: int) -> int:
        """Stages of each pipeline rank. ValueError where the layers per stage do not come out even."""
        ranks, each = self.pipeline_model_parallel_size, self.num_layers_per_virtual_pipeline_stage
        if self.pipeline_model_parallel_layout is not None:
            stages = len(expand_layout(self.pipeline_model_parallel_layout))
            if stages % ranks:
                raise ValueError(
                    f"--pipeline-model-parallel-layout has {stages} stages, which --pipeline-model-parallel-size "
                    f"{ranks} does not divide"
                )
            return stages // ranks
        if each is not None:
            ends = self.ends_that_count
            counted = num_layers + len(ends)
            if counted % (ranks * each):
                more = f" + {len(ends)} ({', '.join(ends)})" if ends else ""
                raise ValueError(
                    f"--num-layers {num_layers}{more} is not divisible by --pipeline-model-parallel-size {ranks} x "
                    f"--num-layers-per-virtual-pipeline-stage {each}; "
                    "--num-virtual-stages-per-pipeline-rank cuts unevenly"
                )
            return counted // (ranks * each)
        return self.num_virtual_stages_per_pipeline_rank or (2 if self.pipeline_schedule == "zb-v" else 1)

    def schedule(self, num_layers: int) -> str:
        """The name of the schedule that runs."""
        return self.pipeline_schedule or ("1f1b" if self.chunks(num_layers) == 1 else "interleaved")

    def data_size(self, world_size: int) -> int:
        """Replicas of the model in a world of this size. ValueError if the layout does not fill it evenly."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if world_size < 1 or world_size % (tensor * pipeline):
            raise ValueError(
                f"world size {world_size} is not a multiple of --tensor-model-parallel-size {tensor} x "
                f"--pipeline-model-parallel-size {pipeline} = {tensor * pipeline}"
            )
        return world_size // (tensor * pipeline)
