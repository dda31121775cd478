"""Attention: documents do not leak, positions start again, rotary and grouped queries equal their plain formulas."""

import itertools
import math

import numpy as np
import pytest
import torch

from megazero.attention import Attention, Rotary, document_mask, rotary_frequencies
from megazero.config import ModelConfig
from megazero.data.batch import MicroBatch
from megazero.data.loader import DocumentRules
from megazero.gpt import GPTSetup, gpt_layers
from megazero.kernels.dispatch import Kernels
from megazero.parallel.groups import mesh_on_paper, open_mesh
from megazero.parallel.params import collect, initialize
from megazero.parallel.topology import Topology
from megazero.pipe.stage import Recompute, build_stages, cut_layers
from tests.harness import on_ranks

EOD = 0
SEQ, VOCAB = 12, 50
RESET = DocumentRules(EOD, mask_loss=True, reset_positions=True, reset_attention=True)


def config(**changes):
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ, "init_method_std": 0.3}
    return ModelConfig(**shape | {"attention_dropout": 0.0, "hidden_dropout": 0.0} | changes)


def gpt(dtype=torch.float32, mesh=None, kernels=None, **changes):
    """A GPT on this rank, from tokens to logits [seq, batch, vocab]; large initial values, so that attention looks."""
    mesh = mesh or mesh_on_paper(Topology(), 0)
    setup = GPTSetup(config(make_vocab_size_divisible_by=1, **changes), VOCAB, dtype, kernels=kernels or Kernels())
    layers = gpt_layers(setup)
    (stage,) = build_stages(layers, mesh, cut_layers(layers, [0]), Recompute()).values()
    initialize(collect(stage.named_layers()), mesh.topology, mesh.rank, seed=11)
    return lambda batch: stage(None, batch).detach()


def batch_of(tokens, rules=RESET):
    """A micro-batch without labels, as the loader makes it of tokens [seq, batch]."""
    columns = np.asarray(tokens)
    return MicroBatch(
        torch.from_numpy(columns), positions=rules.positions(columns), documents=rules.documents(columns)
    )


def tokens_with_eod_at(*places):
    """[seq, 2]: the ends of documents in the first row of the batch, none in the second."""
    tokens = np.random.default_rng(len(places)).integers(1, VOCAB, (SEQ, 2))
    tokens[list(places), 0] = EOD
    return tokens


MODELS = {
    "learned": {},
    "rope": {"position_embedding_type": "rope", "num_query_groups": 2},
    "none": {"position_embedding_type": "none", "qk_layernorm": True},
}
PLACES = [(0,), (5,), (SEQ - 1,), (5, 6), (0, 1), (0, SEQ - 1), (3, 7, 8)]


@pytest.mark.parametrize("model", MODELS)
def test_documents_do_not_see_each_other(model):
    """C036: changing any document changes no bit of the logits of another, wherever the ends stand (eager fp32)."""
    run = gpt(**MODELS[model])
    for places in PLACES:
        tokens = tokens_with_eod_at(*places)
        logits = run(batch_of(tokens))
        starts = [0, *(place + 1 for place in places)]
        for first, stop in itertools.pairwise([*starts, SEQ]):
            changed = tokens.copy()
            mine = tokens[first:stop, 0]
            changed[first:stop, 0] = np.where(mine == EOD, EOD, mine % (VOCAB - 1) + 1)
            found = run(batch_of(changed))
            same = np.ones(SEQ, bool)
            same[first:stop] = False
            assert torch.equal(found[same, 0], logits[same, 0]), (places, first)
            assert torch.equal(found[:, 1], logits[:, 1]), "the other row of the batch"
            if (changed != tokens).any():
                assert not torch.equal(found[~same, 0], logits[~same, 0])


def test_without_the_flags_documents_do_see_each_other():
    """The test above can fail: attention mask and positions each are needed."""
    tokens = tokens_with_eod_at(5)
    changed = tokens.copy()
    changed[2, 0] = tokens[2, 0] % (VOCAB - 1) + 1
    run = gpt()
    for rules in (DocumentRules(EOD), DocumentRules(EOD, reset_positions=True)):
        assert not torch.equal(run(batch_of(changed, rules))[6:, 0], run(batch_of(tokens, rules))[6:, 0])


