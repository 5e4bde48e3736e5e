"""One pass over a loader: the loop.

    for each batch    feed → step → recorder → progress

Whatever ends a pass, what was launched is finished and its values come back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.data import Batches, Feed
from headrace.device import Device, Stream
from headrace.engine.deferred import DeferredValues
from headrace.engine.lanes import Lanes
from headrace.engine.nonfinite import NonFiniteWatch
from headrace.engine.recorder import Recorder
from headrace.engine.schedules import Schedule
from headrace.engine.stages import Progress, Step
from headrace.engine.tally import Tally
from headrace.parallel import Ranks


class Window(Protocol):
    """How far the host may be ahead of the device."""

    def admit(self, nbytes: int = 0) -> None: ...

    def launched(self, stream: Stream) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Stages:
    """What a pass is made of. `batches` are the feed's, possibly wrapped. `limit` batches are asked
    for at most. Inside `settings()` PyTorch computes as the plan says."""

    device: Device
    feed: Feed
    batches: Batches
    step: Step
    window: Window
    recorder: Recorder
    lanes: Lanes
    ranks: Ranks
    settings: Callable[[], AbstractContextManager[object]]
    limit: int | None


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told of progress, in this order: the scheduler after an update, the policy for values
    that are not finite, and the user's functions."""

    schedule: Schedule | None
    policy: NonFiniteWatch
    on_values: Callable[[int, dict[str, float]], object] | None = None
    on_step: Callable[[Progress], object] | None = None
    on_error: Callable[[BaseException], object] | None = None


class Pass:
    """One pass over a loader. `progress` is all there is to know of how far it is."""

    def __init__(self, stages: Stages, observers: Observers, progress: Progress) -> None:
        self.stages, self._observers = stages, observers
        self.progress = progress
        self.tally = Tally(stages.device, restored=len(stages.recorder.entries))
        self.ended = False

    def __iter__(self) -> Generator[Progress, None, None]:
        stages, lanes = self.stages, self.stages.lanes
        batches, step = stages.batches, stages.step
        window, recorder = stages.window, stages.recorder
        with stages.settings(), self._ending(), closing(stages.feed), self._telling():
            self._begin()
            for fetched in batches:
                window.admit(fetched.nbytes)
                try:
                    launched = step(fetched)
                except BaseException:
                    self.tally.note_failed(fetched)
                    raise
                recorder.push(launched)
                self.progress = self.progress.after(launched)  # from here on it is trained on
                self.tally.count(launched)
                updated = launched.updated
                del fetched, launched  # the batch is freed before the next one is asked for
                recorder.send()
                window.launched(lanes.backward)
                if updated:
                    self._tell_schedule()
                if batches.has_more(recorder.awaits):
                    self._hand_out()
                else:  # the last progress comes with the last values
                    self._finish()
                if self._observers.on_step is not None:
                    with lanes.given_back():
                        self._observers.on_step(self.progress)
                yield self.progress
                if self.ended:  # `leave` was called
                    return

    # --- between two batches ----------------------------------------------------------------------

    def settle(self, reason: str) -> tuple[DeferredValues, ...]:
        """Wait for all values so far. (That of an open group's last batch comes with the group's
        update, where updates may be left out.)"""
        self.stages.recorder.drain(reason)
        self._hand_out()
        return self.progress.arrived

    def leave(self) -> None:
        """On all ranks: end the pass here."""
        if not self.ended:
            self._end()

    # --- its parts --------------------------------------------------------------------------------

    def _begin(self) -> None:
        device, stages = self.stages.device, self.stages
        device.ledger.start_epoch()
        device.reset_peak_memory()
        self.tally.begin()
        stages.lanes.take_over()
        self.progress = replace(self.progress, cursor=stages.feed.begin())

    def _tell_schedule(self) -> None:
        schedule = self._observers.schedule
        if schedule is not None:
            schedule.tell_update(self.progress.standing[0])

    def _hand_out(self, *, look: bool = True) -> None:
        """Hand out the values that have arrived. Until then they are part of the state, also if
        the policy ends the run because of one of them."""
        recorder, observers = self.stages.recorder, self._observers
        if not recorder.has_news():
            if self.progress.arrived:
                self.progress = replace(self.progress, arrived=())
            return
        unseen = recorder.unseen()
        if look:
            observers.policy.look(unseen, self.progress.epoch)
        self.progress = replace(self.progress, arrived=recorder.hand_out())
        if observers.on_values is not None:
            with self.stages.lanes.given_back():
                for entry in self.progress.arrived:
                    observers.on_values(entry.step, entry.values)

    def _finish(self) -> None:
        """Use the gradients of a last partial group, and wait for all values."""
        self._use_last_group()
        self._wait_for_values(look=True)

    def _wait_for_values(self, *, look: bool) -> None:
        self.stages.recorder.flush()
        self.stages.window.finish()
        self.stages.recorder.drain()
        self._hand_out(look=look)

    def _use_last_group(self) -> None:
        stages = self.stages
        finished = None if stages.limit == 0 else stages.step.finish()
        stages.recorder.amend({} if finished is None else finished.values)
        if finished is not None:
            updates, standing = self.progress.updates + 1, finished.standing
            self.progress = replace(self.progress, updates=updates, standing=standing)
            self._tell_schedule()

    # --- its end ----------------------------------------------------------------------------------

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """An error is told to `on_error` while the state is that after the last batch trained on,
        if it is. Some errors come at any moment (Ctrl-C, a loader process that died): then a step
        may have been made that is not counted yet. Of several ranks one alone could do nothing."""
        stages, on_error = self.stages, self._observers.on_error
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as problem:
            with stages.lanes.on(stages.lanes.forward):
                whole = stages.step.recover(self.progress.standing)
            if whole and on_error is not None and not stages.ranks.several:
                with stages.lanes.given_back():
                    on_error(problem)
            raise

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """If only this rank knows why the loop ended, the other ranks may be anywhere: ask them
        nothing. (An error in the caller's loop looks here as a `break` does.)"""
        try:
            yield
        except BaseException as problem:
            left = isinstance(problem, GeneratorExit)
            if self.ended:
                self.stages.lanes.give_back()
            elif self.stages.ranks.several:
                self._leave_alone(left)
            else:
                # A pass that fails before its first batch leaves an open group as it was.
                self._end(failed=not left)
            raise
        if self.ended:
            self.stages.lanes.give_back()
        else:
            self._end()

    def _end(self, *, failed: bool = False) -> None:
        """Finish what was begun, hand out the last values, and hand the streams back."""
        stages = self.stages
        try:
            if self.has_trained or not failed:
                self._use_last_group()
        finally:
            try:
                self._wait_for_values(look=not failed)
                self.tally.sum_over(stages.ranks)
            finally:
                self._close()

    def _leave_alone(self, left: bool) -> None:
        stages = self.stages
        if left and (stages.recorder.pending or self.progress.standing[1]):
            stages.device.warn_once(
                "left",
                "the loop was left on rank %d before what it gave was summed over ranks: "
                "expected engine.leave() on all of them, or max_steps",
                stages.ranks.rank,
            )
        stages.recorder.abandon()
        self._close()

    def _close(self) -> None:
        self.stages.recorder.close()
        self.stages.lanes.give_back()
        self.tally.end()
        self.ended = True

    @property
    def has_trained(self) -> bool:
        return self.tally.batches > 0
