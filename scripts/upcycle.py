"""A dense checkpoint becomes a mixture of experts, each a copy of its layer's MLP: offline, on a CPU, tensor by tensor.

    python scripts/upcycle.py --load dense --save moe --num-experts 8 --moe-router-topk 2

then pretrain_gpt.py --load moe --finetune with the flags of the dense run and those of the experts, in any layout.
Flags about experts are those of pretrain_gpt.py, of both families (docs/mixture_of_experts.md); its other flags say
what the dense model is, and cannot be given here.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from megazero.checkpoint_index import read_index
from megazero.config import Config
from megazero.flags import parse
from megazero.settings import flag_name
from megazero.upcycle import Upcycling, upcycle
from scripts.generate import checkpoint_of


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="upcycle.py", usage="upcycle.py --load DIR --save DIR --num-experts N [N ...] [flags about experts]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )
    add = made.add_argument
    add("--load", required=True, metavar="DIR", help="folder of dense checkpoints, or one of them")
    add("--ckpt-step", type=int, metavar="N", help="the checkpoint of this step, not the newest")
    add("--save", required=True, metavar="DIR", help="folder of checkpoints to save to")
    add("--iteration", type=int, default=0, metavar="N", help="save as the checkpoint of this step [0]")
    add("--seed", type=int, default=1234, metavar="N", help="of routers, and of the noise of --jitter [1234]")
    add("--jitter", type=float, default=0.0, metavar="STD", help="noise on the matrices of each expert [0]")
    add("--on-average", action="store_true", help="also where weights do not sum to one number")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on standard error."""
    args, flags = parser().parse_known_args(argv)
    try:
        root, how = Path(args.save), Upcycling(args.seed, args.jitter, args.on_average)
        dense = checkpoint_of(args.load, args.ckpt_step, speaks=True)
        made = upcycle(dense, root, with_experts(dense, flags), how=how, iteration=args.iteration)
    except (ValueError, OSError) as wrong:
        print(f"upcycle.py: error: {wrong}", file=sys.stderr)
        return 2
    print(f"saved {made.folder}: {made.parameters:,} parameters, {made.bytes:,} bytes, weights only")
    for note in made.notes:
        print(note)
    print("train it with pretrain_gpt.py, the flags of the dense run, and these:")
    print(f"  --load {shlex.quote(args.save)} --finetune {shlex.join(flags)}")
    return 0


def with_experts(dense: Path, flags: Sequence[str]) -> Config:
    """The dense checkpoint's settings with experts. ValueError for a flag that is about anything else."""
    try:
        saved = Config.from_json(json.dumps(read_index(dense)[0].config))
    except FileNotFoundError as wrong:
        raise ValueError(f"{dense}: is no checkpoint") from wrong
    config, _ = parse(flags, saved)
    before, after = asdict(saved), asdict(config)
    for section, values in after.items():
        for name, value in values.items():
            if section != "moe" and value != before[section][name]:
                raise ValueError(f"{flag_name(name)}: the model stays the dense one but for its experts")
    return config


if __name__ == "__main__":
    sys.exit(main())
