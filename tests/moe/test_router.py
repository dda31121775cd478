"""The router against golden numbers, and against the published formulas written out as loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.config_moe import MoEConfig
from megazero.moe.router import Gate, Tokens, jittered, moved_bias, route
from megazero.moe.selection import scores_of, sinkhorn

from .slow_router import deepspeed_gate, largest, megatron_aux_loss, megatron_gate, softmax

# Six tokens, four experts, and what DeepSpeed's and Megatron-core's gates make of them.
GOLDEN = [[2, 1, 0, -1], [2, .5, 0, 1], [1.5, 1, .2, 0], [0, 1, 3, .5], [1, .9, .8, .7], [.1, .2, .3, 2]]  # fmt: skip
DRAW = (1234, 7, 3)
COEFFICIENT = {"moe_aux_loss_coeff": (1.0,)}
LM = {"moe_family": "megatron-lm"} | COEFFICIENT
OWN = {"moe_family": "megatron-deepspeed", "moe_min_capacity": 0} | COEFFICIENT


def gate(experts=4, **moe):
    return Gate(MoEConfig(num_experts=(experts,), **moe), experts, layer=5)


def golden(dtype=torch.float64):
    return torch.tensor(GOLDEN, dtype=dtype)


def kept_weights(routing):
    """{(token, expert): weight} of the kept choices; a dropped one must weigh nothing."""
    assert not routing.weights[~routing.kept].any()
    return {
        (t, int(e)): float(w)
        for t, (experts, weights, kept) in enumerate(zip(routing.experts, routing.weights, routing.kept))
        for e, w, k in zip(experts, weights, kept)
        if k
    }


def assert_same(routing, expected, tolerance=1e-12):
    weights, loss = expected
    found = kept_weights(routing)
    assert found.keys() == weights.keys()
    for place, weight in weights.items():
        assert found[place] == pytest.approx(weight, rel=tolerance, abs=tolerance)
    assert float(routing.loss.detach()) == pytest.approx(loss, rel=tolerance)


# ------------------------------------------------------------------------------------------------------ golden numbers


def test_golden_scores():
    expected = [
        [.64391, .23688, .08714, .03206], [.57926, .12925, .07839, .21310], [.47569, .28852, .12964, .10614],
        [.03929, .10680, .78914, .06478], [.28865, .26118, .23633, .21384], [.09988, .11038, .12199, .66776],
    ]  # fmt: skip
    assert torch.allclose(scores_of(golden(), "softmax"), torch.tensor(expected).double(), atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_top1(dtype):
    """Without random selection the first tokens in token order stay: 0 and 1."""
    routing = route(golden(dtype), gate(**OWN | {"moe_min_capacity": 1}))
    assert routing.counts.tolist() == [4, 0, 1, 1] and routing.dropped == 2
    assert routing.loss.item() == pytest.approx(1.249670, abs=5e-7)
    assert routing.balance["deepspeed"] == routing.loss
    expected = {(0, 0): .64391, (1, 0): .57926, (3, 2): .78914, (5, 3): .66776}  # fmt: skip
    assert {k: round(v, 5) for k, v in kept_weights(routing).items()} == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_top2(dtype):
    routing = route(golden(dtype), gate(moe_router_topk=2, moe_eval_capacity_factor=0.5, **OWN))
    assert routing.counts.tolist() == [4, 4, 2, 2] and routing.dropped == 4
    assert routing.loss.item() == pytest.approx(1.249670, abs=5e-7)
    expected = {
        (0, 0): .73106, (0, 1): .26894, (1, 0): .73106, (1, 3): .26894, (2, 1): 1.0, (3, 2): 1.0,
        (5, 2): .15447, (5, 3): .84553,
    }  # fmt: skip
    assert {k: round(v, 5) for k, v in kept_weights(routing).items()} == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_generic_topk(dtype):
    words = {"moe_token_drop_policy": "probs", "moe_router_load_balancing_type": ("aux_loss",)}
    routing = route(golden(dtype), gate(moe_router_topk=2, moe_eval_capacity_factor=0.5, **words, **OWN))
    assert routing.loss.item() == pytest.approx(1.028855, abs=5e-7)
    expected = {
        (0, 0): 1.0, (1, 0): .73106, (1, 3): .26894, (2, 1): 1.0, (3, 2): 1.0, (4, 1): 1.0, (5, 2): .15447,
        (5, 3): .84553,
    }  # fmt: skip
    assert {k: round(v, 5) for k, v in kept_weights(routing).items()} == expected
    assert route(golden(dtype), gate(moe_router_topk=3, **OWN)).loss.item() == pytest.approx(0.978185, abs=5e-7)


@pytest.mark.parametrize("topk, loss", [(1, 1.249670), (2, 1.028855), (3, 0.978185)])
def test_golden_megatron_losses(topk, loss):
    words = LM | {"moe_router_topk": topk, "moe_router_pre_softmax": True}
    assert route(golden(), gate(**words)).loss.item() == pytest.approx(loss, abs=5e-7)
    routing = route(golden(), gate(**words | {"moe_z_loss_coeff": 0.5}))
    assert routing.z.item() == pytest.approx(6.458664, abs=5e-7)
    assert routing.loss.item() == pytest.approx(loss + 0.5 * 6.458664, abs=1e-6)
    assert routing.kept.all() and routing.dropped == 0


# --------------------------------------------------------------------------------------------------- formulas as loops


def random_logits(seed, tokens=23, experts=8):
    """Some of them equal, so that ties are met."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator, dtype=torch.float64).mul(2).round().div(2)


