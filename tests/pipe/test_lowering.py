"""From orders to programs: which messages and reductions are put in, where. Bad orders are refused by their step."""

import pytest

from megazero.pipe.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
    render,
)
from megazero.pipe.lower import add_communication
from megazero.pipe.schedule import SCHEDULES
from megazero.pipe.simulate import Costs, check_blocking, check_programs, simulate

SIZES = [(ranks, micros) for ranks in range(1, 7) for micros in range(1, 10)]
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def lowered(name, ranks, micros):
    return add_communication(SCHEDULES[name](ranks, micros, CHUNKS[name]), ranks * CHUNKS[name])


def test_a_program_reads_as_a_line():
    programs = lowered("1f1b", 2, 2)
    assert render(programs[0]) == "F0 sendA0>1 F1 sendA1>1 recvG0<1 BW0 recvG1<1 BW1 reduce"
    assert render(programs[1]) == "recvA0<0 recvA1<0 F0 BW0 sendG0>0 F1 BW1 sendG1>0 reduce"
    programs = lowered("zb-h1", 2, 2)
    assert render(programs[0]) == "F0 sendA0>1 F1 sendA1>1 recvG0<1 B0 recvG1<1 W0 B1 W1 reduce"
    assert render(programs[1]) == "recvA0<0 recvA1<0 F0 B0 sendG0>0 F1 B1 sendG1>0 W0 W1 reduce"
    programs = lowered("zb-v", 2, 1)
    assert render(programs[1]) == (
        "recvA0.0<0 F0.0 F0.1 sendA0.1>0 recvG0.1<0 B0.1 W0.1 reduce.1 B0.0 sendG0.0>0 W0.0 reduce.0"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_output_leaves_after_its_forward_and_a_gradient_after_its_input_part(name):
    """Both where the neighbour lives elsewhere, and only there. The first stage sends no gradient."""
    for ranks, micros in SIZES:
        homes = SCHEDULES[name].homes(ranks, CHUNKS[name])
        for rank, program in enumerate(lowered(name, ranks, micros)):
            for op, following in zip(program, [*program[1:], None], strict=True):
                if isinstance(op, Forward):
                    to, message = op.stage + 1, SendActivation
                elif isinstance(op, Backward | BackwardInput):
                    to, message = op.stage - 1, SendGrad
                else:
                    continue
                leaves = 0 <= to < len(homes) and homes[to] != rank
                assert (following == message(op.micro, op.stage, homes[to])) if leaves else type(following) not in (
                    SendActivation, SendGrad
                )
            assert SendGrad not in {type(op) for op in program if op.stage == 0}


@pytest.mark.parametrize("name", SCHEDULES)
def test_reduction_follows_the_step_that_completes_the_gradients_of_its_stage(name):
    for ranks, micros in SIZES:
        programs = lowered(name, ranks, micros)
        reductions = [op for program in programs for op in program if isinstance(op, ReduceGrads)]
        assert sorted(op.stage for op in reductions) == list(range(ranks * CHUNKS[name]))
        for program in programs:
            for at, op in enumerate(program):
                if isinstance(op, ReduceGrads):
                    before = [o for o in program[:at] if not isinstance(o, SendGrad)][-1]
                    assert isinstance(before, Backward | BackwardWeight) and before.stage == op.stage
                    later = [o for o in program[at:] if isinstance(o, Backward | BackwardInput | BackwardWeight)]
                    assert op.stage not in {o.stage for o in later}


def test_few_receives_are_posted_ahead():
    """Where a message is used when it comes. Interleaved groups wait for their turn, in memory of the receiver."""
    for ranks, micros in SIZES:
        for name in ("gpipe", "1f1b", "zb-h1"):
            assert max(simulate(lowered(name, ranks, micros)).peak_posted) <= 2
        assert max(simulate(lowered("zb-v", ranks, micros)).peak_posted) <= 3
        assert max(simulate(lowered("interleaved", ranks, micros)).peak_posted) <= ranks + 3


def test_weight_gradients_may_be_put_off_past_anything():
    """Even to the end of the step: only memory grows, and the reduction moves with them."""
    orders = SCHEDULES["zb-h1"](4, 6, 1)
    late = [
        [op for op in order if not isinstance(op, BackwardWeight)] + [BackwardWeight(m, r) for m in reversed(range(6))]
        for r, order in enumerate(orders)
    ]
    programs = add_communication(late, 4)
    check_programs(programs, 4)
    check_blocking(programs)
    assert [program[-1] for program in programs] == [ReduceGrads(stage) for stage in range(4)]
    assert simulate(programs).peak_held == (6,) * 4


def test_whole_and_split_backwards_may_stand_in_one_schedule():
    """A rank whose weight gradients would fill no gap runs them at once; its neighbours need not know."""
    orders = SCHEDULES["zb-h1"](3, 5, 1)
    orders[0] = SCHEDULES["1f1b"](3, 5, 1)[0]
    orders[1] = [Backward(4, 1) if op == BackwardInput(4, 1) else op for op in orders[1] if op != BackwardWeight(4, 1)]
    programs = add_communication(orders, 3)
    check_programs(programs, 3)
    check_blocking(programs)
    assert {type(op) for op in programs[0]} >= {Backward, RecvGrad} and SendGrad(4, 1, 0) in programs[1]
    assert "F0" in render(programs[1]) and "BW4" in render(programs[1]) and "W3" in render(programs[1])


def test_a_bad_order_is_refused_by_its_step():
    good = SCHEDULES["1f1b"](2, 2, 1)
    with pytest.raises(ValueError, match=r"Backward\(micro=1, stage=1\) is missing"):
        add_communication([good[0], good[1][:-1]], 2)
    with pytest.raises(ValueError, match=r"Forward\(micro=0, stage=0\) stands twice"):
        add_communication([good[0] + [Forward(0, 0)], good[1]], 2)
    with pytest.raises(ValueError, match="rank 0 holds stage 0"):
        add_communication([good[0], good[1] + [Forward(5, 0)]], 2)
    with pytest.raises(ValueError, match=r"\[2\] are missing or unknown"):
        add_communication(good, 3)
    with pytest.raises(ValueError, match=r"rank 0: Backward\(micro=0, stage=0\) waits for the forward of stage 0"):
        add_communication([[Backward(0, 0), Forward(0, 0)], [Forward(0, 1), Backward(0, 1)]], 2)


@pytest.mark.parametrize(
    ("backwards", "message"),
    [
        ([BackwardInput(0, 0)], r"BackwardWeight\(micro=0, stage=0\) is missing"),
        ([BackwardWeight(0, 0)], r"BackwardInput\(micro=0, stage=0\) is missing"),
        ([Backward(0, 0), BackwardWeight(0, 0)], r"BackwardWeight\(micro=0, stage=0\) stands beside Backward"),
        ([Backward(0, 0), BackwardInput(0, 0)], r"BackwardInput\(micro=0, stage=0\) stands beside Backward"),
        ([BackwardWeight(0, 0), BackwardInput(0, 0)], r"BackwardWeight\(.*\) waits for the backward of stage 0"),
    ],
)
def test_a_bad_split_backward_is_refused_by_its_step(backwards, message):
    with pytest.raises(ValueError, match=message):
        add_communication([[Forward(0, 0), *backwards]], 1)


def test_receives_are_posted_before_the_step_that_runs_while_they_travel():
    """Messages then hide behind steps, and a slow wire costs a bounded time, however many micro-batches there are."""
    for ranks, micros in SIZES:
        for name, waits in (("gpipe", 0), ("zb-h1", min(max(micros - 2, 0), ranks - 1))):
            fast, slow = (simulate(lowered(name, ranks, micros), Costs(send=send)).makespan for send in (0.0, 0.25))
            assert slow - fast == 2 * 0.25 * (ranks - 1 + waits)
