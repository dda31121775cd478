"""Update rules on cut parameters equal the same rules on whole tensors, written here a second time or torch's own."""

import pytest
import torch
from torch import nn

from megazero.parallel.groups import mesh_on_paper, open_mesh
from megazero.parallel.lamb import Lamb
from megazero.parallel.muon import Muon, matrix_dims, newton_schulz
from megazero.parallel.params import ONES, ZEROS, Initial, collect, declare, initialize
from megazero.parallel.rules import SGD, Adam
from megazero.parallel.shard import ShardSpec
from megazero.parallel.topology import Topology
from megazero.parallel.zero import Rates, Zero, ZeroOptimizer
from tests.harness import on_ranks

SPECS = {                          # name: spec, initial values; odd sizes, so that slices cross parameters
    "word": (ShardSpec((97, 6), ("tensor", None), tied=True, padded=100, table=True), Initial(0.5)),
    "qkv": (ShardSpec((4, 4, 5, 7), ("tensor", None, None, None)), Initial(0.5)),
    "up": (ShardSpec((2, 10, 7), (None, "tensor", None)), Initial(0.5)),
    "out": (ShardSpec((9, 40), (None, "tensor")), Initial(0.5)),
    "router": (ShardSpec((3, 8), (None, None), grad_sum=("tensor",)), Initial(0.5)),
    "position": (ShardSpec((5, 3), (None, None), grad_sum=("tensor",), table=True), Initial(0.5)),
    "scale": (ShardSpec((7,), (None,), grad_sum=("tensor",)), ONES),
    "bias": (ShardSpec((4, 3), ("tensor", None)), ZEROS),
}
RULES = {
    "adam": Adam((0.9, 0.95)), "l2": Adam((0.9, 0.95), decoupled=False), "sgd": SGD(0.9), "lamb": Lamb((0.9, 0.95)),
    "muon": Muon(adam=Adam((0.9, 0.95))),
}
STEPS, DECAY = 4, 0.1


def infos_of(mesh, dtype=torch.float64):
    layer = nn.Module()
    for name, (spec, initial) in SPECS.items():
        declare(layer, name, spec, mesh.topology, initial=initial, dtype=dtype)
    infos = collect([("layer", layer)])
    initialize(infos, mesh.topology, mesh.rank, seed=3)
    return infos


def gradient(name, step, rank, shape):
    """What data rank `rank` sees of a whole gradient: no rank sees anything of every fifth element."""
    seed = 1000 * step + 10 * list(SPECS).index(name) + rank
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    grad.view(-1)[::5] = 0.0
    return grad


def lamb_direction(state, w, grad, decay, step):
    m = state["exp_avg"] = 0.9 * state.get("exp_avg", 0) + 0.1 * grad
    v = state["exp_avg_sq"] = 0.95 * state.get("exp_avg_sq", 0) + 0.05 * grad**2
    update = m / (1 - 0.9**step) / ((v / (1 - 0.95**step)) ** 0.5 + 1e-8) + decay * w
    if w.norm() == 0 or update.norm() == 0:
        return update
    return update * min(max((w.norm() / update.norm()).item(), 0.01), 10.0)


