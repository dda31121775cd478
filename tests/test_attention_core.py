"""Attention in three steps is torch's fused attention, and does what that does not."""

import itertools
import math

import pytest
import torch

from megazero.attention import document_mask
from megazero.attention_core import Rule, attention_core
from megazero.kernels import dispatch
from megazero.kernels.dispatch import Kernels
from tests.test_attention import MODELS, batch_of, gpt, tokens_with_eod_at

UNFUSED = Kernels("torch", (), "unfused")
BY_TRITON = Kernels("torch", ("softmax=triton",), "unfused")
BACKENDS = [UNFUSED] if dispatch.triton is None else [UNFUSED, BY_TRITON]


def problem(heads, groups, dtype=torch.float64, seq=7):
    """q, k, v as a fused projection hands them over, and an upstream gradient."""
    generator = torch.Generator().manual_seed(heads + groups)
    dense = torch.randn(4, seq, 2, heads, 8, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = dense[0], dense[1][:, :, :groups], dense[2][:, :, :groups]
    return [t.permute(1, 2, 0, 3) for t in (q, k, v)], dense[3].permute(1, 2, 0, 3)


def values(inputs, mask, upstream, **how):
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = attention_core(*leaves, mask, **{"dropout": 0.0} | how)
    y.backward(upstream)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


DOCUMENTS = document_mask(torch.tensor([[0, 0], [0, 0], [1, 0], [1, 0], [1, 0], [2, 0]]), 7)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda kernels: kernels.impl("softmax"))
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_three_steps_are_the_fused_op(heads, groups, kernels):
    """fp64, forward and backward, causal and with documents, with and without a divisor of scores and a window."""
    inputs, upstream = problem(heads, groups)
    for mask, window in ((None, None), (DOCUMENTS, None), (None, 0), (None, 2), (DOCUMENTS, 2)):
        expected = values(inputs, mask, upstream, kernels=Kernels(attention="sdpa"), rule=Rule(window))
        for divisor in (None, 5.0) if window is None else (None,):
            found = values(inputs, mask, upstream, kernels=kernels, rule=Rule(window, divisor=divisor))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda kernels: kernels.impl("softmax"))
def test_a_window_hides_what_is_before_it_and_a_sink_is_a_key_without_value(kernels):
    """Against a softmax over the scores of the seen keys and the sink's, written out; query by query, head by head."""
    (q, k, v), _ = problem(4, 2)
    sink = torch.tensor([0.0, 1.0, -1.0, 3.0], dtype=torch.float64)
    for mask, window in ((None, None), (None, 2), (DOCUMENTS, 1)):
        y = attention_core(q, k, v, mask, dropout=0.0, kernels=kernels, rule=Rule(window, sink, 5.0))
        for sample, head, at in itertools.product(range(2), range(4), range(7)):
            first = 0 if window is None else max(0, at - window)
            seen = [n for n in range(first, at + 1) if mask is None or mask[sample, 0, at, n]]
            scores = torch.stack([q[sample, head, at].dot(k[sample, head // 2, n]) / math.sqrt(8) for n in seen])
            share = torch.cat((scores, sink[head : head + 1])).softmax(0)[:-1]
            torch.testing.assert_close(y[sample, head, at], share @ v[sample, head // 2, seen], rtol=1e-12, atol=1e-12)


def test_auto_is_the_fused_op_where_it_serves():
    """The same bits; with a divisor, those of three steps."""
    inputs, upstream = problem(4, 2, torch.float32)
    for divisor, other in ((None, Kernels(attention="sdpa")), (3.0, UNFUSED)):
        found = values(inputs, None, upstream, kernels=Kernels("torch"), rule=Rule(divisor=divisor))
        expected = values(inputs, None, upstream, kernels=other, rule=Rule(divisor=divisor))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_divisor_keeps_scores_within_fp16():
    """Scores of 1e5 are infinite in fp16, and so their row NaN, unless they are divided."""
    inputs, upstream = problem(2, 2, torch.float16)
    inputs[0], inputs[1] = inputs[0] * 300, inputs[1] * 400
    wide = attention_core(*(t.double() for t in inputs), None, dropout=0.0, kernels=Kernels(attention="sdpa"))
    assert values(inputs, None, upstream, kernels=UNFUSED)[0].isnan().any()
    for kernels in BACKENDS:
        found = attention_core(*inputs, None, dropout=0.0, kernels=kernels, rule=Rule(divisor=24.0))
        torch.testing.assert_close(found.double(), wide, rtol=1e-2, atol=1e-2)


def test_dropout_drops_and_scales_probabilities():
    """With v the identity the output is the probabilities: each 0 or 1 / (1 - p) times itself."""
    seq, p = 64, 0.25
    q, k = torch.randn(2, 1, 1, seq, seq)
    v = torch.eye(seq)[None, None]
    plain, dropped = (attention_core(q, k, v, None, dropout=dropout, kernels=UNFUSED) for dropout in (0.0, p))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / (1 - p))
    share = kept.sum().item() / (plain != 0).sum().item()
    assert abs(share - (1 - p)) < 5 * math.sqrt(p * (1 - p) / (plain != 0).sum().item())


@pytest.mark.parametrize("model", MODELS)
def test_a_model_computes_the_same_with_either(model):
    """GPT's logits in fp64, with documents; scaled by layers too."""
    batch = batch_of(tokens_with_eod_at(2, 6))
    expected = gpt(torch.float64, **MODELS[model])(batch)
    for changes in ({}, {"apply_query_key_layer_scaling": True}):
        found = gpt(torch.float64, kernels=UNFUSED, **MODELS[model], **changes)(batch)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert not torch.equal(found, expected), "another order of sums"
