"""Schedules, exhaustively on small sizes: complete, without hang, and as fast and as small as their formulas say.

The formulas are per stage: F forward, B input gradient, W weight gradient; p ranks, m micro-batches, v stages a rank.
"""

import time

import pytest

from megazero.pipe.instructions import Backward, BackwardInput, BackwardWeight, Forward, render
from megazero.pipe.lower import add_communication, placement
from megazero.pipe.schedule import (
    ROUND_ROBIN,
    SCHEDULES,
    V_SHAPE,
    forward_only,
    group_sizes,
    interleaved,
    order_table,
)
from megazero.pipe.simulate import Costs, check_blocking, check_programs, simulate

RANKS, MICROS, CHUNKS = range(1, 9), range(1, 17), range(1, 5)
SIZES = [(ranks, micros) for ranks in RANKS for micros in MICROS]
RUNS = {"gpipe": (1,), "1f1b": (1,), "interleaved": CHUNKS, "zb-h1": (1,), "zb-v": (2,)}
CASES = [(name, chunks) for name in SCHEDULES for chunks in RUNS[name]]

ONES = Costs(1.0, 1.0, 1.0)
UNEQUAL = Costs(4.0, 5.0, 3.0)


def lowered(name, ranks, micros, chunks=1):
    return add_communication(SCHEDULES[name](ranks, micros, chunks), ranks * chunks)


def proven(programs, stages):
    """The programs themselves, after all that can be proven without knowing how long a step takes."""
    check_programs(programs, stages)
    check_blocking(programs)
    return programs


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_training_is_complete_cannot_hang_and_stays_in_place(name, chunks):
    """Also C057 and C065: no stage and no micro-batch is lost, whatever the sizes."""
    schedule = SCHEDULES[name]
    for ranks, micros in SIZES:
        stages = ranks * chunks
        orders = schedule(ranks, micros, chunks)
        steps = [op for order in orders for op in order]
        computes = set(steps)
        assert len(steps) == len(computes) == (3 if name.startswith("zb") else 2) * stages * micros
        assert placement(orders, stages) == schedule.homes(ranks, chunks)
        programs = proven(add_communication(orders, stages), stages)
        assert [[op for op in program if op in computes] for program in programs] == orders


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_evaluation_runs_every_micro_batch_where_training_put_the_stages(name, chunks):
    schedule = SCHEDULES[name]
    for ranks, micros in SIZES:
        stages = ranks * chunks
        orders = schedule.forward_only(ranks, micros, chunks)
        assert placement(orders, stages) == schedule.homes(ranks, chunks)
        programs = proven(add_communication(orders, stages), stages)
        kinds = {type(op).__name__ for program in programs for op in program}
        assert kinds <= {"Forward", "SendActivation", "RecvActivation"}
        forwards = [op for order in orders for op in order]
        assert len(forwards) == len(set(forwards)) == stages * micros
        report = simulate(programs)
        assert report.peak_live == report.peak_held == (0,) * ranks
        if schedule.placement is V_SHAPE:
            assert report.makespan == 2 * (micros + ranks - 1)
        else:
            assert report.makespan == (micros * chunks + ranks - 1 if micros >= ranks else micros + stages - 1)


