"""The simulator: times by stage, messages that take time, bounded sends; and its proofs find planted faults."""

import pytest

from megazero.pipe.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    RecvActivation,
    ReduceGrads,
    SendActivation,
)
from megazero.pipe.schedule import SCHEDULES
from megazero.pipe.simulate import Costs, check_blocking, check_programs, simulate
from tests.pipe.test_lowering import lowered


def test_costs_may_differ_by_stage_and_messages_take_time():
    programs = lowered("1f1b", 2, 1)
    report = simulate(programs, Costs((1.0, 3.0), (1.5, 3.0), (0.5, 2.0), send=0.5))
    assert report.makespan == 1 + 0.5 + 3 + 5 + 0.5 + 2
    assert [(step.start, step.end) for step in report.timeline[1]] == [(1.5, 4.5), (4.5, 9.5)]
    assert report.busy == (3.0, 8.0) and report.idle == (9.0, 4.0) and report.gaps == (9.0, 0.0)
    assert report.bubble == pytest.approx(1 - 11 / 24)


def test_a_split_backward_sends_before_its_weight_gradient():
    report = simulate(lowered("zb-h1", 2, 1), Costs(1.0, 2.0, 4.0, send=0.5))
    assert [(step.op, step.start) for step in report.timeline[0]] == [
        (Forward(0, 0), 0.0), (BackwardInput(0, 0), 5.0), (BackwardWeight(0, 0), 7.0)
    ]
    assert report.timeline[1][-1].start == 4.5 and report.makespan == 11.0


def test_messages_of_one_edge_follow_each_other():
    """A slow wire becomes the bottleneck: the second activation waits until the first has gone through."""
    report = simulate(lowered("gpipe", 2, 3), Costs(1.0, 1.0, 0.0, send=5.0))
    assert [step.start for step in report.timeline[1][:3]] == [6.0, 11.0, 16.0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_bounded_sends_cannot_hang_and_cost_nothing_where_receives_are_posted_early(name):
    for ranks in (2, 3, 4, 8):
        for micros in (1, 4, 5, 16):
            programs = lowered(name, ranks, micros)
            costs = Costs(3.0, 3.0, 3.0, send=0.5)
            free = simulate(programs, costs)
            assert simulate(programs, costs, unfinished_sends=4).makespan == free.makespan
            assert simulate(programs, costs, unfinished_sends=0).makespan >= free.makespan


def test_bounded_sends_wait_for_the_oldest():
    programs = lowered("gpipe", 2, 4)
    costs = Costs(1.0, 1.0, 1.0, send=5.0)
    starts = [[s.start for s in simulate(programs, costs, unfinished_sends=n).timeline[0][:4]] for n in (None, 2, 0)]
    assert starts == [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 6.0], [0.0, 6.0, 12.0, 18.0]]


def test_the_checks_see_planted_faults():
    def fresh(name="1f1b"):
        return lowered(name, 3, 4)

    lost = fresh()
    lost[1].remove(RecvActivation(2, 1, 0))
    with pytest.raises(ValueError, match="lacks what it uses"):
        check_programs(lost, 3)
    with pytest.raises(ValueError, match="hang"):
        check_blocking(lost)
    unsent = fresh()
    unsent[0].remove(SendActivation(2, 0, 1))
    with pytest.raises(ValueError, match="rank 0 sends"):
        check_programs(unsent, 3)
    with pytest.raises(ValueError, match="hang"):
        simulate(unsent)
    crossed = fresh()
    first, second = (crossed[0].index(SendActivation(micro, 0, 1)) for micro in (0, 1))
    crossed[0].insert(second, crossed[0].pop(first))
    with pytest.raises(ValueError, match="rank 0 sends"):
        check_programs(crossed, 3)
    short = fresh()
    short[2].remove(ReduceGrads(2))
    with pytest.raises(ValueError, match="ReduceGrads"):
        check_programs(short, 3)
    double = fresh()
    double[0].append(ReduceGrads(0))
    with pytest.raises(ValueError, match=r"double steps: \['ReduceGrads"):
        check_programs(double, 3)
    early = fresh()
    early[2].insert(0, early[2].pop())
    with pytest.raises(ValueError, match="after the reduction"):
        check_programs(early, 3)
    twice = fresh()
    twice[0].insert(3, Forward(0, 0))
    with pytest.raises(ValueError, match=r"double steps: \['Forward\(micro=0, stage=0\)"):
        check_programs(twice, 3)


def test_the_checks_see_a_weight_gradient_that_is_lost_or_early():
    lost = lowered("zb-h1", 3, 4)
    lost[1].remove(BackwardWeight(2, 1))
    with pytest.raises(ValueError, match=r"BackwardWeight\(micro=2, stage=1\)"):
        check_programs(lost, 3)
    early = lowered("zb-h1", 3, 4)
    early[1].remove(BackwardWeight(2, 1))
    early[1].insert(early[1].index(BackwardInput(2, 1)), BackwardWeight(2, 1))
    with pytest.raises(ValueError, match="lacks what it uses"):
        check_programs(early, 3)
    after = lowered("zb-h1", 3, 4)
    after[1].append(after[1].pop(-2))
    with pytest.raises(ValueError, match="after the reduction"):
        check_programs(after, 3)
    both = lowered("zb-h1", 3, 4)
    both[0].insert(both[0].index(BackwardInput(3, 0)), Backward(3, 0))
    with pytest.raises(ValueError, match=r"Backward\(micro=3, stage=0\)"):
        check_programs(both, 3)


def test_a_send_moved_behind_a_receive_is_found_to_hang():
    programs = lowered("1f1b", 2, 2)
    forward, backward = programs[0].index(SendActivation(1, 0, 1)), programs[0].index(Backward(0, 0)) - 1
    programs[0][forward], programs[0][backward] = programs[0][backward], programs[0][forward]
    with pytest.raises(ValueError, match="hang"):
        check_blocking(programs)
