"""Collectives through memory that ranks share: when a slot may be used again, what goes another way, who is waited for;
and that a block of a model has no more collectives than it must."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megazero.config import ModelConfig
from megazero.data.batch import MicroBatch
from megazero.gpt import GPTSetup, gpt_layers
from megazero.parallel import collectives, layers, shared_memory
from megazero.parallel.collectives import start_all_gather, start_reduce_scatter
from megazero.parallel.groups import Group, open_mesh
from megazero.parallel.params import collect, initialize
from megazero.parallel.shared_memory import SLOTS, Ring, Segment
from megazero.parallel.topology import Topology
from tests.harness import on_ranks


def segment(process: int, capacity: int = 8) -> Segment:
    header = memoryview(bytearray(shared_memory.HEADER)).cast("q")
    return Segment(process, header, torch.zeros(SLOTS, capacity, dtype=torch.uint8))


def test_a_slot_is_used_again_when_all_ranks_are_known_to_have_read_it() -> None:
    ring = Ring(0, [segment(os.getpid()), segment(os.getpid())], 1.0)
    first = [ring.claim(4) for _ in range(SLOTS)]
    assert ring.claim(4) is None                                    # nobody has read the first turn
    for turn in reversed(first):                                    # read in any order
        ring.finish(turn)
    assert ring.claim(4) is None                                    # here; of the others it is not known
    ring = Ring(0, ring.segments, 1.0)
    for number in range(5 * SLOTS):                                 # begun and read in pairs, as a backward does
        turns = [ring.claim(4), ring.claim(4)]
        assert [turn.number for turn in turns] == [2 * number, 2 * number + 1]
        for turn in turns:
            ring.finish(turn)


def test_a_rank_that_has_died_or_gives_no_word_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "CHECK_SECONDS", 0.01)
    gone = subprocess.Popen(["true"])                               # a zombie: nobody has waited for it
    while Path(f"/proc/{gone.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass
    for process, told in ((gone.pid, "has died"), (os.getpid(), "gave no word for 0 s")):
        ring = Ring(0, [segment(os.getpid()), segment(process)], 0.05)
        turn = ring.claim(4)
        turn.lay(torch.ones(1))
        with pytest.raises(ConnectionError, match=told):
            turn.wait()
    gone.wait()


def gathered_and_summed(group: Group, seed: int, rows: int) -> None:
    every = [torch.randint(-9, 9, (2 * rows, 3), generator=torch.Generator().manual_seed(seed + n)) for n in (0, 1)]
    mine = every[group.index]
    pending = [start_all_gather(mine, group), start_reduce_scatter(mine, group)]
    assert torch.equal(pending[1].wait(), sum(every)[rows * group.index : rows * (group.index + 1)])
    assert torch.equal(pending[0].wait(), torch.cat(every))


def count_turns(group: Group) -> int:
    return group.memory._ring._turns


def other_ways() -> None:
    """What is laid down, and what is too large for that, many at once, or not possible for one of the ranks."""
    group = open_mesh(Topology(tensor=2)).tensor
    for rows in (4, 40_000, 5):                                     # the second is larger than the first slots
        gathered_and_summed(group, rows, rows)
    assert count_turns(group) == 4 and group.memory._ring.capacity >= 40_000 * 2 * 3 * 8
    many = [start_all_gather(torch.full((1,), float(10 * n + group.index)), group) for n in range(2 * SLOTS)]
    assert [p.wait().tolist() for p in many] == [[10 * n, 10 * n + 1] for n in range(2 * SLOTS)]
    shared_memory.LARGEST = 100
    before = count_turns(group)
    gathered_and_summed(group, 6, 6)
    assert count_turns(group) == before
    shared_memory.LARGEST = 1 << 26
    alone = open_mesh(Topology(tensor=2)).tensor
    folder, shared_memory.FOLDER = shared_memory.FOLDER, Path("/nowhere" if group.index else "/dev/shm")
    gathered_and_summed(alone, 7, 7)
    shared_memory.FOLDER = folder
    assert count_turns(alone) == 0


def counted_block() -> list[dict[str, int]]:
    """Collectives of a block's forward and of its backward."""
    mesh = open_mesh(Topology(tensor=2))
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, hidden_dropout=0.0)
    block = gpt_layers(GPTSetup(model, 16))[1].build(mesh)
    initialize(collect([("block", block)]), mesh.topology, mesh.rank, seed=1)
    batch = MicroBatch(torch.zeros(4, 2, dtype=torch.int64))
    seen: Counter[str] = Counter()

    def counted(name: str, function, *args, **kwargs):
        seen[name] += 1
        return function(*args, **kwargs)

    block(torch.randn(2, 2, 8), batch)                              # the first one makes the shared memory
    for name in ("start_all_gather", "start_reduce_scatter"):
        wrapped = partial(counted, name.removeprefix("start_"), vars(collectives)[name])
        for module in (collectives, layers):
            setattr(module, name, wrapped)
    for name in ("all_reduce", "broadcast", "all_to_all_single", "all_gather_object", "isend", "irecv", "barrier"):
        setattr(dist, name, partial(counted, name, vars(dist)[name]))
    told = []
    x = torch.randn(2, 2, 8, requires_grad=True)
    y = block(x, batch)
    told.append(dict(seen))
    seen.clear()
    y.sum().backward()
    return [*told, dict(seen)]


def on_two_ranks() -> list[dict[str, int]]:
    shared_memory.SPIN_SECONDS = 2e-3       # as a run waits; other ranks of tests sleep at once
    other_ways()
    return counted_block()


def test_every_way_gives_the_same_and_a_block_has_the_fewest_collectives() -> None:
    """Attention and feed-forward each gather and scatter once in the forward, and in the backward once more, where the
    input that was not kept is gathered again."""
    for forward, backward in on_ranks(2, on_two_ranks):
        assert forward == {"all_gather": 2, "reduce_scatter": 2}
        assert backward == {"all_gather": 4, "reduce_scatter": 2}
