"""Before a capture: would a graph repeat what the step does?

A shape's last batches before its capture are watched. Two in a row must do the same, and read the
same tensors: a graph would repeat what Python decided at capture.
"""

from __future__ import annotations

from collections import Counter

import torch

from headrace.engine.step_trace import StepTrace, Storage

# Two batches of a shape in a row must do the same: so many are compared before it is given up.
_MOST_WATCHED = 6
# A batch's operations take memory to remember: shapes of which one batch was watched so far.
_MOST_REMEMBERED = 8


class StepWatch:
    """What watched batches did, by the hash of their shape. Batches are watched from a shape's
    `first` use on; from its use number `last` on even where many other shapes are, too."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._traces: dict[int, StepTrace] = {}
        self._differences: Counter[int] = Counter()
        #: Shapes of which two batches did the same, and what else they read.
        self._agreed: dict[int, list[torch.Tensor]] = {}
        self._made: set[Storage] = set()

    def wants(self, key: int, uses: int) -> bool:
        """Whether a shape's next batch, after so many, is to be watched."""
        if key in self._agreed or uses < self._first:
            return False
        # A loader that never repeats a shape must not be watched for ever.
        return key in self._traces or uses >= self._last or len(self._traces) < _MOST_REMEMBERED

    def has_agreed(self, key: int) -> bool:
        return key in self._agreed

    def read_by(self, key: int) -> list[torch.Tensor]:
        """What batches of a shape read besides the batch and what the step is known to read."""
        return self._agreed[key]

    def learn(self, key: int, trace: StepTrace, known: set[Storage], *, first: bool) -> str | None:
        """Note what a batch did. Returns why the step cannot be captured, if that is clear now. A
        shape's first batch may be the one in which something is set up, once for all."""
        trace.read = {one: read for one, read in trace.read.items() if one not in known}
        for storage, read in trace.read.items():
            if storage in self._made:
                where = "" if read.line is None else f" at {read.line}"
                return (
                    f"the step reads{where} a tensor that it made for an earlier batch, and a "
                    "graph would go on with the old one: keep one tensor, and write to it in place"
                )
        if not first:
            self._made = {one for one in self._made | trace.survivors() if not one.expired()}
        return self._compare(key, trace)

    def _compare(self, key: int, trace: StepTrace) -> str | None:
        """With the batch of this shape before. Two that did the same may be captured."""
        before = self._traces.pop(key, None)
        difference = None if before is None else trace.difference(before)
        if before is not None and difference is None:
            self._agreed[key] = [read.tensor for read in trace.read.values()]
            return None
        if difference is not None:
            self._differences[key] += 1
            if self._differences[key] == _MOST_WATCHED - 1:
                return f"the step is not the same for each batch: {difference}"
        if len(self._traces) == _MOST_REMEMBERED:
            self._traces.pop(next(iter(self._traces)))
        self._traces[key] = trace
        return None

    def forget(self) -> None:
        """Watch each shape anew."""
        self._agreed.clear()
        self._traces.clear()
