"""What a checkpoint holds, whether its bytes are those that were written, and how two of them differ.

    python scripts/inspect_checkpoint.py runs/a                       saves of a run, and the newest complete one
    python scripts/inspect_checkpoint.py runs/a/iter_0000100 --tensors --config --verify
    python scripts/inspect_checkpoint.py --diff runs/a runs/b         tensor by tensor, whatever layouts wrote them

Needs no GPU and no other process, and memory for one block of a tensor. Exit code 0; 1 where files are not
as they were written, or two checkpoints differ; 2 where one cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also run from a checkout that is not installed

from megazero.checkpoint import Reader  # noqa: E402
from megazero.checkpoint_index import INDEX, FilePart, TensorEntry, read_index  # noqa: E402
from megazero.parallel.shard import Box  # noqa: E402
from megazero.tensor_file import DTYPES, TensorFile  # noqa: E402

BLOCK = 1 << 22         # elements that are compared at a time


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "inspect_checkpoint.py", usage=argparse.SUPPRESS, description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("folder", nargs="?", metavar="DIR", help="folder of checkpoints (--save in training), or one of them")
    add("--ckpt-step", type=int, metavar="N", help="the checkpoint of iteration N; default: the newest complete one")
    add("--tensors", action="store_true", help="list tensors: shape, axes that cut it, dtype of each kind of state")
    add("--config", action="store_true", help="print the settings it was trained with, as JSON")
    add("--verify", action="store_true", help="read every byte and compare the checksums")
    add("--diff", nargs=2, metavar=("A", "B"), help="compare two; with --tensors equal ones are listed too")
    add("--json", action="store_true", help="print one object")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if bool(args.folder) == bool(args.diff):
            raise ValueError("give DIR, or --diff A B")
        code = diff(args) if args.diff else inspect(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:         # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as wrong:
        print(f"inspect_checkpoint.py: error: {wrong}", file=sys.stderr)
        return 2


# ------------------------------------------------------------------------------------------------------- one checkpoint


@dataclass(frozen=True)
class Save:
    """A folder of a root, and what is wrong with it (None: it is complete)."""

    iteration: int
    folder: Path
    broken: str | None
    bytes: int


def saves_of(root: Path) -> list[Save]:
    """Every save under a root, oldest first. Sizes of files are looked at, not their bytes."""
    found = []
    for folder in root.glob("iter_*") if root.is_dir() else ():
        digits = folder.name.removeprefix("iter_")
        if digits.isdecimal() and folder.is_dir():
            held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            found.append(Save(int(digits), folder, what_is_broken(folder), held))
    return sorted(found, key=lambda save: save.iteration)


def what_is_broken(folder: Path) -> str | None:
    """Why a folder is no complete checkpoint, in one line; None: it is one, as far as names and sizes tell."""
    try:
        parts = files_of(folder)
    except FileNotFoundError:
        return f"no {INDEX}: the save was not completed"
    except (ValueError, OSError) as wrong:
        return str(wrong)
    wrong = [line for part in parts if (line := wrong_size(folder, part)) is not None]
    return f"{wrong[0]}{f' and {len(wrong) - 1} more files' if len(wrong) > 1 else ''}" if wrong else None


def files_of(folder: Path) -> list[FilePart]:
    """The files that the index of a checkpoint names."""
    return [part for parts in read_index(folder)[1].values() for part in parts]


def wrong_size(folder: Path, part: FilePart) -> str | None:
    """What is wrong with a file's size."""
    try:
        size = (folder / part.path).stat().st_size
    except FileNotFoundError:
        return f"{part.path} is missing"
    return None if size == part.written.bytes else f"{part.path} has {size} bytes instead of {part.written.bytes}"


def wrong_bytes(folder: Path, part: FilePart) -> str | None:
    """What is wrong with a file; each of its bytes is read and checked."""
    line = wrong_size(folder, part)
    if line is not None:
        return line
    try:
        TensorFile(folder / part.path, expected=part.written).verify(0, part.written.bytes)
    except ValueError as wrong:
        return str(wrong)
    return None


def choose(root: Path, step: int | None) -> Path:
    """The checkpoint that is meant by a root or by a checkpoint's own folder. ValueError where there is none."""
    if step is None and (root / INDEX).is_file():
        return root
    if not root.is_dir():
        raise ValueError(f"{root}: there is no such folder")
    saves = saves_of(root)
    wanted = [save for save in saves if save.iteration == step or (step is None and save.broken is None)]
    if wanted and (wanted[-1].folder / INDEX).is_file():
        return wanted[-1].folder
    if wanted or root.name.startswith("iter_"):
        folder = wanted[-1].folder if wanted else root
        raise ValueError(f"{folder}: {what_is_broken(folder)}")
    if step is not None:
        raise ValueError(f"{root}: there is no iteration {step} among {len(saves)} saves")
    raise ValueError(f"{root}: holds no complete checkpoint" + (f", but {len(saves)} broken ones" if saves else ""))


