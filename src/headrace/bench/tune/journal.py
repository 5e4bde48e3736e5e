"""What was measured, kept as it comes: a search that was interrupted goes on from there.

The search takes the same way through the same measurements. So a journal is gone through from its
start: what is in it is not measured again, and what comes after is appended.
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
    """Stands between a search and `measure`. A line that a killed process left half written is
    dropped. `machine` says where and what is measured: times of another are of no use.

    Raises `TuneError` if the journal is another search's.
    """

    def __init__(
        self,
        path: Path,
        measure: Callable[[Candidate, int], Measurement],
        machine: Mapping[str, Any],
    ) -> None:
        self._path, self._measure = path, measure
        self._log = MetricsLog(path)  # drops half a line
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
        """How many measurements it had when it was opened."""
        return len(self._stored)

    @property
    def is_replaying(self) -> bool:
        return self._next < len(self._stored)

    def measure(self, candidate: Candidate, steps: int) -> Measurement:
        """From the journal if it is there, else measured now and written down."""
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
                f"{self._path}: measurement {number} cannot be read ({problem}); begin anew"
            ) from problem
        if not same:
            raise TuneError(
                f"{self._path}: measurement {number} is of another candidate than "
                f"{candidate.name} over {steps} steps, which this search asks for: the settings "
                "or Headrace have changed; begin anew"
            )
        return found

    def _require_same(self, begun: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        for name, value in machine.items():
            if begun.get(name) != value:
                raise TuneError(
                    f"{self._path}: was begun with {name} {begun.get(name)!r}, here it is "
                    f"{value!r}: times of the two cannot be compared; begin anew"
                )
