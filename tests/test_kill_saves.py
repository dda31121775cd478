"""The kill test of scripts/soak.sh, in short."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import kill_saves


@pytest.mark.timeout(400)
def test_a_rank_killed_while_it_saves_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """C045: SIGKILL of a random rank, once with and once without --async-save; the second run goes on from the save
    that the first one made."""
    assert kill_saves.main(["--kills", "2", "--save", str(tmp_path / "kills")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("lost or spoiled saves: 0")


def test_the_kill_test_sees_saves_that_are_lost_or_spoiled(tmp_path: Path) -> None:
    (tmp_path / "saves/iter_0000001").mkdir(parents=True)
    (tmp_path / "saves/iter_0000001/index.json").write_text("{}")
    told = kill_saves.check(tmp_path, "saved runs/saves/iter_0000001\n")
    assert [line.split(":")[0] for line in told] == ["lost", "spoiled"]
    assert not kill_saves.is_broken_off(tmp_path / "saves")
    (tmp_path / "saves/iter_0000002").mkdir()
    assert kill_saves.is_broken_off(tmp_path / "saves")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "lm_loss": 2.0}\n{"iterat\n{"iteration": 1, "lm_loss": 2.5}\n')
    assert kill_saves.unlike_losses(path) == ["spoiled: iteration 1 has loss 2.0 and then 2.5"]