@pytest.mark.parametrize("costs", [ONES, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_have_the_bubble_of_one_micro_batch_per_further_rank(name, costs):
    """Bubble (p-1)(F+B+W) on every rank, (p-1)/(m+p-1) of the whole: arXiv 2104.04473, section 2.1."""
    one = costs.of(Forward(0, 0)) + costs.of(Backward(0, 0))
    for ranks, micros in SIZES:
        report = simulate(lowered(name, ranks, micros), costs)
        assert report.idle == ((ranks - 1) * one,) * ranks
        assert report.bubble == pytest.approx((ranks - 1) / (micros + ranks - 1))
        least = (micros,) * ranks if name == "gpipe" else tuple(min(ranks - r, micros) for r in range(ranks))
        assert report.peak_live == report.peak_held == least


@pytest.mark.parametrize("chunks", CHUNKS[1:])
@pytest.mark.parametrize("costs", [ONES, UNEQUAL], ids=["equal", "unequal"])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(chunks, costs):
    """(p-1)(F+B+W) of a *stage*, that is 1/v of a rank's; any m >= p. Fewer wait for one to pass through all stages."""
    one = costs.of(Forward(0, 0)) + costs.of(Backward(0, 0))
    for ranks, micros in SIZES:
        report = simulate(lowered("interleaved", ranks, micros, chunks), costs)
        if micros >= ranks:
            assert report.idle == ((ranks - 1) * one,) * ranks
        else:
            assert report.makespan == (ranks * chunks + micros - 1) * one
        group = max(group_sizes(ranks, micros))
        peaks = [min(2 * (ranks - r) - 1 + (chunks - 1) * group, micros * chunks) for r in range(ranks)]
        assert report.peak_live == report.peak_held == tuple(peaks)
        if micros % ranks == 0 and micros > ranks:
            # The published figure, in units of one rank's micro-batch: p (1 + (p-1)/(p v)).
            assert report.peak_live[0] / chunks == pytest.approx(ranks * (1 + (ranks - 1) / (ranks * chunks)))


@pytest.mark.parametrize("costs", [ONES, UNEQUAL, Costs(1.0, 2.0, 0.5)], ids=["equal", "unequal", "light"])
def test_zb_h1_hides_weight_gradients_in_the_bubble(costs):
    """Bubble (p-1)(F+B-W) where W <= F, B; fewer than p micro-batches have W to hide only for so many.

    Arrivals at a rank until its input gradient p-s, until its weight gradient p: arXiv 2401.10241, table 1.
    """
    f, b, w = (costs.of(kind(0, 0)) for kind in (Forward, BackwardInput, BackwardWeight))
    for ranks, micros in SIZES:
        report = simulate(lowered("zb-h1", ranks, micros), costs)
        assert report.idle == ((ranks - 1) * (f + b - w) + max(ranks - micros, 0) * w,) * ranks
        assert report.peak_live == tuple(min(ranks - r, micros) for r in range(ranks))
        assert report.peak_held == (min(ranks, micros),) * ranks


def test_zb_v_leaves_no_rank_idle_once_it_has_begun():
    """Gaps 0 at F = B = W and m >= 2p-1; at most p micro-batches held, of a rank's two stages: arXiv 2405.15362."""
    for ranks, micros in SIZES:
        report = simulate(lowered("zb-v", ranks, micros, 2), ONES)
        if micros >= 2 * ranks - 1:
            assert report.gaps == (0.0,) * ranks
            assert report.makespan == 6 * micros + ranks - 1
            assert report.peak_held == (2 * ranks,) * ranks
        assert max(report.gaps) == 2 * max(2 * ranks - 1 - micros, 0)
        assert max(report.peak_held) <= min(2 * ranks, 2 * micros)


def test_zb_v_with_unequal_times_idles_as_published():
    report = simulate(lowered("zb-v", 4, 8, 2), Costs(0.5, 0.6, 0.4))
    assert report.gaps[0] == pytest.approx(1.2)


def test_zb_v_and_zb_h1_beat_1f1b_on_every_size():
    for ranks, micros in SIZES:
        whole = simulate(lowered("1f1b", ranks, micros)).makespan
        assert simulate(lowered("zb-h1", ranks, micros)).makespan <= whole
        # Half a stage each, so that a rank holds as much of the model.
        assert simulate(lowered("zb-v", ranks, micros, 2), Costs(0.5, 0.5, 0.5)).makespan <= whole


def test_1f1b_computes_in_the_order_of_the_closed_form():
    """DeepSpeed's closed form: forward of m on stage s at step 2m + s, backward at 2m + 2S - 1 - s."""
    for ranks, micros in SIZES:
        for stage, order in enumerate(SCHEDULES["1f1b"](ranks, micros, 1)):
            steps = {Forward(m, stage): 2 * m + stage for m in range(micros)}
            steps |= {Backward(m, stage): 2 * m + 2 * ranks - 1 - stage for m in range(micros)}
            assert order == sorted(steps, key=steps.__getitem__)


PUBLISHED = {
    ("gpipe", 2, 3, 1): """
        F0 F1 F2 BW0 BW1 BW2
        F0 F1 F2 BW0 BW1 BW2""",
    ("1f1b", 4, 4, 1): """
        F0 F1 F2 F3 BW0 BW1 BW2 BW3
        F0 F1 F2 BW0 F3 BW1 BW2 BW3
        F0 F1 BW0 F2 BW1 F3 BW2 BW3
        F0 BW0 F1 BW1 F2 BW2 F3 BW3""",
    ("zb-h1", 4, 8, 1): """
        F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
        F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
        F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
        F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7""",
    ("zb-v", 2, 4, 2): """
        F0.0 F1.0 F2.0 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F3.0 B0.0 W0.0 F2.1 B2.1 W2.1 B1.0 W1.0 F3.1 B3.1 W3.1 B2.0 W2.0 B3.0 W3.0
        F0.0 F0.1 F1.0 F1.1 B0.1 W0.1 F2.0 B0.0 W0.0 F2.1 B1.1 W1.1 F3.0 B1.0 W1.0 F3.1 B2.1 W2.1 B2.0 B3.1 B3.0 W2.0 W3.1 W3.0
        """,  # noqa: E501
    ("interleaved", 2, 4, 2): """
        F0.0 F1.0 F0.1 F1.1 F2.0 BW0.1 F3.0 BW1.1 F2.1 BW0.0 F3.1 BW1.0 BW2.1 BW3.1 BW2.0 BW3.0
        F0.0 F1.0 F0.1 BW0.1 F1.1 BW1.1 F2.0 BW0.0 F3.0 BW1.0 F2.1 BW2.1 F3.1 BW3.1 BW2.0 BW3.0""",
}


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case[0])
def test_orders_equal_the_published_traces(case):
    name, *sizes = case
    assert [render(order) for order in SCHEDULES[name](*sizes)] == [
        line.strip() for line in PUBLISHED[case].strip().splitlines()
    ]


def test_zb_h1_takes_the_published_time():
    assert simulate(lowered("zb-h1", 4, 8), ONES).makespan == 27
    assert simulate(lowered("1f1b", 4, 8), ONES).makespan == 33


def test_the_order_table_runs_each_group_through_all_chunks():
    table = order_table(group_sizes(2, 5, 3), 2)
    assert [m for m, _ in table] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in table] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_groups_hold_no_fewer_micro_batches_than_ranks():
    """A small rest is shared out, so that no number of micro-batches hangs or stalls; a large one stays as it is."""
    assert group_sizes(4, 8) == [4, 4]
    assert group_sizes(4, 9) == [5, 4]
    assert group_sizes(4, 11) == [6, 5]
    assert group_sizes(4, 3) == [3]
    assert group_sizes(4, 13, 5) == [7, 6]
    assert group_sizes(4, 14, 5) == [5, 5, 4]
    assert group_sizes(4, 6, 100) == [6]
    for ranks, micros in SIZES:
        for group in range(ranks, micros + 2):
            sizes = group_sizes(ranks, micros, group)
            assert sum(sizes) == micros and (min(sizes) >= ranks or micros < ranks)
    with pytest.raises(ValueError, match="a group of 3 micro-batches is too small for 4 pipeline ranks"):
        group_sizes(4, 8, 3)


