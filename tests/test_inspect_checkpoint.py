"""scripts/inspect_checkpoint.py: what a checkpoint holds, whether its bytes are good, how two of them differ."""

from __future__ import annotations

import json
import math
import os
import sys
from math import prod
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import commit, folder_of
from megazero.parallel.shard import Box
from megazero.parallel.topology import Topology
from scripts import inspect_checkpoint
from tests.test_checkpoint import KINDS, MODEL, PROGRESS, make_index, make_state, save, write_all

LAYOUTS = [Topology(), Topology(pipeline=2, data=2, tensor=2), Topology(pipeline=3, data=1, tensor=2)]


def said(capsys: pytest.CaptureFixture, code: int, *words: object) -> tuple[str, str]:
    """Standard output and error of the command, run here."""
    try:
        got = inspect_checkpoint.main([str(word) for word in words])
    except SystemExit as left:
        got = left.code
    out, err = capsys.readouterr()
    assert got == code, out + err
    return out, err


def told(capsys: pytest.CaptureFixture, code: int, *words: object) -> dict:
    """What --json tells."""
    return json.loads(said(capsys, code, *words, "--json")[0])


def data_file(folder: Path) -> Path:
    return max(folder.glob("*/*.safetensors"))


# ------------------------------------------------------------------------------------------------------- one checkpoint


def test_a_checkpoint_tells_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = save(tmp_path, LAYOUTS[1], make_state())
    facts = told(capsys, 0, folder, "--tensors", "--config", "--verify")
    assert {name: facts[name] for name in PROGRESS} == PROGRESS and facts["folder"] == str(folder)
    shapes = {name: list(spec(1).shape) for name, (_, spec) in MODEL.items()}
    assert {name: tensor["shape"] for name, tensor in facts["tensors"].items()} == shapes
    assert facts["parameters"] == sum(map(prod, shapes.values())) and facts["tensor_count"] == len(MODEL)
    assert facts["tensors"]["layers.1.gate_up"] == {
        "shape": [2, 12, 5], "cut": {"1": "tensor"}, "dtypes": dict.fromkeys(KINDS, "F32"), "bytes": 3 * 4 * 120,
        "tied": False,
    }
    assert facts["topology"]["tensor"] == facts["topology"]["pipeline"] == 2 and facts["files"] == 8
    assert facts["bytes"] == sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    assert facts["config"] == {"model": {"hidden_size": 6}} and facts["damage"] == [] and "saves" not in facts
    out, _ = said(capsys, 0, tmp_path, "--tensors", "--config", "--verify")
    for words in ("complete", "iteration        7", "8 ranks: tensor 2 x pipeline 2 x data 2", "good", "hidden_size"):
        assert words in out
    assert out.index("layers.0.qkv") < out.index("layers.1.gate_up") and "dim 1 by tensor" in out


@pytest.mark.parametrize(("losses", "line"), [([], None), ([2.5] * 100, "losses           the last 100, that")])
def test_what_spikes_are_told_by_is_counted_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture, losses: list[float], line: str | None
) -> None:
    index, folder = make_index(LAYOUTS[0], progress=PROGRESS | {"losses": losses}), folder_of(tmp_path, 7)
    commit(folder, write_all(folder, index, make_state()), index)
    out, _ = said(capsys, 0, tmp_path)
    assert "2.5" not in out and (line in out if line else "losses" not in out)
    assert told(capsys, 0, tmp_path)["losses"] == losses


