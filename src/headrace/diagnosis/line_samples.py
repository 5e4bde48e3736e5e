"""At which lines the training waits, from looking ten times a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import NamedTuple

from headrace.diagnosis.waits import users_frames, wait_at
from headrace.source_lines import short_path

SAMPLE_S = 0.1
_MAX_PLACES = 1000
#: Forms of which the line alone does not say that the host waits there.
_NO_WAITS = ("other", "inside PyTorch", "in backward", "headrace")


class WaitingPlace(NamedTuple):
    """A line and the form of its wait."""

    place: str
    title: str


class LineSample(NamedTuple):
    """Where the training was at a moment; None if it did not wait there."""

    at_ns: int
    place: WaitingPlace | None


class LineSampler:
    """Looks at the line where a thread is, in a thread of its own, inside its block."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._stop = threading.Event()
        self._samples: list[LineSample] = []
        self._known: dict[tuple[CodeType, int], WaitingPlace | None] = {}
        self._looker = threading.Thread(target=self._run, name="headrace sampler", daemon=True)

    def __enter__(self) -> LineSampler:
        self._looker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._looker.join()

    def begin(self, thread: int) -> None:
        """Look at this thread from now on."""
        self._thread = thread

    def take(self) -> Sequence[LineSample]:
        """The samples since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def look(self, frame: FrameType | None) -> None:
        """Take a sample of a thread that is at this frame."""
        innermost, _ = users_frames(frame)
        place = None
        if innermost is not None:
            key = innermost.f_code, innermost.f_lasti
            if key not in self._known:
                if len(self._known) >= _MAX_PLACES:
                    self._known.clear()
                self._known[key] = _waiting_place(frame)
            place = self._known[key]
        self._samples.append(LineSample(perf_counter_ns(), place))

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            if self._thread is not None:
                self.look(sys._current_frames().get(self._thread))


def _waiting_place(frame: FrameType | None) -> WaitingPlace | None:
    wait = wait_at(frame)
    line = wait.called_from or wait.line
    if line is None or wait.form.name in _NO_WAITS:
        return None
    return WaitingPlace(f"{short_path(line.file)}:{line.line}", wait.form.title)