def capacity(tokens, topk, factor, experts=8):
    return min(tokens, math.ceil(tokens * topk * factor / experts))


@pytest.mark.parametrize("topk", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", [None, "probs", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_the_gate_of_deepspeed(topk, policy, factor):
    slow = "first" if topk == 2 and policy != "probs" else policy or ("probs" if topk > 2 else "position")
    words = OWN | {"moe_router_topk": topk, "moe_token_drop_policy": policy, "moe_eval_capacity_factor": factor}
    for seed in range(3):
        logits = random_logits(seed)
        expected = deepspeed_gate(logits.tolist(), topk, capacity(len(logits), topk, factor), slow)
        assert_same(route(logits, gate(8, **words)), expected)


STEERING = [{}, {"bias": True}, {"groups": (4, 2)}, {"groups": (2, 1), "bias": True}]
MEGATRON = [
    (function, pre, topk, steering)
    for function, pre in (("softmax", False), ("softmax", True), ("sigmoid", False), ("sigmoid", True))
    for topk in (1, 2, 4)
    for steering in STEERING
    if (topk > 1 or pre or function == "sigmoid") and (function == "sigmoid" or "bias" not in steering)
    and topk % steering.get("groups", (1, 1))[1] == 0
]  # fmt: skip


@pytest.mark.parametrize("function, pre, topk, steering", MEGATRON)
@pytest.mark.parametrize("factor, policy", [(None, "probs"), (0.5, "probs"), (1.0, "position")])
def test_the_gate_of_megatron(function, pre, topk, steering, factor, policy):
    words = LM | {
        "moe_router_topk": topk, "moe_router_score_function": function, "moe_router_pre_softmax": pre,
        "moe_router_topk_scaling_factor": 2.5, "moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy,
        "moe_router_enable_expert_bias": steering.get("bias", False),
    }  # fmt: skip
    if "groups" in steering:
        words |= dict(zip(("moe_router_num_groups", "moe_router_group_topk"), steering["groups"]))
    bias = torch.linspace(-0.5, 0.5, 8, dtype=torch.float64) if steering.get("bias") else None
    for seed in range(2):
        logits = random_logits(seed)
        expected = megatron_gate(
            logits.tolist(), topk, function=function, pre=pre, scale=2.5, groups=steering.get("groups"),
            bias=None if bias is None else bias.tolist(),
            capacity=factor and capacity(len(logits), topk, factor), policy=policy,
        )  # fmt: skip
        assert_same(route(logits, gate(8, **words), bias=bias), expected)


def test_the_sequence_level_loss_is_the_mean_over_sequences():
    logits = random_logits(1, tokens=24)
    words = LM | {"moe_router_load_balancing_type": ("seq_aux_loss",)}
    expected = sum(megatron_aux_loss(logits[i : i + 8].tolist(), 2, "softmax") for i in (0, 8, 16)) / 3
    assert route(logits, gate(8, **words), tokens=Tokens(sequences=3)).loss.item() == pytest.approx(expected, rel=1e-12)


def test_the_global_loss_takes_the_counts_it_is_given():
    logits, words = random_logits(1), LM | {"moe_router_load_balancing_type": ("global_aux_loss",)}
    own = route(logits, gate(8, **words))
    assert own.loss.item() == pytest.approx(megatron_aux_loss(logits.tolist(), 2, "softmax"), rel=1e-12)
    elsewhere = torch.arange(8) * 3
    seen = []

    def widen(counts):
        seen.append(counts)
        return counts + elsewhere

    found = route(logits, gate(8, **words), widen=widen).loss.item()
    scores = [softmax(row) for row in logits.tolist()]
    counts = (own.counts + elsewhere).tolist()
    tokens_everywhere = sum(counts) / 2
    expected = sum(
        8 / (2 * len(scores) * tokens_everywhere) * sum(row[e] for row in scores) * counts[e] for e in range(8)
    )
    assert found == pytest.approx(expected, rel=1e-12) and torch.equal(seen[0], own.counts)


def test_sinkhorn_is_even_and_chooses_only_in_training():
    logits = random_logits(3, tokens=32)
    logits[:, 0] += 3.0
    plan = sinkhorn(logits)
    assert torch.allclose(plan.sum(0), torch.full((8,), 1 / 8, dtype=torch.float64), atol=1e-3)
    assert torch.allclose(plan.sum(1), torch.full((32,), 1 / 32, dtype=torch.float64), atol=1e-3)
    for topk in (1, 2):
        words = {"moe_family": "megatron-lm", "moe_router_load_balancing_type": ("sinkhorn",), "moe_router_topk": topk}
        training = route(logits, gate(8, **words), tokens=Tokens(draw=DRAW))
        evaluation = route(logits, gate(8, **words))
        assert training.experts.tolist() == [largest(row, topk) for row in plan.tolist()]
        assert evaluation.experts.tolist() == [largest(row, topk) for row in logits.tolist()]
        assert training.counts.max() < evaluation.counts.max()
        activation = logits.sigmoid() if topk == 1 else logits.softmax(1)
        assert torch.equal(training.weights, activation.gather(1, training.experts))
        assert training.balance == {} and training.loss == 0


# ------------------------------------------------------------------------------------------------------------ capacity


def test_c100_capacity_holds_without_random_selection():
    """The fifth token is dropped: it has no weight, and only its residual goes on."""
    logits = torch.tensor([[3.0, 0, 0, 0]] * 5)
    routing = route(logits, gate(moe_family="megatron-deepspeed"))
    assert routing.kept.flatten().tolist() == [True] * 4 + [False]
    assert routing.weights[4] == 0 and routing.dropped == 1 and routing.counts.tolist() == [5, 0, 0, 0]


@pytest.mark.parametrize("draw", [None, DRAW])
@pytest.mark.parametrize("topk", [1, 2])
def test_c101_a_capacity_above_the_tokens_drops_nothing(draw, topk):
    words = {"moe_router_topk": topk, "moe_train_capacity_factor": 8.0, "moe_eval_capacity_factor": 8.0}
    routing = route(torch.zeros(3, 4), gate(moe_family="megatron-deepspeed", **words), tokens=Tokens(draw=draw))
    assert routing.kept.all() and routing.dropped == 0


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_c100_no_expert_takes_more_than_its_capacity_and_none_less_than_it_could(data):
    """In every mode, training or not, with padding or without."""
    experts = data.draw(st.sampled_from([2, 4, 7]), "experts")
    tokens = data.draw(st.integers(1, 24), "tokens")
    topk = data.draw(st.integers(1, min(experts, 3)), "topk")
    factor = data.draw(st.sampled_from([0.1, 0.5, 1.0, 1.1, 3.0]), "factor")
    least = data.draw(st.integers(0, 5), "least")
    policy = data.draw(st.sampled_from([None, "probs", "position"]), "policy")
    training = data.draw(st.booleans(), "training")
    used = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens), "used"))
    used = data.draw(st.sampled_from([None, used]), "mask")
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    words = {
        "moe_router_topk": topk, "moe_train_capacity_factor": factor, "moe_eval_capacity_factor": factor,
        "moe_min_capacity": least, "moe_token_drop_policy": policy,
    }  # fmt: skip
    routing = route(logits, gate(experts, **words), tokens=Tokens(used=used, draw=DRAW if training else None))
    real = tokens if used is None else int(used.sum())
    bound = min(real, max(least, math.ceil(round(real * topk / experts * factor, 9))))
    taken = torch.bincount(routing.experts[routing.kept], minlength=experts)
    assert taken.tolist() == [min(bound, int(count)) for count in routing.counts]
    assert int(routing.dropped) == real * topk - int(routing.kept.sum())
    assert used is None or not routing.kept[~used].any()


