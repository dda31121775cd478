"""Hidden states of any number, dtype and shape, different at every cut, and layers with losses of their own: any
schedule gives the losses, gradients and reports of one process."""

import functools
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from megazero.machine import Setup, measured_seconds
from megazero.parallel.groups import Group, mesh_on_paper, open_mesh
from megazero.parallel.layers import gather_linear, lookup
from megazero.parallel.params import adopt, collect, initialize
from megazero.parallel.topology import Topology
from megazero.pipe.engine import PipeEngine
from megazero.pipe.lower import add_communication
from megazero.pipe.message import DTYPES, HEADER, Format
from megazero.pipe.output import WithLoss, flat, hidden_of, with_losses_of
from megazero.pipe.p2p import Wires, edges_of
from megazero.pipe.schedule import SCHEDULES
from megazero.pipe.stage import LayerSpec, Recompute, build_stages, cut_layers
from megazero.precision import Dtypes
from tests.harness import RankFailed, on_ranks

HIDDEN, VOCAB = 6, 11
RUNS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
TIMES = (Recompute(), Recompute("uniform", 2))
CPU = torch.device("cpu")


class Layer(nn.Module):
    """A weight that is put off, and what a layer of one of the kinds below does with it.

    A micro-batch is (source [rows + 3, hidden], ids [rows], scale). Hidden states are (source, ids) at first, then
    (memory, ids), then (memory, x), where x loses a row in each layer, then x alone.
    """

    def __init__(self, kind, mesh):
        super().__init__()
        self.kind, self.queue = kind, mesh.weights
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.table = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        adopt(self, std=0.4)

    def forward(self, hidden, batch):
        return Layer.__dict__[self.kind](self, hidden, batch)

    def map(self, x):
        return gather_linear(x, self.linear.weight, self.linear.bias, Group("tensor"), self.queue)

    def enter(self, _, batch):
        return batch[0], batch[1]

    def encode(self, hidden, batch):
        memory, ids = hidden
        return torch.tanh(self.map(memory)), ids

    def bridge(self, hidden, batch):
        memory, ids = hidden
        return memory, lookup(ids, self.table.weight, self.queue)

    def attend(self, x, memory):
        return torch.softmax(x @ memory.T, -1) @ memory

    def decode(self, hidden, batch):
        memory, x = hidden
        return memory, (x + self.attend(torch.tanh(self.map(x)), memory))[1:]

    def gate(self, hidden, batch):
        """A layer of parts, one of which has a loss: it must not stand in the reported one."""
        memory, x = hidden
        y = self.part(x, batch)
        return with_losses_of((memory, x + hidden_of(y)), y, memory)

    def part(self, x, batch):
        y = torch.tanh(self.map(x))
        chosen = y.argmax(-1)
        reports = {"chosen": torch.bincount(chosen, minlength=HIDDEN), "mean": y.mean().detach()}
        return WithLoss(y, y.square().mean() * batch[2], reports)

    def watch(self, hidden, batch):
        """Something to tell and no loss; the memory goes on although nobody above needs it."""
        memory, x = hidden
        return WithLoss((memory, self.map(x)), reports={"chosen": torch.ones(HIDDEN, dtype=torch.int64)})

    def narrow(self, hidden, batch):
        return self.map(hidden[1])

    def leave(self, x, batch):
        """The loss of the model, and one of the layer's own beside it."""
        return WithLoss(x.square().sum() * batch[2], x.sum() * batch[2], {"mean": x.mean().detach()})


KINDS = ["enter", "encode", "encode", "bridge", "decode", "gate", "decode", "gate", "watch", "narrow", "leave"]
LAYERS = [
    LayerSpec(f"layers.{i}", functools.partial(Layer, kind), cost=float(0 < i < len(KINDS) - 1), recomputable=i > 0)
    for i, kind in enumerate(KINDS)
]


def data(micros, rows):
    generator = torch.Generator().manual_seed(100 * micros + rows)
    return [
        (
            torch.randn(rows + 3, HIDDEN, generator=generator, dtype=torch.float64),
            torch.randint(0, VOCAB, (rows,), generator=generator), 1.0 / micros,
        )
        for _ in range(micros)
    ]


def stages_on(mesh, homes, how):
    stages = build_stages(LAYERS, mesh, cut_layers(LAYERS, homes), how)
    infos = collect([named for stage in stages.values() for named in stage.named_layers()])
    initialize(infos, mesh.topology, mesh.rank, seed=3)
    return stages, infos


