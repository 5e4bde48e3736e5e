"""What a benchmark has measured so far, kept where it survives the process that measured it.

A contestant may end the process, by a segmentation fault say, or leave it without a usable device.
The next process goes on from here without that contestant.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

from headrace.errors import BenchError

Activity = Literal["comparing losses", "warming up", "timing", "monitoring", "profiling"]
_START_AGAIN = 75  # EX_TEMPFAIL


class Measured(Protocol):
    """A contestant, as far as this file is concerned."""

    name: str
    timings: list[Any]

    def measured(self) -> dict[str, Any]: ...

    def resume(self, measured: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A contestant that ended the process or the device's context, what it was doing, and how."""

    name: str
    activity: Activity
    why: str

    def __str__(self) -> str:
        return f"{self.why} while {self.activity}"


class EarlierResults:
    """A file of records. Each process appends what it measures; `resume` reads all of them.

    Make it before forking. The first process calls `ended` before each fork but the first.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the program
        self._flags = mmap.mmap(-1, 1)  # shared with the children
        self._size = 0
        self._timings: dict[str, int] = {}  # how many of each contestant's are stored
        self._ending: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the command has ended by itself, with a result or an error."""
        return bool(self._flags[0])

    def end(self) -> None:
        self._flags[0] = 1

    def ended(self, how: str) -> None:
        """Note how the last child has ended."""
        self._ending = how

    def has_grown(self) -> bool:
        """Whether anything was stored since the last call."""
        before, self._size = self._size, os.fstat(self._file.fileno()).st_size
        return self._size > before

    def settled(self, name: str, value: str) -> str:
        """The first value that any of the processes has settled on under that name."""
        for kind, content in self._records():
            if kind == "settled" and content[0] == name:
                return str(content[1])
        self._append("settled", (name, value))
        return value

    def start_again(self) -> NoReturn:
        """End this process, so that another one goes on."""
        os._exit(_START_AGAIN)

    def begin(self, name: str | None, activity: Activity | None = None) -> None:
        """A contestant runs now; None: the workload itself is built."""
        self._append("began", (name, activity))

    def keep(self, contestant: Measured) -> None:
        new = contestant.timings[self._timings.get(contestant.name, 0) :]
        self._append("measured", (contestant.name, contestant.measured(), new))
        self._timings[contestant.name] = len(contestant.timings)

    def lose(self, loss: Loss) -> None:
        self._append("lost", loss)

    def resume(self, contestants: Iterable[Measured]) -> list[Loss]:
        """Give the contestants what is known of them, and return those that were lost. Raises
        `BenchError` if the last process was ended by none of them."""
        by_name = {contestant.name: contestant for contestant in contestants}
        losses: list[Loss] = []
        running: tuple[str | None, Activity | None] | None = None
        for kind, content in self._records():
            if kind == "began":
                running = content
            elif kind == "measured":
                name, measured, timings = content
                by_name[name].resume(measured)
                by_name[name].timings += timings
                self._timings[name] = len(by_name[name].timings)
            elif kind == "lost":
                losses.append(content)
                running = None
        if self._ending is None or running is None:
            return losses
        ended_in, activity = running
        if ended_in is None or activity is None:
            raise BenchError(
                f"the workload ended the process ({self._ending}) while it was built; run its "
                "function alone to see why"
            )
        lost = Loss(ended_in, activity, f"ended the process ({self._ending})")
        self.lose(lost)
        return [*losses, lost]

    def _append(self, kind: str, content: object) -> None:
        self._file.seek(0, os.SEEK_END)
        pickle.dump((kind, content), self._file)
        self._file.flush()

    def _records(self) -> Iterator[tuple[str, Any]]:
        """All records. One that is half written is dropped: its process ended in it."""
        self._file.seek(0)
        while True:
            at = self._file.tell()
            try:
                record = pickle.load(self._file)  # noqa: S301 - our own, and nobody else's
            except (EOFError, pickle.UnpicklingError):
                break
            yield record
        self._file.seek(at)
        self._file.truncate()
