"""Vocab-parallel cross entropy equals torch's over the real vocabulary, whatever cuts or pads it."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megazero.kernels import cross_entropy, dispatch
from megazero.parallel.groups import Group, open_mesh
from megazero.parallel.loss import Vocabulary, vocab_parallel_cross_entropy
from megazero.parallel.topology import Topology
from tests.harness import on_ranks

SEQ, BATCH, VOCAB = 6, 5, 97
ALONE = Group("tensor")
IMPLS = ["torch"] if dispatch.triton is None else ["torch", "triton"]


def problem(dtype, padded, scale=3.0):
    """Logits [seq, batch, padded] with wild padding, labels over the ends of the vocabulary, upstream gradients."""
    generator = torch.Generator().manual_seed(5)
    logits = (scale * torch.randn(SEQ, BATCH, padded, generator=generator, dtype=torch.float64)).to(dtype)
    logits[..., VOCAB:] = 1e4                              # padding would win if it took part
    labels = torch.randint(0, VOCAB, (SEQ, BATCH), generator=generator)
    labels[0, 0], labels[0, 1], labels[0, 2] = 0, VOCAB - 1, VOCAB - 2
    return logits, labels, torch.randn(SEQ, BATCH, generator=generator, dtype=torch.float64)


def torch_loss(logits, labels, upstream, smoothing):
    """Loss per token and gradient by torch, fp64, over the real entries.

    Megatron's alpha spreads alpha over the *other* entries: torch's label_smoothing s, spread over all V of them, is
    alpha V / (V - 1).
    """
    x = logits[..., :VOCAB].double().requires_grad_()
    share = smoothing * VOCAB / (VOCAB - 1)
    y = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=share).view(labels.shape)
    y.backward(upstream)
    return y.detach(), x.grad


def our_loss(logits, labels, upstream, smoothing, group, impl="auto"):
    """This rank's loss per token, and its part of the gradient."""
    mine = logits.chunk(group.size, -1)[group.index].clone().requires_grad_()
    y = vocab_parallel_cross_entropy(mine, labels, Vocabulary(VOCAB, group, smoothing, impl))
    assert y.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    y.backward(upstream.to(y.dtype))
    return y.detach(), mine.grad


def check_rank(n, impl="torch"):
    group = open_mesh(Topology(tensor=n)).tensor
    slow = impl == "triton" and n > 1                      # the interpreter's few cases are those with most in them
    for padded in (256,) if slow else (100, 256):          # at 256 over 4, two ranks hold padding alone
        for smoothing in (0.1,) if slow else (0.0, 0.1, 0.5):
            for dtype, loss_limit, grad_limit in (
                (torch.float64, 1e-13, 1e-14),
                (torch.float32, 2e-6, 1e-6),
                # logits are read exactly; the gradient is rounded once, or cut off by Triton's interpreter
                (torch.bfloat16, 2e-6, 2.0**-8 if impl == "torch" else 2.0**-7),
            ):
                logits, labels, upstream = problem(dtype, padded)
                expected, expected_grad = torch_loss(logits, labels, upstream, smoothing)
                found, grad = our_loss(logits, labels, upstream, smoothing, group, impl)
                assert (found.double() - expected).abs().max() <= loss_limit * expected.abs().max()
                real = F.pad(expected_grad, (0, padded - VOCAB)).chunk(n, -1)[group.index]
                assert ((grad.double() - real).abs() <= grad_limit * (real.abs() + 1e-2)).all()
                first = group.index * padded // n
                assert not grad[..., max(0, VOCAB - first) :].any(), "padding gets no gradient"
    return found


@pytest.mark.parametrize(
    ("n", "impl"), [(1, "torch"), (2, "torch"), (4, "torch"), *((n, "triton") for n in (1, 4) if "triton" in IMPLS)]
)
def test_equals_torch_on_the_whole_vocabulary(n, impl):
    """C030. fp64, fp32 and bf16 logits, with and without smoothing; all tensor ranks have the same loss, bit by bit."""
    found = on_ranks(n, check_rank, n, impl)
    assert all(torch.equal(loss_of_rank, found[0]) for loss_of_rank in found)


def test_smoothing_follows_the_published_formula():
    """loss = (1 - s) nll - s / K * sum_i log p_i with s = alpha K / (K - 1) and K the whole, unpadded vocabulary."""
    logits, labels, upstream = problem(torch.float64, 100)
    log_p = logits[..., :VOCAB].log_softmax(-1)
    share = 0.2 * VOCAB / (VOCAB - 1)
    nll = -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    found, grad = our_loss(logits, labels, upstream, 0.2, ALONE)
    torch.testing.assert_close(found, (1 - share) * nll - share / VOCAB * log_p.sum(-1), rtol=1e-13, atol=0)
    target = F.one_hot(labels, VOCAB).double()
    expected = (log_p.exp() - (1 - share) * target - share / VOCAB) * upstream.unsqueeze(-1)
    torch.testing.assert_close(grad[..., :VOCAB], expected, rtol=1e-12, atol=1e-15)


def test_gradcheck():
    logits, labels, _ = problem(torch.float64, 97)
    x = logits[:2, :2].clone().requires_grad_()
    for smoothing in (0.0, 0.3):
        def run(x, smoothing=smoothing):
            return vocab_parallel_cross_entropy(x, labels[:2, :2], Vocabulary(VOCAB, ALONE, smoothing))

        assert torch.autograd.gradcheck(run, (x,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunks_change_no_bit(dtype):
    """A chunk of one row, of seven (which does not divide 30), and all rows at once."""
    logits, labels, upstream = problem(dtype, 100)
    whole = our_loss(logits, labels, upstream, 0.1, ALONE)
    for rows in (1, 7):
        with mock.patch.object(cross_entropy, "CACHED_ELEMENTS", rows * 100):
            assert len(cross_entropy.row_chunks(logits.flatten(0, 1))) == math.ceil(30 / rows)
            found = our_loss(logits, labels, upstream, 0.1, ALONE)
        assert torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_takes_the_place_of_logits_that_nobody_else_reads(dtype, impl):
    """The same bits, in the memory of the logits; where they are not given up, they stay as they are."""
    logits, labels, upstream = problem(dtype, 100)
    expected = our_loss(logits, labels, upstream, 0.1, ALONE, impl)[1]
    for owned in (False, True):
        kept, seen = logits.clone(), []
        leaf = kept.requires_grad_()
        whole = leaf * 1                                   # not a leaf, as the head's logits are not
        whole.register_hook(seen.append)
        y = vocab_parallel_cross_entropy(whole, labels, Vocabulary(VOCAB, ALONE, 0.1, impl), owned=owned)
        y.backward(upstream.to(y.dtype))
        assert torch.equal(leaf.grad, expected) and torch.equal(whole, expected if owned else logits)
        assert (seen[0].data_ptr() == whole.data_ptr()) == owned


def test_an_even_guess_costs_the_logarithm_of_the_real_vocabulary():
    logits = torch.zeros(1, 1, 128)
    y = vocab_parallel_cross_entropy(logits, torch.tensor([[3]]), Vocabulary(VOCAB, ALONE))
    assert y.item() == pytest.approx(math.log(VOCAB), abs=1e-6)


def test_large_logits_stay_finite():
    logits, labels, upstream = problem(torch.float32, 100, scale=1e4)
    found, grad = our_loss(logits, labels, upstream, 0.1, ALONE)
    assert found.isfinite().all() and grad.isfinite().all()
    expected, expected_grad = torch_loss(logits, labels, upstream, 0.1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
