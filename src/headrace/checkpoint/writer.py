"""Checkpoints written in the background, while training goes on."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any

from headrace.checkpoint import states
from headrace.checkpoint.folders import require_counts, write_checkpoint
from headrace.checkpoint.snapshot import Snapshot
from headrace.device import Device
from headrace.errors import ClosedError

log = logging.getLogger("headrace")


class CheckpointWriter:
    """Saves what the training state is now, and lets the caller go on at once.

        with CheckpointWriter(device, folder) as writer:
            ...
            writer.save(state, step)          # weights may be overwritten as soon as it returns

    One checkpoint is written at a time: `save` first waits for the one before (`checkpoint` in
    the ledger; the background thread's own wait for the copy is `checkpoint_copy`). For as long
    as its copy takes, a snapshot needs the device memory of what it saves once more. An error in
    the background is raised, as itself, by the next `save` or by `close`. A process that ends
    without `close` loses the checkpoint that is being written, and none of the older ones.
    """

    def __init__(self, device: Device, folder: Path, keep: int = 2) -> None:
        require_counts(keep=keep)
        self._device = device
        self._folder = folder
        self._keep = keep
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._under_way: _Job | None = None
        self._closed = False

    def save(self, state: object, step: int, *, wait: bool = False) -> None:
        """Write `state`, as it is at this point of the current stream, as the checkpoint of `step`.

        With `wait`, the checkpoint is on the disk when this returns.
        """
        if self._closed:
            raise ClosedError("a CheckpointWriter was used after its close")
        require_counts(step=step)
        self._finish()
        document, tensors = states.encode(state)
        self._start()
        self._under_way = job = _Job(document, Snapshot(self._device, tensors), step)
        self._queue.put(job)
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
                tensors = job.snapshot.arrive()
                write_checkpoint(
                    self._folder, job.document, tensors, step=job.step, keep=self._keep
                )
            except BaseException as problem:  # raised in the foreground, as itself
                job.error = problem
            finally:
                tensors = {}
                job.snapshot.release()
                job.done.set()


class _Job:
    """One checkpoint to be written."""

    def __init__(self, document: Any, snapshot: Snapshot, step: int) -> None:
        self.document = document
        self.snapshot = snapshot
        self.step = step
        self.done = threading.Event()
        self.error: BaseException | None = None