@pytest.mark.parametrize("chunks", CHUNKS[1:])
def test_interleaved_groups_follow_the_rule_of_megatron(chunks):
    """Where the last group is full, or no smaller than the ranks: w = min(2 (p-r-1) + (v-1) N, M v) forwards first, the
    k-th of micro-batch and chunk k of the table; then backwards in turn, of the same micro-batches, chunks from behind.
    """
    for ranks in range(1, 7):
        for micros in MICROS:
            for group in range(ranks, micros + 1):
                if 0 < micros % group < ranks:
                    continue
                table = [
                    (m, chunk) for first in range(0, micros, group) for chunk in range(chunks)
                    for m in range(first, min(first + group, micros))
                ]
                for r, order in enumerate(interleaved(ranks, micros, chunks, group)):
                    forwards = [op for op in order if isinstance(op, Forward)]
                    assert [(op.micro, op.stage) for op in forwards] == [(m, c * ranks + r) for m, c in table]
                    backwards = [(m, (chunks - 1 - c) * ranks + r) for m, c in table]
                    assert [(op.micro, op.stage) for op in order if isinstance(op, Backward)] == backwards
                    first = min(2 * (ranks - r - 1) + (chunks - 1) * group, micros * chunks)
                    kinds = "F" * first + "FB" * (len(table) - first) + "B" * first
                    assert "".join("F" if isinstance(op, Forward) else "B" for op in order) == kinds


