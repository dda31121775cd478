"""How a run starts: ranks that must not train together are told apart, and who speaks of an error before they meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import pretrain_gpt
from megazero.data.indexed import IndexedWriter
from megazero.flags import parse
from megazero.parallel.groups import World, speaks_for_host
from megazero.starting import check_same_everywhere, fingerprints
from tests.training import SMALL

ONE, OTHER = World(0, 2, 0), World(1, 2, 1)


def differ(here: str, there: str, **found: object) -> str | None:
    """What rank 1 with the flags `here` says where rank 0 has `there`, and has found other things there."""
    store = dist.HashStore()
    for world, flags in ((ONE, there), (OTHER, here)):
        config, _ = parse(f"{SMALL} {flags}".split())
        seen = pretrain_gpt.seen_by(pretrain_gpt.prepare(config, world)) | (found if world is OTHER else {})
        try:
            check_same_everywhere(config, seen, world, store)
        except ValueError as wrong:
            return str(wrong)
    return None


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ("--log-interval 3", "", "--log-interval: 3 here, 100 on rank 0"),
        ("--log-params-norm --check-replicas 2", "--check-replicas 3",
         "--log-params-norm: True here, False on rank 0; --check-replicas: 2 here, 3 on rank 0"),
        ("--tensor-model-parallel-size 2", "", "--tensor-model-parallel-size: 2 here, 1 on rank 0"),
        ("--split 9,1,0", "--split 8,2,0", "--split: 9,1,0 here, 8,2,0 on rank 0"),
    ],
)  # fmt: skip
def test_ranks_with_other_flags_do_not_train_together(here: str, there: str, told: str) -> None:
    """What only the console shows is shown by all ranks together, so it counts as well."""
    assert differ(here, there) == f"the ranks were started with different flags: {told}"


def test_places_may_differ_between_hosts(tmp_path: Path) -> None:
    flags = "--metrics-jsonl {0}/m --tensorboard-dir {0}/tb --kill-switch-path {0}/stop --num-workers {1}"
    assert differ(flags.format("a", 0), flags.format("b", 2)) is None


def test_ranks_that_see_other_files_do_not_train_together() -> None:
    assert differ("--seed 7", "--seed 7") is None
    (samples,) = [name for name in pretrain_gpt.seen_by(plan("--seed 7")) if name.startswith("the samples")]
    own, other = (pretrain_gpt.seen_by(plan(f"--seed {seed}"))[samples] for seed in (7, 8))
    assert own.keys() == {"train", "valid", "test"} and not set(own.values()) & set(other.values())
    assert differ("--seed 7", "--seed 7", **{samples: other}) == (
        f"the ranks see different files: {samples}: {other} here, {own} on rank 0"
    )


def test_a_part_in_megatrons_order_is_known_by_its_size_without_building_it(tmp_path: Path) -> None:
    found = []
    for documents in (4, 5):
        out = IndexedWriter(tmp_path / f"corpus{documents}", vocab_size=97)
        for number in range(documents):
            out.add_document([[number] * 40])
        out.finish()
        flags = f"--data-path {tmp_path}/corpus{documents} --sample-order megatron --split 1,0,0 --seq-length 16"
        config, _ = parse(f"{SMALL} {flags} --train-iters 1 --eval-iters 0".replace("--mock-data", "").split())
        samples = pretrain_gpt.prepare(config, ONE).samples
        found.append(fingerprints(samples, config.data))
        assert samples["train"]._order is None
    assert found == [{"train": 9}, {"train": 12}]


def plan(flags: str) -> pretrain_gpt.Plan:
    return pretrain_gpt.prepare(parse(f"{SMALL} {flags}".split())[0], ONE)


def test_an_error_before_the_ranks_meet_is_told_once_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its first process, or where that one has none, as with too few GPUs, by another."""
    store = dist.HashStore()
    monkeypatch.setattr("megazero.parallel.groups.dist.rendezvous", lambda *_, **how: iter([(store, 0, 2)]))
    monkeypatch.setattr("megazero.parallel.groups.FIRST_SECONDS", 0.1)
    worlds = [World(rank, 4, rank) for rank in range(4)]
    assert [speaks_for_host(world) for world in worlds] == [True, False, False, False]      # not by torchrun
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert [speaks_for_host(world) for world in worlds] == [True, False, False, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [speaks_for_host(world) for world in worlds[2:]] == [True, False]
