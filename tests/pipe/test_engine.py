"""The engine on gloo ranks: any schedule gives the gradients of one process, and nothing hangs."""

import functools
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megazero.parallel.collectives import all_reduce
from megazero.parallel.groups import Group, open_mesh
from megazero.parallel.layers import gather_linear
from megazero.parallel.topology import Topology
from megazero.parallel.weights import WeightQueue
from megazero.pipe.engine import PipeEngine
from megazero.pipe.lower import add_communication
from megazero.pipe.p2p import Wires, edge_rounds, edges_of
from megazero.pipe.schedule import SCHEDULES, gpipe, one_f_one_b
from megazero.pipe.simulate import simulate
from megazero.pipe.split import even
from tests.harness import RankFailed, on_ranks

HIDDEN, LAYERS = 8, 13
# Schedules and the stages of each rank.
RUNS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
options = {"device": torch.device("cpu")}


class Part(nn.Module):
    """Some tanh layers whose weight gradients can be put off; the last stage ends in a loss. A micro-batch is (input,
    target), each [rows, hidden]."""

    def __init__(self, layers, is_last):
        super().__init__()
        self.layers, self.is_last, self.queue = nn.ModuleList(layers), is_last, WeightQueue()

    def forward(self, x, batch):
        x = batch[0] if x is None else x
        for layer in self.layers:
            x = torch.tanh(gather_linear(x, layer.weight, layer.bias, Group("tensor"), self.queue))
        return (x - batch[1]).square().sum() if self.is_last else x


def make_layers():
    layers = [nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(LAYERS)]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for p in layer.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / HIDDEN**0.5
    return layers


def data(micros, rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(2, rows, HIDDEN, generator=generator, dtype=torch.float64)) for _ in range(micros)]


@functools.cache
def serial(micros, rows, seed=1):
    """Losses, and gradients by layer, of one process without pipeline."""
    layers = make_layers()
    whole, losses = Part(layers, True), []
    for batch in data(micros, rows, seed):
        loss = whole(None, batch)
        loss.backward()
        losses.append(loss.item())
    return losses, [[p.grad for p in layer.parameters()] for layer in layers]


class Reduced:
    """Stands where the reduction of gradients stands, and keeps what it is told."""

    every = False

    def __init__(self):
        self.armed, self.finished = [], []

    def arm(self, stage):
        self.armed.append(stage)

    def finish(self, stage):
        assert self.armed.count(stage) == 1, "its last backward was told"
        self.finished.append(stage)


def pipeline_of(mesh, shares):
    """Its pipeline, whose neighbours share memory or not."""
    assert mesh.pipeline.size == 1 or mesh.pipeline.patience is not None
    return mesh.pipeline if shares else replace(mesh.pipeline, patience=None)


class Rank:
    """One pipeline rank with its stages, as a schedule places them."""

    def __init__(self, ranks, name="1f1b", chunks=1, shares=True):
        self.mesh, self.schedule, self.chunks = open_mesh(Topology(pipeline=ranks)), SCHEDULES[name], chunks
        homes = self.schedule.homes(ranks, chunks)
        layers, self.stages, self.bounds = make_layers(), len(homes), even(LAYERS, len(homes))
        self.parts = {
            s: Part(layers[self.bounds[s] : self.bounds[s + 1]], s == self.stages - 1)
            for s, home in enumerate(homes) if home == self.mesh.stage
        }
        self.reduced = Reduced()
        self.engine = PipeEngine(
            self.parts, self.stages - 1, Wires(pipeline_of(self.mesh, shares), edges_of(self.programs(1))),
            queues={s: part.queue for s, part in self.parts.items()}, reduction=self.reduced, **options
        )

    def programs(self, micros, evaluate=False):
        order = self.schedule.forward_only if evaluate else self.schedule
        return add_communication(order(self.mesh.pipeline.size, micros, self.chunks), self.stages)

    def step(self, micros, rows, seed=1, evaluate=False):
        """Run one step and compare its losses with one process."""
        program = self.programs(micros, evaluate)[self.mesh.stage]
        losses = self.engine.run(program, data(micros, rows, seed), key=rows)
        expected, _ = serial(micros, rows, seed)
        is_last = self.stages - 1 in self.parts
        assert [loss.item() for loss in losses] == pytest.approx(expected if is_last else [], rel=1e-12)
        assert not any(loss.requires_grad for loss in losses)

    def check_gradients(self, micros, rows, seed=1):
        """Compare this rank's gradients with one process, and clear them."""
        _, grads = serial(micros, rows, seed)
        for number, part in self.parts.items():
            for i, layer in enumerate(part.layers):
                for p, expected in zip(layer.parameters(), grads[self.bounds[number] + i], strict=True):
                    torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-12)
                    p.grad = None
        reduced, self.engine.reduction = self.reduced, Reduced()
        self.reduced = self.engine.reduction
        assert sorted(reduced.finished) == sorted(self.parts), "each stage is reduced once, when it is complete"