def inspect(args: argparse.Namespace) -> int:
    """Print what is asked; 1 where a file of the checkpoint is not as it was written."""
    root = Path(args.folder)
    alone = args.ckpt_step is None and (root / INDEX).is_file()
    saves = [] if alone else saves_of(root)
    for save in saves if not args.json else ():
        print(f"{save.folder.name:14} {save.bytes:>16,} bytes  {save.broken or 'complete'}")
    folder = choose(root, args.ckpt_step)
    reader, parts = Reader(folder), files_of(folder)
    damage = verify(folder, parts) if args.verify else [wrong_size(folder, part) for part in parts]
    facts = facts_of(reader, parts) | {"damage": [line for line in damage if line is not None]}
    if args.json:
        facts["verified"] = args.verify
        if saves:
            facts["saves"] = [asdict(save) | {"folder": str(save.folder)} for save in saves]
        if args.tensors:
            facts["tensors"] = {name: tensor_facts(entry) for name, entry in reader.tensors.items()}
        if args.config:
            facts["config"] = reader.config
        print(json.dumps(facts))
    else:
        print("\n" * bool(saves), end="")
        show(reader, facts, args)
    return int(bool(facts["damage"]))


def verify(folder: Path, parts: Sequence[FilePart]) -> list[str | None]:
    """What is wrong with each file, all bytes read; with a bar where a terminal is."""
    found = []
    total = sum(part.written.bytes for part in parts)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for part in parts:
            found.append(wrong_bytes(folder, part))
            bar.update(part.written.bytes)
    return found


def facts_of(reader: Reader, parts: Sequence[FilePart]) -> dict[str, object]:
    """The figures of a checkpoint, as --json has them."""
    kinds: dict[str, set[str]] = {}
    for entry in reader.tensors.values():
        for kind, dtype in entry.dtypes.items():
            kinds.setdefault(kind, set()).add(dtype)
    return {
        "folder": str(reader.folder),
        **reader.progress,
        "topology": asdict(reader.topology),
        "parameters": sum(entry.spec.numel for entry in reader.tensors.values()),
        "tensor_count": len(reader.tensors),
        "kinds": {kind: sorted(dtypes) for kind, dtypes in kinds.items()},
        "files": len(parts),
        "bytes": sum(part.written.bytes for part in parts),
    }


def tensor_facts(entry: TensorEntry) -> dict[str, object]:
    """Of one tensor."""
    wide = sum(DTYPES[dtype].itemsize for dtype in entry.dtypes.values())
    cut = {str(dim): axis for dim, axis in enumerate(entry.spec.cut) if axis is not None}
    return {
        "shape": list(entry.spec.shape), "cut": cut, "dtypes": dict(entry.dtypes), "bytes": entry.spec.numel * wide,
        "tied": entry.spec.tied,
    }


def show(reader: Reader, facts: dict, args: argparse.Namespace) -> None:
    """Print figures, and what else is asked for, for people."""
    axes = reader.topology
    print(f"checkpoint       {reader.folder}")
    for key, value in reader.progress.items():
        if key == "losses" and value:
            print(f"losses           the last {len(value):,}, that spikes are told by")
        elif value not in (None, 0, []) or key == "iteration":
            print(f"{key.replace('_', ' '):16} {f'{value:,}' if isinstance(value, int) else json.dumps(value)}")
    layout = f"tensor {axes.tensor} x pipeline {axes.pipeline} x data {axes.data} (expert {axes.expert})"
    print(f"written by       {axes.world} ranks: {layout}")
    print(f"parameters       {facts['parameters']:,} in {facts['tensor_count']} tensors")
    print(f"state            {', '.join(' '.join((kind, *dtypes)) for kind, dtypes in facts['kinds'].items())}")
    print(f"bytes            {facts['bytes']:,} in {facts['files']} files")
    for line in facts["damage"]:
        print(f"damage           {line}")
    if args.verify and not facts["damage"]:
        print("checksums        all good")
    if args.tensors:
        print()
        for name, entry in sorted(reader.tensors.items(), key=by_number):
            told = tensor_facts(entry)
            cut = ", ".join(f"dim {dim} by {axis}" for dim, axis in told["cut"].items()) or "whole"
            tied = ", tied" if told["tied"] else ""
            dtypes = "/".join(dict.fromkeys(entry.dtypes.values()))
            print(f"{name:44} {told['shape']!s:22} {dtypes:8} {told['bytes']:>14,} bytes  {cut}{tied}")
    if args.config:
        print()
        print(json.dumps(reader.config, indent=2))


