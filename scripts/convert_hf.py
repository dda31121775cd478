"""Hugging Face folders and megazero checkpoints, one into the other: offline, on a CPU, a tensor at a time.

    python scripts/convert_hf.py import HF_DIR --save runs/llama          # then pretrain_gpt.py --load runs/llama ...
    python scripts/convert_hf.py export runs/llama --out HF_DIR --dtype bf16

Families: GPT-2, Llama, Mixtral, Qwen2 and Qwen3, dense and with experts. The weights come back bit by bit. A model that
cannot be had here is refused by the key of its config.json, one that Hugging Face cannot have by its flag.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

import torch

from megazero import snapshot
from megazero.config import Config
from megazero.hf import export_folder, import_folder
from megazero.hf_config import flags_of
from megazero.settings import flag_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="convert_hf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = made.add_subparsers(dest="command", required=True)
    into = commands.add_parser("import", allow_abbrev=False, help="make a checkpoint of a Hugging Face folder")
    into.add_argument("folder", metavar="HF_DIR", help="with config.json and safetensors files")
    into.add_argument("--save", required=True, metavar="DIR", help="folder of checkpoints to save to")
    into.add_argument("--iteration", type=int, default=0, metavar="N", help="save as the checkpoint of this step [0]")
    out = commands.add_parser("export", allow_abbrev=False, help="make a Hugging Face folder of a checkpoint")
    out.add_argument("folder", metavar="DIR", help="folder of checkpoints, or one of them")
    out.add_argument("--out", required=True, metavar="HF_DIR", help="folder to make")
    out.add_argument("--dtype", choices=tuple(DTYPES), help="type of the weights; default: as they are stored")
    out.add_argument("--ckpt-step", type=int, metavar="N", help="the checkpoint of this step, not the newest")
    out.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file, as 500MB [5GB]")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on standard error."""
    args = parser().parse_args(argv)
    try:
        bring_in(args) if args.command == "import" else bring_out(args)
    except (ValueError, OSError) as wrong:
        print(f"convert_hf.py: error: {wrong}", file=sys.stderr)
        return 2
    return 0


def bring_in(args: argparse.Namespace) -> None:
    made = import_folder(Path(args.folder), Path(args.save), iteration=args.iteration)
    print(f"saved {made.folder}: {made.tensors} tensors, {made.bytes:,} bytes, weights only")
    print("train it further with pretrain_gpt.py and these flags:")
    print(f"  --load {shlex.quote(args.save)} --finetune {shlex.join(flags_for(made.config))}")


def flags_for(config: Config) -> list[str]:
    """What describes an imported model to pretrain_gpt.py."""
    words = flags_of(config)
    for name in ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"):
        value = vars(config.data)[name]
        words += [] if value is None else [flag_name(name), value]
    return words + (["--bf16"] if config.precision.bf16 else [])


def bring_out(args: argparse.Namespace) -> None:
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    made = export_folder(
        checkpoint_of(args.folder, args.ckpt_step), Path(args.out), dtype=dtype,
        shard_bytes=bytes_of(args.max_shard_size),
    )
    for note in made.notes:
        print(f"convert_hf.py: {note}", file=sys.stderr)
    print(f"saved {made.folder}: {made.family}, {made.files} files of weights, {made.bytes:,} bytes")


def checkpoint_of(root: str, step: int | None) -> Path:
    """The folder of the checkpoint to read."""
    found = snapshot.find(Path(root), step, say=print)
    if found is None:
        which = "no complete checkpoint" if step is None else f"no complete checkpoint of iteration {step}"
        raise ValueError(f"{root}: there is {which}")
    return found


def bytes_of(size: str) -> int:
    """5GB -> 5,000,000,000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B|)", size.upper())
    number = 0 if found is None else int(float(found[1]) * UNITS[found[2]])
    if number < 1:
        raise ValueError(f"--max-shard-size {size}: must be a number of bytes, as 500MB or 5GB")
    return number


if __name__ == "__main__":
    sys.exit(main())