@pytest.mark.parametrize("model", MODELS)
def test_a_document_in_the_middle_is_computed_as_if_alone(model):
    """C036: positions restart at 0 right after eod, and attention begins there."""
    run = gpt(torch.float64, **MODELS[model])
    tokens = tokens_with_eod_at(2, 6)
    batch = batch_of(tokens)
    assert batch.positions[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    logits = run(batch)
    for first, stop in ((0, 3), (3, 7), (7, SEQ)):
        alone = run(MicroBatch(torch.from_numpy(tokens[first:stop])))
        torch.testing.assert_close(logits[first:stop, 0], alone[:, 0], rtol=1e-12, atol=1e-12)


def test_a_document_of_one_eod_sees_only_itself():
    mask = document_mask(batch_of(tokens_with_eod_at(5, 6)).documents, SEQ)
    assert mask.shape == (2, 1, SEQ, SEQ) and mask.any(-1).all(), "no row is without a key"
    assert mask[0, 0, 6].nonzero().flatten().tolist() == [6]
    assert mask[0, 0, 7].nonzero().flatten().tolist() == [7] and mask[0, 0, 5].sum() == 6
    assert torch.equal(mask[1, 0], torch.ones(SEQ, SEQ, dtype=torch.bool).tril())
    assert document_mask(None, SEQ) is None


def test_padding_of_the_sequence_is_a_document_of_its_own():
    mask = document_mask(torch.zeros(5, 1, dtype=torch.int64), 8)[0, 0]
    assert not mask[:5, 5:].any() and not mask[5:, :5].any() and mask.any(-1).all()


@pytest.mark.parametrize("model", MODELS)
def test_attention_is_causal(model):
    """Later tokens change no bit of earlier logits, with and without document masks."""
    run = gpt(**MODELS[model])
    tokens = tokens_with_eod_at(4)
    for at in (1, 6, SEQ - 1):
        changed = tokens.copy()
        changed[at:] = changed[at:] % (VOCAB - 1) + 1
        for rules in (DocumentRules(EOD), RESET):
            before, after = run(batch_of(tokens, rules)), run(batch_of(changed, rules))
            assert torch.equal(before[:at], after[:at]) and not torch.equal(before[at:], after[at:])


def logits_on_rank(n):
    """Logits of sequences that the tensor size does not divide, whole, on this rank."""
    mesh = open_mesh(Topology(tensor=n))
    found = []
    for model in MODELS.values():
        run = gpt(torch.float64, mesh, vocab_size=None, **{**model, "num_query_groups": 2})
        for seq in (SEQ, 7, 1):
            for rules in (DocumentRules(EOD), RESET):
                part = run(batch_of(tokens_with_eod_at(3, 5)[:seq], rules))
                found.append(part)
    return found


def test_any_length_and_any_document_give_the_same_logits_on_two_tensor_ranks():
    """C036 over tensor ranks: the sequence is padded inside, and neither masks nor positions are shifted by it."""
    (whole,), parts = on_ranks(1, logits_on_rank, 1), on_ranks(2, logits_on_rank, 2)
    for expected, *found in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat(found, -1), expected, rtol=1e-11, atol=1e-11)


# ------------------------------------------------------------------------------------------------- rotary positions


def turned(x, position, frequencies, interleaved):
    """One head [head_dim] as numpy, by rotation matrices on pairs."""
    pairs = len(frequencies)
    y = x.copy()
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        y[a], y[b] = c * x[a] - s * x[b], s * x[a] + c * x[b]
    return y


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_queries_and_keys_and_leaves_values(interleaved, percent):
    """Element by element against rotation matrices; the part of a head beyond `rotary_percent` stays."""
    model = config(
        position_embedding_type="rope", rotary_percent=percent, rotary_interleaved=interleaved, rotary_base=500.0,
        num_query_groups=2,
    )
    frequencies = [500.0 ** (-2 * i / (8 * percent)) for i in range(int(4 * percent))]
    fused = torch.randn(5, 2, 2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))   # 2 groups
    positions = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1000, 2]])
    for at in (None, positions):
        found = Rotary(model)(fused.clone().flatten(2), at).view_as(fused)
        for s, b, g in np.ndindex(5, 2, 2):
            place = s if at is None else at[s, b].item()
            assert torch.equal(found[s, b, g, 3], fused[s, b, g, 3]), "values stay"
            for row in range(3):
                expected = turned(fused[s, b, g, row].numpy(), place, frequencies, interleaved)
                np.testing.assert_allclose(found[s, b, g, row].numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_gradients(interleaved):
    rotary = Rotary(config(position_embedding_type="rope", rotary_percent=0.5, rotary_interleaved=interleaved))
    fused = torch.randn(3, 1, 2 * 3 * 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x * 1.0, torch.tensor([[5], [0], [1]])), (fused,))


