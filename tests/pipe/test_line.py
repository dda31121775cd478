"""Lines between neighbours in a pipeline: what is sent arrives in order and in any layout, a send is over when it was
asked for, and whoever is gone or silent is told of. And when there is a line at all."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from megazero.parallel.groups import open_mesh
from megazero.parallel.topology import Topology
from megazero.pipe import line
from megazero.pipe.line import SLOTS, Line, Offer
from megazero.pipe.p2p import Wires
from tests.harness import on_ranks


def ends(nbytes: int = 100, seconds: float = 30.0) -> tuple[Line, Line]:
    """Both ends of a line."""
    offer = Offer(nbytes)
    wire = line.joined(offer.name)
    first = offer.conclude(True, 1, seconds)
    return first, line.taken(wire, 0, seconds)


def test_an_offer_is_taken_or_leaves_nothing_behind() -> None:
    """Neither memory nor a name under which others could join."""
    before = set(os.listdir("/proc/self/fd"))
    offer = Offer(1)
    assert offer.conclude(False, 1, 30.0) is None
    assert line.joined(offer.name) is None and line.joined(line.NOBODY) is None
    assert set(os.listdir("/proc/self/fd")) == before
    offer = Offer(1)
    wire = line.joined(offer.name)
    del offer
    gc.collect()                                                    # whoever made it is gone
    with pytest.raises(ConnectionError, match="pipeline rank 0"):
        line.taken(wire, 0, 5.0)


def number(n: int) -> torch.Tensor:
    return torch.full((3,), n)


def test_messages_of_both_ways_arrive_in_order() -> None:
    """Whether they are asked for before or after they are sent, or more than there are slots for in turn."""
    first, second = ends()
    for ahead in (0, 1, 5):
        for source, target in ((first, second), (second, first)):
            got, asked, sent = [torch.zeros(3, dtype=torch.int64) for _ in range(2 * SLOTS)], [], []
            for n in range(2 * SLOTS + ahead):
                if n < 2 * SLOTS:
                    asked.append(target.receive([got[n]]))
                if n >= ahead:
                    sent.append(source.send([number(n - ahead)]))
                    asked[n - ahead].wait()
                    sent[-1].wait()
            assert [x.tolist() for x in got] == [[n] * 3 for n in range(2 * SLOTS)]
    early = [first.send([number(n)]) for n in range(SLOTS)]         # all slots are full
    for n, sending in enumerate(early):
        x = torch.zeros(3, dtype=torch.int64)
        second.receive([x]).wait()
        sending.wait()
        assert x.tolist() == [n] * 3


def test_receives_may_be_waited_for_in_any_order() -> None:
    first, second = ends()
    got = [torch.zeros(3, dtype=torch.int64) for _ in range(4)]
    asked = [second.receive([x]) for x in got]
    for n in range(4):
        first.send([number(n)])
    for receiving in reversed(asked):
        receiving.wait()
    assert [x[0].item() for x in got] == [0, 1, 2, 3]


def test_a_message_is_of_any_tensors() -> None:
    """Several, of several dtypes, empty, scalar, and not contiguous at either end; what was sent may change at once."""
    first, second = ends(1 << 17)
    wide = torch.arange(24.0).view(4, 6)
    message = [wide.T, torch.tensor(7, dtype=torch.int8), torch.zeros(0, 5), wide[:, ::2].bfloat16(), wide > 3]
    expected = [x.clone() for x in message]
    got = [torch.zeros(4, 6).T, torch.zeros((), dtype=torch.int8), torch.ones(0, 5),
           torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 6, dtype=torch.bool)]
    first.send(message)
    wide.fill_(-1)
    second.receive(got).wait()
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_a_send_is_over_when_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: what is under way stays bounded. Few slots are ever used where few messages are under way."""
    first, second = ends(seconds=1.0)
    sending = first.send([number(1)])
    with pytest.raises(ConnectionError, match="pipeline rank 1 gave no word for 1 s"):
        sending.wait()
    got = [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
    second.receive([got[0]])
    sending.wait()
    second.receive([got[1]])                                        # asked for before it is sent
    first.send([number(2)]).wait()
    assert len(second._awaited) == 1 and not got[1].any()           # not taken yet: its slot waits
    for _ in range(3 * SLOTS):
        first.send([number(3)])
        second.receive([got[0]]).wait()
    assert not first._out[2:].any(), "two slots do for two messages under way"


def test_who_is_gone_is_told_of() -> None:
    """To whoever still needs something of it; what it sent before is there, and answers to it are no error."""
    first, second = ends()
    for n in (1, 2):
        first.send([number(n)])
    del first
    gc.collect()
    got = torch.zeros(3, dtype=torch.int64)
    for n in (1, 2):
        second.receive([got]).wait()
        assert got.tolist() == [n] * 3
    with pytest.raises(ConnectionError, match="Connection closed by peer: pipeline rank 0"):
        second.receive([got]).wait()
    with pytest.raises(ConnectionError, match="Connection closed by peer: pipeline rank 0"):
        for _ in range(2):
            second.send([got])


def capacities(other_host: bool, largest: int = 1 << 26) -> list[int]:
    """What the line between two ranks holds after each of some offers, 0 for no line; messages pass in any case."""
    mesh = open_mesh(Topology(2))
    wires, found = Wires(mesh.pipeline, {(0, 1), (1, 0)}), []
    line.LARGEST = largest
    if other_host and mesh.rank == 1:
        line._address = lambda name: b"\0elsewhere-" + name         # as if the name were unknown here
    for numbers in (1 << 10, 1 << 15, 1 << 9, 1 << 20):
        x = torch.full((numbers,), float(mesh.rank + 1))
        (wires.accept if mesh.rank else wires.offer)(1 - mesh.rank, line.nbytes_of([x]))
        got = torch.zeros_like(x)
        arriving, sending = wires.receive([got], 1 - mesh.rank), wires.send([x], 1 - mesh.rank)
        arriving.wait()
        sending.wait()
        assert got.eq(2 - mesh.rank).all()
        own = wires._lines[1 - mesh.rank]
        found.append(0 if own is None else own.capacity)
    return found


def test_a_line_grows_with_its_messages_and_ends_alone_decide_if_there_is_one() -> None:
    """Not between hosts, and not for a message above the bound, which goes over gloo."""
    for found in on_ranks(2, capacities, False):
        assert found == [1 << 16, 1 << 17, 1 << 17, 1 << 22]
    for found in on_ranks(2, capacities, False, 1 << 20):
        assert found == [1 << 16, 1 << 17, 1 << 17, 1 << 17]
    for found in on_ranks(2, capacities, True):
        assert found == [0, 0, 0, 0]


def no_memory() -> list[int]:
    def refuse(name: str) -> int:
        raise OSError("no memory")

    os.memfd_create = refuse
    return capacities(False)


def test_where_there_is_no_memory_messages_go_over_gloo() -> None:
    assert on_ranks(2, no_memory) == [[0] * 4] * 2