def test_the_factor_is_the_decimal_number_that_was_written():
    """10 tokens times 1.1 are 11, although 10 * 1.1 is a little more in binary."""
    logits = torch.zeros(20, 2)
    logits[:, 0] = 1.0
    for used in (None, torch.ones(20, dtype=torch.bool)):
        routing = route(logits, gate(2, **OWN, moe_eval_capacity_factor=1.1), tokens=Tokens(used=used))
        assert routing.kept.sum() == 11


def test_without_dropping_every_choice_is_kept():
    logits = torch.tensor([[3.0, 0, 0, 0]] * 50)
    for draw in (None, DRAW):
        assert route(logits, gate(**OWN, disable_moe_token_dropping=True), tokens=Tokens(draw=draw)).kept.all()
    own = gate(**OWN, disable_moe_token_dropping_in_eval=True)
    assert route(logits, own).kept.all()
    assert route(logits, own, tokens=Tokens(draw=DRAW)).kept.sum() == 13


def test_random_token_selection_is_another_one_in_each_draw_and_the_same_in_the_same():
    logits, own = torch.tensor([[3.0, 0, 0, 0]] * 50), gate(**OWN)
    first = route(logits, own, tokens=Tokens(draw=DRAW)).kept.flatten()
    torch.rand(5)  # a draw elsewhere changes nothing
    assert torch.equal(first, route(logits, own, tokens=Tokens(draw=DRAW)).kept.flatten())
    other = route(logits, own, tokens=Tokens(draw=(1234, 8, 3))).kept.flatten()
    assert first.sum() == other.sum() == 13 and not torch.equal(first, other)
    assert not first[:13].all()
    still = gate(**OWN, moe_use_rts=False)
    assert route(logits, still, tokens=Tokens(draw=DRAW)).kept.flatten()[:13].all()


