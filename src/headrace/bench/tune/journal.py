"""The journal stores each measurement at once, so that an interrupted search can continue.

The search makes the same decisions from the same measurements. So on resuming it is replayed from
the start: it gets stored measurements from the journal, and new ones are appended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.bench.tune.candidates import Candidate
from headrace.bench.tune.trials import Measurement
from headrace.errors import TuneError
from headrace.runs import MetricsLog, read_metrics
from headrace.schema import Fields

_KIND = "measurement"


class Journal:
    """Wraps `measure`: returns a stored measurement if there is one, else measures and stores it.

    `machine` describes the machine and the workload; times from another one cannot be compared.
    Raises `TuneError` if the journal belongs to another search. Drops a half-written last line.
    """

    def __init__(
        self,
        path: Path,
        measure: Callable[[Candidate, int], Measurement],
        machine: Mapping[str, Any],
    ) -> None:
        self._path, self._measure = path, measure
        self._log = MetricsLog(path)  # drops a half-written line
        lines = list(read_metrics(path))
        self._stored = [line for line in lines if line.get("kind") == _KIND]
        begun = next((line for line in lines if line.get("kind") == "machine"), None)
        if begun is None:
            self._log.write("machine", 0, **machine)
        else:
            self._require_same(begun, machine)
        self._next = 0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self._log.close()

    @property
    def stored(self) -> int:
        """How many measurements the file held when it was opened."""
        return len(self._stored)

    @property
    def is_replaying(self) -> bool:
        return self._next < len(self._stored)

    def measure(self, candidate: Candidate, steps: int) -> Measurement:
        """The next measurement: from the journal, or measured now and stored."""
        number, self._next = self._next, self._next + 1
        if number < len(self._stored):
            return self._replayed(number, candidate, steps)
        found = self._measure(candidate, steps)
        self._log.write(
            _KIND, number, candidate=candidate.to_dict(), steps=steps, found=asdict(found)
        )
        return found

    def _replayed(self, number: int, candidate: Candidate, steps: int) -> Measurement:
        line = self._stored[number]
        try:
            same = line["steps"] == steps and (
                Candidate.from_dict(line["candidate"]).key == candidate.key
            )
            found = Fields(line["found"], "found", TuneError).record(Measurement)
        except (KeyError, TypeError, ValueError) as problem:
            raise TuneError(
                f"{self._path}: measurement {number} cannot be read ({problem}); start a new search"
            ) from problem
        if not same:
            raise TuneError(
                f"{self._path}: measurement {number} is not of {candidate.name} over {steps} "
                "steps, which this search asks for: the settings or Headrace have changed; start a "
                "new search"
            )
        return found

    def _require_same(self, begun: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        for name, value in machine.items():
            if begun.get(name) != value:
                raise TuneError(
                    f"{self._path}: the search was started with {name} {begun.get(name)!r}, here "
                    f"it is {value!r}: their times cannot be compared; start a new search"
                )