def orthogonal(matrix):
    """Jordan's iteration as his paper has it, on the matrix as it stands: X <- aX + (bA + cAA)X with A = XX^T."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return 0.2 * max(matrix.shape) ** 0.5 * x


def muon_direction(name, state, grad):
    state["momentum"] = 0.95 * state.get("momentum", 0) + grad
    g = grad + 0.95 * state["momentum"]
    if name == "qkv":               # (groups, q + 2, head_dim, hidden): by queries, keys, values
        return torch.stack([orthogonal(g[:, i].reshape(-1, 7)).view(4, 5, 7) for i in range(4)], dim=1)
    if name == "up":                # gate and up
        return torch.stack([orthogonal(g[0]), orthogonal(g[1])])
    return orthogonal(g)


def train_whole(rule, data):
    """Norms of gradients and parameters, zeros, and final values, by whole tensors alone."""
    whole = {info.name[6:]: info.tensor.detach().clone() for info in infos_of(mesh_on_paper(Topology(), 0))}
    whole["word"] = whole["word"][:97].clone()
    parameters = {name: nn.Parameter(tensor) for name, tensor in whole.items()}
    made = {
        "l2": lambda p, decay: torch.optim.Adam([p], 1.0, (0.9, 0.95), weight_decay=decay),
        "sgd": lambda p, decay: torch.optim.SGD([p], 1.0, 0.9, weight_decay=decay),
    }.get(rule, lambda p, decay: torch.optim.AdamW([p], 1.0, (0.9, 0.95), weight_decay=decay))
    decays = {name: DECAY * (SPECS[name][1].std is not None) for name in SPECS}
    optimizers = {name: made(p, decays[name]) for name, p in parameters.items()}
    states, record = {name: {} for name in SPECS}, []
    for step in range(STEPS):
        rate = 1e-2 * (step + 1)
        zeros = 0
        for name, p in parameters.items():
            p.grad = sum(gradient(name, step, rank, p.shape) for rank in range(data))
            zeros += int((p.grad == 0).sum())
        norm = nn.utils.clip_grad_norm_(parameters.values(), 5.0).item()
        assert norm > 5.0
        for name, p in parameters.items():
            if rule == "lamb":
                p.data -= rate * lamb_direction(states[name], p.data, p.grad, decays[name], step + 1)
            elif rule == "muon" and name in ("qkv", "up", "out", "router"):
                p.data = (1 - rate * DECAY) * p.data - rate * muon_direction(name, states[name], p.grad)
            else:
                optimizers[name].param_groups[0]["lr"] = rate
                optimizers[name].step()
        record.append((norm, sum(p.data.norm() ** 2 for p in parameters.values()).sqrt().item(), zeros))
    return record, {name: p.detach() for name, p in parameters.items()}


def check_rules(topology, stages, expected):
    """Every rule on this rank against its record and final values."""
    mesh = open_mesh(topology)
    for (rule, (record, values)), stage in ((each, stage) for each in expected.items() for stage in stages):
        infos = infos_of(mesh)
        zero = Zero(stage, clip=5.0, bucket_size=500, overlap_gather=stage == 2)
        optimizer = ZeroOptimizer(infos, mesh, RULES[rule], dtype=torch.float64, zero=zero)
        for step in range(STEPS):
            for info in infos:
                name, spec = info.name[6:], info.spec
                share = 1 / topology.size("tensor") if spec.grad_sum else 1.0
                grad = gradient(name, step, mesh.data.index, spec.shape)
                box = spec.box(topology, mesh.rank)
                target = optimizer.reducer.gradient(info.tensor)
                target.flatten()[: box.numel] += share * grad[box.slices()].flatten()
            zeros = optimizer.zero_count().item()
            update = optimizer.step(Rates(1e-2 * (step + 1), DECAY))
            optimizer.wait()
            found = update.norm.item(), optimizer.parameter_norm().item(), zeros
            assert found == pytest.approx(record[step], rel=1e-12) and zeros == record[step][2], (rule, stage, step)
            assert update.clipped and not update.skipped
        for info in infos:
            box, want = info.spec.box(topology, mesh.rank), values[info.name[6:]]
            got = info.tensor.detach().flatten()[: box.numel].view(box.shape)
            torch.testing.assert_close(got, want[box.slices()], rtol=1e-10, atol=1e-11, msg=f"{rule} {info.name}")
            assert not info.tensor.flatten()[box.numel :].any(), "padding stays zero"
    return True


@pytest.mark.parametrize(("tensor", "data", "stages"), [(1, 1, (1,)), (1, 3, (0, 1, 2)), (2, 2, (0, 1, 2))])
def test_a_rule_on_slices_is_the_rule_on_whole_tensors(tensor, data, stages):
    """C082: with norms of gradient and parameters, the clipping, and the count of zeros; at every stage of ZeRO."""
    expected = {rule: train_whole(rule, data) for rule in RULES}
    assert all(on_ranks(tensor * data, check_rules, Topology(data=data, tensor=tensor), stages, expected))


def one_tensor(rule, dtype=torch.float32, steps=20, zero=None):
    """A parameter of 40 x 30 after 20 steps of a rule, and its optimizer; gradients as `trajectory` makes them."""
    layer, mesh = nn.Module(), mesh_on_paper(Topology(), 0)
    declare(layer, "w", ShardSpec((40, 30), (None, None)), Topology(), initial=Initial(0.5), dtype=torch.float32)
    infos = collect([("layer", layer)])
    initialize(infos, Topology(), 0, seed=1)
    optimizer = ZeroOptimizer(infos, mesh, rule, dtype=dtype, zero=zero or Zero())
    for step in range(steps):
        optimizer.reducer.gradient(infos[0].tensor).copy_(trajectory(step))
        optimizer.step(Rates(1e-2, 0.1))
    return optimizer


def trajectory(step):
    return torch.randn(40, 30, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step % 3 - 2)


@pytest.mark.parametrize(
    ("rule", "by_torch", "other"),
    [(Adam(), torch.optim.AdamW, torch.optim.Adam), (Adam(decoupled=False), torch.optim.Adam, torch.optim.AdamW)],
    ids=["AdamW", "Adam"],
)
def test_decay_is_decoupled_or_l2_as_asked(rule, by_torch, other):
    """C151: Adam and AdamW are torch's to 1e-6 over 20 steps, and neither is the other."""
    found = one_tensor(rule).buckets[0].weight[:1200].view(40, 30)
    start = one_tensor(rule, steps=0).buckets[0].weight[:1200].view(40, 30)
    ends = []
    for kind in (by_torch, other):
        p = nn.Parameter(start.clone())
        optimizer = kind([p], lr=1e-2, weight_decay=0.1)
        for step in range(20):
            p.grad = trajectory(step)
            optimizer.step()
        ends.append(((found - p.detach()).abs().max() / p.detach().abs().max()).item())
    assert ends[0] < 1e-6 and ends[1] > 1e-3, ends


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_state_is_never_rounded_to_the_type_of_the_parameters(rule):
    """C154: with bf16 parameters masters and moments have the bits of a run in fp32."""
    wide, narrow = one_tensor(rule).buckets[0], one_tensor(rule, torch.bfloat16).buckets[0]
    assert narrow.params.dtype == torch.bfloat16 and wide.slices.keys() == narrow.slices.keys()
    for kind in wide.slices:
        assert narrow.slices[kind].dtype == torch.float32
        assert torch.equal(wide.slices[kind], narrow.slices[kind]), kind
    assert torch.equal(narrow.params[:1200], narrow.weight[:1200].bfloat16())