def test_interleaving_one_stage_is_1f1b():
    """And holds no more."""
    for ranks, micros in SIZES:
        assert interleaved(ranks, micros, 1) == SCHEDULES["1f1b"](ranks, micros, 1)


@pytest.mark.parametrize("chunks", [2, 3])
def test_any_group_size_runs_with_the_same_bubble(chunks):
    for ranks in (1, 2, 3, 4, 6):
        for micros in range(ranks, 17):
            for group in range(ranks, micros + 1):
                orders = SCHEDULES["interleaved"].in_groups(group)(ranks, micros, chunks)
                assert orders == interleaved(ranks, micros, chunks, group)
                report = simulate(proven(add_communication(orders, ranks * chunks), ranks * chunks))
                assert report.idle == (3.0 * (ranks - 1),) * ranks
                held = 2 * ranks - 1 + (chunks - 1) * max(group_sizes(ranks, micros, group))
                assert report.peak_live[0] == min(held, micros * chunks)


def test_only_an_interleaved_schedule_has_groups():
    for name, schedule in SCHEDULES.items():
        assert schedule.in_groups(None) is schedule
        assert (schedule.in_groups(3) is schedule) == (name != "interleaved")


def test_v_placement_holds_both_ends_on_the_first_rank():
    assert V_SHAPE.homes(4, 2) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert ROUND_ROBIN.homes(4, 2) == [0, 1, 2, 3, 0, 1, 2, 3]
    turn = [op for op in lowered("zb-v", 4, 8, 2)[3] if type(op).__name__.startswith(("Send", "Recv"))]
    assert {op.peer for op in turn} == {2}          # between stage 3 and stage 4 nothing is sent


def test_sizes_below_one_and_stages_that_a_schedule_does_not_run_are_refused():
    for name in SCHEDULES:
        with pytest.raises(ValueError, match="must be at least 1"):
            SCHEDULES[name](2, 0, 1)
    for name in ("gpipe", "1f1b", "zb-h1"):
        with pytest.raises(ValueError, match=f"--pipeline-schedule {name} runs 1 stage on each pipeline rank, not 2"):
            SCHEDULES[name](2, 4, 2)
    with pytest.raises(ValueError, match="zb-v runs 2 stages on each pipeline rank, not 1 .*--num-layers-per-virtual-"):
        SCHEDULES["zb-v"].homes(2, 1)
    with pytest.raises(ValueError, match="forward_only: ranks"):
        forward_only(0, 1)


def test_64_stages_and_512_micro_batches_are_built_and_proven_in_seconds():
    """10^5 ranks have such pipelines; interleaved, and 1F1B: 1.2 s each, where nothing else runs."""
    for name, ranks, chunks in (("1f1b", 64, 1), ("interleaved", 32, 2)):
        start = time.process_time()
        programs = proven(lowered(name, ranks, 512, chunks), ranks * chunks)
        assert simulate(programs).idle == (3.0 * (ranks - 1),) * ranks
        assert time.process_time() - start < 10


def test_an_order_reads_as_a_line():
    assert render(SCHEDULES["interleaved"].forward_only(1, 2, 2)[0]) == "F0.0 F0.1 F1.0 F1.1"
    assert render(SCHEDULES["zb-v"].forward_only(2, 2, 2)[1]) == "F0.0 F0.1 F1.0 F1.1"
