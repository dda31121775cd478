"""The harness itself: results come back in order, and whatever goes wrong on a rank is told within its limit."""

import functools
import os
import time

import pytest
import torch
import torch.distributed as dist

from .harness import RankFailed, on_ranks, run_script


def _sum_of_ranks(scale, offset=0):
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return dist.get_rank(), x * scale + offset, torch.get_num_threads()


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"planted fault on rank {rank}")
    dist.all_reduce(torch.zeros(1))


def _hang_on(rank):
    if dist.get_rank() == rank:
        _sleep_for_long()


def _sleep_for_long():
    time.sleep(100)


def _die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def _double(x):
    return 2 * x


def test_every_rank_returns_in_order():
    results = on_ranks(4, functools.partial(_sum_of_ranks, offset=0.5), 2.0)
    assert [rank for rank, _, _ in results] == [0, 1, 2, 3]
    assert all(value.item() == 12.5 and threads == 1 for _, value, threads in results)


def test_one_rank_needs_no_process_group():
    assert on_ranks(1, _double, 3) == [6]
    assert not dist.is_initialized()


def test_the_rank_that_failed_first_is_shown():
    with pytest.raises(RankFailed, match="rank 1 of 2 failed(.|\n)*ValueError: planted fault on rank 1"):
        on_ranks(2, _fail_on, 1)


def test_a_hanging_rank_is_killed_and_its_stack_shown():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 hangs: no result after 2 s(.|\n)*_sleep_for_long"):
        on_ranks(2, _hang_on, 1, timeout=2)
    assert time.monotonic() - start < 10


def test_a_dead_rank_is_named():
    with pytest.raises(RankFailed, match="rank 1 of 2 failed:\nit died with exit code 7"):
        on_ranks(2, _die_on, 1)


def test_a_script_runs_as_torchrun_would_start_it(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "COLOUR")
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nprint(*(os.environ.get(n) for n in {names}), sys.argv[1])\nsys.exit(3)\n")
    ended = run_script([script, "word"], n=2, env={"COLOUR": "red"})
    assert [e.stdout.split() for e in ended] == [[str(r), str(r), "2", "2", "127.0.0.1", "red", "word"] for r in (0, 1)]
    assert [e.code for e in ended] == [3, 3] and all(e.seconds < 30 for e in ended)
    assert run_script([script, "word"])[0].stdout.split()[:4] == ["None"] * 4


def test_a_hanging_script_is_killed_and_its_stack_shown(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(100)\n")
    with pytest.raises(RankFailed, match=r"ranks \[1\](.|\n)*script.py\", line 3"):
        run_script([script], n=2, timeout=2)