def test_a_fused_weight_is_several_matrices():
    """gate and up; each query of a group, the key, the value; every expert's."""
    assert matrix_dims(ShardSpec((8, 5, 64, 512), ("tensor", None, None, None))) == ([1], [0, 2])
    assert matrix_dims(ShardSpec((2, 96, 32), (None, "tensor", None))) == ([0], [1])
    assert matrix_dims(ShardSpec((32, 96), (None, "tensor"))) == ([], [0])
    assert matrix_dims(ShardSpec((8, 2, 96, 32), ("expert", None, "expert_tensor", None))) == ([0, 1], [2])


@pytest.mark.parametrize("shape", [(40, 40), (20, 90), (90, 20)])
def test_newton_schulz_makes_all_directions_equally_strong(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.linalg.svdvals(newton_schulz(matrix, 5))
    assert 0.3 < found.min() and found.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    exact = u @ v
    assert (newton_schulz(matrix, 5) * exact).sum() / exact.square().sum() > 0.8


def test_newton_schulz_runs_in_bf16_on_request():
    runs = (Muon(), 0), (Muon(), 1), (Muon(narrow=True), 1)
    start, wide, narrow = (one_tensor(rule, steps=steps).buckets[0].weight for rule, steps in runs)
    assert 1e-4 < (wide - narrow).norm() / (wide - start).norm() < 2e-2


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest():
    infos = infos_of(mesh_on_paper(Topology(), 0))
    optimizer = ZeroOptimizer(infos, mesh_on_paper(Topology(), 0), Muon(), dtype=torch.float64, zero=Zero())
    kinds = {}
    for owned in optimizer.owned():
        kinds.setdefault(owned.info.name[6:], []).append(owned.kind)
    two = ["weight", "exp_avg", "exp_avg_sq"]
    assert kinds == {name: ["weight", "momentum"] for name in ("qkv", "up", "out", "router")} | dict.fromkeys(
        ("word", "position", "scale", "bias"), two
    )


def test_the_kernels_are_the_same_step():
    """Norm, clipping by a factor on the device, update and the parameters' copy: torch's path and Triton's, with fp16
    parameters (bf16 is cut off by Triton's interpreter)."""
    pytest.importorskip("triton")
    ends = []
    for impl in ("torch", "triton"):
        for dtype in (torch.float32, torch.float16):
            optimizer = one_tensor(Adam(impl=impl), dtype, zero=Zero(clip=0.5, norm_impl=impl))
            (bucket,) = optimizer.buckets
            ends.append(bucket.weight.clone())
            assert torch.equal(bucket.params, bucket.weight.to(dtype))
    for end in ends[1:]:
        assert ((end - ends[0]).abs().max() / ends[0].abs().max()).item() < 1e-6
    assert (one_tensor(Adam()).buckets[0].weight - ends[0]).abs().max() > 1e-3, "the clipping counts"
