"""The soak of scripts/soak.sh, in short, and that it sees what it looks for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from scripts import soak_faults
from scripts.ranks import is_saving
from scripts.soak_job import Fault, Part, Soak
from scripts.soak_kinds import kinds
from tests.harness import _server


@pytest.mark.timeout(100)
def test_a_job_goes_on_through_faults_as_if_there_were_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """C045 and C135: a rank killed while it saves, a signal in an evaluation, a byte flipped in the newest save; in
    the end every bit is that of an undisturbed run."""
    asked = ["--faults", "3", "--part", "1", "--kinds", "kill-save,signal-eval,flipped-byte", "--json",
             f"{tmp_path}/table.json", "--save", f"{tmp_path}/soak"]  # fmt: skip
    _server()                       # one for all tests
    code, said = soak_faults.main(asked), capsys.readouterr().out
    assert code == 0 and "moments equal in every bit" in said and said.endswith("wrong: nothing\n"), said
    *rows, total = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert len(rows) == 3 and total["injected"] == total["survived"] == 3 and total["lost"] == 0


# ------------------------------------------------------------------------------------------- what is wrong is seen


class Played:
    """A rank that ends with some code, or does not end."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code

    wait = poll


def played(words: str, *codes: int | None, step: bool = False) -> Callable:
    """A start whose ranks say some words, and perhaps tell of a step."""
    def start(flags: Sequence[str], ranks: int, out: TextIO) -> Any:
        out.write(words)
        if step:
            (Path(out.name).parent / "metrics.jsonl").write_text('{"iteration": 4, "lm_loss": 2.0}\n')
        return [Played(code) for code in codes]

    return start


PART = Part("part", "", ((2, ""),), True)


def soak_of(folder: Path, start: Callable) -> Soak:
    return Soak(folder / "soak", PART, random.Random(1), start)


def test_a_save_that_is_lost_or_spoiled_is_seen(tmp_path: Path) -> None:
    soak = soak_of(tmp_path, played(""))
    (soak.saves / "iter_0000001").mkdir(parents=True)
    (soak.saves / "iter_0000001/index.json").write_text("{}")
    assert [line.split(":")[0] for line in soak.examine([1])] == ["spoiled", "lost"]
    soak.damaged.add(1)
    assert soak.examine() == [] and not is_saving(soak.saves)
    (soak.saves / "iter_0000002").mkdir()
    assert is_saving(soak.saves)


def test_a_start_that_goes_back_too_far_or_ranks_that_stay_are_seen(tmp_path: Path) -> None:
    soak = soak_of(tmp_path, played("going on after iteration 3\nsaved x/iter_0000005\n", 1, None, step=True))
    soak.good, before = 5, Fault("kill-save")
    soak.pending.append(before)
    soak.train()
    assert before.wrong == ["lost: went on after 3 instead of 5"] and before.lost == 1 and not before.survived
    fault = Fault("signal-step")
    assert soak.leaves(fault, 0.05) == [1, -9] and soak.job is None and fault.seconds > 0.05
    assert [line.split(",")[0] for line in fault.wrong] == [
        "ranks [1] still there after 0 s", "lost: iteration 5 was saved"
    ]
    soak.start = played("error: no\n", 1, 1)
    with pytest.raises(ValueError, match="does not come to a step after .'signal-step'.:\nerror: no"):
        soak.train()


def test_a_loss_a_step_or_a_weight_that_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soak, straight = soak_of(tmp_path, played("")), tmp_path / "straight"
    straight.mkdir()
    told = '{"iteration": 1, "lm_loss": 2.0}\n{"split": "valid", "iteration": 1, "lm_loss": 3.0}\n'
    (straight / "metrics.jsonl").write_text(told + '{"iteration": 2, "lm_loss": 1.9}\n')
    (soak.folder / "metrics.jsonl").write_text(told + '{"iterat\n{"iteration": 1, "lm_loss": 2.5}\n')
    weight = torch.ones(3)
    states = {"straight": {("w", "weight"): weight}, "soak": {("w", "weight"): weight.nextafter(2 * weight)}}
    monkeypatch.setattr(soak_faults, "read_save", lambda folder: states[folder.parent.parent.name])
    wrong, far = soak_faults.unlike(soak, straight, 2)
    assert wrong == [
        "part: ('train', 1) has loss 2.5, undisturbed 2.0", "part: 1 steps were never told of, the first ('train', 2)",
        "part: ('w', 'weight') differs by 1.2e-07",
    ]
    assert far.repeated == 1


def test_as_many_faults_are_dealt_as_asked_and_of_each_kind() -> None:
    every = kinds(mounts=True, layouts=2)
    for count in 1, 30, 200:
        assert len(soak_faults.deck(every, count, random.Random(1))) == count
    dealt = soak_faults.deck(every, 200, random.Random(1))
    assert {kind.name for kind in dealt} == {kind.name for kind in every}
