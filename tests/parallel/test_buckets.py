"""Buckets and ZeRO: flat memory with views in it, slices that cover it once, and AdamW as torch's."""

import functools
from unittest import mock

import pytest
import torch
from torch import nn

from megazero.parallel import reducer, zero
from megazero.parallel.buckets import ADAM_KINDS, ALIGN, make_buckets
from megazero.parallel.groups import mesh_on_paper, open_mesh
from megazero.parallel.params import ONES, ZEROS, Initial, collect, declare, initialize
from megazero.parallel.rules import Adam
from megazero.parallel.shard import ShardSpec, owned_boxes
from megazero.parallel.topology import Topology
from megazero.parallel.zero import Rates, Zero, ZeroOptimizer
from tests.harness import on_ranks
from tests.training import SMALL, Outcome, assemble, distance, train, train_rank

SPECS = {                          # name: spec, initial values; odd sizes, so that slices cross parameters
    "word": (ShardSpec((97, 6), ("tensor", None), tied=True, padded=100), Initial(0.5)),
    "qkv": (ShardSpec((4, 3, 5, 7), ("tensor", None, None, None)), Initial(0.5)),
    "row": (ShardSpec((3, 8), (None, "tensor")), Initial(0.5)),
    "position": (ShardSpec((5, 3), (None, None), grad_sum=("tensor",)), Initial(0.5)),
    "scale": (ShardSpec((7,), (None,), grad_sum=("tensor",)), ONES),
    "bias": (ShardSpec((4, 3), ("tensor", None)), ZEROS),
}
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}


def adamw(infos, mesh, dtype, clip=0.0, stage=1):
    return ZeroOptimizer(infos, mesh, Adam(**ADAM), dtype=dtype, zero=Zero(stage, clip))


def infos_of(mesh, dtype=torch.float64):
    layer = nn.Module()
    for name, (spec, initial) in SPECS.items():
        declare(layer, name, spec, mesh.topology, initial=initial, dtype=dtype)
    infos = collect([("layer", layer)])
    initialize(infos, mesh.topology, mesh.rank, seed=3)
    return infos


def test_parameters_and_gradients_are_views_of_flat_memory():
    infos = infos_of(mesh_on_paper(Topology(), 0), torch.float32)
    before = [info.tensor.detach().clone() for info in infos]
    buckets = make_buckets(infos, mesh_on_paper(Topology(), 0), torch.bfloat16)
    assert sorted(info.name for bucket in buckets for info in bucket.infos) == sorted(info.name for info in infos)
    for bucket in buckets:
        assert bucket.params.dtype == torch.bfloat16 and bucket.grads.dtype == bucket.weight.dtype == torch.float32
        for info, start in zip(bucket.infos, bucket.starts, strict=True):
            part = slice(start, start + info.tensor.numel())
            assert info.tensor.dtype == torch.bfloat16 and info.tensor.grad.dtype == torch.float32
            bucket.params[part] = 2.0
            bucket.grads[part] = 3.0
            assert (info.tensor == 2).all() and (info.tensor.grad == 3).all()
            master = bucket.weight[part].view(info.tensor.shape)
            assert torch.equal(master, before[infos.index(info)]), "masters hold what was not yet rounded"
        bucket.check_views()


def test_autograd_adds_into_the_flat_gradient():
    infos = infos_of(mesh_on_paper(Topology(), 0), torch.float32)
    buckets = make_buckets(infos, mesh_on_paper(Topology(), 0), torch.bfloat16)
    for _ in range(3):
        sum((info.tensor * 2).sum() for info in infos).backward()
    for bucket in buckets:
        bucket.check_views()
        for info, start in zip(bucket.infos, bucket.starts, strict=True):
            assert (bucket.grads[start : start + info.tensor.numel()] == 6).all()
    infos[0].tensor.grad = torch.zeros_like(infos[0].tensor.grad)
    with pytest.raises(AssertionError, match=f"{infos[0].name}: its gradient left the flat buffer"):
        for bucket in buckets:
            bucket.check_views()


