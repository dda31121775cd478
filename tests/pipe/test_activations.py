"""What the engine holds, measured on gloo ranks: as many activations as on paper, and sent ones only until they are
gone."""

import functools
import weakref

import pytest
import torch

from megazero.parallel.groups import open_mesh
from megazero.parallel.topology import Topology
from megazero.parallel.weights import WeightQueue
from megazero.pipe.engine import SENDS_UNDER_WAY, PipeEngine
from megazero.pipe.instructions import Backward, Forward
from megazero.pipe.lower import add_communication
from megazero.pipe.output import WithLoss
from megazero.pipe.p2p import Wires, edges_of
from megazero.pipe.schedule import SCHEDULES
from megazero.pipe.simulate import simulate
from tests.harness import on_ranks
from tests.pipe.test_engine import RUNS

SHAPE = (2, 3)
MEBIBYTE = 1 << 20
options = {"device": torch.device("cpu")}


class Token:
    """Something whose life can be watched."""


class Alive:
    """How many tokens live, and how many did at most."""

    def __init__(self):
        self.tokens, self.peak = weakref.WeakSet(), 0

    def new(self):
        token = Token()
        self.tokens.add(token)
        self.peak = max(self.peak, len(self.tokens))
        return token


class _Counted(torch.autograd.Function):
    """Holds one token as long as its node lives, and one until its weight gradient is done."""

    @staticmethod
    def forward(ctx, x, live, held, queue):
        ctx.live, ctx.held, ctx.queue = live.new(), held.new(), queue
        return x + 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.queue.put(functools.partial(id, ctx.held))
        return grad, None, None, None


class Part:
    """A stage that counts what is kept for its backward, together with the other stages of its rank."""

    def __init__(self, live, held, is_last):
        self.live, self.held, self.is_last, self.queue, self.has_graph = live, held, is_last, WeightQueue(), False
        self.first = torch.zeros(SHAPE, dtype=torch.float64, requires_grad=True)

    def __call__(self, x, batch):
        x = _Counted.apply(self.first if x is None else x, self.live, self.held, self.queue)
        self.has_graph = x.requires_grad
        return x.sum() if self.is_last else x


def count_activations(ranks, sizes):
    """(peak of live, peak of held) of this rank, by schedule and number of micro-batches."""
    mesh = open_mesh(Topology(pipeline=ranks))
    found = {}
    for name, chunks in RUNS:
        schedule, stages = SCHEDULES[name], ranks * chunks
        mine = [s for s, home in enumerate(schedule.homes(ranks, chunks)) if home == mesh.stage]
        wires = Wires(mesh.pipeline, edges_of(add_communication(schedule(ranks, 1, chunks), stages)))
        for micros in sizes:
            live, held = Alive(), Alive()
            parts = {s: Part(live, held, s == stages - 1) for s in mine}
            queues = {s: part.queue for s, part in parts.items()}
            engine = PipeEngine(parts, stages - 1, wires, queues=queues, **options)
            engine.run(add_communication(schedule(ranks, micros, chunks), stages)[mesh.stage], [None] * micros)
            assert not live.tokens and not held.tokens, "a step leaves nothing behind"
            assert all(part.has_graph for part in parts.values())
            found[name, chunks, micros] = live.peak, held.peak
            engine.run(
                add_communication(schedule.forward_only(ranks, micros, chunks), stages)[mesh.stage], [None] * micros
            )
            assert not live.tokens and not held.tokens, "an evaluation keeps nothing"
            assert not any(part.has_graph for part in parts.values())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_rank_holds_as_many_activations_as_on_paper(ranks):
    """Measured by what lives, at every forward: graphs until their backward, weight gradients until they are added."""
    for rank, found in enumerate(on_ranks(ranks, count_activations, ranks, (1, 2, 5, 8))):
        for (name, chunks, micros), peaks in found.items():
            paper = simulate(add_communication(SCHEDULES[name](ranks, micros, chunks), ranks * chunks))
            assert peaks == (paper.peak_live[rank], paper.peak_held[rank]), f"{name} x {chunks}, {micros}, rank {rank}"


