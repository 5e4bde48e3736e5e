"""The loop: one pass over a loader.

    for each batch    feed → step → recorder → progress

However a pass ends, the device finishes the batches that were launched, and their values arrive.
With several ranks, a rank that leaves the loop alone loses values that were not summed yet.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from headrace.engine.loop.parts import Observers, Stages
from headrace.engine.loop.tally import Tally
from headrace.engine.stages import Progress
from headrace.engine.values.arrived import DeferredValues
from headrace.errors import StepError


class Pass:
    """One pass over a loader. `progress` says how far it is."""

    def __init__(self, stages: Stages, observers: Observers, progress: Progress) -> None:
        self.stages, self._observers = stages, observers
        self.progress = progress
        self.tally = Tally(stages.device, restored=len(stages.recorder.entries))
        self.ended = False
        self._scheduled_updates = progress.standing.updates  # after which the scheduler was stepped

    def __iter__(self) -> Generator[Progress, None, None]:
        stages, lanes = self.stages, self.stages.lanes
        batches, step = stages.batches, stages.step
        window, recorder = stages.window, stages.recorder
        with stages.settings(), self._ending_pass(), closing(stages.feed), self._reporting_errors():
            self._begin()
            for fetched in batches:
                window.admit(fetched.nbytes)
                try:
                    launched = step(fetched)
                except BaseException:
                    self.tally.note_failed(fetched)
                    raise
                recorder.push(launched)
                self.progress = self.progress.after(launched)  # now the batch counts as trained on
                self.tally.count(launched)
                updated = launched.updated
                del fetched, launched  # free the batch before the next one is fetched
                recorder.send()
                window.launched(lanes.backward)
                if updated:
                    self._after_update()
                if batches.has_more(recorder.has_outstanding):
                    self._hand_out()
                else:  # the last progress has the last values
                    self._finish()
                if self._observers.hooks.on_step is not None:
                    with lanes.yielding_to_caller():
                        self._observers.hooks.on_step(self.progress)
                yield self.progress
                if self.ended:  # `leave` was called
                    return

    # --- between two batches ----------------------------------------------------------------------

    def settle(self, reason: str) -> tuple[DeferredValues, ...]:
        """Wait for all values so far, and return those that are new. If updates may be skipped, an
        open group's last batch is not among them: its values arrive with the update."""
        self.stages.recorder.drain(reason)
        self._hand_out()
        return self.progress.arrived

    def leave(self) -> None:
        """End the pass here. All ranks must call it."""
        if not self.ended:
            self._end()

    # --- the parts of an iteration ----------------------------------------------------------------

    def _begin(self) -> None:
        device, stages = self.stages.device, self.stages
        device.ledger.start_epoch()
        device.reset_peak_memory()
        self.tally.begin()
        stages.lanes.wait_for_caller()
        self.progress = replace(self.progress, cursor=stages.feed.begin())

    def _after_update(self) -> None:
        observers, updates = self._observers, self.progress.standing.updates
        lanes = self.stages.lanes
        if observers.schedule is not None:
            with lanes.on(lanes.backward):  # a rate on the device: after the update that reads it
                try:
                    observers.schedule.after_update(updates)
                except StepError:  # it has no rate for the next update; this one is complete
                    self._scheduled_updates = updates
                    raise
        self._scheduled_updates = updates
        if observers.hooks.on_update is not None and updates % observers.hooks.on_update_every == 0:
            with lanes.yielding_to_caller():
                observers.hooks.on_update(self.progress)

    def _hand_out(self, *, check: bool = True) -> None:
        """Hand out the values that have arrived. `check` looks for non-finite ones first: if that
        ends the run, none has been handed out, and a stored state still has them."""
        recorder, observers = self.stages.recorder, self._observers
        if not recorder.has_new_values():
            if self.progress.arrived:
                self.progress = replace(self.progress, arrived=())
            return
        unseen = recorder.unseen()
        if check:
            observers.non_finite.check(unseen, self.progress.epoch)
        self.progress = replace(self.progress, arrived=recorder.hand_out())
        if observers.hooks.on_values is not None:
            with self.stages.lanes.yielding_to_caller():
                for entry in self.progress.arrived:
                    observers.hooks.on_values(entry.step, entry.values)
        if observers.hooks.on_outputs is not None:
            with self.stages.lanes.yielding_to_caller():
                for entry in self.progress.arrived:
                    if entry.outputs is not None:
                        observers.hooks.on_outputs(entry.step, entry.outputs)

    def _finish(self) -> None:
        """Make the update of a last partial group, and wait for all values."""
        self._update_last_group()
        self._wait_for_values(check=True)

    def _wait_for_values(self, *, check: bool) -> None:
        self.stages.recorder.flush()
        self.stages.window.finish()
        self.stages.recorder.drain()
        self._hand_out(check=check)

    def _update_last_group(self) -> None:
        stages = self.stages
        # A pass of no batches leaves a restored open group as it was.
        finished = None if stages.limit == 0 else stages.step.finish()
        stages.recorder.amend({} if finished is None else finished.values)
        if finished is not None:
            updates, standing = self.progress.updates + 1, finished.standing
            self.progress = replace(self.progress, updates=updates, standing=standing)
            self._after_update()

    # --- the end of a pass ------------------------------------------------------------------------

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Call `on_error` if the state is still the one after the last batch trained on. It may not
        be: Ctrl-C, or a loader process that dies, can interrupt a step before it is counted, or the
        scheduler's step after it. With several ranks it is never called, because one rank alone
        cannot store a state."""
        stages, on_error = self.stages, self._observers.on_error
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as problem:
            with stages.lanes.on(stages.lanes.forward):
                whole = stages.step.recover(self.progress.standing)
            whole = whole and not self._is_schedule_behind
            if whole and on_error is not None and not stages.ranks.several:
                with stages.lanes.yielding_to_caller():
                    on_error(problem)
            raise

    @property
    def _is_schedule_behind(self) -> bool:
        """Whether the scheduler was not stepped, or not to the end, after the last update."""
        is_behind = self._scheduled_updates < self.progress.standing.updates
        return is_behind and self._observers.schedule is not None

    @contextmanager
    def _ending_pass(self) -> Iterator[None]:
        """End the pass after the block, however the block ends. If only this rank knows why the
        loop ended, the other ranks may be anywhere: ask them nothing. (An error in the caller's
        loop looks like a `break` here.)"""
        try:
            yield
        except BaseException as problem:
            by_break = isinstance(problem, GeneratorExit)
            if self.ended:
                self.stages.lanes.make_caller_wait()
            elif self.stages.ranks.several:
                self._end_this_rank(by_break)
            else:
                self._end(failed=not by_break)
            raise
        if self.ended:
            self.stages.lanes.make_caller_wait()
        else:
            self._end()

    def _end(self, *, failed: bool = False) -> None:
        """Make a last partial group's update, hand out the last values and return the streams."""
        stages = self.stages
        try:
            # A pass that fails before its first batch leaves a restored open group as it was.
            if self.has_trained or not failed:
                self._update_last_group()
        finally:
            try:
                self._wait_for_values(check=not failed)
                self.tally.sum_over(stages.ranks)
            finally:
                self._close()

    def _end_this_rank(self, by_break: bool) -> None:
        """End the pass without the other ranks. Values that were not summed yet are lost."""
        stages = self.stages
        if by_break and (stages.recorder.pending or self.progress.standing.in_group):
            stages.device.warn_once(
                "left",
                "rank %d left the loop before its last values were summed over ranks: expected "
                "engine.leave() on all ranks first, or max_steps",
                stages.ranks.rank,
            )
        stages.recorder.abandon()
        self._close()

    def _close(self) -> None:
        self.stages.recorder.close()
        self.stages.lanes.make_caller_wait()
        self.tally.end()
        self.ended = True

    @property
    def has_trained(self) -> bool:
        return self.tally.batches > 0
