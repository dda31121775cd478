"""Head and loss in chunks of tokens equal head, then loss, in values and gradients, and never hold all logits."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.parallel.groups import Group, open_mesh
from megazero.parallel.head_loss import chunked_head_loss
from megazero.parallel.layers import gather_linear
from megazero.parallel.loss import Vocabulary, vocab_parallel_cross_entropy
from megazero.parallel.topology import Topology
from megazero.parallel.weights import WeightQueue
from tests.harness import on_ranks

SEQ, BATCH, HIDDEN, VOCAB, PADDED = 7, 3, 8, 37, 40
TOKENS = SEQ * BATCH


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return out


def whole(x, weight, labels, vocabulary, queue):
    """What the head does where nothing is chunked."""
    logits = gather_linear(x, weight, None, vocabulary.group, queue)[: labels.shape[0]]
    return vocab_parallel_cross_entropy(logits, labels, vocabulary)


def run(loss_of, group, dtype=torch.float64, deferred=False):
    """(losses, gradient of x, gradient of the weight) of this rank; the sequence is padded to the group's size."""
    generator = torch.Generator().manual_seed(3)
    padded = SEQ + -SEQ % group.size
    x = torch.randn(padded, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    table = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (SEQ, BATCH), generator=generator)
    upstream = torch.randn(SEQ, BATCH, generator=generator, dtype=torch.float64)
    x = x.chunk(group.size)[group.index].to(dtype).requires_grad_()
    weight, queue = nn.Parameter(table.chunk(group.size)[group.index].to(dtype)), WeightQueue()
    arrived = []
    queue.arrived = arrived.append
    losses = loss_of(x, weight, labels, Vocabulary(VOCAB, group, 0.1), queue)
    if deferred:
        with queue.deferring() as work:
            losses.backward(upstream.to(losses.dtype))
        assert weight.grad is None, "put off"
        with torch.no_grad():
            for part in work:
                part()
    else:
        losses.backward(upstream.to(losses.dtype))
    assert len(arrived) == 1, "however many chunks"
    return losses.detach(), x.grad, weight.grad


def chunked(size):
    return lambda *args: chunked_head_loss(*args, size)


def check_rank(n):
    group = open_mesh(Topology(tensor=n)).tensor
    expected = run(whole, group)
    for size in (1, 5, TOKENS, 10 * TOKENS):
        for deferred in (False, True):
            for found, wanted in zip(run(chunked(size), group, deferred=deferred), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_equals_head_and_loss_one_after_the_other(n):
    """Any size of a chunk, weight gradients at once and put off, a sequence that is padded to the tensor size, and a
    rank that has little but padding of the vocabulary."""
    on_ranks(n, check_rank, n)


def test_in_bf16_gradients_are_rounded_as_without_chunks():
    expected = run(whole, Group("tensor"), torch.bfloat16)
    for found, wanted in zip(run(chunked(5), Group("tensor"), torch.bfloat16), expected, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)     # sums over chunks are rounded apart


def test_no_tensor_is_as_large_as_the_logits():
    """In the forward and in the backward, at once and put off; and without chunks one is."""
    for loss_of, limit in ((chunked(4), 4 * PADDED), (whole, TOKENS * PADDED)):
        for deferred in (False, True):
            with Largest() as largest:
                run(loss_of, Group("tensor"), deferred=deferred)
            inputs = max(PADDED * HIDDEN, TOKENS * HIDDEN)
            assert largest.elements == max(limit, inputs)