# ------------------------------------------------------------------------------------------------------------ sampling


def test_rsample_draws_from_the_softmax_and_weighs_without_noise():
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]], dtype=torch.float64).repeat(20_000, 1)
    own = gate(**OWN, moe_noisy_gate_policy="RSample", disable_moe_token_dropping=True)
    routing = route(logits, own, tokens=Tokens(draw=DRAW))
    scores = logits[0].softmax(0)
    assert torch.allclose(routing.counts.double() / len(logits), scores, atol=0.015)  # four standard deviations
    assert torch.equal(routing.weights, scores[routing.experts])
    assert set(route(logits, own).experts.flatten().tolist()) == {0}  # in evaluation, the best


def test_the_second_expert_is_sampled_in_training_only():
    logits = torch.tensor([[3.0, 0.0, -1.0, 0.5]], dtype=torch.float64).repeat(20_000, 1)
    own = gate(**OWN, moe_router_topk=2, disable_moe_token_dropping=True)
    routing = route(logits, own, tokens=Tokens(draw=DRAW))
    assert (routing.experts[:, 0] == 0).all() and (routing.experts[:, 1] != 0).all()
    rest = torch.tensor([0.0, -1.0, 0.5], dtype=torch.float64).softmax(0)
    assert torch.allclose(routing.counts[1:].double() / len(logits), rest, atol=0.015)
    assert torch.allclose(routing.weights.sum(1), torch.ones(20_000, dtype=torch.float64))
    for calm in (route(logits, own), route(logits, gate(
        **OWN, moe_router_topk=2, disable_moe_token_dropping=True, disable_moe_top2_2nd_expert_sampling=True
    ), tokens=Tokens(draw=DRAW))):  # fmt: skip
        assert calm.experts.tolist() == [[0, 3]] * len(logits)


