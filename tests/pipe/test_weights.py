"""Weight gradients put off by a stage's queue: the same numbers, each once, and their memory goes as on paper."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megazero.config import ModelConfig
from megazero.data.batch import MicroBatch
from megazero.gpt import Block, GPTSetup, Head
from megazero.parallel.groups import Group, Mesh, open_mesh
from megazero.parallel.layers import gather_linear
from megazero.parallel.params import collect, initialize
from megazero.parallel.random import recompute
from megazero.parallel.topology import Topology
from megazero.parallel.weights import WeightQueue, gradient_of
from megazero.pipe.engine import PipeEngine
from megazero.pipe.instructions import BackwardInput, BackwardWeight, Forward, ReduceGrads
from megazero.pipe.lower import add_communication
from megazero.pipe.p2p import Wires
from megazero.pipe.schedule import SCHEDULES
from tests.harness import on_ranks

SEQ, BATCH, HIDDEN = 8, 2, 16


def test_work_runs_at_once_or_when_it_is_asked_for() -> None:
    queue, done = WeightQueue(), []
    queue.put(lambda: done.append(1))
    assert done == [1] and not queue.is_deferring
    with queue.deferring() as work:
        assert queue.is_deferring
        queue.put(lambda: done.append(2))
        queue.put(lambda: done.append(3))
    assert done == [1] and not queue.is_deferring
    queue.put(lambda: done.append(4))
    for later in work:
        later()
    assert done == [1, 4, 2, 3]


def test_a_queue_defers_for_one_backward_at_a_time_and_an_error_ends_it() -> None:
    queue = WeightQueue()
    with queue.deferring():
        with pytest.raises(AssertionError, match="a backward inside a backward"):
            with queue.deferring():
                pass
    with pytest.raises(RuntimeError, match="planted"):
        with queue.deferring():
            raise RuntimeError("planted")
    assert not queue.is_deferring


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_added_in_the_dtype_of_the_gradient(dtype: torch.dtype) -> None:
    """Into the buffer where it lies: what the optimizer reduces must not be replaced by another tensor."""
    parameter = nn.Parameter(torch.zeros(2, 3, 5, dtype=dtype))         # 6 x 5 as a matrix
    buffer = torch.ones(30, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    parameter.grad_dtype = buffer.dtype
    parameter.grad = buffer.view(2, 3, 5)
    left, right = torch.randn(6, 4).to(dtype), torch.randn(4, 5).to(dtype)
    queue, told = WeightQueue(), []
    queue.arrived = told.append
    for times in (1, 2):
        queue.add_product_(parameter, left, right)
        expected = 1.0 + times * (left @ right).to(buffer.dtype)
        torch.testing.assert_close(buffer.view(6, 5), expected, rtol=1e-5, atol=1e-5)
    assert parameter.grad.data_ptr() == buffer.data_ptr() and told == [parameter] * 2


def test_a_parameter_without_a_buffer_gets_a_gradient_of_zeros() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert gradient_of(parameter) is parameter.grad and not parameter.grad.any()


def layers(mesh: Mesh, **changes: object) -> tuple[nn.Module, nn.Module]:
    """A block and a head with biases, drawn weights and a queue that they share."""
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, seq_length=SEQ, add_qkv_bias=True, **changes
    )
    setup = GPTSetup(model, 24, torch.float64)
    pair = Block(setup, 0, mesh), Head(setup, mesh)
    initialize(collect([("block", pair[0]), ("head", pair[1])]), mesh.topology, mesh.rank, seed=1)
    return pair


def gradients(defer: bool, tensor: int, again: bool, **changes: object) -> tuple[Tensor, dict[str, Tensor], int]:
    """Input gradient, gradients by name, and how much work was put off, of two micro-batches, W after both B."""
    mesh = open_mesh(Topology(tensor=tensor))
    block, head = layers(mesh, **changes)
    generator, queued, inputs = torch.Generator().manual_seed(3), [], []
    for number in range(2):
        x = torch.randn(SEQ, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
        x = x.chunk(tensor)[mesh.tensor.index].clone().requires_grad_()
        tokens = torch.randint(24, (SEQ, BATCH), generator=generator)
        batch = MicroBatch(tokens, tokens, draw=(1, 1, number))
        run = functools.partial(block, batch=batch)
        loss = head(recompute(run, x) if again else run(x), batch)
        if defer:
            with mesh.weights.deferring() as work:
                loss.backward()
            queued.append(work)
        else:
            loss.backward()
        inputs.append(x.grad)
    for work in queued:
        with torch.no_grad():
            for later in work:
                later()
    named = {info.name: info.tensor.grad for info in collect([("block", block), ("head", head)])}
    return torch.stack(inputs), named, len(queued[0]) if queued else 0


MODELS = {
    "gpt": {"activation": "gelu_tanh"},
    "llama": {
        "activation": "swiglu", "ffn_hidden_size": 24, "disable_bias_linear": True, "normalization": "RMSNorm",
        "num_query_groups": 2, "position_embedding_type": "rope",
    },
}


def check_split_backward(tensor: int) -> None:
    for model in MODELS.values():
        for again in (False, True):
            dx, grads, _ = gradients(False, tensor, again, **model)
            split_dx, split_grads, count = gradients(True, tensor, again, **model)
            assert count == 5 and torch.equal(dx, split_dx) and grads.keys() == split_grads.keys()
            assert [name for name, grad in grads.items() if not torch.equal(grad, split_grads[name])] == []


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_split_backward_gives_the_same_bits(tensor: int) -> None:
    """Every linear layer puts its weight off: queries, keys and values, attention output, two of the ffn, the head.
    With activations kept or recomputed."""
    on_ranks(tensor, check_split_backward, tensor)


def test_deferred_work_holds_what_it_needs_and_frees_it_one_by_one() -> None:
    """Input and output gradient of each layer until its own weight gradient is added; the graph is gone by then."""
    queue, weights = WeightQueue(), [nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    alive: list[weakref.ref] = []
    seen: list[list[bool]] = []
    put = queue.put

    def noted(work: Callable[[], None]) -> None:
        """Before it runs."""
        gc.collect()
        seen.append([ref() is not None for ref in alive])
        work()

    def stage(_: None, x: Tensor) -> Tensor:
        for weight in weights:
            x = gather_linear(x, weight, None, Group("tensor"), queue) * 1.0
            alive.append(weakref.ref(x.untyped_storage()))
        return x.sum()

    queue.put = lambda work: put(functools.partial(noted, work))
    engine = PipeEngine({0: stage}, 0, Wires(Group("pipeline"), []), device=torch.device("cpu"), queues={0: queue})
    program = [Forward(0, 0), BackwardInput(0, 0), BackwardWeight(0, 0), ReduceGrads(0)]
    engine.run(program, [torch.randn(4, 64, requires_grad=True)])
    # The results of layers 0 and 1 are the inputs of 1 and 2, and are still wanted; the last one is not.
    assert seen == [[True, True, False], [True, False, False], [False, False, False]]
    assert all(weight.grad is not None for weight in weights)


class Told:
    """Stands where the reduction stands, and knows how many weight gradients of each stage are there when it is told
    of one."""

    def __init__(self, every: bool) -> None:
        self.every, self.added = every, Counter[int]()
        self.seen: dict[str, list[tuple[int, int]]] = {"arm": [], "reduce": [], "finish": []}

    def arm(self, stage: int) -> None:
        self.seen["arm"].append((stage, self.added[stage]))

    def reduce(self, stage: int) -> None:
        self.seen["reduce"].append((stage, self.added[stage]))

    def finish(self, stage: int) -> None:
        self.seen["finish"].append((stage, self.added[stage]))


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("every", [False, True])
def test_a_reduction_is_told_before_the_step_that_completes_a_stage(name: str, chunks: int, every: bool) -> None:
    """Or before every one that completes a micro-batch; and when all are there."""
    micros, told, queues = 4, Told(every), [WeightQueue() for _ in range(chunks)]
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(chunks)]

    def stage(x: Tensor | None, batch: Tensor, *, at: int) -> Tensor:
        y = gather_linear(batch if x is None else x, weights[at], None, Group("tensor"), queues[at])
        return y.sum() if at == chunks - 1 else y

    for at, queue in enumerate(queues):
        queue.arrived = lambda _, at=at: told.added.update([at])
    engine = PipeEngine(
        {at: functools.partial(stage, at=at) for at in range(chunks)}, chunks - 1, Wires(Group("pipeline"), []),
        device=torch.device("cpu"), queues=dict(enumerate(queues)), reduction=told,
    )
    (program,) = add_communication(SCHEDULES[name](1, micros, chunks), chunks)
    engine.run(program, [torch.ones(3, 2, requires_grad=True)] * micros)
    times = range(micros) if every else [micros - 1]
    assert sorted(told.seen["arm"]) == [(at, n) for at in range(chunks) for n in times]
    assert sorted(told.seen["reduce"]) == [(at, n + 1) for at in range(chunks) for n in times if every]
    assert sorted(told.seen["finish"]) == [(at, micros) for at in range(chunks)]


def run_twice(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layer(layer(x))


def test_a_weight_that_is_used_twice_gets_both_gradients() -> None:
    queue, weight = WeightQueue(), nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    x = torch.randn(3, 6, dtype=torch.float64)
    plain = weight.detach().clone().requires_grad_()
    run_twice(lambda y: y @ plain.T, x).square().sum().backward()
    leaf = x.clone().requires_grad_()
    with queue.deferring() as work:
        run_twice(lambda y: gather_linear(y, weight, None, Group("tensor"), queue), leaf).square().sum().backward()
    assert weight.grad is None and len(work) == 2
    for later in work:
        later()
    torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-12, atol=1e-12)
