"""Checks before a capture that a graph would repeat what the step does.

`StepWatch` compares the last batches of a shape before its capture. Two in a row must run the same
operations on the same tensors: otherwise a graph would repeat what Python decided at capture.

Some code asks PyTorch whether it is being captured, and runs something else then: transformers
reads a padding mask back to the host (`padding_mask.all()`) only outside of captures. Such a step
is watched again, and from then on is told in each trial that it is being captured. So the trial
runs what the capture would run, and only what stands in the way of the capture itself counts. This
is right because the answer is true for every batch that a graph will train on, and because a
library that asks promises the same result either way, up to rounding: it may choose another kernel.
Optimizers ask too, and refuse a capture unless they were made capturable, which happens only right
before one; they are told the truth.

Code that asks and then does what a graph can repeat, as transformers without a mask, needs no other
answer. If the capture `can_deny`, it is told "no" in the capture as well, so that the graph has the
kernels of the plain loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import torch

from headrace.capture.watching.host_constants import HostConstants
from headrace.capture.watching.host_draws import HostDraws
from headrace.capture.watching.trace import OperationTrace, Storage
from headrace.capture.watching.traced_run import TracedRun
from headrace.device import CaptureQuery

# Give up capturing after this many batches of a shape without two in a row that agree.
_MAX_WATCHED = 6
# A trace takes memory. Shapes that were watched once and wait for a second batch keep theirs.
_MAX_TRACES = 8


class StepWatch:
    """Compares traces of watched batches, by the key of their graph, here called their shape. Not
    by its hash: -1 and -2 have the same.

    A shape's batches are watched from its `first` use on, while fewer than `_MAX_TRACES` other
    shapes are being watched, and from its `last` use on in any case.
    """

    def __init__(self, first: int, last: int, *, can_deny: bool = False) -> None:
        self._first, self._last = first, last
        self._can_deny = can_deny
        self._traces: dict[Hashable, OperationTrace] = {}
        self._differences: Counter[Hashable] = Counter()
        #: Shapes of which two batches agreed, with the trace of the second.
        self._agreed: dict[Hashable, OperationTrace] = {}
        self._made: set[Storage] = set()
        #: Whether trials are told that they are being captured, because a trial has asked.
        self.as_captured = False

    def wants(self, key: Hashable, uses: int) -> bool:
        """Whether to watch the next batch of a shape that was used `uses` times."""
        if key in self._agreed or uses < self._first:
            return False
        # A loader that never repeats a shape must not be watched for ever.
        return key in self._traces or uses >= self._last or len(self._traces) < _MAX_TRACES

    def has_agreed(self, key: Hashable) -> bool:
        """Whether two batches of this shape in a row did the same."""
        return key in self._agreed

    @property
    def rounding(self) -> str | None:
        """Why the last digits of a captured step may differ from an eager one's; None if nothing is
        known to change them."""
        if not self.as_captured:
            return None
        return (
            "code in the step asks whether it is being captured and may run other kernels then, as "
            "attention masks of transformers do, so the last digits, and what an attention's "
            "dropout draws, may differ from the plain loop's"
        )

    def read_by(self, key: Hashable) -> list[torch.Tensor]:
        """Tensors that a shape's batches read besides the batch and the `known` ones."""
        return [read.tensor for read in self._agreed[key].read.values()]

    def host_draws(self, key: Hashable) -> HostDraws | None:
        """What a shape's batches draw on the host; None if nothing."""
        draws = self._agreed[key].host_draws
        return draws if draws.are_all else None

    def host_constants(self, key: Hashable) -> HostConstants | None:
        """What a shape's batches copy from the host; None if nobody has noted it."""
        return self._agreed[key].host_constants

    def values_hold(self, key: Hashable) -> bool:
        """Whether what a shape's batches read back is still the same, as far as one can see."""
        constants = self._agreed[key].host_constants
        return constants is None or constants.read_backs.hold()

    def difference(self, key: Hashable, run: TracedRun) -> str | None:
        """What a batch did otherwise than those that the shape was captured after; None if it did
        the same."""
        if run.obstacles:
            return run.met()
        run.trace.leave_out(run.known)
        return run.trace.difference(self._agreed[key])

    def learn(self, key: Hashable, run: TracedRun, *, first: bool) -> str | None:
        """Add a batch. Returns why the step cannot be captured, if that is clear now. A shape's
        `first` batch may meet obstacles, and later ones may read what it has made: that may be a
        one-time setup."""
        trace = run.trace
        if trace.asked and not trace.as_captured and (run.obstacles or not self._can_deny):
            self.as_captured = True
            self.forget()
            return None
        if run.obstacles:
            return None if first else run.met()
        if trace.is_nested:
            where = "" if trace.nested_at is None else f" at {trace.nested_at}"
            return (
                f"the step uses a nested tensor{where}, whose rows may have other sizes in each "
                "batch, and a graph would repeat those that it was captured with: pad the rows, "
                "and pass a mask"
            )
        trace.leave_out(run.known)
        for storage, read in trace.read.items():
            if storage in self._made:
                where = "" if read.line is None else f" at {read.line}"
                return (
                    f"the step reads{where} a tensor that it made for an earlier batch, and a "
                    "graph would keep reading the old one: keep one tensor and write to it in "
                    "place, with copy_()"
                )
        if not first:
            made = self._made | trace.survivors()
            self._made = {storage for storage in made if not storage.expired()}
        return self._compare(key, trace)

    def _compare(self, key: Hashable, trace: OperationTrace) -> str | None:
        """Compare with the shape's previous batch. If they agree, the shape may be captured."""
        before = self._traces.pop(key, None)
        difference = None if before is None else trace.difference(before)
        if before is not None and difference is None:
            self.agree(key, trace)
            return None
        if difference is not None:
            self._differences[key] += 1
            if self._differences[key] == _MAX_WATCHED - 1:
                return f"the step differs between batches of one shape: {difference}"
        if len(self._traces) == _MAX_TRACES:
            self._traces.pop(next(iter(self._traces)))
        self._traces[key] = trace
        return None

    def agree(self, key: Hashable, trace: OperationTrace) -> None:
        """Later checks compare with this trace."""
        trace.forget_memory()
        self._agreed[key] = trace

    def query_in_capture(self) -> CaptureQuery:
        """What code is answered in a capture that `can_deny`: the same as in the trials."""
        return CaptureQuery(self.as_captured, in_captures=True)

    def answer_as_captured(self) -> None:
        """Tell trials from now on that they are being captured."""
        self.as_captured = True

    def forget(self) -> None:
        """Watch every shape again."""
        self._agreed.clear()
        self._traces.clear()
