"""Signals as a thread sees them: at once, whatever the main thread is waiting for.

Python runs its own handlers between two instructions of the main thread, so never while that waits in a collective. The
signal's number, though, is written to a socket the moment it comes.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import TracebackType

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Signals:
    """While the context lasts, `told` is called with each signal of HANDLED, in a thread of its own. Nothing is done
    where this is not the process's main thread, which alone may say what signals do."""

    def __init__(self, told: Callable[[signal.Signals], None]) -> None:
        self.told = told
        self._before: dict[signal.Signals, object] = {}
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            here, there = self._sockets = socket.socketpair()
            there.setblocking(False)
            self._fd = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, _nothing) for number in HANDLED}
            threading.Thread(target=self._listen, args=(here,), name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sockets is None:
            return
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._fd)
        self._sockets[1].close()                # which ends the thread
        self._sockets = None

    def _listen(self, socket: socket.socket) -> None:
        while True:
            numbers = socket.recv(64)
            if not numbers:                     # closed: the context is over
                socket.close()
                return
            for number in numbers:
                if number in HANDLED:
                    self.told(signal.Signals(number))


def _nothing(number: int, frame: object) -> None:
    """Being there, it keeps the system from ending the process."""
