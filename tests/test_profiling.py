"""--profile: the steps of the window and no others, on the chosen ranks alone, and a table of what they cost."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

import pretrain_gpt
from megazero.config import LoggingConfig
from megazero.profiling import Profile
from tests.training import SMALL


def test_the_window_is_traced_and_its_costliest_ops_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    window = f"--profile --profile-step-start 2 --profile-step-end 3 --profile-dir {tmp_path}/traces"
    assert pretrain_gpt.main(f"{SMALL} --num-layers 1 --train-iters 4 {window}".split()) == 0
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "profile_rank_0000.json"
    events = {event["name"]: event for event in json.loads(path.read_text())["traceEvents"]}
    assert {"iteration 2", "iteration 3", "aten::addmm", "_GatherLinearBackward"} <= set(events)
    assert not {"iteration 1", "iteration 4"} & set(events)
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(f"profile of rank 0, iterations 2 to 3: {path}")
    table = [line.split(maxsplit=3) for line in lines[at + 2 : at + 12]]
    spent = [float(milliseconds) for milliseconds, _, _, _ in table]
    assert len(table) == 10 and spent == sorted(spent, reverse=True) and spent[0] > 0
    assert all(0 < float(share.rstrip("%")) <= 100 for _, share, _, _ in table)
    assert lines[at + 12].startswith("iteration 4/4")                   # a step's line is told after the next step


def test_a_rank_or_a_step_that_is_not_chosen_has_nothing_around_it(tmp_path: Path) -> None:
    def around(iteration: int, rank: int, **changes: object) -> object:
        logging = LoggingConfig(**{"profile": True, "profile_dir": str(tmp_path), **changes})
        return Profile(logging, rank, print).around(iteration)

    for context in (around(9, 0), around(13, 0), around(10, 1), around(10, 0, profile=False),
                    around(10, 0, profile_ranks=(1,))):
        assert isinstance(context, nullcontext)
    for context in (around(10, 0), around(12, 0), around(10, 1, profile_ranks=(1, 2))):
        assert not isinstance(context, nullcontext)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_never_reaches_the_window_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    Profile(LoggingConfig(profile=True, profile_dir=str(tmp_path)), 0, said.append).close(9)
    assert said == ["nothing to profile: no iteration from 10 to 12 was trained"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags, told", [
    ("--profile-step-start 5 --profile-step-end 4", "--profile-step-end 4 is below --profile-step-start 5"),
    ("--profile-ranks 0 1", "--profile-ranks 1: there are 1 ranks, counted from 0"),
    ("--profile-dir {tmp_path}/file/traces", "--profile-dir {tmp_path}/file/traces: cannot be written"),
    ("--profile pt-half", "--profile is a switch and takes no value, but got pt-half"),
])  # fmt: skip
def test_a_profile_that_cannot_be_is_refused(
    flags: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert pretrain_gpt.main(f"{SMALL} --profile pt {flags}".format(tmp_path=tmp_path).split()) == 2
    assert told.format(tmp_path=tmp_path) in capsys.readouterr().err
