"""One pass over a loader under a plan: the loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.data import BatchCache, Prefetcher, PrefetchIterator, Shares, batch_leaves, first_of
from headrace.device import Device, deterministic_kernels
from headrace.engine import memory_error
from headrace.engine.deferred import (
    DeferredScalars,
    DeferredValues,
    as_means,
    to_be_restored,
    to_be_summed,
)
from headrace.engine.graphed import GraphReport
from headrace.engine.lanes import HostSync, Lanes
from headrace.engine.loss_parts import LossParts
from headrace.engine.nonfinite import SKIPPED, NonFinitePolicy, NonFiniteWatch
from headrace.engine.results import EpochResult, Pass, Start, WeightedSum, epoch_result
from headrace.engine.run_ahead import RunAhead
from headrace.engine.step import TrainingStep
from headrace.errors import OutOfMemoryError, StepError
from headrace.parallel import SINGLE, Ranks
from headrace.plan import Plan


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Where the loop stands after a batch. `come_back` holds the values of earlier batches that
    have arrived from the device since the last one. Nothing was waited for, except after the last
    batch: its info is held back until all values have arrived."""

    epoch: int
    batch: int
    updates: int
    come_back: tuple[DeferredValues, ...]


class Loop:
    """One pass over a loader. `run_batch(loop, index, batch)` launches a batch on the loop's
    `lanes` and calls `report` with what its loss function returned. `most` bounds the batches that
    are asked for."""

    def __init__(
        self,
        loader: Iterable[Any],
        run_batch: Callable[[Loop, int, Any], None],
        *,
        device: Device,
        plan: Plan,
        epoch: int,
        step: TrainingStep | None = None,
        most: int | None = None,
        start: Start = Start(),  # noqa: B008 - frozen
        needs_tensors: bool = True,
        ranks: Ranks = SINGLE,
        cache: BatchCache | None = None,
        deterministic: bool = False,
        nvtx: bool = False,
        on_step: Callable[[StepInfo], object] | None = None,
        on_values: Callable[[int, dict[str, float]], object] | None = None,
        on_error: Callable[[BaseException], object] | None = None,
        non_finite: NonFiniteWatch | None = None,
        loader_timeout: float = 0,
    ) -> None:
        self.device, self.plan, self.epoch = device, plan, epoch
        self.step = step
        self.ended = False
        self.replays = 0
        self._start, self._most = start, most
        split = plan.split_backward and step is not None
        self.lanes = Lanes(device, plan, split=split, annotate=nvtx)
        self._needs_tensors = needs_tensors
        self._deterministic = deterministic
        self._ranks = ranks
        self._on_step, self._on_values, self._on_error = on_step, on_values, on_error
        self._non_finite = non_finite or NonFiniteWatch(NonFinitePolicy("report"), device)
        #: The loader's own state, after the batch trained on last; and after its end, if it came.
        self.loader_state: Any = start.loader
        self.loader_after: Any = None
        self.failed_batch: str | None = None
        self._is_whole, self._failed, self._is_void = True, False, False
        self._counted: tuple[int, int] | None = None if step is None else step.progress
        self._largest: tuple[int, int] = (0, 0)
        source = loader if most is None else first_of(loader, most)
        self._shares: Shares | None = None
        if ranks.several:
            source = self._shares = Shares(
                loader, ranks, device.ledger, most=most, ended=start.ended
            )
        self._feed = Prefetcher(
            source,
            device,
            plan.prefetch_depth,
            pin=plan.pin,
            transfers=self.lanes.transfers,
            owner=self.lanes.forward,
            runs_on_owner=self.lanes.forward is self.lanes.caller,
            cache=cache,
            loader_timeout=loader_timeout,
            draws=start.draws,
        )
        #: The loader's batches; None: it has not begun.
        self.fed: PrefetchIterator | None = None
        self._run_batch = run_batch
        self._deferred = DeferredScalars(
            device, plan.deferred_every, stream=self.lanes.losses, ranks=ranks
        )
        self._window = RunAhead(device, plan.run_ahead_steps, plan.run_ahead_bytes)
        self._sync = HostSync(device, plan, self.lanes) if plan.sync != "none" else None
        # Values that a restored engine had not yet reported come first.
        self._entries: list[DeferredValues] = list(start.pending)
        self._unreported, self._looked = start.pending, 0
        self._restored = len(self._entries)
        self._summed = (0, start.loss)
        self._come_back: tuple[DeferredValues, ...] = ()
        self._batches = self._samples = self._peak = 0
        self._start_ns = device.ledger.now_ns()
        self._weighted = False
        self._updates_before = step.updates if step is not None else 0

    def run(self) -> Generator[None, None, None]:
        """The loop. Whatever happens, what was launched is finished and its values come back."""
        with ExitStack() as session:
            session.enter_context(self._settings())
            session.push(self._left)
            feed = session.enter_context(closing(self._begin()))
            session.push(self._tell_error)
            self.loader_state = feed.loader_state
            for index, batch in enumerate(feed):
                if self.lanes.blocking:
                    self.lanes.wait_for_copy(feed)
                self._window.admit(feed.last_nbytes)
                self._samples += feed.last_samples
                if self._shares is not None:
                    self._join_the_others(self._shares, index, feed.last_samples)
                if index == 0 and self._needs_tensors:
                    _require_tensor(batch)
                try:
                    self._run_batch(self, index, batch)
                except BaseException:
                    if self.step is not None:
                        with self.lanes.on(self.lanes.forward):
                            self._is_whole = self.step.recover(of_batch=True)
                    # One whose backward failed has a loss, but nothing was learned from it.
                    self._deferred.forget(self._start.first + index)
                    self.failed_batch = memory_error.described(batch)
                    raise
                del batch  # freed before the next one is asked for
                self.loader_state = feed.loader_state
                self._batches += 1
                self._counted = self._progress()  # last: from here on it is trained on
                if self.step is not None:
                    self.step.raise_late()
                if feed.last_nbytes > self._largest[0]:
                    self._largest = (feed.last_nbytes, feed.last_samples)
                self._window.launched(self.lanes.backward)
                if self._sync is not None:
                    self._sync.after_batch(index)
                if feed.has_more(ask=self._deferred.awaits()):
                    self._collect(self._deferred.ready())
                else:  # the last info comes with the last values
                    self._use_last_group()
                    self._collect(self._wait_for_values())
                if self._on_step is not None:
                    with self.lanes.given_back():
                        self._on_step(self.info())
                yield
                if self.ended:  # `leave` was called
                    return
            if self._batches != self._most:  # else the loader was not asked for all of its epoch
                self.loader_after = feed.loader_state

    def _join_the_others(self, shares: Shares, index: int, samples: int) -> None:
        """Of several ranks: what the batch that is to come is to them."""
        if shares.is_stand_in(index):
            self._samples -= samples
        if self.step is not None:
            self.step.is_last = shares.is_last(index)

    def report(self, index: int, parts: LossParts) -> None:
        self._weighted = self._weighted or parts.weighted
        values: Mapping[str, Any] = parts.values
        if self._ranks.several:
            values = to_be_summed(values, parts.weight, self.device)
        self._deferred.push(self._start.first + index, values)

    def is_stand_in(self, index: int) -> bool:
        """Whether the loader had ended before this batch, and another rank's had not: it is the
        one before once more, and counts for nothing."""
        return self._shares is not None and self._shares.is_stand_in(index)

    def info(self) -> StepInfo:
        """Where the loop stands, after a batch."""
        return StepInfo(self.epoch, self.trained - 1, self._updates(), self._come_back)

    @property
    def trained(self) -> int:
        """Batches of the epoch that were trained on, those before this loop included."""
        return self._start.first + self._batches

    @property
    def has_trained(self) -> bool:
        return self._batches > 0

    @property
    def own(self) -> int:
        """Those among them that this rank's loader gave."""
        shares = self._shares
        return self._start.own + (self._batches if shares is None else shares.own(self._batches))

    @property
    def own_has_ended(self) -> bool:
        """Whether it is known to give no more, while other ranks' may."""
        return self._shares is not None and self._shares.has_ended(self._batches)

    @property
    def loss(self) -> WeightedSum:
        """The epoch's loss so far: of values that were handed out, before this loop and in it."""
        (done, loss), reported = self._summed, len(self._entries) - len(self._unreported)
        self._summed = (reported, loss.plus(self._entries[done:reported], "loss"))
        return self._summed[1]

    def drawn_ahead(self) -> list[dict[str, Any]]:
        """Where the host's generators stood before each batch that was fetched, not trained on."""
        fetched = [] if self.fed is None else self.fed.drawn_ahead(self._batches)
        return fetched + ([] if self._start.draws is None else [*self._start.draws.again])

    def drawn_last(self) -> dict[str, Any] | None:
        """Where they stood before the batch trained on last was asked for."""
        if self.fed is not None and self._batches:
            return self.fed.drawn_last(self._batches)
        return None if self._start.draws is None else self._start.draws.last

    def out_of_memory(self, problem: BaseException, graphs: GraphReport | None) -> OutOfMemoryError:
        """What is to be said of a loop that found no memory."""
        nbytes, samples = self._largest
        return memory_error.explained(
            problem,
            device=self.device,
            plan=self.plan,
            step=self.step,
            batch=self.failed_batch,
            largest=f"of {samples:,} samples, {nbytes / 1e6:,.1f} MB" if nbytes else None,
            graph_bytes=0 if graphs is None else graphs.memory_bytes,
        )

    def deferred_state(self) -> list[dict[str, Any]]:
        """The values that were not handed out yet, those of a restored state among them."""
        if self._ranks.several and self._deferred.pending:
            raise StepError(
                "values of earlier batches are not summed over ranks yet: expected engine.settle() "
                "on all ranks before a state is taken"
            )
        return to_be_restored(self._unreported) + self._deferred.state()

    def keep_peak(self) -> None:
        """Before another pass counts the device's memory anew."""
        self._peak = max(self._peak, self.device.peak_memory())

    def settle(self, reason: str) -> tuple[DeferredValues, ...]:
        """Wait for all values so far, between two batches."""
        with self.lanes.on(self.lanes.forward):
            self._deferred.flush()
        self._collect(self._deferred.drain(reason))
        return self._come_back

    def result(self) -> EpochResult:
        """What the pass gave; the loop must have ended."""
        counted = Pass(
            epoch=self.epoch,
            plan=self.plan.name,
            device=str(self.device),
            batches=self._batches,
            updates=self._updates(),
            replays=self.replays,
            samples=self._samples,
            weighted=self._weighted,
            restored=self._restored,
            elapsed_s=self._elapsed_s,
            peak_memory_bytes=max(self._peak, self.device.peak_memory()),
        )
        return epoch_result(counted, self._entries, self.device.ledger.epoch_statistics())

    def _begin(self) -> PrefetchIterator:
        self.device.ledger.start_epoch()
        self.device.reset_peak_memory()
        self._start_ns = self.device.ledger.now_ns()
        self.lanes.take_over()
        try:
            self.fed = iter(self._feed).begun()
        except BaseException as problem:
            self._tell_error(type(problem), problem, None)
            raise
        return self.fed

    def leave(self) -> None:
        """Between two batches, on all ranks: end the pass here."""
        if not self.ended:
            self._end()

    def _left(self, kind: type[BaseException] | None, *problem: object) -> None:
        """At the end. If it was none that all ranks know of, the others may be anywhere: nothing
        is asked of them. (An error in the caller's loop looks here as a `break` does.)"""
        failed = kind is not None and kind is not GeneratorExit
        self._is_void = failed and not self.has_trained
        if self.ended:
            self.lanes.give_back()
        elif self._ranks.several and kind is not None:
            if kind is GeneratorExit and (self._deferred.pending or self._group_is_open()):
                self.device.say_once(
                    "left",
                    "the loop was left on rank %d before what it gave was summed over ranks: "
                    "expected engine.leave() on all of them, or max_steps",
                    self._ranks.rank,
                )
            self._deferred.abandon()
            self._close()
        else:
            self._end()

    def _group_is_open(self) -> bool:
        return self.step is not None and self.step.group_is_open

    def _end(self) -> None:
        """Finish what was begun, hand out the last values, and hand the streams back."""
        try:
            self._use_last_group()
        finally:
            try:
                self._collect(self._wait_for_values())
                self._samples = sum(self._ranks.gathered(self._samples, self.device.ledger))
            finally:
                self._close()

    def _wait_for_values(self) -> list[DeferredValues]:
        with self.lanes.on(self.lanes.forward):
            self._deferred.flush()
        if self._sync is not None:
            self._sync.at_end(self._batches)
        return self._deferred.drain()

    def _use_last_group(self) -> None:
        """Update with the gradients of a last partial group, if there is one."""
        step = self.step
        if step is None or not step.group_is_open or self._is_void or self._most == 0:
            return
        try:
            with self.lanes.on(self.lanes.backward):
                if step.before_last_update is not None:
                    step.before_last_update()
                step.update()
        except BaseException:
            self._is_whole = step.recover(of_batch=False)
            raise
        self.lanes.backward_to_forward()
        if step.gate is not None:  # its batches were reported before it was known to be left out
            values = step.gate.last_update()
            with self.lanes.on(self.lanes.forward):
                self.report(self._batches - 1, LossParts(values[SKIPPED], 1, False, {**values}))
        self._counted = self._progress()
        step.raise_late()

    def _close(self) -> None:
        with self.lanes.on(self.lanes.forward):
            self._deferred.close()
        self.lanes.give_back()
        self._elapsed_s = (self.device.ledger.now_ns() - self._start_ns) / 1e9
        self.ended = True

    def _tell_error(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: object
    ) -> None:
        """Between the last batch that was trained on and the end, if the state is whole. Some
        errors come at any moment (Ctrl-C, a loader process that died): then a step may have been
        made that is not counted yet. Of several ranks one alone could do nothing with it."""
        failed = problem is not None and kind is not GeneratorExit
        whole = self._is_whole and self._counted == self._progress()
        told = self._on_error if whole and not self._ranks.several else None
        try:
            if problem is not None and failed and told is not None:
                with self.lanes.given_back():
                    told(problem)
        finally:  # until here values are looked at: what is the state worth?
            self._failed = failed

    def _collect(self, come_back: list[DeferredValues]) -> None:
        if not come_back and not self._unreported:  # mostly
            self._come_back = ()
            return
        if self._ranks.several:
            come_back = [as_means(entry) for entry in come_back]
        if come_back and "loss" not in come_back[-1].values and self.step is not None:
            come_back = self._with_last_update(come_back)
        self._entries += come_back
        # Until they are handed out they are part of the state, also if one of them ends the loop.
        self._unreported += tuple(come_back)
        looked, self._looked = self._looked, len(self._unreported)  # an error is raised once
        if not self._failed:
            self._non_finite.look(self._unreported[looked:], self.epoch)
        self._come_back, self._unreported, self._looked = self._unreported, (), 0
        if self._on_values is not None:
            with self.lanes.given_back():
                for entry in self._come_back:
                    self._on_values(entry.step, entry.values)

    def _with_last_update(self, come_back: list[DeferredValues]) -> list[DeferredValues]:
        """What is known of a last partial group's update belongs to its last batch."""
        *come_back, late = come_back
        known = come_back or self._entries
        if known and known[-1].step == late.step:
            skipped = {SKIPPED: late.values[SKIPPED]}
            late = known[-1] = DeferredValues(late.step, known[-1].values | skipped)
        if not come_back and not self._failed:
            self._non_finite.look([late], self.epoch)
        return come_back

    def _progress(self) -> tuple[int, int] | None:
        return None if self.step is None else self.step.progress

    def _updates(self) -> int:
        return self._batches if self.step is None else self.step.updates - self._updates_before

    @contextmanager
    def _settings(self) -> Iterator[None]:
        with self.device.numerics(self.plan.precision), deterministic_kernels(self._deterministic):
            yield


def _require_tensor(batch: Any) -> None:
    if next(batch_leaves(batch), None) is None:
        raise StepError(
            f"batch 0 (a {type(batch).__name__}) holds no tensor: expected tensors, in whatever "
            "nesting of tuples, dicts and dataclasses"
        )
