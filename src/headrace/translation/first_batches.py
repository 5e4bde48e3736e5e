"""What the first batches of a run show: how long it took to start, and how long it will take."""

from __future__ import annotations

from headrace.translation.announcements import warn_of_dense_attention, will_compile
from headrace.translation.build import RunParts
from headrace.translation.observers import RunObservers
from headrace.translation.run_size import FirstBatches, about
from headrace.translation.start_up import StartUp

_SHORT_RUN_S = 60.0
#: After so many batches it looks whether the plan has been chosen: a report takes some time.
_LOOK_EVERY = 20


class FirstBatchNotes:
    """Says each of them once. `ends_at_s` is when the time limit is over."""

    def __init__(
        self,
        parts: RunParts,
        observers: RunObservers,
        start_up: StartUp | None,
        ends_at_s: float | None,
    ) -> None:
        self._parts = parts
        self._observers = observers
        self._ends_at_s = ends_at_s
        self._start_up = start_up  # None once it was said
        # Under a plan with graphs, the first batches capture them.
        self._measured = FirstBatches(skip=5 if parts.plan.graphs == "off" else 100)
        self._is_first = True
        self._until_look = _LOOK_EVERY
        graphs = parts.engine.graphs
        #: Whether the plan `auto` has not chosen yet.
        self._is_open = parts.plan.graphs == "auto" and graphs is not None and not graphs.decision

    def on_batch(self, now_s: float, batches: int) -> None:
        """Call this after each batch, with the number of those that are left in the run."""
        if self._is_first and will_compile(self._parts):
            report = self._parts.engine.compiled
            is_compiled = report is not None and report.compiled
            warn_of_dense_attention(self._parts, is_compiled=is_compiled)
        self._is_first = False
        self._say_decision()
        batch_s = self._measured.on_batch(now_s)
        if batch_s is not None:
            self.say_start_up()
        if batch_s is None or batches * batch_s < _SHORT_RUN_S:
            return
        is_limited = self._ends_at_s is not None and now_s + batches * batch_s > self._ends_at_s
        self._observers.progress.message(
            f"measured over the first batches: {about(batches * batch_s)} of training left, "
            f"without validation{'; --time-limit ends it before' if is_limited else ''}"
        )

    def _say_decision(self) -> None:
        """Say what the plan `auto` has measured and chosen, soon after it has."""
        self._until_look -= 1
        if not self._is_open or self._until_look:
            return
        self._until_look = _LOOK_EVERY
        graphs = self._parts.engine.graphs
        if graphs is not None and graphs.decision is not None:
            self._is_open = False
            self._observers.progress.message(graphs.decision)

    def say_start_up(self) -> None:
        """Say how long the start took, if there was something to compile or capture."""
        if self._start_up is None:
            return
        start_up, self._start_up = self._start_up.with_first_batches(self._parts.engine), None
        metrics, progress = self._observers.metrics, self._observers.progress
        metrics.write("start", self._parts.engine.updates, **start_up.values)
        if start_up.compile_s is not None or start_up.capture_s is not None:
            progress.message(str(start_up))
