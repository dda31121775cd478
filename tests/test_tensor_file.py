"""Files of a checkpoint: their checksums, how they are cut, what is read of them, and what they cost."""

from __future__ import annotations

import json
import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megazero import checkpoint, tensor_file
from megazero.checkpoint import Reader, Wanted, Writing, commit, write_files
from megazero.checkpoint_index import (
    BucketLayout,
    FilePart,
    Index,
    StageLayout,
    TensorEntry,
    check_cover,
    index_to_text,
    owned_ranges,
    read_index,
)
from megazero.checksum import WIDTH, add_bytes_, checksum, digest, new_columns
from megazero.parallel.buckets import ADAM_KINDS
from megazero.parallel.shard import ShardSpec
from megazero.parallel.topology import Topology
from megazero.tensor_file import CHUNK_BYTES, TensorFile, Written, write_file
from tests.test_checkpoint import check_equal, make_index, make_state, slices_of

# ------------------------------------------------------------------------------------------------------ checksums


def test_a_checksum_is_the_same_however_the_bytes_come() -> None:
    draw = random.Random(0)
    data = np.random.default_rng(0).integers(0, 256, 5 * WIDTH * 4 + 3, dtype=np.uint8)
    for _ in range(20):
        cuts = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(6))})
        pieces = list(zip(cuts, cuts[1:], strict=False))
        draw.shuffle(pieces)
        columns = new_columns()
        for first, last in pieces:
            add_bytes_(columns, data[first:last], first)
        assert digest(columns) == checksum(data)


def test_a_checksum_notices_bits_words_and_pages_that_are_wrong() -> None:
    draw, whole = random.Random(0), np.random.default_rng(0).integers(0, 256, 2**20, dtype=np.uint8)
    right = checksum(whole)
    for _ in range(50):
        data = whole.copy()
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        assert checksum(data) != right
    for unit in (4, 512, 4096):
        rows = whole.copy().reshape(-1, unit)
        a, b = draw.sample(range(len(rows)), 2)
        rows[[a, b]] = rows[[b, a]]
        assert checksum(rows.reshape(-1)) != right
        rows = whole.copy().reshape(-1, unit)
        rows[a] = 0
        assert checksum(rows.reshape(-1)) != right