TOPOLOGIES = [
    Topology(), Topology(data=2), Topology(data=3), Topology(data=2, tensor=2), Topology(pipeline=2, data=2, tensor=4),
    Topology(data=5, tensor=2), Topology(pipeline=3, data=1, tensor=2),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_owned_slices_cover_every_element_once(topology):
    """What all recorded owners hold makes whole tensors; `assemble` refuses a gap or a second copy. Also C082."""
    expected = {info.name: info.tensor.detach().clone() for info in infos_of(mesh_on_paper(Topology(), 0))}
    parts = []
    for rank in range(topology.world):
        mesh = mesh_on_paper(topology, rank)
        infos = infos_of(mesh)
        if mesh.stage not in (0, topology.pipeline - 1):
            infos = []                                          # the parameters here lie on the ends
        elif topology.pipeline > 1 and mesh.stage:
            infos = [info for info in infos if info.spec.tied]
        for bucket in make_buckets(infos, mesh, torch.float64):
            assert bucket.share * bucket.owners.size == bucket.params.numel() and bucket.share % ALIGN == 0
            padding = bucket.params.numel() - sum(info.tensor.numel() for info in bucket.infos)
            assert 0 <= padding < bucket.owners.size * ALIGN
            for owned in bucket.owned() if bucket.recorded else ():
                boxes = owned_boxes(owned.info.spec, topology, rank, owned.start, owned.stop)
                assert sum(box.numel for box in boxes) <= owned.data.numel() == owned.stop - owned.start
                at = 0
                for box in boxes:
                    data = owned.data[at : at + box.numel].reshape(box.shape)
                    parts.append(((owned.info.name, owned.kind), owned.info.spec.shape, box, data))
                    at += box.numel
    whole = assemble([parts])
    assert whole.keys() == {(name, kind) for name in expected for kind in ADAM_KINDS}
    for (name, kind), found in whole.items():
        assert torch.equal(found, expected[name][: len(found)] if kind == "weight" else torch.zeros_like(found))


def test_every_owner_composes_its_buckets_alike_and_the_tied_one_comes_last():
    topology = Topology(pipeline=2, data=2, tensor=2)
    for axis in ("data", "tensor"):
        for group in topology.groups(axis):
            made = [
                [[info.name for info in bucket.infos] for bucket in make_buckets(infos_of(m), m, torch.float64)]
                for m in (mesh_on_paper(topology, rank) for rank in group)
            ]
            assert all(names == made[0] for names in made)
            assert made[0][-1] == ["layer.word"]


def test_a_bucket_holds_what_is_treated_alike():
    mesh = mesh_on_paper(Topology(data=2, tensor=2), 1)
    found = {
        tuple(info.name for info in b.infos): (b.axis, [g.axis for g in b.grad_sum], b.recorded, b.decay)
        for b in make_buckets(infos_of(mesh), mesh, torch.float64)
    }
    assert found == {
        ("layer.qkv", "layer.row"): ("data", [], True, True),
        ("layer.bias",): ("data", [], True, False),
        ("layer.position",): ("data", ["tensor"], False, True),
        ("layer.scale",): ("data", ["tensor"], False, False),
        ("layer.word",): ("tied_data", [], True, True),
    }


def test_optimizer_bytes_fall_with_the_data_size():
    """12 bytes of master and moments for each element, shared by the data ranks, to within the padding."""
    for data in (1, 2, 4):
        mesh = mesh_on_paper(Topology(data=data), data - 1)
        infos = infos_of(mesh, torch.float32)
        buckets = make_buckets(infos, mesh, torch.bfloat16)
        elements = sum(info.tensor.numel() for info in infos)
        state = sum(bucket.state(kind).nbytes for bucket in buckets for kind in ADAM_KINDS)
        assert 0 <= state - 12 * elements / data < 12 * ALIGN * len(buckets)
        full = sum(bucket.params.nbytes + bucket.grads.nbytes for bucket in buckets)
        assert 0 <= full - 6 * elements < 6 * ALIGN * data * len(buckets)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_bf16_parameters_accumulate_in_fp32(stage):
    """C085: 64 micro-batches, against the same sum in fp64: below 3e-3, where a bf16 accumulator is not."""
    layer = nn.Module()
    spec = ShardSpec((48, 32), (None, None))
    declare(layer, "weight", spec, Topology(), initial=Initial(0.2), dtype=torch.float32)
    infos = collect([("layer", layer)])
    initialize(infos, Topology(), 0, seed=1)
    optimizer = adamw(infos, mesh_on_paper(Topology(), 0), torch.bfloat16, stage=stage)
    weight = infos[0].tensor
    exact = weight.detach().double().requires_grad_()
    narrow = torch.zeros_like(weight)
    generator = torch.Generator().manual_seed(0)
    for _ in range(64):
        x = (torch.randn(16, 32, generator=generator) + 0.5).bfloat16()
        target = torch.randn(16, 48, generator=generator)
        for w in (weight, exact):
            y = torch.tanh(x.to(w.dtype) @ w.T)
            (y.to(exact.dtype) - target).square().mean().backward()
        copy = weight.detach().clone().requires_grad_()
        (torch.tanh(x @ copy.T).double() - target).square().mean().backward()
        narrow += copy.grad
    (found,) = optimizer.reducer.owned()
    found = found[: weight.numel()].view(weight.shape)
    assert weight.dtype == torch.bfloat16 and found.dtype == torch.float32

    def error(found):
        return ((found.double() - exact.grad).norm() / exact.grad.norm()).item()

    assert error(found) < 3e-3 < error(narrow), (error(found), error(narrow))


def gradient(name, step, rank, shape):
    """What rank `rank` of the data axis sees of a whole parameter's gradient."""
    seed = 1000 * step + 10 * list(SPECS).index(name) + rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adamw_by_torch(data, steps, clip):
    """The same parameters, whole, under torch's optimizer; norms and final values."""
    whole = {info.name[6:]: info.tensor.detach().clone() for info in infos_of(mesh_on_paper(Topology(), 0))}
    whole["word"] = whole["word"][:97].clone()
    parameters = {name: nn.Parameter(tensor) for name, tensor in whole.items()}
    decaying = [p for name, p in parameters.items() if SPECS[name][1].std is not None]
    others = [p for name, p in parameters.items() if SPECS[name][1].std is None]
    optimizer = torch.optim.AdamW([{"params": decaying}, {"params": others, "weight_decay": 0.0}], **ADAM)
    norms = []
    for step in range(steps):
        for name, p in parameters.items():
            p.grad = sum(gradient(name, step, rank, p.shape) for rank in range(data))
        norms.append(nn.utils.clip_grad_norm_(parameters.values(), clip or 1e300).item())
        for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
            group |= {"lr": 1e-2 * (step + 1), "weight_decay": decay}
        optimizer.step()
    return norms, {name: p.detach() for name, p in parameters.items()}


def check_adamw(topology, clip, norms, expected):
    """Five steps of ours on this rank against the norms and final values of torch's."""
    mesh = open_mesh(topology)
    infos = infos_of(mesh)
    optimizer = adamw(infos, mesh, torch.float64, clip)
    for step in range(5):
        for info in infos:
            name, spec = info.name[6:], info.spec
            share = 1 / topology.size("tensor") if spec.grad_sum else 1 / topology.size("ends") if spec.tied else 1.0
            grad = gradient(name, step, mesh.data.index, spec.shape)
            box = spec.box(topology, mesh.rank)
            info.tensor.grad.flatten()[: box.numel] += share * grad[box.slices()].flatten()
        update = optimizer.step(Rates(1e-2 * (step + 1), 0.1))
        norm = update.norm
        assert bool(update.clipped) == (0 < clip < norms[step])
        assert norm.dtype == torch.float64 and norm.item() == pytest.approx(norms[step], rel=1e-13)
        assert not any(bucket.grads.any() for bucket in optimizer.buckets), "ready for the next step"
    for info in infos:
        box = info.spec.box(topology, mesh.rank)
        found, want = info.tensor.detach().flatten()[: box.numel].view(box.shape), expected[info.name[6:]][box.slices()]
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)
        assert not info.tensor.flatten()[box.numel :].any(), "padding stays zero"
    return norm.item(), {info.name: info.tensor.detach() for info in infos}