def test_jitter_multiplies_the_input_in_training():
    x = torch.ones(4, 2, 64, dtype=torch.float64)
    own = gate(moe_input_jitter_eps=0.25)
    found = jittered(x, own, DRAW, 0)
    assert 0.75 <= found.min() < 0.77 and 1.23 < found.max() <= 1.25
    assert torch.equal(found, jittered(x, own, DRAW, 0)) and not torch.equal(found, jittered(x, own, DRAW, 1))
    assert jittered(x, own, None, 0) is x and jittered(x, gate(), DRAW, 0) is x


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_c099_ties_are_decided_alike_every_time(topk):
    """All logits equal: the lower experts, the earlier tokens; with sampling, the same sample again."""
    logits = torch.zeros(64, 8)
    calm = route(logits, gate(8, **OWN, moe_router_topk=topk, disable_moe_top2_2nd_expert_sampling=True))
    assert calm.experts.tolist() == [list(range(topk))] * 64
    assert calm.kept.flatten().tolist() == [t < 8 * topk for t in range(64) for _ in range(topk)]
    own = gate(8, **OWN, moe_router_topk=topk)
    first, again = (route(logits, own, tokens=Tokens(draw=DRAW)) for _ in range(2))
    for name in ("experts", "weights", "kept", "counts", "loss"):
        assert torch.equal(vars(first)[name], vars(again)[name])


# -------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("words", [OWN, LM | {"moe_router_pre_softmax": True, "moe_router_topk": 1}])
def test_c110_the_loss_is_1_when_balanced_and_rises_to_the_experts_when_collapsed(words):
    def loss(crowded):
        """`crowded` of 8 tokens prefer expert 0, the others the next in turn, almost surely."""
        wanted = torch.tensor([0 if t < crowded else t % 4 for t in range(8)])
        logits = torch.nn.functional.one_hot(wanted, 4).double().mul(60).requires_grad_()
        return route(logits, gate(**words)).loss, logits

    losses = [loss(crowded)[0].item() for crowded in (0, 2, 4, 8)]
    assert losses[0] == pytest.approx(1.0, abs=1e-9) and losses[-1] == pytest.approx(4.0, abs=1e-9)
    assert losses == sorted(losses) and losses[2] > 1.2

    logits = torch.tensor([[1.0, 0.5, 0.2, 0.1]], dtype=torch.float64).repeat(8, 1).requires_grad_()
    route(logits, gate(**words)).loss.backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()  # a step down crowds expert 0 less


def test_c115_masked_tokens_do_not_count_and_padding_is_as_if_it_were_not_there():
    """Counted in the loss or not, a token is routed; padding is not, and leaves places and capacity to the others."""
    logits = random_logits(5, tokens=24)
    every = ("aux_loss", "seq_aux_loss", "deepspeed")
    words = {
        "moe_router_load_balancing_type": every, "moe_aux_loss_coeff": (1.0, 1.0, 1.0), "moe_z_loss_coeff": 1.0,
        "moe_router_topk": 2, "moe_min_capacity": 0,
    }  # fmt: skip
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, 7:] = False
    short = logits[mask.flatten()]
    expected = route(short, gate(8, **words), tokens=Tokens(sequences=2))
    wild = torch.where(mask.flatten().unsqueeze(1), logits, 50 * logits.flip(1))
    padded = route(wild, gate(8, **words), tokens=Tokens(sequences=2, used=mask.flatten()))
    for name in ("experts", "weights", "kept"):
        assert torch.equal(vars(padded)[name][mask.flatten()], vars(expected)[name])
    for found in (padded, route(wild, gate(8, **words), tokens=Tokens(sequences=2, counted=mask.flatten()))):
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
        assert found.z.item() == pytest.approx(expected.z.item(), rel=1e-12)
    assert torch.equal(padded.counts, expected.counts) and padded.dropped == expected.dropped
    assert not padded.kept[~mask.flatten()].any() and found.kept[~mask.flatten()].any()
    nothing = route(logits, gate(8, **words), tokens=Tokens(sequences=2, used=torch.zeros(24, dtype=torch.bool)))
    assert nothing.loss == 0 and nothing.dropped == 0 and not nothing.kept.any()