def check_schedules(ranks, shares):
    for name, chunks in RUNS:
        rank = Rank(ranks, name, chunks, shares)
        for micros in (1, 2, 3, 5, 8):
            rank.step(micros, 3)
            rank.check_gradients(micros, 3)
        rank.step(5, 7, evaluate=True)                   # evaluation between steps, with a shape of its own
        assert not rank.reduced.finished
        assert all(p.grad is None for part in rank.parts.values() for p in part.parameters())
        for rows in (5, 1):                              # hidden states of another shape, with the same engine
            rank.step(4, rows)
            rank.check_gradients(4, rows)


@pytest.mark.parametrize(("ranks", "shares"), [(1, True), (2, True), (3, True), (4, True), (2, False), (4, False)])
def test_any_schedule_gives_the_gradients_of_one_process(ranks, shares):
    """C057 C064 C070: layers that few numbers of stages divide, 1 to 8 micro-batches, each with a loss of its own,
    hidden states of changing shape; neighbours share memory or send over gloo."""
    on_ranks(ranks, check_schedules, ranks, shares)


def check_large_messages(ranks, shares):
    """More than 4 MiB each way, in both directions at once: no send may wait for a receive that comes later."""
    rows = (5 << 20) // (8 * HIDDEN)
    for name, chunks in RUNS:
        rank = Rank(ranks, name, chunks, shares)
        rank.step(2, rows)
        rank.check_gradients(2, rows)


@pytest.mark.parametrize("shares", [True, False])
def test_large_messages_do_not_hang(shares):
    on_ranks(2, check_large_messages, 2, shares)


def test_edges_make_their_groups_without_waiting_in_a_circle():
    """In each round every rank is in one edge at most, and every edge is made once."""
    for ranks in range(1, 9):
        edges = edges_of(add_communication(one_f_one_b(ranks, 4), ranks))
        assert edges == {(a, b) for a in range(ranks) for b in range(ranks) if abs(a - b) == 1}
        rounds = edge_rounds(edges)
        assert sorted(edge for this in rounds for edge in this) == sorted(edges)
        for this in rounds:
            assert len({rank for edge in this for rank in edge}) == 2 * len(this)


def test_a_program_that_leaves_work_behind_is_noticed():
    rank = Rank(1)
    program = add_communication(gpipe(1, 2), 1)[0]
    with pytest.raises(AssertionError, match=r"the program left \[\(0, 1\)\] unfinished"):
        rank.engine.run([op for op in program if str(op) != "Backward(micro=1, stage=0)"], data(2, 3))


class Sleeper:
    """A stage whose forward, input gradient and weight gradient each take a given time without work."""

    class _Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seconds, queue):
            ctx.seconds, ctx.queue = seconds, queue
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(ctx.seconds)
            ctx.queue.put(functools.partial(time.sleep, ctx.seconds))
            return grad, None, None

    def __init__(self, seconds, wire_shape, is_last):
        self.seconds, self.is_last, self.queue = seconds, is_last, WeightQueue()
        self.first = torch.zeros(wire_shape, dtype=torch.float64, requires_grad=True)

    def __call__(self, x, batch):
        x = self._Sleep.apply(self.first if x is None else x, self.seconds, self.queue)
        return x[0, 0] * 1.0 if self.is_last else x