@functools.cache
def serial(micros, rows):
    """Losses, gradients by name, and reports, of one process without engine."""
    stages, infos = stages_on(mesh_on_paper(Topology(), 0), [0], Recompute())
    losses, reports = [], {}
    for batch in data(micros, rows):
        out = stages[0](None, batch)
        (out.x + out.loss).backward()
        losses.append(out.x.item())
        for name, value in out.reports.items():
            reports[name] = reports.get(name, 0) + value
    return losses, {info.name: info.tensor.grad for info in infos}, reports


class Rank:
    """One pipeline rank with its stages."""

    def __init__(self, ranks, name, chunks, how):
        self.mesh, self.schedule, self.ranks, self.chunks = open_mesh(Topology(ranks)), SCHEDULES[name], ranks, chunks
        homes = self.schedule.homes(ranks, chunks)
        self.stages, self.infos = stages_on(self.mesh, homes, how)
        self.last = len(homes) - 1
        wires = Wires(self.mesh.pipeline, edges_of(add_communication(self.schedule(ranks, 1, chunks), self.last + 1)))
        queues = {number: stage.weights for number, stage in self.stages.items()}
        self.engine = PipeEngine(self.stages, self.last, wires, device=CPU, queues=queues)

    def run(self, micros, rows, train, key):
        """(losses, gradients, reports) of a step; gradients are cleared."""
        order = self.schedule if train else self.schedule.forward_only
        program = add_communication(order(self.ranks, micros, self.chunks), self.last + 1)[self.mesh.stage]
        losses = [loss.item() for loss in self.engine.run(program, data(micros, rows), key)]
        grads = {info.name: info.tensor.grad for info in self.infos}
        for info in self.infos:
            info.tensor.grad = None
        return losses, grads, self.engine.reports


STEPS = [(5, 7, True), (3, 9, False), (2, 8, True), (3, 9, False), (5, 7, True), (1, 7, False)]


def steps_of(ranks):
    """Steps of several shapes in turn, with every schedule and recomputation; the engine is the same for all steps."""
    found = []
    for name, chunks in RUNS:
        for how in TIMES:
            rank = Rank(ranks, name, chunks, how)
            found.append([rank.run(*step, key=step[1]) for step in STEPS])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_schedule_trains_layers_with_several_tensors_and_own_losses_as_one_process(ranks):
    """C070 C098: gradients to 1e-12, reports exact and counted once, recomputed or not; training and evaluation
    alternate and have shapes of their own, and a curriculum's come back."""
    by_rank = on_ranks(ranks, steps_of, ranks)
    for case, runs in enumerate(zip(*by_rank, strict=True)):
        what = RUNS[case // len(TIMES)], TIMES[case % len(TIMES)]
        for (micros, rows, train), outcomes in zip(STEPS, zip(*runs, strict=True), strict=True):
            losses, grads, reports = serial(micros, rows)
            assert [x for told, _, _ in outcomes for x in told] == pytest.approx(losses, rel=1e-12), what
            found = {name: grad for _, of_rank, _ in outcomes for name, grad in of_rank.items()}
            assert found.keys() == grads.keys()
            for name, grad in found.items():
                expected = grads[name] if train else None
                assert (grad is None) == (expected is None), (what, name)
                if grad is not None:
                    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12, msg=f"{what} {name}")
            total = {name: sum(told[name] for _, _, told in outcomes if name in told) for name in reports}
            assert torch.equal(total["chosen"], reports["chosen"]), what
            torch.testing.assert_close(total["mean"], reports["mean"], rtol=1e-12, atol=1e-12)


def test_shapes_may_not_change_under_one_key():
    with pytest.raises(RankFailed, match=r"stage 0: its output is .*\[12, 6\].*, but was .*\[10, 6\].* same key None"):
        on_ranks(2, change_shape)


def change_shape():
    rank = Rank(2, "1f1b", 1, Recompute())
    rank.run(2, 7, True, None)
    rank.run(2, 9, False, None)                            # evaluation is told apart
    rank.run(2, 9, True, None)


def test_what_cannot_go_on_to_the_next_stage_is_refused():
    mesh, programs = mesh_on_paper(Topology(), 0), add_communication(SCHEDULES["gpipe"](1, 1, 1), 1)
    weight = torch.ones(2, 2, requires_grad=True)
    engine = PipeEngine({0: lambda x, batch: weight.to_sparse()}, 0, Wires(mesh.pipeline, []), device=CPU)
    with pytest.raises(ValueError, match="a tensor of torch.sparse_coo cannot be sent to the next stage; to_dense"):
        engine.run(programs[0], [None])


