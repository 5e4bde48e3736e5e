"""What the dispatch mode needs to know about the call that the function mode is running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.device import CaptureQuery, Obstacle
    from headrace.fake.tape import Tape


class ModeCall(threading.local):
    """What the dispatch mode needs to know about the call that the function mode is running."""

    #: Where `device=` asks for the result: "device" or "host".
    named: str | None = None
    #: "device" in a call on device tensors, "host" in any other call, None outside of calls.
    inside: str | None = None
    #: "to device" or "to host" while a tensor is moved; `non_blocking` as in `.to()`.
    moving: str | None = None
    non_blocking = False
    #: True while `x[i] = 1.0` runs: PyTorch makes a tensor of the number and copies it.
    storing_number = False
    #: True while PyTorch may check values that it checks on the CPU only: the host does not wait.
    checking_values = False
    #: The capture that this thread is making, and the obstacles that `device.watch()` collects.
    tape: Tape | None = None
    obstacles: list[Obstacle] | None = None
    #: Answers code of this thread that asks whether its work is being captured.
    capture_query: CaptureQuery | None = None

    @contextmanager
    def changed(self, **changes: Any) -> Iterator[None]:
        """Change some fields inside the block."""
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            yield
        finally:
            vars(self).update(before)
