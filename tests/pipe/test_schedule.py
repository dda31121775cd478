"""Schedules, their lowering and the simulator, exhaustively on small sizes."""

import time

import pytest

from megazero.pipe.instructions import (
    Backward,
    Forward,
    RecvActivation,
    ReduceGrads,
    SendActivation,
    render,
)
from megazero.pipe.lower import add_communication
from megazero.pipe.schedule import SCHEDULES
from megazero.pipe.simulate import Costs, check_blocking, check_programs, simulate

SIZES = [(ranks, micros) for ranks in range(1, 9) for micros in range(1, 13)]
TRAINING = ("gpipe", "1f1b")
CHUNKS = {"gpipe": (1,), "1f1b": (1,), "forward_only": (1, 2, 3)}


def lowered(name, ranks, micros, chunks=1):
    return add_communication(SCHEDULES[name](ranks, micros, chunks), ranks * chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_program_is_complete_and_cannot_hang(name):
    """Also C057 and C065: no stage and no micro-batch is lost, whatever the sizes."""
    for ranks, micros in SIZES:
        for chunks in CHUNKS[name]:
            programs = lowered(name, ranks, micros, chunks)
            check_programs(programs, ranks * chunks)
            check_blocking(programs)
            done = [op for program in programs for op in program if isinstance(op, Forward)]
            assert len(done) == len(set(done)) == ranks * chunks * micros


def test_evaluation_has_neither_backward_nor_reduction():
    for ranks, micros in SIZES:
        for program in lowered("forward_only", ranks, micros):
            assert {type(op).__name__ for op in program} <= {"Forward", "SendActivation", "RecvActivation"}
            assert [op.micro for op in program if isinstance(op, Forward)] == list(range(micros))


def test_1f1b_computes_in_the_order_of_the_closed_form():
    """DeepSpeed's closed form: forward of m on stage s at step 2m + s, backward at 2m + 2S - 1 - s."""
    for ranks, micros in SIZES:
        for stage, order in enumerate(SCHEDULES["1f1b"](ranks, micros, 1)):
            steps = {Forward(m, stage): 2 * m + stage for m in range(micros)}
            steps |= {Backward(m, stage): 2 * m + 2 * ranks - 1 - stage for m in range(micros)}
            assert order == sorted(steps, key=steps.__getitem__)


def test_1f1b_equals_the_published_trace():
    orders = [render(order) for order in SCHEDULES["1f1b"](4, 4, 1)]
    assert orders == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("name", TRAINING)
def test_bubble_and_time_follow_the_formula(name):
    """Bubble (p-1)(F+B) of the whole (m+p-1)(F+B): arXiv 2104.04473, section 2.2."""
    for ranks, micros in SIZES:
        report = simulate(lowered(name, ranks, micros), Costs(1.0, 2.0))
        assert report.makespan == 3 * (micros + ranks - 1)
        assert report.bubble == pytest.approx((ranks - 1) / (micros + ranks - 1))
        assert report.busy == (3.0 * micros,) * ranks


def test_live_activations_follow_the_formulas():
    for ranks, micros in SIZES:
        assert simulate(lowered("gpipe", ranks, micros)).peak_live == (micros,) * ranks
        peak = simulate(lowered("1f1b", ranks, micros)).peak_live
        assert peak == tuple(min(ranks - rank, micros) for rank in range(ranks))


def test_forward_only_fills_the_pipeline_once():
    for ranks, micros in SIZES:
        assert simulate(lowered("forward_only", ranks, micros)).makespan == micros + ranks - 1
    assert simulate(lowered("forward_only", 4, 8, 2)).makespan == 2 * 8 + 3


def test_costs_may_differ_by_stage_and_messages_take_time():
    programs = lowered("1f1b", 2, 1)
    report = simulate(programs, Costs(forward=(1.0, 3.0), backward=(2.0, 5.0), send=0.5))
    assert report.makespan == 1 + 0.5 + 3 + 5 + 0.5 + 2
    assert [(step.start, step.end) for step in report.timeline[1]] == [(1.5, 4.5), (4.5, 9.5)]


def test_few_receives_are_posted_ahead():
    for ranks, micros in SIZES:
        for name in TRAINING:
            assert max(simulate(lowered(name, ranks, micros)).peak_posted) <= 2


def test_reduction_follows_the_last_backward_of_its_stage():
    for ranks, micros in SIZES:
        for rank, program in enumerate(lowered("1f1b", ranks, micros)):
            assert program[-1] == ReduceGrads(rank)
            assert program.count(ReduceGrads(rank)) == 1


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
    with pytest.raises(ValueError, match=r"rank 0: Backward\(micro=0, stage=0\) waits for"):
        add_communication([[Backward(0, 0), Forward(0, 0)], [Forward(0, 1), Backward(0, 1)]], 2)


def test_sizes_below_one_and_chunks_are_refused():
    with pytest.raises(ValueError, match="must be at least 1"):
        SCHEDULES["gpipe"](2, 0, 1)
    with pytest.raises(ValueError, match="at most 1 stage, not 2"):
        SCHEDULES["1f1b"](2, 4, 2)


def test_the_checks_see_planted_faults():
    def fresh():
        return lowered("1f1b", 3, 4)

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
    with pytest.raises(ValueError, match="after its reduction"):
        check_programs(early, 3)


def test_a_send_moved_behind_a_receive_is_found_to_hang():
    programs = lowered("1f1b", 2, 2)
    forward, backward = programs[0].index(SendActivation(1, 0, 1)), programs[0].index(Backward(0, 0)) - 1
    programs[0][forward], programs[0][backward] = programs[0][backward], programs[0][forward]
    with pytest.raises(ValueError, match="hang"):
        check_blocking(programs)


def test_64_stages_and_512_micro_batches_are_lowered_in_seconds():
    start = time.perf_counter()
    programs = lowered("1f1b", 64, 512)
    check_programs(programs, 64)
    check_blocking(programs)
    assert simulate(programs).makespan == 3 * (512 + 63)
    assert time.perf_counter() - start < 10      # about 2 s alone on one core


def test_a_program_reads_as_a_line():
    programs = lowered("1f1b", 2, 2)
    assert render(programs[0]) == "F0 sendA0>1 F1 sendA1>1 recvG0<1 B0 recvG1<1 B1 reduce"
    assert render(programs[1]) == "recvA0<0 recvA1<0 F0 B0 sendG0>0 F1 B1 sendG1>0 reduce"
    assert render(SCHEDULES["forward_only"](1, 2, 2)[0]) == "F0.0 F0.1 F1.0 F1.1"