class Watched:
    """A first stage, whose outputs are watched, or a last one. `ends_in` is its last operation."""

    def __init__(self, stage, ends_in):
        self.stage, self.ends_in = stage, ends_in
        self.weight = torch.full((MEBIBYTE // 8, 1), 0.5, dtype=torch.float64, requires_grad=True)
        self.outputs, self.most = [], 0

    def __call__(self, x, batch):
        if self.stage == 1:
            return x.sum() * batch
        out = self.ends_in(self.weight * batch)
        self.outputs.append(out)
        self.most = max(self.most, sum(self.sizes()) // MEBIBYTE)
        return out

    def sizes(self):
        return [out.untyped_storage().nbytes() for out in self.outputs]


def double(x):
    """Its result is needed by nobody's backward."""
    return x * 2.0


def watch_outputs(ends_in, micros):
    """(most outputs in memory at once, those in memory at the end, gradient of the weight) of the first rank."""
    mesh = open_mesh(Topology(pipeline=2))
    programs = add_communication(SCHEDULES["gpipe"](2, micros, 1), 2)
    part = Watched(mesh.stage, ends_in)
    engine = PipeEngine({mesh.stage: part}, 1, Wires(mesh.pipeline, edges_of(programs)), **options)
    engine.run(programs[mesh.stage], [float(m) for m in range(micros)])
    return part.most, sum(size > 0 for size in part.sizes()), part.weight.grad


def test_a_sent_activation_is_freed_when_it_has_gone():
    """In GPipe, which holds all micro-batches: at most the sends under way, the one that starts and the one being made
    are in memory; at last none, though somebody has the tensors."""
    micros = 12
    most, left, grad = on_ranks(2, watch_outputs, double, micros)[0]
    assert most <= SENDS_UNDER_WAY + 2 and left == 0
    assert torch.equal(grad, torch.full_like(grad, 2.0 * sum(m * m for m in range(micros))))


def test_an_output_that_a_node_saved_is_not_freed():
    """tanh needs its result for its backward: freeing it would end in wrong gradients, or in a crash."""
    micros = 12
    most, left, grad = on_ranks(2, watch_outputs, torch.tanh, micros)[0]
    assert most == left == micros
    numbers = torch.arange(micros, dtype=torch.float64)
    expected = (numbers * numbers * (1 - torch.tanh(0.5 * numbers).square())).sum()
    torch.testing.assert_close(grad, torch.full_like(grad, expected.item()), rtol=1e-12, atol=0)


def fork(x):
    """One of each kind: needed by nobody (twice in one storage), saved by its node, by another one, a leaf, a view."""
    y = (x * 2.0).view(2, -1)
    z = x * 3.0
    return y[0], y[1], torch.tanh(x), z, z.square(), torch.ones(5), torch.ones(5, requires_grad=True)[:2]


def watch_parts(micros):
    """Which parts of the first rank's outputs are in memory at the end, and the gradient of its weight."""
    mesh = open_mesh(Topology(pipeline=2))
    programs = add_communication(SCHEDULES["1f1b"](2, micros, 1), 2)
    weight, outputs = torch.full((64,), 0.5, dtype=torch.float64, requires_grad=True), []

    def first(x, batch):
        outputs.append(fork(weight * batch))
        return outputs[-1]

    parts = [first, lambda x, batch: sum(t.sum() for t in x)]
    engine = PipeEngine({mesh.stage: parts[mesh.stage]}, 1, Wires(mesh.pipeline, edges_of(programs)), **options)
    engine.run(programs[mesh.stage], [float(m) for m in range(micros)])
    return [[x.untyped_storage().nbytes() > 0 for x in out] for out in outputs], weight.grad


def test_of_several_tensors_those_are_freed_that_nobody_needs():
    kept, grad = on_ranks(2, watch_parts, 4)[0]
    assert kept == [[False, False, True, True, False, True, True]] * 4
    numbers = torch.arange(4, dtype=torch.float64)
    expected = (numbers * (2 + 1 - torch.tanh(0.5 * numbers).square() + 3 + 9 * numbers)).sum()
    torch.testing.assert_close(grad, torch.full_like(grad, expected.item()), rtol=1e-12, atol=0)


def hand_on_a_parameter(is_view):
    """The first rank's gradient of a parameter that (or half of which) is the very output of its stage."""
    mesh = open_mesh(Topology(pipeline=2))
    programs = add_communication(SCHEDULES["1f1b"](2, 8, 1), 2)
    weight = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    parts = [lambda x, batch: weight[:2] if is_view else weight, lambda x, batch: x.sum()]
    engine = PipeEngine({mesh.stage: parts[mesh.stage]}, 1, Wires(mesh.pipeline, edges_of(programs)), **options)
    engine.run(programs[mesh.stage], [None] * 8)
    return weight.detach(), weight.grad


@pytest.mark.parametrize("is_view", [True, False])
def test_an_output_that_is_a_parameter_is_not_freed(is_view):
    """Learned tokens at the front of a model, say: freeing what was sent would take the parameter with it."""
    weight, grad = on_ranks(2, hand_on_a_parameter, is_view)[0]
    assert torch.equal(weight, torch.ones_like(weight))
    assert grad[:2].eq(8.0).all() and grad[2:].eq(0.0 if is_view else 8.0).all()


class _Alias(torch.autograd.Function):
    """Hands on what it gets, and autograd knows of no view."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def hand_on(parts, micros):
    """Of the first of two ranks, which holds all stages but the last: the gradient of the weight, 0.5 everywhere, that
    `parts` are given, and what they report. All forwards come first."""
    mesh, stages = open_mesh(Topology(pipeline=2)), len(parts)
    held, numbers = [range(stages - 1), [stages - 1]], range(micros)
    programs = add_communication([
        [Forward(m, s) for m in numbers for s in mine] + [Backward(m, s) for m in numbers for s in reversed(mine)]
        for mine in held
    ], stages)
    weight = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    given = {s: functools.partial(parts[s], weight) for s in held[mesh.stage]}
    engine = PipeEngine(given, stages - 1, Wires(mesh.pipeline, edges_of(programs)), **options)
    engine.run(programs[mesh.stage], [float(m) for m in numbers])
    return weight.grad, engine.reports


def squash(weight, x, batch):
    return torch.tanh(weight * batch)


def pass_on(weight, x, batch):
    return _Alias.apply(x)


def tell(weight, x, batch):
    out = weight * 3.0
    return WithLoss(out, reports={"out": out.detach()})


def total(weight, x, batch):
    return x.sum()


def test_what_a_stage_hands_on_untouched_is_not_freed():
    """The stage below, on the same rank, saved it: tanh needs its result."""
    micros = 12
    grad, _ = on_ranks(2, hand_on, [squash, pass_on, total], micros)[0]
    numbers = torch.arange(micros, dtype=torch.float64)
    expected = (numbers * (1 - torch.tanh(0.5 * numbers).square())).sum()
    torch.testing.assert_close(grad, torch.full_like(grad, expected.item()), rtol=1e-12, atol=0)


def test_what_a_stage_reports_of_its_output_is_not_freed():
    grad, reports = on_ranks(2, hand_on, [tell, total], 1)[0]
    assert reports["out"].tolist() == [1.5] * 3 and grad.tolist() == [3.0] * 3


def count_asides(ranks, chunks, name, micros):
    """Most tensors without gradient, handed on beside one that has it, that live on this rank at once: of those that
    its stages made, and of those that they got."""
    mesh, stages = open_mesh(Topology(pipeline=ranks)), ranks * chunks
    programs = add_communication(SCHEDULES[name](ranks, micros, chunks), stages)
    weight, alive, most = torch.ones(4, requires_grad=True), ([], []), [0, 0]

    def watch(kind, aside):
        alive[kind].append(weakref.ref(aside.untyped_storage()))
        most[kind] = max(most[kind], sum(seen() is not None for seen in alive[kind]))

    def part(x, batch, *, last):
        y, aside = (weight, torch.zeros(4)) if x is None else x
        assert aside.shape == (4,)
        watch(1, aside)
        if last:
            return (y * 2.0 + aside).sum()
        aside = aside + 1.0
        watch(0, aside)
        return y * 2.0, aside

    mine = [s for s, home in enumerate(SCHEDULES[name].homes(ranks, chunks)) if home == mesh.stage]
    parts = {s: functools.partial(part, last=s == stages - 1) for s in mine}
    engine = PipeEngine(parts, stages - 1, Wires(mesh.pipeline, edges_of(programs)), **options)
    engine.run(programs[mesh.stage], [None] * micros)
    return most


@pytest.mark.parametrize(("ranks", "chunks", "name"), [(2, 1, "gpipe"), (2, 2, "interleaved"), (2, 2, "zb-v")])
def test_what_no_gradient_comes_back_for_is_forgotten_when_it_is_used(ranks, chunks, name):
    """A teacher's hidden states, say: those being made and under way, the one being used."""
    for made, got in on_ranks(ranks, count_asides, ranks, chunks, name, 16):
        assert made <= SENDS_UNDER_WAY + 1 and got <= 2
