"""The vocab-parallel KL divergence equals torch's over the real vocabulary, whatever cuts or pads it."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megazero.kernels import cross_entropy
from megazero.parallel.groups import Group, open_mesh
from megazero.parallel.loss import vocab_parallel_divergence
from megazero.parallel.topology import Topology
from tests.harness import on_ranks

SEQ, BATCH, VOCAB = 6, 5, 97
ALONE = Group("tensor")


def problem(dtype, padded, scale=3.0):
    """Student's and teacher's logits [seq, batch, padded] with wild padding, and upstream gradients."""
    generator = torch.Generator().manual_seed(7)
    both = (scale * torch.randn(2, SEQ, BATCH, padded, generator=generator, dtype=torch.float64)).to(dtype)
    both[0, ..., VOCAB:], both[1, ..., VOCAB:] = 1e4, -1e4            # padding would decide all if it took part
    return both[0], both[1], torch.randn(SEQ, BATCH, generator=generator, dtype=torch.float64)


def torch_divergence(student, teacher, upstream, temperature):
    """Per token and its gradient by torch, fp64, over the real entries."""
    z = student[..., :VOCAB].double().requires_grad_()
    log_q, log_p = (z / temperature).log_softmax(-1), (teacher[..., :VOCAB].double() / temperature).log_softmax(-1)
    y = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    y.backward(upstream)
    return y.detach(), z.grad


def our_divergence(student, teacher, upstream, temperature, group):
    """This rank's divergence per token, and its part of the gradient."""
    mine, its = (x.chunk(group.size, -1)[group.index].clone().requires_grad_() for x in (student, teacher))
    y = vocab_parallel_divergence(mine, its, vocab=VOCAB, temperature=temperature, group=group)
    assert y.dtype == (torch.float64 if student.dtype == torch.float64 else torch.float32)
    y.backward(upstream.to(y.dtype))
    assert its.grad is None, "the teacher learns nothing"
    return y.detach(), mine.grad


def check_rank(n):
    group = open_mesh(Topology(tensor=n)).tensor
    for padded in (100, 256):                              # at 256 over 4, two ranks hold padding alone
        for temperature in (1.0, 0.5, 3.0):
            for dtype, loss_limit, grad_limit in (
                (torch.float64, 1e-13, 1e-14),
                (torch.float32, 2e-6, 1e-5),           # at 0.5 the logits are up to 24 apart
                (torch.bfloat16, 2e-6, 2.0**-8),           # logits are read exactly; the gradient is rounded once
            ):
                student, teacher, upstream = problem(dtype, padded)
                expected, expected_grad = torch_divergence(student, teacher, upstream, temperature)
                found, grad = our_divergence(student, teacher, upstream, temperature, group)
                assert (found.double() - expected).abs().max() <= loss_limit * expected.abs().max()
                real = F.pad(expected_grad, (0, padded - VOCAB)).chunk(n, -1)[group.index]
                assert ((grad.double() - real).abs() <= grad_limit * (real.abs() + 1e-1)).all()
                first = group.index * padded // n
                assert not grad[..., max(0, VOCAB - first) :].any(), "padding gets no gradient"
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
def test_equals_torch_on_the_whole_vocabulary(n):
    """fp64, fp32 and bf16 logits, three temperatures; all tensor ranks have the same divergence, bit by bit."""
    found = on_ranks(n, check_rank, n)
    assert all(torch.equal(of_rank, found[0]) for of_rank in found)


def test_gradcheck():
    student, teacher, _ = problem(torch.float64, VOCAB)
    for temperature in (1.0, 2.0):
        def run(z, temperature=temperature):
            return vocab_parallel_divergence(z, teacher[:2, :2], vocab=VOCAB, temperature=temperature, group=ALONE)

        assert torch.autograd.gradcheck(run, (student[:2, :2].clone().requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunks_change_no_bit(dtype):
    """A chunk of one row, of seven (which does not divide 30), and all rows at once."""
    given = problem(dtype, 100)
    whole = our_divergence(*given, 2.0, ALONE)
    for rows in (1, 7):
        with mock.patch.object(cross_entropy, "CACHED_ELEMENTS", rows * 100):
            found = our_divergence(*given, 2.0, ALONE)
        assert torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])


def test_a_student_that_says_the_same_is_at_zero_exactly():
    student, _, upstream = problem(torch.float32, 100)
    found, grad = our_divergence(student, student, upstream, 2.0, ALONE)
    assert not found.any() and not grad.any()


def test_a_sure_teacher_makes_it_the_cross_entropy():
    """With all of its probability on one token, KL is -log q of that token."""
    student, _, upstream = problem(torch.float64, 100)
    labels = torch.arange(SEQ * BATCH).view(SEQ, BATCH) % VOCAB
    found, _ = our_divergence(student, 1e5 * F.one_hot(labels, 100).double(), upstream, 1.0, ALONE)
    expected = -student[..., :VOCAB].log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_an_even_guess_costs_what_the_teacher_knows():
    """log V less the teacher's entropy; here two tokens alike, so log(V / 2)."""
    teacher = torch.full((1, 1, 128), -1e4)
    teacher[..., :2] = 0.0
    y = vocab_parallel_divergence(torch.zeros(1, 1, 128), teacher, vocab=VOCAB, temperature=1.0, group=ALONE)
    assert y.item() == pytest.approx(math.log(VOCAB / 2), abs=1e-6)


def test_large_logits_stay_finite():
    student, teacher, upstream = problem(torch.float32, 100, scale=1e4)
    found, grad = our_divergence(student, teacher, upstream, 1.0, ALONE)
    assert found.isfinite().all() and grad.isfinite().all()
    expected, _ = torch_divergence(student, teacher, upstream, 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