def by_number(named: tuple[str, object]) -> list[object]:
    """Sorts names as people count: layers.2 before layers.10."""
    return [(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in re.split(r"(\d+)", named[0])]


# ------------------------------------------------------------------------------------------------------ two checkpoints


@dataclass(frozen=True)
class Comparison:
    """One kind of state of one tensor in two checkpoints.

    equal     bit for bit, in shape and dtype too
    max_abs   the largest difference of two elements; NaN where one is not a number, or shapes differ
    relative  that over the largest element of B
    note      what else is different, in words
    """

    name: str
    kind: str
    equal: bool
    max_abs: float
    relative: float
    note: str


def diff(args: argparse.Namespace) -> int:
    """Print how two checkpoints differ; 1 where they do."""
    a, b = (Reader(choose(Path(folder), args.ckpt_step)) for folder in args.diff)
    in_a, in_b = ({(name, kind): None for name, entry in r.tensors.items() for kind in entry.dtypes} for r in (a, b))
    only = [
        [f"{kind} of {name}" for name, kind in sorted((key for key in mine if key not in theirs), key=by_number)]
        for mine, theirs in ((in_a, in_b), (in_b, in_a))
    ]
    both = sorted((key for key in in_a if key in in_b), key=by_number)
    compared = [compare(a, b, name, kind) for name, kind in tqdm(both, unit="tensor", disable=None)]
    wrong = [one for one in compared if not one.equal]
    if args.json:
        listed = [asdict(one) | finite(one) for one in compared]
        sides = {"a": str(a.folder), "b": str(b.folder), "only_in_a": only[0], "only_in_b": only[1]}
        print(json.dumps({"equal": not (wrong or any(only)), **sides, "tensors": listed}))
        return int(bool(wrong or any(only)))
    for side, lines in zip("AB", only, strict=True):
        for line in lines:
            print(f"only in {side}: {line}")
    for one in compared if args.tensors else wrong:
        figures = "equal" if one.equal else f"max difference {one.max_abs:.3e}, relative {one.relative:.3e}"
        print(f"{one.name:44} {one.kind:12} {figures}{one.note and f' ({one.note})'}")
    print(f"A {a.folder}: iteration {a.progress['iteration']}; B {b.folder}: iteration {b.progress['iteration']}")
    alone = len(only[0]) + len(only[1])
    print(f"{len(compared) - len(wrong)} of {len(compared)} states of tensors equal, {alone} on one side only")
    return int(bool(wrong or any(only)))


def finite(one: Comparison) -> dict[str, float | None]:
    """Its numbers, None for what JSON cannot write."""
    numbers = {"max_abs": one.max_abs, "relative": one.relative}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def compare(a: Reader, b: Reader, name: str, kind: str) -> Comparison:
    """Block by block. Raises ValueError where a file is missing or damaged."""
    shapes = [reader.tensors[name].spec.shape for reader in (a, b)]
    types = [reader.tensors[name].dtypes[kind] for reader in (a, b)]
    if shapes[0] != shapes[1]:
        note = f"shape {list(shapes[0])} in A, {list(shapes[1])} in B"
        return Comparison(name, kind, False, math.nan, math.nan, note)
    equal, most, largest = types[0] == types[1], 0.0, 0.0
    for box in blocks(Box((0,) * len(shapes[0]), shapes[0])):
        x, y = (reader.read(name, kind, box).reshape(-1) for reader in (a, b))
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            largest = greater(largest, y.double().abs().max().item())
            continue
        equal = False
        x, y = x.double(), y.double()
        same = (x == y) | (x.isnan() & y.isnan())
        most = greater(most, torch.where(same, 0.0, x - y).abs().max().item())
        largest = greater(largest, y.abs().max().item())
    relative = most / largest if largest else (math.inf if most else 0.0)
    note = "" if types[0] == types[1] else f"{types[0]} in A, {types[1]} in B"
    return Comparison(name, kind, equal, most, relative, note)


def greater(a: float, b: float) -> float:
    """The greater of two; NaN where one is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def blocks(box: Box) -> Iterator[Box]:
    """Boxes of at most BLOCK elements that fill a box: halves of halves, along the first dim that can be cut."""
    if box.numel <= BLOCK:
        if box.numel:
            yield box
        return
    dim = next(dim for dim, n in enumerate(box.shape) if n > 1)
    half = box.shape[dim] // 2
    for at, n in ((0, half), (half, box.shape[dim] - half)):
        start, shape = list(box.start), list(box.shape)
        start[dim], shape[dim] = start[dim] + at, n
        yield from blocks(Box(tuple(start), tuple(shape)))


if __name__ == "__main__":
    sys.exit(main())
