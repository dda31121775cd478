"""The lookout of one rank: a thread beside the training that hears signals, tells other ranks of a stop or a failure
through the job's store, and sees who has gone silent and what hangs.

The store is that of the rendezvous, on a connection of its own; while nothing happens a rank asks it one question a
second. What ranks write there:

    alarm             something has happened: look at the others
    stop              why the run is to end; `left`: somebody has left before the training began
    furthest, frozen  the furthest position of all ranks, and how many have told theirs (see stopping.py)
    failed            the rank that failed first
    hang              the rank that first saw nothing move; `doing/RANK` of each; `shown`, when all has been shown
    beat/RANK         a number that grows while the rank lives; "left" when it is through
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .hang import describe, stacks, table
from .parallel.activity import Activity
from .parallel.collectives import AgreedError
from .parallel.groups import World, is_lost_peer
from .signals import Signals
from .stopping import Stop

TICK = 1.0              # seconds between questions to the store; while ranks agree on where to stop, FAST
FAST = 0.05
BEAT = 5.0              # seconds between signs of life
SILENCE = 30.0          # seconds without one after which a rank counts as lost
GRACE = 5.0             # seconds in which a rank leaves by itself when another has failed
BEHIND = 0.3            # seconds that it stays behind that one, so that torchrun sees which was the first
LINGER = 5.0            # seconds in which a launcher that has stopped another host's ranks stops its own
PATIENCE = 10.0         # seconds for all ranks to say what they do when the job hangs
PROGRAM = "pretrain_gpt.py"


@dataclass(frozen=True)
class Watched:
    """What a lookout is to look for.

    signals       whether signals stop the run
    kill_switch   a file that does, when it is there; rank 0 looks
    hang_seconds  without any progress of a rank, after which the job hangs; None: never
    """

    signals: bool = True
    kill_switch: Path | None = None
    hang_seconds: float | None = None


class Lookout:
    """A context around all that a run does. An error that leaves it is shown once, and the other ranks are told.

    stop      where the run ends
    activity  what this rank does; its beats standing still is a hang
    code      the exit code of the process, when the context is over
    """

    def __init__(self, world: World, how: Watched) -> None:
        self.world, self.how = world, how
        self.stop, self.activity, self.code = Stop(), Activity(), 0
        self._store: Any = None
        self._signals = Signals(self._heard)
        self._interrupts, self._signalled = 0, False
        self._starting, self._over = True, False
        self._beginning, self._left = threading.Lock(), False   # held, and true, where ranks leave before the training
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)
        self._told = self._decided = False                  # what this rank did about a stop
        self._failed: float | None = None                   # when it saw that another one had failed
        self._awake, self._looked = 0.0, time.monotonic()   # seconds in which this thread ran, not those suspended
        self._beat, self._beaten = 0, -BEAT
        self._life = "", 0.0                                # the next rank's last sign of life, and when that came
        self._moved = -1, 0.0                               # this rank's beats, and when they grew
        self._shown = False                                 # whether a hang is being shown
        self._answered = 0                                  # how often the store has answered this thread
        self._asks = "the job's store"                      # or the disk of a file

    def __enter__(self) -> Lookout:
        if self.how.signals:
            self._signals.__enter__()
        return self

    def connect(self, store: Any) -> None:
        """The ranks have met in `store`; None: there are no others."""
        self._store = store
        self._thread.start()
        if store is not None:
            threading.Thread(target=self._guard, name="guard", daemon=True).start()

    def train(self) -> None:
        """Training begins, on all ranks: from now on they stop together, and until now each has left at once. One that
        is about to leave does not return."""
        with self._beginning:
            self._starting = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        shown = error is None or self._shows(error)
        self._over = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.how.signals:
            self._signals.__exit__(kind, error, trace)
        return shown

    # ------------------------------------------------------------------------------------------------------ stopping

    def _heard(self, number: signal.Signals) -> None:
        """In the thread of the signals."""
        self._signalled = True
        if self.code:                                       # it is leaving, and torchrun has seen another one leave
            return
        self._interrupts += number is signal.SIGINT
        if self._interrupts > 1:
            self._leave("leaves at once, without saving: interrupted twice", 128 + signal.SIGINT)
        if self._starting:
            self._leave_start(number.name)
        if self.world.rank == 0 and self.stop.reason is None:
            again = "; again to leave at once" if number is signal.SIGINT else ""
            print(f"{number.name}: stopping at the next micro-batch{again}", flush=True)
        self.stop.ask(number.name)
        self._wake.set()

    def _leave_start(self, reason: str, *, left: bool = False) -> None:
        """Nothing is trained yet, so there is nothing to save or to agree on. This returns where training has begun,
        unless another rank has `left` before: without that one there is no first step."""
        with self._beginning:
            if not (self._starting or left):
                return
            self._left = True
            if self._store is not None:
                try:
                    for key in ("stop", "left", "alarm"):
                        self._store.set(key, reason)
                except RuntimeError:                        # who holds the store has left already
                    pass
                time.sleep(2 * TICK)                        # so long the others may need to see it
            self.linger()
            if self.world.rank == 0:
                print(f"left before the first step, as asked: {reason}", flush=True)
            self._leave(None, 0)

    def linger(self) -> None:
        """Wait where other ranks alone were told to stop, under a launcher of several hosts: each stops its own ranks
        when a host has come, and one whose ranks had ended by themselves, with code 0, would hold the job for done."""
        if self.world.launched and self.stop.reason == signal.SIGTERM.name and not self._signalled:
            time.sleep(LINGER)

    def _agree(self) -> None:
        """Say how far this rank is, and learn how far all go."""
        self.stop.ask(self._store.get("stop").decode())
        if self._starting or self._store.check(["left"]):
            self._leave_start(self.stop.reason, left=self._store.check(["left"]))
        if not self._told:
            mine = self.stop.freeze()
            known = self._store.compare_set("furthest", "", str(mine)).decode()
            while int(known) < mine:
                known = self._store.compare_set("furthest", known, str(mine)).decode()
            self._store.add("frozen", 1)
            self._told = True
        if not self._decided and self._store.add("frozen", 0) == self.world.size:
            self.stop.decide(int(self._store.get("furthest")))
            self._decided = True

    # ------------------------------------------------------------------------------------------------------- looking

    def _look(self) -> None:
        """In the thread of the lookout."""
        while not self._over:
            now = time.monotonic()
            self._awake += min(now - self._looked, 2 * TICK)
            self._looked = now
            try:
                if self._store is None:
                    self._look_here()
                else:
                    self._look_around()
                self._answered += 1
            except RuntimeError as error:                   # of the store
                if not self._over:
                    self._wake.wait(GRACE)                  # the main thread may be at its end, or see it too
                    if not self._over:
                        self._leave(f"leaves: the job's store is gone: {_first_line(error)}", 1)
            self._wake.wait(FAST if self._told and not self._decided else TICK)
            self._wake.clear()
        if self._store is not None and not self.code:
            try:
                self._store.set(f"beat/{self.world.rank}", "left")
            except RuntimeError:                            # who holds the store was through first
                pass

    def _guard(self) -> None:
        """In a thread of its own: the store of a host that has lost its power or its link does not answer at all."""
        waited, answered = 0.0, -1
        while self._thread.is_alive():
            waited = waited + TICK if answered == self._answered else 0.0
            answered = self._answered
            if waited > SILENCE:
                self._leave(f"error: rank {self.world.rank} had no answer of {self._asks} for {SILENCE:.0f} s", 1)
            time.sleep(TICK)

    def _look_here(self) -> None:
        self._look_for_file()
        if self.stop.reason is not None and not self._decided:
            if self._starting:
                self._leave_start(self.stop.reason)
            self.stop.decide(self.stop.freeze())
            self._decided = True
        if self._hangs():
            self._leave(f"{self._hang_line()}\n{table({0: describe(self.activity)}, 1)}\n{stacks()}", 1)

    def _look_around(self) -> None:
        store = self._store
        self._look_for_file()
        self._live()
        if self.stop.reason is not None and not self._told:
            store.set("stop", self.stop.reason)
            store.set("alarm", "")
        if self._hangs():
            store.compare_set("hang", "", str(self.world.rank))
            store.set("alarm", "")
        if not store.check(["alarm"]):
            return
        if store.check(["failed"]):
            self._leave_after(int(store.get("failed")))
        if store.check(["hang"]):
            self._show_hang(int(store.get("hang")))
        if store.check(["stop"]):
            self._agree()

    def _look_for_file(self) -> None:
        path = self.how.kill_switch
        if path is None or self.world.rank:
            return
        store, self._asks = self._asks, f"the disk of --kill-switch-path {path}"
        if path.exists():
            self.stop.ask(f"--kill-switch-path {path}")
        self._asks = store

    # ------------------------------------------------------------------------------------------------------- failing

    def _live(self) -> None:
        """Give a sign of life, and look for that of the next rank."""
        now, following = self._awake, (self.world.rank + 1) % self.world.size
        if now - self._beaten < BEAT:
            return
        self._beaten, self._beat, key = now, self._beat + 1, f"beat/{following}"
        self._store.set(f"beat/{self.world.rank}", str(self._beat))
        life = self._store.get(key).decode() if self._store.check([key]) else ""
        if life != self._life[0] or life == "left":
            self._life = life, now
        if now - self._life[1] > SILENCE and self._claim(following) == following and self._failed is None:
            self._say(f"error: rank {following} is gone: no sign of life for {SILENCE:.0f} s")

    def _claim(self, rank: int) -> int:
        """Tell all that `rank` has failed; which one failed first."""
        try:
            first = int(self._store.compare_set("failed", "", str(rank)))
            self._store.set("alarm", "")
        except RuntimeError:                                # who holds the store is gone, so nobody can be told
            return rank
        return first

    def _leave_after(self, failed: int) -> None:
        """Another rank has failed: leave, if this one has not done so by itself for some time."""
        if self._failed is None:
            self._failed = self._awake
        if self._awake - self._failed > GRACE:
            self._leave(f"leaves, for rank {failed} has failed", 1)

    def _shows(self, error: BaseException) -> bool:
        """Say what is wrong, unless another rank has said it. Whether that is all there is to say."""
        rank, size, self.code = self.world.rank, self.world.size, 1
        if isinstance(error, AgreedError):
            if rank == 0:
                self._say(f"error: {error}")
            return True
        if self._store is None:
            if isinstance(error, ValueError | OSError):
                self._say(f"error: {error}")
                return True
            return False
        if self._shown:                                     # others have left the hang that this rank still shows
            self._thread.join()
        lost = is_lost_peer(error)
        if lost and self._has_been_left():
            self.linger()
            self._leave(None, 0)
        first = self._claim(rank)
        if first != rank:
            also = "" if lost else f"; here: {type(error).__name__}: {_first_line(error)}"
            text = f"rank {rank} of {size} leaves, for rank {first} has failed{also}"
        elif lost:
            text = f"error: rank {rank} of {size} has lost another one: {_first_line(error)}: {describe(self.activity)}"
        elif isinstance(error, ValueError | OSError):
            text = f"error: {error} (rank {rank} of {size})"
        else:
            text = f"error: rank {rank} of {size} failed:\n{''.join(traceback.format_exception(error))}"
        self._say(text)
        time.sleep(BEHIND if lost or first != rank else 0.0)
        self._leave(None, 1)
        return True

    def _has_been_left(self) -> bool:
        """Whether another rank left as asked before the training began, which this one had no time to hear of."""
        try:
            if not self._store.check(["left"]):
                return False
            self.stop.ask(self._store.get("left").decode())
            return True
        except RuntimeError:                                # the same for who holds the store
            return self.stop.reason is not None and (self._starting or self._left)

    # ------------------------------------------------------------------------------------------------------- hanging

    def _hangs(self) -> bool:
        beats, now = self.activity.beats, self._awake
        if beats != self._moved[0]:
            self._moved = beats, now
        return self.how.hang_seconds is not None and now - self._moved[1] > self.how.hang_seconds

    def _hang_line(self) -> str:
        minutes = self.how.hang_seconds / 60
        return f"error: the job hangs: nothing moves for {minutes:g} minutes (--hang-timeout-minutes)"

    def _show_hang(self, seen_by: int) -> None:
        """All ranks say what they do, the one that saw the hang shows it, then each shows where it is in the code."""
        store, rank, size, end = self._store, self.world.rank, self.world.size, time.monotonic() + PATIENCE
        self._shown = True
        store.set(f"doing/{rank}", describe(self.activity))
        if seen_by == rank:
            doing = {}
            for other in range(size):
                while not store.check([f"doing/{other}"]) and time.monotonic() < end:
                    self._answered += 1
                    time.sleep(FAST)
                if store.check([f"doing/{other}"]):
                    doing[other] = store.get(f"doing/{other}").decode()
            self._say(f"{self._hang_line()}, seen by rank {rank}\n{table(doing, size)}")
            store.set("shown", "")
        while not store.check(["shown"]) and time.monotonic() < end + PATIENCE:
            self._answered += 1
            time.sleep(FAST)
        self._say(f"rank {rank} is here:\n{stacks()}")
        time.sleep(2 * TICK)                                # whoever holds the store leaves after those that ask it
        self._leave(None, 1)

    # ------------------------------------------------------------------------------------------------------- leaving

    def _say(self, text: str) -> None:
        """In one piece, so that ranks do not speak at once."""
        sys.stdout.flush()
        sys.stderr.write(f"{PROGRAM}: {text}\n")
        sys.stderr.flush()

    def _leave(self, text: str | None, code: int) -> None:
        """End this process, whatever its other threads wait for."""
        if text is not None:
            self._say(text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