GATES = {
    "deepspeed 1": OWN | {"moe_z_loss_coeff": 0.3},
    "deepspeed 2": OWN | {"moe_router_topk": 2},
    "deepspeed 3": OWN | {"moe_router_topk": 3},
    "post": LM,
    "pre": LM | {"moe_router_pre_softmax": True, "moe_expert_capacity_factor": 0.5},
    "sigmoid": LM | {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    "several": LM | {
        "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.5, 0.25, 2.0), "moe_z_loss_coeff": 0.1,
    },
    "sinkhorn": {"moe_family": "megatron-lm", "moe_router_load_balancing_type": ("sinkhorn",)},
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_weights_and_losses_have_the_right_gradients(name):
    """Away from the jumps of a choice, every weight and the loss are smooth functions of the logits."""
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True] * 6 + [False] * 2)

    def smooth(logits):
        routing = route(logits, gate(**GATES[name]), tokens=Tokens(sequences=2, counted=mask))
        return (routing.weights, routing.loss) if routing.loss.requires_grad else routing.weights

    assert torch.autograd.gradcheck(smooth, (logits,))
    assert not route(logits, gate(**GATES[name])).z.requires_grad


def test_a_loss_that_nobody_asked_for_is_reported_and_has_no_gradient():
    routing = route(golden().requires_grad_(), gate(moe_family="megatron-lm"))
    assert routing.balance["aux_loss"].item() == pytest.approx(1.028855, abs=5e-7)
    assert routing.loss == 0 and not routing.loss.requires_grad and routing.weights.requires_grad


# --------------------------------------------------------------------------------------------------------- expert bias


def test_the_bias_moves_towards_the_experts_that_are_short():
    bias = torch.tensor([0.5, 0.0, 0.0, -0.5])
    assert torch.allclose(moved_bias(bias, torch.tensor([4, 0, 1, 1]), 0.25), torch.tensor([0.25, 0.25, 0.25, -0.25]))
    assert torch.equal(moved_bias(bias, torch.tensor([3, 3, 3, 3]), 0.25), bias)
    big = 2**53
    counts = torch.tensor([big // 4 + 1, big // 4 - 1, big // 4, big // 4])
    assert moved_bias(torch.zeros(4), counts, 1.0).tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_the_bias_balances_and_leaves_the_weights_alone():
    logits = random_logits(8, tokens=256)
    logits[:, :2] += 2.0
    words = LM | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    bias, crowd = torch.zeros(8), []
    for _ in range(300):
        routing = route(logits, gate(8, **words), bias=bias)
        crowd.append(int(routing.counts.max()))
        bias = moved_bias(bias, routing.counts, 0.01)
    assert crowd[0] > 200 and crowd[-1] < 90 and routing.counts.sum() == 512  # 64 each would be even
    chosen = logits.sigmoid().gather(1, routing.experts)
    assert torch.allclose(routing.weights, chosen / chosen.sum(1, keepdim=True))


def test_memory_is_linear_in_tokens_times_experts():
    """The largest tensor of a gate call, backward included, is as large as the logits."""
    largest_seen = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest_seen
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(one, torch.Tensor):
                    largest_seen = max(largest_seen, one.numel())
            return out

    logits = torch.randn(512, 16, requires_grad=True)
    several = [OWN | {"moe_router_topk": topk} for topk in (1, 2, 4)]
    for words in (*several, LM | {"moe_expert_capacity_factor": 1.0}):
        with Watch():
            routing = route(logits, gate(16, **words), tokens=Tokens(draw=DRAW))
            (routing.loss + routing.weights.sum()).backward()
    assert largest_seen == 512 * 16
