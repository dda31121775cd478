"""Messages between two pipeline ranks of one host, through memory that both have mapped.

A message is copied in and copied out; one byte on a socket says that it is there, and another that it was asked for.
Gloo needs several wake-ups of threads of its own for that, and copies through the kernel.
"""

from __future__ import annotations

import heapq
import mmap
import os
import socket
import struct
import sys
import uuid
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

SLOTS = 63                              # of each direction; those that are never used take no memory
SMALLEST, LARGEST = 1 << 16, 1 << 26    # bytes of a slot; what is larger goes another way
ALIGNED = 64                            # bytes, of each tensor's place in a slot
NAME, NOBODY = 16, bytes(16)            # bytes of a line's name, and the name where there is no line

# A byte on the socket is one of these, plus the number of a slot.
SENT, TAKEN, ASKED_AND_TAKEN, ASKED = 0, 64, 128, 192


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    """What a message takes of a slot."""
    return sum(-x.nbytes % ALIGNED + x.nbytes for x in tensors)


class Offer:
    """The one end of a line before the other end has taken it. Raises OSError where there is no such memory or socket.

    name  which the other end needs
    """

    def __init__(self, nbytes: int) -> None:
        self.name, capacity = uuid.uuid4().bytes, max(SMALLEST, 1 << (nbytes - 1).bit_length())
        if sys.platform != "linux":
            raise OSError(f"{sys.platform} has no sockets without a file")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address(self.name))
        self._listener.listen(1)
        self._memory = os.memfd_create("megazero")
        os.ftruncate(self._memory, 2 * SLOTS * capacity)

    def conclude(self, is_taken: bool, peer: int, seconds: float) -> Line | None:
        """The line, where the other end has joined it. The offer is over."""
        with self._listener:
            line = None
            if is_taken:
                self._listener.settimeout(seconds)
                wire, _ = self._listener.accept()
                socket.send_fds(wire, [b"."], [self._memory])
                line = Line(wire, mmap.mmap(self._memory, 0), 0, peer, seconds)
            os.close(self._memory)
            return line


def offered(nbytes: int) -> Offer | None:
    """An offer of a line for messages of so many bytes; None where none can be made."""
    try:
        return Offer(nbytes)
    except OSError:
        return None


def joined(name: bytes) -> socket.socket | None:
    """The connection to whoever offers a line of this name; None where nobody does on this host."""
    wire = socket.socket(socket.AF_UNIX)
    try:
        wire.connect(_address(name))
    except OSError:
        wire.close()
        return None
    return wire


def taken(wire: socket.socket, peer: int, seconds: float) -> Line:
    """The other end of an offered line. Raises ConnectionError where the one that offered it is gone."""
    wire.settimeout(seconds)
    try:
        _, received, *_ = socket.recv_fds(wire, 1, 1)
    except ConnectionError:
        received = []
    if not received:
        raise ConnectionError(f"Connection closed by peer: pipeline rank {peer}")
    line = Line(wire, mmap.mmap(received[0], 0), 1, peer, seconds)
    os.close(received[0])
    return line


def _address(name: bytes) -> bytes:
    """In the namespace of sockets that have no file, which only this host's network knows."""
    return b"\0megazero-" + name.hex().encode()


class Line:
    """One end of it. Messages of one direction arrive in the order in which they are sent and asked for.

    A send is over when the other end has asked for the message, as it is with gloo and NCCL; but its tensors may be
    changed at once. Raises ConnectionError where the other end is gone, or silent for `seconds`.
    """

    def __init__(self, wire: socket.socket, memory: mmap.mmap, index: int, peer: int, seconds: float) -> None:
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, SLOTS, -1)
        self.peer, self.seconds, self.capacity = peer, seconds, slots.shape[-1]
        self._out, self._in = slots[index], slots[1 - index]
        self._wire = wire
        wire.setblocking(True)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", max(1, round(seconds)), 0))
        self._free = list(range(SLOTS))                     # a heap: the lowest is taken, so that few are ever used
        self._sent = 0
        self._asked = 0                                     # so many of those sent were asked for
        self._here: deque[int] = deque()                    # slots of messages that nobody has asked for
        self._awaited: deque[Receiving] = deque()           # and those who have asked for messages that are not here

    def send(self, tensors: Sequence[Tensor]) -> Sending:
        """Send tensors of any layout."""
        self._listen(wait=False)
        while not self._free:
            self._listen()
        slot = heapq.heappop(self._free)
        for place, x in zip(_places(self._out[slot], tensors), tensors, strict=True):
            place.copy_(x)
        self._sent += 1
        try:
            self._wire.send(bytes((SENT + slot,)))
        except ConnectionError:
            raise self._is_gone() from None
        return Sending(self, self._sent)

    def receive(self, tensors: Sequence[Tensor]) -> Receiving:
        """Ask for a message of such tensors, which are filled when `wait` of what is returned ends."""
        receiving = Receiving(self, tensors)
        self._listen(wait=False)
        if self._here:
            receiving.take(slot := self._here.popleft())
            self._answer(ASKED_AND_TAKEN + slot)
        else:
            self._awaited.append(receiving)
            self._answer(ASKED)
        return receiving

    def _answer(self, word: int) -> None:
        """An answer that nobody is left to hear is no error: whoever needs something of the other end will see."""
        try:
            self._wire.send(bytes((word,)))
        except ConnectionError:
            pass

    def _is_gone(self) -> ConnectionError:
        return ConnectionError(f"Connection closed by peer: pipeline rank {self.peer}")

    def _listen(self, wait: bool = True) -> None:
        """Read what the other end has said, of which something must come with `wait`."""
        try:
            words = self._wire.recv(4096, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if wait:
                raise ConnectionError(f"pipeline rank {self.peer} gave no word for {self.seconds:.0f} s") from None
            return
        except ConnectionError:
            words = b""
        if not words and wait:
            raise self._is_gone()
        for word in words:
            kind, slot = word & 192, word & 63
            if kind != SENT:
                self._asked += kind != TAKEN
                if kind != ASKED:
                    heapq.heappush(self._free, slot)
            elif self._awaited:
                self._awaited.popleft().take(slot)
                self._answer(TAKEN + slot)
            else:
                self._here.append(slot)


class Sending:
    """A message under way."""

    def __init__(self, line: Line, number: int) -> None:
        self._line, self._number = line, number

    def wait(self) -> None:
        """Wait until it has been asked for."""
        while self._line._asked < self._number:
            self._line._listen()


class Receiving:
    """A message that was asked for."""

    def __init__(self, line: Line, tensors: Sequence[Tensor]) -> None:
        self._line, self._tensors, self._is_here = line, tensors, False

    def take(self, slot: int) -> None:
        """It is in this slot."""
        for place, x in zip(_places(self._line._in[slot], self._tensors), self._tensors, strict=True):
            x.copy_(place)
        self._is_here = True

    def wait(self) -> None:
        """Wait until the tensors are filled."""
        while not self._is_here:
            self._line._listen()


def _places(slot: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where each tensor of a message lies in a slot, in its dtype and shape."""
    places, at = [], 0
    for x in tensors:
        places.append(slot[at : at + x.nbytes].view(x.dtype).view(x.shape))
        at += nbytes_of((x,))
    return places