def test_a_flipped_byte_anywhere_is_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = save(tmp_path, LAYOUTS[1], make_state())
    path = data_file(folder)
    good = path.read_bytes()
    for place in (0, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert told(capsys, 0, folder)["damage"] == [], "without --verify only sizes are looked at"
        (line,) = told(capsys, 1, folder, "--verify")["damage"]
        assert path.name in line
        assert line in said(capsys, 1, folder, "--verify")[0]
    path.write_bytes(good)
    assert told(capsys, 0, folder, "--verify")["damage"] == []


def test_a_root_tells_which_saves_are_complete_and_what_is_wrong_with_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """C045: what a killed or damaged save looks like."""
    for iteration in (10, 20, 30, 40, 50, 100):
        save(tmp_path, LAYOUTS[1], make_state(), iteration=iteration)
    (folder_of(tmp_path, 30) / "index.json").unlink()
    index = folder_of(tmp_path, 40) / "index.json"
    index.write_text(index.read_text().replace('"tensor": 2', '"tensor": 4'))
    data_file(folder_of(tmp_path, 50)).unlink()
    data_file(folder_of(tmp_path, 100)).write_bytes(b"short")
    facts = told(capsys, 0, tmp_path)
    assert facts["folder"] == str(folder_of(tmp_path, 20)), "the newest complete one"
    broken = {one["iteration"]: one["broken"] for one in facts["saves"]}
    assert list(broken) == [10, 20, 30, 40, 50, 100] and broken[10] is broken[20] is None
    assert broken[30] == "no index.json: the save was not completed" and "not a valid index" in broken[40]
    assert broken[50].endswith("is missing") and "has 5 bytes instead of" in broken[100]
    assert len(said(capsys, 0, tmp_path)[0].split("\n\n")[0].splitlines()) == 6
    assert told(capsys, 1, tmp_path, "--ckpt-step", 100)["damage"] == [broken[100]]
    _, err = said(capsys, 2, folder_of(tmp_path, 30))
    assert err == f"inspect_checkpoint.py: error: {folder_of(tmp_path, 30)}: {broken[30]}\n"


# ------------------------------------------------------------------------------------------------------ two checkpoints

STATES = 3 * len(MODEL)         # the weight and two moments of each tensor


@pytest.mark.parametrize("block", [1 << 22, 7])
def test_checkpoints_of_one_state_are_equal_whatever_layouts_wrote_them(
    block: int, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_checkpoint, "BLOCK", block)
    state = make_state()
    state["exp_avg"]["layers.0.row"][0, 0] = math.nan
    a, b, c = (save(tmp_path / str(number), layout, state) for number, layout in enumerate(LAYOUTS))
    for one, other in ((a, b), (b, c), (c, a)):
        facts = told(capsys, 0, "--diff", one, other)
        assert facts["equal"] and len(facts["tensors"]) == STATES
        assert facts["only_in_a"] == facts["only_in_b"] == []
    out, _ = said(capsys, 0, "--diff", tmp_path / "0", tmp_path / "1")
    assert out.count("\n") == 2 and f"{STATES} of {STATES} states of tensors equal, 0 on one side only" in out


@pytest.mark.parametrize("block", [1 << 22, 7])
def test_one_other_element_is_found_and_measured(
    block: int, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_checkpoint, "BLOCK", block)
    state, other = make_state(), make_state()
    other["weight"]["layers.2.row"][6, 3] += 0.5
    other["exp_avg_sq"]["layers.1.scale"].neg_()
    other["exp_avg"]["layers.0.norm"][2] = math.nan
    a, b = save(tmp_path / "a", LAYOUTS[1], state), save(tmp_path / "b", LAYOUTS[2], other)
    facts = told(capsys, 1, "--diff", a, b)
    wrong = {(one["name"], one["kind"]): one for one in facts["tensors"] if not one["equal"]}
    assert len(wrong) == 3 and not facts["equal"]
    row = wrong["layers.2.row", "weight"]
    assert row["max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert row["relative"] == pytest.approx(0.5 / other["weight"]["layers.2.row"].abs().max().item(), rel=1e-6)
    assert wrong["layers.1.scale", "exp_avg_sq"]["relative"] == 2
    assert wrong["layers.0.norm", "exp_avg"]["max_abs"] is None, "a difference to what is no number"
    out, _ = said(capsys, 1, "--diff", a, b)
    assert "layers.2.row" in out and "max difference 5.000e-01" in out and f"{STATES - 3} of {STATES}" in out
    assert len(said(capsys, 1, "--diff", a, b, "--tensors")[0].splitlines()) == STATES + 2


def test_other_dtypes_shapes_and_names_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(torch.bfloat16)
    a = save(tmp_path / "a", LAYOUTS[1], state, dtype=torch.bfloat16)
    wide = {kind: {name: x.float() for name, x in tensors.items()} for kind, tensors in state.items()}
    b = save(tmp_path / "b", LAYOUTS[2], wide)
    facts = told(capsys, 1, "--diff", a, b)["tensors"]
    assert {(one["note"], one["max_abs"]) for one in facts} == {("BF16 in A, F32 in B", 0.0)}
    monkeypatch.delitem(MODEL, "layers.2.row")
    monkeypatch.setitem(MODEL, "layers.2.other", MODEL["head.weight"])
    monkeypatch.setitem(MODEL, "layers.0.norm", MODEL["layers.1.scale"])
    other = make_state()
    c = save(tmp_path / "c", LAYOUTS[2], other)
    facts = told(capsys, 1, "--diff", b, c)
    assert facts["only_in_a"] == ["weight of layers.2.row", "exp_avg of layers.2.row", "exp_avg_sq of layers.2.row"]
    assert len(facts["only_in_b"]) == 3
    assert "shape [6] in A, [] in B" in {one["note"] for one in facts["tensors"]}
    out, _ = said(capsys, 1, "--diff", b, c)
    assert "only in A: exp_avg of layers.2.row" in out and "only in B: weight of layers.2.other" in out


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `| head` is; what is printed is mostly so little that it is written when all is done."""
    folder = save(tmp_path, LAYOUTS[1], make_state())
    for words in (["--diff", folder, folder, "--tensors"], [folder]):
        read, write = os.pipe()
        os.close(read)
        with open(write, "w") as out:
            monkeypatch.setattr(sys, "stdout", out)
            assert inspect_checkpoint.main([str(word) for word in words]) == 0


def test_a_damaged_file_ends_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, b = (save(tmp_path / name, LAYOUTS[1], make_state()) for name in "ab")
    path = data_file(b)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    _, err = said(capsys, 2, "--diff", a, b)
    assert path.name in err and "damaged" in err and err.count("\n") == 1


def test_blocks_fill_a_box_and_none_is_larger_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (1, 5, 100):
        monkeypatch.setattr(inspect_checkpoint, "BLOCK", block)
        for shape in ((), (1,), (13,), (1, 1, 17), (5, 3, 4)):
            seen = torch.zeros(shape)
            for box in inspect_checkpoint.blocks(Box((0,) * len(shape), shape)):
                assert box.numel <= block
                seen[box.slices()] += 1
            assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("{root}/none", "there is no such folder"),
        ("{root}/empty", "holds no complete checkpoint"),
        ("{root}/broken", "holds no complete checkpoint, but 1 broken ones"),
        ("{root}/good --ckpt-step 8", "there is no iteration 8 among 1 saves"),
        ("--diff {root}/good {root}/empty", "holds no complete checkpoint"),
        ("--diff {root}/good", "expected 2 arguments"),
        ("", "give DIR, or --diff A B"),
        ("{root}/good --diff {root}/good {root}/good", "give DIR, or --diff A B"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_and_the_exit_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture, words: str, wrong: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "iter_0000003").mkdir(parents=True)
    save(tmp_path / "good", LAYOUTS[0], make_state())
    out, err = said(capsys, 2, *words.format(root=tmp_path).split())
    assert wrong in err and err.startswith("inspect_checkpoint.py: error: ") and err.count("\n") == 1
