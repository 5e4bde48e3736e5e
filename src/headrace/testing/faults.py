"""What a fake device can suffer: work that is never done. (Memory that ends is the checker's.)"""

from __future__ import annotations

import threading


class Hang:
    """A device that has stopped: `device.hang = Hang()`. Queries say no, and a host that waits
    stands still, for real, until `resume`. `waited_for` is set once one does."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self._over = threading.Event()

    def wait(self) -> None:
        self.waited_for.set()
        self._over.wait()

    def resume(self) -> None:
        self._over.set()
