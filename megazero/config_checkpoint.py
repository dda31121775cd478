"""The section of a configuration that says what is saved, what stays, and where a run starts from."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import check_fields, flag


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and where a run starts from."""

    save: str | None = flag(None, "folder to save to")
    load: str | None = flag(None, "folder of checkpoints to load from, or one of them")
    save_interval: int | None = flag(None, "steps between saves", at_least=1)
    async_save: bool = flag(False, "copy the state to host memory and write it beside the training")
    keep_last: int | None = flag(None, "remove all saves but the last so many, when a new one is complete", at_least=1)
    save_retain_interval: int | None = flag(None, "remove all but the last save and multiples of this", at_least=1)
    no_save_optim: bool = flag(False, "save weights only; they load with --no-load-optim or --finetune")
    checkpoint_file_mib: int = flag(16384, "a rank begins another file of a save beyond so many MiB", at_least=1)
    auto_resume: bool = flag(False, "go on from the newest checkpoint in --save, or begin where there is none")
    ckpt_step: int | None = flag(None, "load the checkpoint of this iteration, not the newest", at_least=0)
    use_checkpoint_args: bool = flag(False, "model settings that no flag gives are those of the checkpoint in --load")
    finetune: bool = flag(False, "load weights only and start at iteration 0")
    no_load_optim: bool = flag(False, "do not load the optimizer's moments")
    reset_iteration: bool = flag(False, "count iterations from 0 after --load, and go on with everything else")
    verify_checkpoint: bool = flag(True, "compare checksums of all that is loaded; --no-verify-checkpoint does not")

    @property
    def interval(self) -> int | None:
        """Steps between saves, None: nothing is saved."""
        return None if self.save is None else self.save_interval

    def __post_init__(self) -> None:
        check_fields(self)
        if self.save is not None and self.save_interval is None:
            raise ValueError(f"--save {self.save} needs --save-interval")
        if self.auto_resume and self.save is None:
            raise ValueError("--auto-resume needs --save")
        if self.ckpt_step is not None and self.load is None and not self.auto_resume:
            raise ValueError(f"--ckpt-step {self.ckpt_step} needs --load")
        if self.reset_iteration and self.load is None:
            raise ValueError("--reset-iteration needs --load")
        if self.finetune and self.load is None:
            raise ValueError("--finetune needs --load, which names the weights to begin with")
        if self.keep_last is not None and self.save is None:
            raise ValueError(f"--keep-last {self.keep_last} needs --save")
        if self.use_checkpoint_args and self.load is None:
            raise ValueError("--use-checkpoint-args needs --load")
        every = self.save_retain_interval
        if every is not None and every % (self.save_interval or every):
            raise ValueError(
                f"--save-retain-interval {every} is not a multiple of --save-interval {self.save_interval}"
            )
