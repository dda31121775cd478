"""Checkpoints on paper topologies: every rank is played in turn, without a process group."""

import json
import pickle
import random
from dataclasses import replace
from math import gcd, prod

import pytest
import torch
from safetensors import safe_open

from megazero import checkpoint
from megazero.checkpoint import Reader, commit, finish, folder_of, latest, new_save_id, write_rank
from megazero.checkpoint_index import BucketLayout, Index, StageLayout, TensorEntry, check_cover, checksum_of
from megazero.parallel.buckets import ADAM_KINDS as KINDS
from megazero.parallel.buckets import make_buckets
from megazero.parallel.groups import mesh_on_paper
from megazero.parallel.params import Initial, ParamInfo
from megazero.parallel.shard import Box, ShardSpec, flat_to_boxes, is_cut_by_tensor
from megazero.parallel.topology import Topology
from megazero.tensor_file import DTYPE_NAMES, TensorFile, write_file

VOCAB = 97
FEW = "the expert axis of a layer with two experts"
# One pipeline's worth of layers; each name is followed by the layer that decides its stage (None: tied, both ends).
MODEL = {
    "embedding.weight": ("tied", lambda tensor: ShardSpec(
        (VOCAB, 6), ("tensor", None), tied=True, padded=-(-VOCAB // tensor) * tensor)),
    "layers.0.norm": (0, lambda tensor: ShardSpec((6,), (None,), grad_sum=("tensor",))),
    "layers.0.qkv": (0, lambda tensor: ShardSpec((4, 3, 2, 6), ("tensor", None, None, None))),
    "layers.0.row": (0, lambda tensor: ShardSpec((5, 12), (None, "tensor"))),
    "layers.1.gate_up": (1, lambda tensor: ShardSpec((2, 12, 5), (None, "tensor", None))),
    "layers.1.scale": (1, lambda tensor: ShardSpec((), ())),
    "layers.1.experts": (1, lambda tensor: ShardSpec((4, 2, 8, 3), ("expert", None, "expert_tensor", None))),
    "layers.2.experts": (2, lambda tensor: ShardSpec((2, 8, 3), (FEW, "expert_tensor", None))),
    "layers.1.router": (1, lambda tensor: ShardSpec((4, 6), (None, None), grad_sum=("tensor",))),
    "layers.2.row": (2, lambda tensor: ShardSpec((7, 4), (None, "tensor"))),
    "head.weight": (2, lambda tensor: ShardSpec((VOCAB, 6), ("tensor", None), padded=-(-VOCAB // tensor) * tensor)),
}  # fmt: skip
TOPOLOGIES = [
    Topology(pipeline=p, data=d, tensor=t)
    for p, d, t in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 3, 2), (2, 2, 2), (1, 1, 4), (3, 1, 2), (2, 3, 1), (3, 2, 4)]
] + [Topology(2, 4, 2, expert=2), Topology(1, 2, 4, expert=4, expert_tensor=1), Topology(1, 4, 1, expert=4)]
PROGRESS = {"iteration": 7, "consumed_samples": 56, "consumed_tokens": 896}


def stage_of(layer, topology):
    return (0, topology.pipeline - 1) if layer == "tied" else (layer * topology.pipeline // 3,)


def on_axes(spec, topology):
    """Two experts are cut over the greatest common divisor of 2 and the expert size."""
    few = topology.expert_axis(gcd(2, topology.expert))
    return replace(spec, cut=tuple(few if axis == FEW else axis for axis in spec.cut))


def make_index(topology, dtype=torch.float32, align=1, progress=PROGRESS):
    """Buckets as an optimizer would make them: by data axis, cut and not cut; slices cut parameters anywhere."""
    stages = []
    for stage in range(topology.pipeline):
        specs = {
            name: on_axes(spec(topology.tensor), topology)
            for name, (layer, spec) in MODEL.items() if stage in stage_of(layer, topology)
        }
        buckets = []
        for axis, cut in sorted({(s.data_axis, is_cut_by_tensor(s, topology)) for s in specs.values()}):
            names = tuple(n for n, s in specs.items() if (s.data_axis, is_cut_by_tensor(s, topology)) == (axis, cut))
            total = sum(prod(specs[n].local_shape(topology)) for n in names)
            share = -(-total // (topology.size(axis) * align)) * align
            buckets.append(BucketLayout(axis, names, share))
        dtypes = dict.fromkeys(KINDS, DTYPE_NAMES[dtype])
        stages.append(StageLayout({n: TensorEntry(s, dtypes) for n, s in specs.items()}, tuple(buckets)))
    return Index(topology, tuple(stages), {"model": {"hidden_size": 6}}, progress)


def shard(spec, topology, rank, whole):
    """The local shard of a global tensor, padding rows zero, flat."""
    local = torch.zeros(spec.local_shape(topology), dtype=whole.dtype)
    box = spec.box(topology, rank)
    local[tuple(slice(0, n) for n in box.shape)] = whole[box.slices()]
    return local.flatten()


def slices_of(index, rank, state):
    """What the optimizer of `rank` holds; `state[kind][name]` are global tensors."""
    topology = index.topology
    stage = index.stages[topology.coord(rank).pipeline]
    out = {kind: [] for kind in state}
    for kind, tensors in state.items():
        for bucket in stage.buckets:
            flat = torch.zeros(bucket.share * topology.size(bucket.axis), dtype=tensors["layers.0.row"].dtype)
            parts = torch.cat([shard(stage.tensors[n].spec, topology, rank, tensors[n]) for n in bucket.names])
            flat[: len(parts)] = parts
            at = topology.index(bucket.axis, rank)
            out[kind].append(flat[at * bucket.share : (at + 1) * bucket.share])
    return out


def make_state(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        kind: {n: torch.randn(spec(1).shape, generator=g).to(dtype) for n, (_, spec) in MODEL.items()}
        for kind in KINDS
    }


def write_all(folder, index, state):
    save_id = new_save_id()
    return [
        write_rank(
            folder, rank, slices_of(index, rank, state), topology=index.topology,
            stage=index.stages[index.topology.coord(rank).pipeline], save_id=save_id,
        )
        for rank in range(index.topology.world)
    ]  # fmt: skip


def save(root, topology, state, iteration=7, dtype=torch.float32):
    index = make_index(topology, dtype)
    folder = folder_of(root, iteration)
    commit(folder, write_all(folder, index, state), index)
    finish(root, iteration)
    return folder


def check_equal(reader, state):
    for kind, tensors in state.items():
        for name, whole in tensors.items():
            assert torch.equal(reader.read(name, kind), whole), (kind, name)


@pytest.mark.parametrize("written", TOPOLOGIES, ids=str)
def test_any_layout_reads_what_any_wrote(tmp_path, written):
    """C037, C039, C051: weights and moments by name, bit for bit, the tied weight once and at both ends."""
    state = make_state()
    reader = Reader(save(tmp_path, written, state))
    assert reader.progress == PROGRESS and reader.topology == written
    check_equal(reader, state)
    for topology in TOPOLOGIES:
        index = make_index(topology, align=3)
        for rank in range(topology.world):
            stage = index.stages[topology.coord(rank).pipeline]
            for name in stage.tensors:
                spec = stage.tensors[name].spec
                local = shard(spec, topology, rank, state["exp_avg"][name])
                cuts = sorted({0, len(local), len(local) // 3, len(local) // 2})
                parts = [
                    reader.read_flat(name, "exp_avg", spec, topology=topology, rank=rank, start=a, stop=b)
                    for a, b in zip(cuts, cuts[1:], strict=False)
                ]
                assert torch.equal(torch.cat(parts), local), (name, topology, rank)


def buckets_of(topology, rank, whole):
    """The optimizer's own buckets on one rank, weights taken from global tensors (experts aside: no group yet)."""
    stage = topology.coord(rank).pipeline
    infos = []
    for name, (layer, make_spec) in MODEL.items():
        spec = on_axes(make_spec(topology.tensor), topology)
        if stage in stage_of(layer, topology) and not spec.is_expert:
            local = shard(spec, topology, rank, whole[name]).view(spec.local_shape(topology))
            infos.append(ParamInfo(name, torch.nn.Parameter(local), spec, Initial(std=0.02), decay=len(spec.shape) > 1))
    return make_buckets(infos, mesh_on_paper(topology, rank), torch.bfloat16)


@pytest.mark.parametrize("written, read", [((2, 3, 2), (1, 2, 4)), ((1, 1, 1), (3, 2, 2)), ((3, 1, 4), (1, 1, 1))])
def test_the_optimizers_own_state_survives_a_change_of_layout(tmp_path, written, read):
    """C039: master copies and both moments, through the buckets of the optimizer itself."""
    state, zeros = make_state(), {name: torch.zeros(spec(1).shape) for name, (_, spec) in MODEL.items()}
    topology, parts, stages = Topology(*written), [], {}
    for rank in range(topology.world):
        by_kind = [buckets_of(topology, rank, state[kind]) for kind in KINDS]      # each kind as if it were a weight
        slices = {kind: [b.weight for b in buckets] for kind, buckets in zip(KINDS, by_kind, strict=True)}
        layouts = tuple(BucketLayout(b.axis, tuple(i.name for i in b.infos), b.share) for b in by_kind[0])
        entries = {i.name: TensorEntry(i.spec, dict.fromkeys(KINDS, "F32")) for b in by_kind[0] for i in b.infos}
        stage = stages.setdefault(topology.coord(rank).pipeline, StageLayout(entries, layouts))
        parts.append(write_rank(tmp_path, rank, slices, topology=topology, stage=stage, save_id="a"))
    commit(tmp_path, parts, Index(topology, tuple(stages.values()), {}, {}))
    reader, topology = Reader(tmp_path), Topology(*read)
    for rank in range(topology.world):
        buckets, wanted = buckets_of(topology, rank, zeros), [buckets_of(topology, rank, state[kind]) for kind in KINDS]
        for mine in (mine for bucket in buckets for mine in bucket.owned()):
            where = {"topology": topology, "rank": rank, "start": mine.start, "stop": mine.stop}
            mine.data.copy_(reader.read_flat(mine.info.name, mine.kind, mine.info.spec, **where))
        for kind, expected in zip(KINDS, wanted, strict=True):
            for found, right in zip(buckets, expected, strict=True):
                assert torch.equal(found.state(kind), right.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_stored_bit_for_bit(tmp_path, dtype):
    state = make_state(dtype)
    state["weight"]["layers.0.row"][0, 0] = float("-0.0")
    reader = Reader(save(tmp_path, Topology(2, 2, 2), state, dtype=dtype))
    check_equal(reader, state)
    assert reader.read("layers.0.row", "weight").dtype == dtype


def test_boxes_are_read_anywhere(tmp_path):
    state = make_state()
    reader = Reader(save(tmp_path, Topology(1, 3, 2), state))
    rng = random.Random(0)
    for name in ("layers.0.qkv", "layers.1.gate_up", "embedding.weight"):
        shape = reader.tensors[name].spec.shape
        for _ in range(50):
            start = tuple(rng.randrange(n) for n in shape)
            size = tuple(rng.randint(1, n - at) for n, at in zip(shape, start, strict=True))
            box = Box(start, size)
            assert torch.equal(reader.read(name, "weight", box), state["weight"][name][box.slices()])
    with pytest.raises(ValueError, match="outside of its shape"):
        reader.read("layers.0.row", "weight", Box((0, 0), (6, 12)))


def test_a_read_opens_only_the_files_that_meet_its_box(tmp_path):
    folder = save(tmp_path, Topology(pipeline=3, data=2, tensor=2), make_state())
    index = json.loads((folder / "index.json").read_text())
    for entry in index["files"]:
        if entry["rank"] // 4 != 1:                  # all but the middle stage
            (folder / entry["path"]).unlink()
    reader = Reader(folder)
    assert reader.read("layers.1.gate_up", "weight").shape == (2, 12, 5)
    with pytest.raises(ValueError, match="missing, but the index names it"):
        reader.read("layers.0.norm", "weight")


def test_any_safetensors_library_reads_the_files(tmp_path):
    state = make_state()
    folder = save(tmp_path, Topology(), state)
    (path,) = folder.glob("*/*.safetensors")
    with safe_open(path, "pt") as file:
        stored = file.get_tensor("weight/layers.0.row[0:60]")
        assert torch.equal(stored.view(5, 12), state["weight"]["layers.0.row"])
        assert len(list(file.keys())) == 3 * len(MODEL)


@pytest.mark.parametrize(
    ("spec", "expert"),
    [
        (ShardSpec((999, 512), ("tensor", None), padded=1024), 1),
        (ShardSpec((8, 2, 128, 256), ("expert", None, "expert_tensor", None)), 2),
    ],
    ids=["dense", "8 experts"],
)
def test_the_folder_is_little_larger_than_its_tensors(tmp_path, spec, expert):
    """C049: at most 1.02 times the bytes of the tensors, padding and replicas not stored."""
    topology = Topology(pipeline=1, data=2, tensor=2, expert=expert)
    share = prod(spec.local_shape(topology)) // topology.size(spec.data_axis)
    bucket = BucketLayout(spec.data_axis, ("weight",), share)
    index = Index(topology, (StageLayout({"weight": TensorEntry(spec, {"weight": "F32"})}, (bucket,)),), {}, {})
    parts = [
        write_rank(
            tmp_path, rank, {"weight": [torch.zeros(bucket.share)]},
            topology=topology, stage=index.stages[0], save_id="a",
        )
        for rank in range(topology.world)
    ]  # fmt: skip
    commit(tmp_path, parts, index)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size <= 1.02 * spec.numel * 4


def test_a_lost_rank_is_told(tmp_path):
    index = make_index(Topology(1, 2, 2))
    parts = write_all(tmp_path, index, make_state())
    with pytest.raises(ValueError, match=r"files of ranks \[0, 1, 3\] instead of all 4"):
        commit(tmp_path, parts[:2] + parts[3:], index)
    with pytest.raises(ValueError, match="instead of all 4"):
        commit(tmp_path, [*parts, parts[1]], index)
    assert not (tmp_path / "index.json").exists()


def test_a_file_that_the_committing_rank_does_not_see_is_told(tmp_path):
    """Ranks that write to disks of their own nodes must not end in a save that cannot be loaded."""
    index = make_index(Topology(1, 2, 1))
    parts = write_all(tmp_path, index, make_state())
    (tmp_path / parts[1].path).unlink()
    with pytest.raises(ValueError, match="shared by all ranks"):
        commit(tmp_path, parts, index)


def test_ranks_that_disagree_on_the_layout_are_told(tmp_path):
    index = make_index(Topology(1, 2, 1))
    parts = write_all(tmp_path, make_index(Topology(1, 2, 1), align=8), make_state())
    with pytest.raises(ValueError, match="rank 0 wrote another layout"):
        commit(tmp_path, parts, index)


def test_a_layout_that_loses_or_doubles_elements_is_refused():
    spec = ShardSpec((8, 4), ("tensor", None))
    entry = TensorEntry(spec, {"weight": "F32"})

    def index(*stages, topology):
        return Index(topology, stages, {}, {})

    def layout(*buckets, names=("a",)):
        return StageLayout(dict.fromkeys(names, entry), buckets)

    good = BucketLayout("data", ("a",), 8)
    check_cover(index(layout(good), topology=Topology(1, 2, 2)))
    with pytest.raises(ValueError, match="slices of 7 elements lose a part of a"):
        check_cover(index(layout(BucketLayout("data", ("a",), 7)), topology=Topology(1, 2, 2)))
    with pytest.raises(ValueError, match=r"a: in buckets of pipeline ranks \[0, 0\]"):
        check_cover(index(layout(good, good), topology=Topology(1, 2, 2)))
    with pytest.raises(ValueError, match=r"b: in buckets of pipeline ranks \[\]"):
        check_cover(index(layout(good, names=("a", "b")), topology=Topology(1, 2, 2)))
    with pytest.raises(ValueError, match=r"a: in buckets of pipeline ranks \[0, 1\]"):
        check_cover(index(layout(good), layout(good), topology=Topology(2, 2, 2)))
    with pytest.raises(ValueError, match="a: 16 elements written of 32"):
        check_cover(index(layout(BucketLayout("stage", ("a",), 8)), topology=Topology(1, 2, 2)))
    with pytest.raises(ValueError, match="2 stage layouts for 1 pipeline ranks"):
        check_cover(index(layout(good), layout(good), topology=Topology(1, 2, 2)))


@pytest.fixture
def saved(tmp_path):
    state = make_state()
    return save(tmp_path, Topology(1, 2, 1), state), state


def data_file(folder, rank=0):
    (path,) = folder.glob(f"*/rank_{rank:06d}-*.safetensors")
    return path


def test_a_flipped_byte_is_told_in_one_line(saved):
    folder, _ = saved
    path = data_file(folder)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"rank_000000.*damaged: wrong checksum") as error:
        check_equal(Reader(folder), make_state())
    assert "\n" not in str(error.value)
    Reader(folder, verify=False).read("layers.0.norm", "weight")


def test_no_flipped_byte_goes_unnoticed(saved):
    folder, state = saved
    path = data_file(folder)
    data = path.read_bytes()
    rng = random.Random(0)
    for at in [*range(12), *(rng.randrange(len(data)) for _ in range(40))]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        with pytest.raises(ValueError, match="rank_000000"):
            check_equal(Reader(folder), state)


def test_a_truncated_file_is_told_in_one_line(saved):
    folder, state = saved
    path = data_file(folder, rank=1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"rank_000001.*truncated or replaced"):
        check_equal(Reader(folder), state)
    with pytest.raises(ValueError, match="not a tensor file"):
        check_equal(Reader(folder, verify=False), state)


def test_only_touched_chunks_are_verified(tmp_path):
    tensor = torch.arange(3 * 2**22, dtype=torch.int32)          # 48 MiB: chunks 0 to 3
    written = write_file(tmp_path / "x.safetensors", [("x", tensor)], metadata={})
    assert len(written.sums) == 4
    with open(tmp_path / "x.safetensors", "r+b") as file:
        file.seek(20 * 2**20)
        file.write(b"\xff\xff\xff")
    file = TensorFile(tmp_path / "x.safetensors", expected=written)
    assert file.bits("x", 0, 5).tolist() == [0, 1, 2, 3, 4]
    assert file.bits("x", 9 * 2**20, 9 * 2**20 + 1).tolist() == [9 * 2**20]
    with pytest.raises(ValueError, match="wrong checksum in bytes from 16777216"):
        file.bits("x", 5 * 2**20, 5 * 2**20 + 1)


@pytest.mark.parametrize("damage", ["flip", "cut", "pickle", "list", "format"])
def test_a_bad_index_is_told_in_one_line_and_passed_over(tmp_path, damage):
    save(tmp_path, Topology(), make_state(), iteration=5)
    folder = save(tmp_path, Topology(), make_state(), iteration=6)
    path = folder / "index.json"
    text = path.read_bytes()
    path.write_bytes({
        "flip": text.replace(b'"consumed_samples": 56', b'"consumed_samples": 57'),
        "cut": text[:-40],
        "pickle": pickle.dumps(Explodes()),
        "list": b"[1, 2]",
        "format": text.replace(b"megazero-2", b"megazero-9"),
    }[damage])  # fmt: skip
    with pytest.raises(ValueError, match=r"iter_0000006/index.json: not a valid index") as error:
        Reader(folder)
    assert "\n" not in str(error.value)
    said = []
    assert latest(tmp_path, say=said.append) == 5
    assert len(said) == 1 and "ignored" in said[0]


class Explodes:
    def __reduce__(self):
        return (exec, ("raise SystemError('executed')",))


def test_a_pickle_in_place_of_a_file_is_refused_and_not_executed(saved):
    folder, state = saved
    data_file(folder).write_bytes(pickle.dumps(Explodes()) * 50)
    for verify in (True, False):
        with pytest.raises(ValueError, match="rank_000000"):
            check_equal(Reader(folder, verify=verify), state)


@pytest.mark.parametrize("path", ["../outside.safetensors", "/etc/passwd", "0000/../../x", "0000\\..\\x"])
def test_an_index_cannot_lead_out_of_its_folder(saved, path):
    folder, _ = saved
    rewrite_index(folder, lambda body: body["files"][0].update(path=path))
    with pytest.raises(ValueError, match="unsafe path"):
        Reader(folder)


def test_a_link_cannot_lead_out_of_the_folder(saved, tmp_path):
    folder, _ = saved
    path = data_file(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="leads out of the checkpoint's folder"):
        Reader(folder).read("layers.0.norm", "weight")


def rewrite_index(folder, change):
    """Forge an index with a right checksum."""
    body = json.loads((folder / "index.json").read_text())
    del body["crc32"]
    change(body)
    body["crc32"] = checksum_of(body)
    (folder / "index.json").write_text(json.dumps(body))


def test_a_forged_index_that_does_not_cover_is_refused(saved):
    folder, _ = saved
    rewrite_index(folder, lambda body: body["tensors"]["layers.0.row"].update(shape=[500, 12]))
    with pytest.raises(ValueError, match="not a valid index: slices of"):
        Reader(folder)


def test_a_kill_between_data_and_index_leaves_the_old_save_valid(tmp_path):
    """C045: data files without an index are no checkpoint, in a new folder and in one that was complete."""
    old, new = make_state(seed=0), make_state(seed=1)
    folder = save(tmp_path, Topology(1, 2, 1), old, iteration=100)
    write_all(folder_of(tmp_path, 200), make_index(Topology(1, 2, 1)), new)
    write_all(folder, make_index(Topology(1, 3, 1)), new)
    said = []
    assert latest(tmp_path, say=said.append) == 100
    assert "iter_0000200" in said[0] and "not completed" in said[0]
    check_equal(Reader(folder), old)


def test_saving_an_iteration_again_replaces_it_whole(tmp_path):
    old, new = make_state(seed=0), make_state(seed=1)
    save(tmp_path, Topology(1, 3, 2), old)
    folder = save(tmp_path, Topology(2, 1, 1), new)
    check_equal(Reader(folder), new)
    assert len(list(folder.rglob("*.safetensors"))) == 2
    assert not list(folder.rglob("*.tmp"))


def test_the_tracker_is_only_a_hint(tmp_path):
    save(tmp_path, Topology(), make_state(), iteration=10)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10\n"
    for wrong in ("999", "nonsense", ""):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(wrong)
        assert latest(tmp_path) == 10
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert latest(tmp_path) == 10
    (tmp_path / "iter_later").mkdir()
    save(tmp_path, Topology(), make_state(), iteration=12_345_678)
    assert latest(tmp_path) == 12_345_678


def test_an_empty_root_has_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "0000").write_text("a file where a folder should be")
    index = make_index(Topology())
    with pytest.raises(OSError, match="0000"):
        write_all(tmp_path, index, make_state())


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megazero.tensor_file.os.fsync", full)
    with pytest.raises(OSError, match=r"cannot write: No space left on device: '.*x.safetensors'"):
        write_file(tmp_path / "x.safetensors", [("x", torch.zeros(3))], metadata={})
    assert list(tmp_path.iterdir()) == []


def test_wrong_names_kinds_and_shapes_are_told(saved):
    reader = Reader(saved[0])
    with pytest.raises(ValueError, match="has no tensor layers.9.norm"):
        reader.read("layers.9.norm", "weight")
    with pytest.raises(ValueError, match="has no momentum of layers.0.norm"):
        reader.read("layers.0.norm", "momentum")
    with pytest.raises(ValueError, match=r"layers.0.norm has shape \[6\], the model wants \[8\]"):
        spec = ShardSpec((8,), (None,))
        reader.read_flat("layers.0.norm", "weight", spec, topology=Topology(), rank=0, start=0, stop=8)


def test_a_rank_writes_flat_ranges_that_meet_end_to_end():
    for topology in TOPOLOGIES:
        index = make_index(topology, align=5)
        seen = {}
        for rank in range(topology.world):
            stage = index.stages[topology.coord(rank).pipeline]
            for r in checkpoint.owned_ranges(stage, topology, rank):
                box = stage.tensors[r.name].spec.box(topology, rank)
                for local in flat_to_boxes(box.shape, r.start, r.stop):
                    count = seen.setdefault(r.name, torch.zeros(MODEL[r.name][1](1).shape))
                    count[local.shift(box.start).slices()] += 1
        assert all(bool((count == 1).all()) for count in seen.values()) and len(seen) == len(MODEL)