def run_adamw(tensor, data, by_torch):
    return [check_adamw(Topology(data=data, tensor=tensor), clip, *expected) for clip, expected in by_torch.items()]


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (1, 3), (2, 2)])
def test_zero_is_torchs_adamw_on_summed_gradients(tensor, data):
    """C082: with clipping and without; the norm is that of the sum, and all ranks hold the same bits afterwards."""
    by_torch = {clip: adamw_by_torch(data, 5, clip) for clip in (0.5, 0.0)}
    ranks = on_ranks(tensor * data, run_adamw, tensor, data, by_torch)
    for results in zip(*ranks, strict=True):
        assert len({norm for norm, _ in results}) == 1
        for rank, (_, values) in enumerate(results):
            for name, found in values.items():
                assert torch.equal(found, results[rank % tensor][1][name]), "data ranks hold the same parameters"


def test_small_updates_of_bf16_parameters_are_not_lost():
    """A learning rate far below a bf16 step moves the master by the full amount, and the parameter in the end."""
    mesh = mesh_on_paper(Topology(), 0)
    infos = [info for info in infos_of(mesh, torch.float32) if info.name == "layer.scale"]
    optimizer = adamw(infos, mesh, torch.bfloat16)
    for _ in range(200):
        infos[0].tensor.grad.fill_(1.0)
        optimizer.step(Rates(1e-4, 0.0))
    master = optimizer.buckets[0].weight[:7]
    torch.testing.assert_close(master, torch.full((7,), 1.0 - 200 * 1e-4), rtol=1e-5, atol=0)
    assert torch.equal(infos[0].tensor, master.bfloat16())


