"""A fault that a test can cause on a fake device: it hangs."""

from __future__ import annotations

import threading


class Hang:
    """Stops a device: `device.hang = Hang()`.

    Queries then return False, and a host thread that waits really blocks until `resume` is called.
    `waited_for` is set as soon as one blocks.
    """

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self._over = threading.Event()

    def wait(self) -> None:
        self.waited_for.set()
        self._over.wait()

    def resume(self) -> None:
        self._over.set()
