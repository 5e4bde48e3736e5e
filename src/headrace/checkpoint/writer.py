"""Writes checkpoints in the background, while training goes on."""

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
from headrace.errors import CheckpointError, ClosedError
from headrace.parallel import SINGLE, Ranks

log = logging.getLogger("headrace")


class CheckpointWriter:
    """Saves the current training state without making the caller wait.

        with CheckpointWriter(device, folder) as writer:
            ...
            writer.save(state, step)          # weights may be overwritten as soon as it returns

    `save` clones the state on the device; a background thread copies the clones to the host and
    writes them. Until they are copied, the state takes its device memory twice. If there is no
    memory for clones, `save` itself copies the state to the host and waits (`checkpoint_copy` in
    the ledger, as for the thread's own waits).

    One checkpoint is written at a time: `save` first waits for the previous one (`checkpoint` in
    the ledger). The next `save` or `close` raises an error of the background thread. A process
    that ends without `close` loses the checkpoint being written, and none of the older ones.

    With several `ranks`, all of them save the same step, each its part. `folder` must be on a file
    system that they share.
    """

    def __init__(
        self, device: Device, folder: str | Path, keep: int = 2, *, ranks: Ranks = SINGLE
    ) -> None:
        require_counts(keep=keep)
        self._ranks = ranks.with_own_group()  # the thread must not mix with training's collectives
        self._device = device
        self._folder = Path(folder)
        self._keep = keep
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current_job: _Job | None = None
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
        """Save `state`, as it is at this point of the current stream, as the checkpoint of `step`.

        With `wait`, the checkpoint is on the disk when this returns. `unless_raised` is for a check
        of the last losses, say: it is called after the clones are queued, so that the device has
        work while it waits. If it raises, nothing is written.
        """
        if self._closed:
            raise ClosedError("a CheckpointWriter was used after its close")
        require_counts(step=step)
        self._wait_for_current_job()
        shared = sharded.encode(state, self._ranks) if self._ranks.several else None
        document, tensors = (None, shared.tensors) if shared is not None else states.encode(state)
        self._start()
        snapshot = Snapshot(self._device, tensors)
        try:
            if unless_raised is not None:
                unless_raised()
        except BaseException:
            snapshot.release()  # now: the caller may keep the error, which refers to the snapshot
            raise
        job = _Job(document, snapshot, step, shared)
        # In this order: after Ctrl-C between the two, `close` must not wait for a job not queued.
        self._queue.put(job)
        self._current_job = job
        if wait:
            self._wait_for_current_job()

    def close(self) -> None:
        """Wait for the checkpoint being written, end the thread, and raise its error, if any."""
        self._closed = True
        try:
            self._wait_for_current_job()
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
        except Exception as problem:
            if kind is None:
                raise
            # The error that ended the block is more important.
            if isinstance(problem, CheckpointError):
                log.warning("%s", problem)
            else:
                log.warning("the last checkpoint was not written", exc_info=True)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="headrace-checkpoint", daemon=True)
            thread.start()
            self._thread = thread

    def _wait_for_current_job(self) -> None:
        job = self._current_job
        if job is None:
            return
        if job.done.is_set():
            self._device.ledger.passed("checkpoint")
        else:
            # Two at once would take the memory twice, and an older one might be renamed last.
            with self._device.ledger.waiting("checkpoint"):
                job.done.wait()
        self._current_job = None
        if job.error is not None:
            raise job.error

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                try:
                    self._write(job, job.snapshot.to_host())
                finally:
                    job.snapshot.release()
            except BaseException as problem:  # `_wait_for_current_job` raises it
                job.error = problem
            finally:
                job.done.set()
            del job  # its error may keep the whole state alive

    def _write(self, job: _Job, tensors: Mapping[str, torch.Tensor]) -> None:
        step, keep = job.step, self._keep
        if job.shared is None:
            write_checkpoint(self._folder, job.document, tensors, step=step, keep=keep)
        else:
            ranks, ledger = self._ranks, self._device.ledger
            sharded.write_shared(
                self._folder, job.shared, tensors, step=step, keep=keep, ranks=ranks, ledger=ledger
            )


class _Job:
    """A checkpoint for the thread to write."""

    def __init__(
        self, document: Any, snapshot: Snapshot, step: int, shared: sharded.SharedState | None
    ) -> None:
        self.document = document
        self.shared = shared
        self.snapshot = snapshot
        self.step = step
        self.done = threading.Event()
        self.error: BaseException | None = None