def test_a_header_says_any_format():
    """Dtypes, shapes, scalars, empty tensors, a tuple of one: read as it was written; what does not fit is refused."""
    states = [
        torch.zeros(3, 2, 1), (torch.zeros(4, requires_grad=True),), (torch.zeros(()), torch.zeros(0, 5).bool()),
        tuple(torch.zeros(2, dtype=dtype) for dtype in DTYPES),
    ]
    for state in states:
        form = Format.of(state)
        header = form.header(CPU)
        assert header.shape == (HEADER,) and Format.read(header.tolist()) == form
        made = form.empty(CPU)
        assert Format.of(made if form.is_tuple else made[0]) == form
    with pytest.raises(ValueError, match="a tensor of torch.sparse_coo cannot be sent to the next stage"):
        Format.of(torch.zeros(2, 2).to_sparse())
    with pytest.raises(ValueError, match="22 tensors are too many, or .* of 128 numbers"):
        Format.of(tuple(torch.zeros(1, 1, 1) for _ in range(22))).header(CPU)
    with pytest.raises(ValueError, match="a tensor of torch.uint16 cannot be sent"):
        Format.of(torch.zeros(1, dtype=torch.uint16)).header(CPU)


def hand_over_all_dtypes(shares):
    """The sum of each tensor that the second rank got, which are of all dtypes, and a scalar and an empty one."""
    mesh = open_mesh(Topology(2))
    pipeline = mesh.pipeline if shares else replace(mesh.pipeline, patience=None)
    programs = add_communication(SCHEDULES["gpipe"].forward_only(2, 2, 1), 2)
    parts = [
        lambda x, batch: (*(torch.full((3, 2), 1 + batch).to(d) for d in DTYPES), torch.tensor(7.0), torch.ones(0, 4)),
        lambda x, batch: torch.stack([t.to(torch.float64).sum() for t in x]),
    ]
    engine = PipeEngine({mesh.stage: parts[mesh.stage]}, 1, Wires(pipeline, edges_of(programs)), device=CPU)
    return engine.run(programs[mesh.stage], [0, 1])


@pytest.mark.parametrize("shares", [True, False])
def test_all_dtypes_travel(shares):
    """Through memory that the two share, and over gloo."""
    found = on_ranks(2, hand_over_all_dtypes, shares)[1]
    for number, sums in enumerate(found):
        expected = [6.0 if dtype is torch.bool else 6.0 * (1 + number) for dtype in DTYPES]
        assert sums.tolist() == [*expected, 7.0, 0.0]


class Blocking:
    """Wires on which every send and receive blocks until it is done."""

    class Done:
        def wait(self):
            pass

    def __init__(self, wires):
        self.pipeline, self.offer, self.accept, self.wires = wires.pipeline, wires.offer, wires.accept, wires

    def send(self, tensors, to):
        self.wires.send(tensors, to).wait()
        return self.Done()

    def receive(self, tensors, source):
        self.wires.receive(tensors, source).wait()
        return self.Done()


def block(ranks):
    found = []
    for name, chunks in RUNS:
        rank = Rank(ranks, name, chunks, Recompute())
        rank.engine.wires = Blocking(rank.engine.wires)
        found.append([rank.run(4, 7, train, 7)[0] for train in (False, True, True)])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_headers_cannot_hang_a_step(ranks):
    """A receive waits for its first header where it stands; here all messages block where they stand, header or not."""
    losses, _, _ = serial(4, 7)
    for of_ranks in zip(*on_ranks(ranks, block, ranks), strict=True):
        for told in zip(*of_ranks, strict=True):
            assert [x for part in told for x in part] == pytest.approx(losses, rel=1e-12)


class Slow(nn.Module):
    """A layer that takes its time, and makes sure of what it gets."""

    def __init__(self, layer, seconds, want):
        super().__init__()
        self.layer, self.seconds, self.want = layer, seconds, want

    def forward(self, hidden, batch):
        assert len(flat(hidden)) == self.want
        time.sleep(self.seconds)
        return self.layer(hidden, batch)


def measure(ranks):
    mesh = open_mesh(Topology(ranks))
    wires = Wires(mesh.pipeline, edges_of(add_communication(SCHEDULES["1f1b"](ranks, 1, 1), ranks)))


    def slowed(i, spec):
        return LayerSpec(spec.name, lambda mesh: Slow(spec.build(mesh), 0.05 * (i in (2, 6)), WANT[i]), spec.cost)

    layers = [slowed(i, spec) for i, spec in enumerate(LAYERS)]
    setup = Setup(Dtypes(torch.float64, torch.float64))
    return measured_seconds(layers, wires, mesh, setup, data(1, 7)[0])


WANT = [0, *[2] * 9, 1]


def test_layers_are_timed_on_the_hidden_states_that_they_get():
    """For a split by measured cost: the same list on all ranks, in which the slow layers are found."""
    first, *others = on_ranks(3, measure, 3)
    assert all(other == first for other in others)
    assert [i for i, seconds in enumerate(first) if seconds > 0.04] == [2, 6]
