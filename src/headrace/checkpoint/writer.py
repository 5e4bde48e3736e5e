"""Checkpoints written in the background, while training goes on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint import sharded, states
from headrace.checkpoint.folders import require_counts, write_checkpoint
from headrace.checkpoint.snapshot import Snapshot, reserve_staging
from headrace.device import Device
from headrace.errors import ClosedError
from headrace.parallel import SINGLE, Ranks

log = logging.getLogger("headrace")


class CheckpointWriter:
    """Saves what the training state is now, and lets the caller go on at once.

        with CheckpointWriter(device, folder) as writer:
            ...
            writer.save(state, step)          # weights may be overwritten as soon as it returns

    One checkpoint is written at a time: `save` first waits for the one before (`checkpoint` in
    the ledger; the background thread's own waits for its copies are `checkpoint_copy`). All that
    the caller does is to clone what is saved, on the device: until the thread has copied it to the
    host, a snapshot needs that device memory once more. An error in the background is raised, as
    itself, by the next `save` or by `close`. A process that ends without `close` loses the
    checkpoint that is being written, and none of the older ones. Where the device has no memory
    for clones, `save` copies to the host itself, and waits for it (`checkpoint_copy`).

    With several `ranks` all of them save the same step, each its part: the folder is to be on a
    file system that all of them share.
    """

    def __init__(
        self, device: Device, folder: str | Path, keep: int = 2, *, ranks: Ranks = SINGLE
    ) -> None:
        require_counts(keep=keep)
        self._ranks = ranks.with_own_group()  # the thread's own: the others go on
        self._device = device
        self._folder = Path(folder)
        self._keep = keep
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._under_way: _Job | None = None
        self._closed = False
        reserve_staging(device)

    def save(
        self,
        state: object,
        step: int,
        *,
        wait: bool = False,
        unless_raised: Callable[[], object] | None = None,
    ) -> None:
        """Write `state`, as it is at this point of the current stream, as the checkpoint of `step`.

        With `wait`, the checkpoint is on the disk when this returns. `unless_raised` is called
        once the device has been told to clone the state: a look at what led to it, that may wait
        for the device while this has enough to do. If it raises, nothing is written.
        """
        if self._closed:
            raise ClosedError("a CheckpointWriter was used after its close")
        require_counts(step=step)
        self._finish()
        shared = sharded.encode(state, self._ranks) if self._ranks.several else None
        document, tensors = (None, shared.tensors) if shared is not None else states.encode(state)
        self._start()
        snapshot = Snapshot(self._device, tensors)
        try:
            if unless_raised is not None:
                unless_raised()
        except BaseException:
            snapshot.release()  # the error may be kept, and hold on to it
            raise
        job = _Job(document, snapshot, step, shared)
        self._queue.put(job)  # first: Ctrl-C between the two must not leave one waited for in vain
        self._under_way = job
        if wait:
            self._finish()

    def close(self) -> None:
        """Wait for the checkpoint under way, end the thread, and raise what went wrong, if so."""
        self._closed = True
        try:
            self._finish()
        finally:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
                thread.join()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:
                raise
            # The error that ended the block matters more.
            log.warning("the last checkpoint was not written", exc_info=True)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="headrace-checkpoint", daemon=True)
            thread.start()
            self._thread = thread

    def _finish(self) -> None:
        job = self._under_way
        if job is None:
            return
        if job.done.is_set():
            self._device.ledger.passed("checkpoint")
        else:
            # Two at once would need the memory twice, and could be renamed in the wrong order.
            with self._device.ledger.waiting("checkpoint"):
                job.done.wait()
        self._under_way = None
        if job.error is not None:
            raise job.error

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                try:
                    self._write(job, job.snapshot.arrive())
                finally:
                    job.snapshot.release()
            except BaseException as problem:  # raised in the foreground, as itself
                job.error = problem
            finally:
                job.done.set()
            del job  # what went wrong may hold on to all that was to be written

    def _write(self, job: _Job, tensors: Mapping[str, torch.Tensor]) -> None:
        told: dict[str, Any] = {"step": job.step, "keep": self._keep}
        if job.shared is None:
            write_checkpoint(self._folder, job.document, tensors, **told)
        else:
            ranks, ledger = self._ranks, self._device.ledger
            sharded.write_shared(
                self._folder, job.shared, tensors, ranks=ranks, ledger=ledger, **told
            )


class _Job:
    """One checkpoint to be written."""

    def __init__(
        self, document: Any, snapshot: Snapshot, step: int, shared: sharded.SharedState | None
    ) -> None:
        self.document = document
        self.shared = shared
        self.snapshot = snapshot
        self.step = step
        self.done = threading.Event()
        self.error: BaseException | None = None