SLEEPERS = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)]
MESSAGES = {"4 KiB": (4 << 10) // 8, "4 MiB": (4 << 20) // 8}      # fp64 numbers
# Seconds of a sleep. Over gloo four copies of 4 MiB on two cores cost time too.
SECONDS = {("4 KiB", True): 0.015, ("4 MiB", True): 0.03, ("4 KiB", False): 0.015, ("4 MiB", False): 0.09}


def sleep_through(ranks, micros, paper, limit, shares):
    """Time of a step of sleeping stages in sleeps, by schedule and size of the messages: that of the slowest rank, in
    the best of up to ten tries.

    It stops trying below `limit` of the time on paper, for what a try takes beyond it may be another process.
    """
    mesh = open_mesh(Topology(pipeline=ranks))
    found = {}
    for name, chunks in SLEEPERS:
        schedule, stages = SCHEDULES[name], ranks * chunks
        programs = add_communication(schedule(ranks, micros, chunks), stages)
        wires = Wires(pipeline_of(mesh, shares), edges_of(programs))
        mine = [s for s, home in enumerate(schedule.homes(ranks, chunks)) if home == mesh.stage]
        for message, numbers in MESSAGES.items():
            seconds = SECONDS[message, shares]
            parts = {s: Sleeper(seconds, (1, numbers), s == stages - 1) for s in mine}
            queues = {s: part.queue for s, part in parts.items()}
            engine = PipeEngine(parts, stages - 1, wires, queues=queues, **options)
            best = torch.tensor(float("inf"))
            for _ in range(10):
                dist.barrier()
                start = time.perf_counter()
                engine.run(programs[mesh.stage], [None] * micros, key=message)
                took = torch.tensor((time.perf_counter() - start) / seconds)
                best = torch.minimum(best, all_reduce(took, mesh.pipeline, "max"))
                if best <= limit * paper[name]:
                    break
            found[name, message] = best.item()
    return found


@pytest.mark.parametrize("shares", [True, False])
def test_sleeping_stages_take_the_simulated_time(shares):
    """At most 1.15 of it, though messages travel: the engine adds no waiting of its own."""
    ranks, micros, limit = 4, 6, 1.15
    paper = {
        name: simulate(add_communication(SCHEDULES[name](ranks, micros, chunks), ranks * chunks)).makespan
        for name, chunks in SLEEPERS
    }
    assert paper == {"1f1b": 3 * (6 + 3), "interleaved": 3 * (2 * 6 + 3), "zb-h1": 3 * 6 + 3}
    (measured, *_) = on_ranks(ranks, sleep_through, ranks, micros, paper, limit, shares, timeout=90)
    for (name, message), slowest in measured.items():
        ratio = slowest / paper[name]
        assert 0.99 <= ratio <= limit, f"{name}, messages of {message}: {ratio:.3f} of the time on paper"


class Planted(RuntimeError):
    """The fault that a test plants."""


def fail_in_the_middle(ranks, name="1f1b", chunks=1):
    """A step in which the second rank fails in the second micro-batch of its last stage."""
    rank = Rank(ranks, name, chunks)
    if rank.mesh.stage == 1:
        number = max(rank.parts)
        good = rank.parts[number]

        def broken(x, batch):
            if batch is rank.second:
                raise Planted(f"planted fault in stage {number}")
            return good(x, batch)

        rank.engine.stages = {**rank.parts, number: broken}
    batches = data(4, 3)
    rank.second = batches[1]
    rank.engine.run(rank.programs(4)[rank.mesh.stage], batches)


def test_a_stage_that_raises_is_named():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 3 failed(.|\n)*planted fault in stage 1"):
        on_ranks(3, fail_in_the_middle, 3, timeout=30)
    assert time.monotonic() - start < 20


def test_wires_need_no_process_group_where_there_is_no_edge():
    Wires(Group("pipeline"), [])