def test_scores_depend_on_the_distance_alone():
    """What rotary positions are for: a query at m meets a key at n as those at m + c and n + c meet."""
    rotary = Rotary(config(position_embedding_type="rope"))
    fused = torch.randn(1, 1, 3 * 8, dtype=torch.float64).repeat(2, 1, 1)

    def score(m, n):
        x = rotary(fused.clone(), torch.tensor([[m], [n]]))
        return (x[0, 0, :8] @ x[1, 0, 8:16]).item()

    assert score(7, 3) == pytest.approx(score(1007, 1003), rel=1e-9) != pytest.approx(score(7, 4), rel=1e-6)


def test_rotation_in_bf16_is_computed_in_fp32():
    """Far positions in bf16: rounded once at the end, not in the angles."""
    rotary = Rotary(config(position_embedding_type="rope"))
    fused = torch.randn(1, 1, 3 * 8).bfloat16()
    at = torch.tensor([[100_003]])
    exact = rotary(fused.double(), at)
    found = rotary(fused.clone(), at)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-5)


def llama3(frequencies, factor, low, high, original):
    """Llama-3's scaling as its authors publish it: frequency by frequency, on wavelengths."""
    out = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            out.append(frequency)
        elif wavelength > original / low:
            out.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / factor + smooth * frequency)
    return out


@pytest.mark.parametrize(("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192),
                                                                 (4.0, 0.5, 8.0, 256)])
def test_llama_3_scaling_follows_the_published_rule(factor, low, high, original):
    model = config(
        hidden_size=512, position_embedding_type="rope", rotary_base=500_000.0, use_rope_scaling=True,
        rope_scaling_factor=factor, rope_low_freq_factor=low, rope_high_freq_factor=high,
        rope_original_max_positions=original,
    )
    plain = [500_000.0 ** (-2 * i / 128) for i in range(64)]
    found, expected = rotary_frequencies(model).tolist(), llama3(plain, factor, low, high, original)
    assert found == pytest.approx(expected, rel=1e-12)
    ratios = [a / b for a, b in zip(found, plain)]
    assert ratios[0] == 1 and ratios[-1] == pytest.approx(1 / factor) and max(ratios) == 1
    assert any(1 / factor < ratio < 1 for ratio in ratios), "some lie between"


# ---------------------------------------------------------------------------------------------------- grouped queries


def plain_attention(x, named, model):
    """[seq, batch, hidden] by explicit repetition of keys and values, one softmax per head."""
    weight, bias = named["qkv.weight"], named.get("qkv.bias")
    fused = torch.einsum("sbh,gqdh->sbgqd", x, weight) + (0 if bias is None else bias)
    queries, dim = model.queries_per_group, model.head_dim
    out = torch.zeros(*x.shape[:2], model.num_attention_heads, dim, dtype=x.dtype)
    ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    for head in range(model.num_attention_heads):
        group, row = divmod(head, queries)
        q, k, v = fused[:, :, group, row], fused[:, :, group, queries], fused[:, :, group, queries + 1]
        if model.qk_layernorm:
            q, k = (_norm(y, named[f"{n}_norm.weight"], named[f"{n}_norm.bias"]) for y, n in ((q, "q"), (k, "k")))
        scores = torch.einsum("sbd,tbd->bst", q, k) / math.sqrt(dim)
        out[:, :, head] = torch.einsum("bst,tbd->sbd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)
    y = out.flatten(2) @ named["out.weight"].T
    return y + named["out.bias"] if "out.bias" in named else y


def _norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{"num_query_groups": 1}, {"num_query_groups": 2, "disable_bias_linear": True}, {}, {"kv_channels": 12},
     {"num_query_groups": 2, "qk_layernorm": True}, {"disable_bias_linear": True, "add_qkv_bias": True}],
    ids=str,
)
def test_attention_equals_explicit_heads(changes, selective):
    """Forward and all gradients in fp64; 1, 2 and 4 query groups, any head size, q/k norm, biases."""
    model, mesh = config(**changes), mesh_on_paper(Topology(), 0)
    attention = Attention(model, mesh, 0, dtype=torch.float64, selective=selective)
    initialize(collect([("attention", attention)]), mesh.topology, 0, seed=4)
    generator = torch.Generator().manual_seed(1)
    for p in attention.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    named = dict(attention.named_parameters())
    assert ("qkv.bias" in named, "out.bias" in named) == (model.qkv_bias, model.bias)
    x = torch.randn(SEQ, 2, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(SEQ, 2, 32, generator=generator, dtype=torch.float64)
    inputs = [x, *named.values()]
    found = attention(x, MicroBatch(torch.zeros(SEQ, 2, dtype=torch.int64)))
    expected = plain_attention(x, named, model)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    found.backward(upstream)
    for a, b in zip(inputs, gradients, strict=True):
        torch.testing.assert_close(a.grad, b, rtol=1e-10, atol=1e-11)