def test_publish_carries_masters_into_parameters():
    mesh = mesh_on_paper(Topology(), 0)
    infos = infos_of(mesh, torch.float32)
    optimizer = adamw(infos, mesh, torch.bfloat16)
    for owned in optimizer.owned():
        owned.data.fill_(1.25 if owned.kind == "weight" else 0.0)
    optimizer.publish()
    assert all((info.tensor == 1.25).all() for info in infos)


def copies(trainer):
    """What this rank holds of each parameter, by name and place."""
    optimizer = trainer.machine.optimizer
    topology, rank = optimizer.mesh.topology, optimizer.mesh.rank
    return {
        (info.name, info.spec.box(topology, rank)): info.tensor.detach().clone()
        for bucket in optimizer.buckets for info in bucket.infos
    }


@pytest.mark.parametrize("layout", [(2, 2, 2), (1, 3, 1)])
def test_every_copy_of_a_weight_has_the_same_bits_after_training(layout):
    """C061, C073: ten steps in bf16 with accumulation and dropout; norms and biases over tensor ranks, everything over
    data ranks, the tied table on both ends."""
    flags = "--bf16 --micro-batch-size 1 --train-iters 10 --hidden-dropout 0.1"
    held, holders = {}, {}
    for mine in train(flags, layout, look=copies).seen:
        for place, tensor in mine.items():
            assert torch.equal(held.setdefault(place, tensor), tensor), place
            holders[place] = holders.get(place, 0) + 1
    tensor, pipeline, data = layout
    for (name, _), count in holders.items():
        whole = name.endswith(("norm.weight", "norm.bias", "out.bias", "down.bias", "position"))
        assert count == data * (tensor if whole else 1) * (2 if name == "embedding.word.weight" else 1), name


def forget_sums(buckets):
    for bucket in buckets:
        bucket.grad_sum = []
    return buckets


def halve_tied(reduce_scatter, x, group, out=None):
    return reduce_scatter(x.mul_(0.5) if group.axis == "tied_data" else x, group, out)


def train_with_fault(fault, argv, world):
    """A training run on this rank in which one sum over ranks is wrong."""
    make, reduce_scatter = zero.make_buckets, reducer.start_reduce_scatter
    module, name, spoiled = {
        "norm gradients are not summed over tensor": (zero, "make_buckets", lambda *args: forget_sums(make(*args))),
        "the tied gradient is halved": (reducer, "start_reduce_scatter", functools.partial(halve_tied, reduce_scatter)),
        "none": (zero, "make_buckets", make),
    }[fault]
    with mock.patch.object(module, name, spoiled):
        return train_rank(argv, world, None, None)


@pytest.mark.parametrize(
    ("layout", "fault", "seen"),
    [
        ((2, 1, 1), "norm gradients are not summed over tensor", True),
        ((1, 2, 1), "the tied gradient is halved", True),
        ((2, 1, 1), "none", False),
    ],
)
def test_a_planted_fault_is_seen_by_the_measures_of_parity(layout, fault, seen):
    """Gradient norm and moments tell a wrong sum at once; the same run without a fault passes."""
    flags = "--fp64 --train-iters 2"
    tensor, pipeline, data = layout
    argv = f"{SMALL} {flags} --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}".split()
    results = on_ranks(2, functools.partial(train_with_fault, fault, argv, 2))
    found = Outcome(results[0][0].steps, assemble([pieces for _, pieces, _ in results]))
    measured = distance(found, train(flags))
    assert (measured["norm"] > 1e-5) == seen and (measured["moments"] > 1e-3) == seen, measured
    if not seen:
        assert max(measured.values()) < 1e-10