def test_tensors_of_any_width_and_length_are_read_back_and_verified(tmp_path: Path) -> None:
    """Odd lengths leave words of a chunk to two tensors, and parts are read in any order."""
    dtypes = (torch.bfloat16, torch.float64, torch.uint8, torch.float32, torch.bool, torch.int64, torch.float16)
    tensors = [(str(n), (torch.arange(3001 + n) % 2).to(dtype)) for n, dtype in enumerate(dtypes)]
    tensors.append(("long", torch.arange(2**23 + 5, dtype=torch.float32)))
    written = write_file(tmp_path / "x", tensors, metadata={})
    file = TensorFile(tmp_path / "x", expected=written)
    for name, tensor in reversed(tensors):
        for start, stop in ((tensor.numel() // 2, tensor.numel()), (0, tensor.numel() // 2)):
            out = np.empty(stop - start, tensor_file.BITS[tensor.element_size()])
            file.verify(*file.read_(name, start, stop, out))
            assert torch.equal(torch.from_numpy(out).view(tensor.dtype), tensor[start:stop])


def test_what_is_read_in_parts_is_verified_and_a_file_that_shrinks_is_told(tmp_path: Path) -> None:
    tensor = torch.arange(3 * 2**22, dtype=torch.float32)
    written = write_file(tmp_path / "x", [("a", tensor)], metadata={})
    out = np.empty(tensor.numel(), np.int32)

    file = TensorFile(tmp_path / "x", expected=written)
    for number, at in enumerate(range(0, tensor.numel(), 2**22 + 5)):
        file.verify(*file.read_("a", at, min(at + 2**22 + 5, tensor.numel()), out[at : at + 2**22 + 5], number))
    assert torch.equal(torch.from_numpy(out).view(torch.float32), tensor)
    with open(tmp_path / "x", "r+b") as spoiled:
        spoiled.seek(2**25)
        spoiled.write(b"x")
    file = TensorFile(tmp_path / "x", expected=written)
    with pytest.raises(ValueError, match="damaged: wrong checksum in bytes from 33554432"):
        file.verify(*file.read_("a", 0, tensor.numel(), out))
    os.truncate(tmp_path / "x", 2**22)
    with pytest.raises(ValueError, match="ends at byte 4194304 while it is read"):
        file.read_("a", 2**20 - file._data_at // 4, 2**21 - file._data_at // 4, out[: 2**20])


# ------------------------------------------------------------------------------------------------- files and ranks


def save(folder: Path, topology: Topology, state: dict, how: Writing) -> list[FilePart]:
    """Write and commit by all ranks in turn; the files."""
    index, parts = make_index(topology), []
    for rank in range(topology.world):
        stage = index.stages[topology.coord(rank).pipeline]
        parts += write_files(
            folder, rank, slices_of(index, rank, state), topology=topology, stage=stage, save_id="a", how=how
        )
    commit(folder, parts, index)
    return parts


@pytest.mark.parametrize("topology", [Topology(), Topology(2, 2, 2)])
def test_files_are_cut_at_a_size_and_read_as_one(topology: Topology, tmp_path: Path) -> None:
    state = make_state()
    parts = save(tmp_path, topology, state, Writing(file_bytes=1000))
    assert len(parts) > 2 * topology.world
    for part in parts:
        entries = TensorFile(tmp_path / part.path).entries.values()
        assert len(entries) == 1 or sum(entry.numel * 4 for entry in entries) <= 1000
    check_equal(Reader(tmp_path), state)


def test_a_large_state_is_written_as_files_of_like_size_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one of them cannot be written, none stays."""
    monkeypatch.setattr(checkpoint, "FILE_AT_ONCE_BYTES", 100)
    state = make_state()
    parts = save(tmp_path / "a", Topology(), state, Writing(at_once=2))
    sizes = [part.written.bytes for part in parts]
    assert len(sizes) == 2 and max(sizes) < 1.5 * min(sizes)
    check_equal(Reader(tmp_path / "a"), state)

    calls = []

    def full() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "b", Topology(), state, Writing(at_once=2, between=full))
    assert not list((tmp_path / "b").rglob("*.safetensors"))


def test_a_lost_file_of_a_rank_is_told(tmp_path: Path) -> None:
    state, topology = make_state(), Topology(1, 2, 1)
    parts = save(tmp_path, topology, state, Writing(file_bytes=1000))
    with pytest.raises(ValueError, match="not committed"):
        commit(tmp_path, parts[:-1], make_index(topology))
    (tmp_path / parts[-1].path).unlink()
    with pytest.raises(ValueError, match="rank_000001.*missing, but the index names it"):
        check_equal(Reader(tmp_path), state)


def test_a_reader_keeps_few_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have a thousand; a checkpoint of many ranks has more files."""
    state = make_state()
    save(tmp_path, Topology(1, 3, 2), state, Writing(file_bytes=1000))
    monkeypatch.setattr(checkpoint, "OPEN_FILES", 2)
    monkeypatch.setattr(checkpoint, "JOBS", 3)
    reader, before = Reader(tmp_path), len(os.listdir("/proc/self/fd"))
    check_equal(reader, state)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 3


def test_state_is_read_straight_into_its_place_and_verified(tmp_path: Path) -> None:
    """All ranges of a rank at once, large ones by several threads; a flipped byte anywhere is told."""
    spec = ShardSpec((3000, 2000), (None, None))
    bucket = BucketLayout("data", ("small", "large"), 3 * 2**20 + 16)
    entries = {"small": TensorEntry(ShardSpec((5,), (None,)), dict.fromkeys(("weight", "exp_avg"), "F32"))}
    entries["large"] = TensorEntry(spec, dict.fromkeys(("weight", "exp_avg"), "F32"))
    stage, topology = StageLayout(entries, (bucket,)), Topology(1, 2, 1)
    slices = [{k: [torch.randn(bucket.share)] for k in ("weight", "exp_avg")} for _ in range(2)]
    parts = []
    for rank in range(2):
        parts += write_files(
            tmp_path, rank, slices[rank], topology=topology, stage=stage, save_id="a", how=Writing()
        )
    commit(tmp_path, parts, Index(topology, (stage,), {}, {}))

    def load() -> torch.Tensor:
        out = torch.full((spec.numel,), 7.0)
        wanted = [Wanted("large", "exp_avg", spec, at, min(at + 2**20, spec.numel), out[at : at + 2**20])
                  for at in range(0, spec.numel, 2**20)]
        Reader(tmp_path).fill_(wanted, topology=Topology(), rank=0)
        return out

    both = torch.cat([found["exp_avg"][0] for found in slices])
    assert torch.equal(load(), both[5 : 5 + spec.numel])
    for at in (100, 14 * 2**20, parts[1].written.bytes - 3):
        with open(tmp_path / parts[1].path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(ValueError, match="rank_000001"):
            load()
        with open(tmp_path / parts[1].path, "r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    load()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, "nan"), (torch.float32, "-inf"), (torch.float64, "inf"), (torch.bfloat16, "nan"),
     (torch.float16, "-inf")],
)
def test_values_that_are_not_finite_are_not_written(dtype: torch.dtype, value: str, tmp_path: Path) -> None:
    """C131: wherever they stand in a tensor; large finite ones whose sum overflows are."""
    weight = torch.zeros(5 * 2**20, dtype=dtype)
    for at in (0, 2**20 + 1, weight.numel() - 1):
        weight[at] = float(value)
        with pytest.raises(ValueError, match="weight/w: holds values that are not finite numbers"):
            write_file(tmp_path / "x", [("other", weight), ("weight/w", weight)], metadata={}, finite={"weight/w"})
        assert list(tmp_path.iterdir()) == []
        weight[at] = torch.finfo(dtype).max
    weight[3] = torch.finfo(dtype).min
    write_file(tmp_path / "x", [("weight/w", weight)], metadata={}, finite={"weight/w"})


# ------------------------------------------------------------------------------------------------------- what it costs


def peak_memory() -> int:
    """The most memory that this process has held, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def test_a_save_and_a_load_need_little_memory_of_their_own(tmp_path: Path) -> None:
    """At most 64 MiB beside a state of 384 MiB."""
    tensors = [(str(n), torch.ones(2**25)) for n in range(3)]
    write_file(tmp_path / "first", tensors[:1], metadata={})            # what threads and libraries need once
    Path("/proc/self/clear_refs").write_text("5")                       # the peak is from now on
    before = peak_memory()
    written = write_file(tmp_path / "x", tensors, metadata={})
    assert peak_memory() - before < 64 * 2**20
    file = TensorFile(tmp_path / "x", expected=written)
    for name, tensor in tensors:
        file.verify(*file.read_(name, 0, 2**25, tensor.numpy().view(np.int32)))
    assert peak_memory() - before < 64 * 2**20


def test_the_index_of_a_large_model_at_ten_thousand_ranks_is_small_and_read_fast(tmp_path: Path) -> None:
    """175B at tensor 8, pipeline 16, data 80, written on paper by the same code: under 5 MiB, read in under 1 s."""
    topology, hidden = Topology(pipeline=16, data=80, tensor=8), 12288
    dtypes = dict.fromkeys(ADAM_KINDS, "F32")
    table = ShardSpec((50257, hidden), ("tensor", None), tied=True, padded=51200)

    def block(n: int) -> dict[str, ShardSpec]:
        qkv, row = (3, 96, 128, hidden), (None, "tensor")
        specs = {
            "attention.qkv.weight": ShardSpec(qkv, (None, "tensor", None, None)),
            "attention.qkv.bias": ShardSpec(qkv[:3], (None, "tensor", None)),
            "attention.out.weight": ShardSpec((hidden, hidden), row),
            "attention.out.bias": ShardSpec((hidden,), (None,), grad_sum=("tensor",)),
            "mlp.up.weight": ShardSpec((4 * hidden, hidden), ("tensor", None)),
            "mlp.up.bias": ShardSpec((4 * hidden,), ("tensor",)),
            "mlp.down.weight": ShardSpec((hidden, 4 * hidden), row),
            "mlp.down.bias": ShardSpec((hidden,), (None,), grad_sum=("tensor",)),
        }
        norms = {f"norm_{at}.{part}": ShardSpec((hidden,), (None,), grad_sum=("tensor",))
                 for at in (1, 2) for part in ("weight", "bias")}
        return {f"layers.{n}.{name}": spec for name, spec in (specs | norms).items()}

    def buckets(specs: dict[str, ShardSpec]) -> tuple[BucketLayout, ...]:
        found, alike = [], {}
        for name, spec in specs.items():
            alike.setdefault((spec.data_axis, "tensor" in spec.cut, len(spec.shape) > 1), []).append(name)
        for (axis, _, _), names in alike.items():
            for at in range(0, len(names), 4):
                part = tuple(names[at : at + 4])
                held = sum(int(np.prod(specs[name].local_shape(topology))) for name in part)
                found.append(BucketLayout(axis, part, -(-held // (topology.size(axis) * 16)) * 16))
        return tuple(found)

    stages = []
    for stage in range(16):
        specs = {k: v for n in range(stage * 6, stage * 6 + 6) for k, v in block(n).items()}
        specs |= {"embedding.word.weight": table} if stage in (0, 15) else {}
        stages.append(StageLayout({name: TensorEntry(s, dtypes) for name, s in specs.items()}, buckets(specs)))
    index = Index(topology, tuple(stages), {}, {"iteration": 1})
    check_cover(index)
    assert sum(e.spec.numel for n, e in {n: e for s in stages for n, e in s.tensors.items()}.items()) > 174e9
    parts = []
    for rank in range(topology.world):
        stage = stages[topology.coord(rank).pipeline]
        size = sum(r.stop - r.start for r in owned_ranges(stage, topology, rank)) * 12 if rank % 80 < 2 else 220 * 2**20
        path = f"{rank // 256:04d}/rank_{rank:06d}-0123abcd.safetensors"
        parts.append(FilePart(rank, path, Written(size, (4_000_000_000,) * -(-size // CHUNK_BYTES)), 0))
    text = index_to_text(index, parts)
    (tmp_path / "index.json").write_text(text)
    assert len(text) < 5 * 2**20
    seconds = []
    for _ in range(3):
        start = time.process_time()
        read_index(tmp_path)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1, seconds
    assert json.loads(text)["topology"]["data"] == 80
