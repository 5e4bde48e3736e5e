"""An iterator that gives up when a batch takes too long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

from headrace.device import Device, Stream
from headrace.errors import LoaderError


class TimedIterator:
    """An iterator that raises `LoaderError` when a batch takes longer than `timeout_s` seconds.

    A daemon thread asks the inner iterator. Threads cannot be stopped: one that hangs is abandoned,
    with its iterator.
    """

    def __init__(self, iterator: Iterator[Any], device: Device, timeout_s: float) -> None:
        self._iterator, self._device, self._timeout_s = iterator, device, timeout_s
        self._requests: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._received = 0
        self._hangs = False
        self._thread: threading.Thread | None = None

    def __next__(self) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headrace-loader", daemon=True)
            self._thread.start()
        # A loader that puts tensors on the device must use the stream of the caller.
        self._requests.put(self._device.current_stream())
        try:
            batch, problem = self._results.get(timeout=self._timeout_s)
        except queue.Empty:
            self._hangs = True
            raise LoaderError(
                f"the loader produced no batch for {self._timeout_s:g} s (waiting for batch "
                f"{self._received + 1} of this pass): it hangs, or loader_timeout is too short"
            ) from None
        self._received += 1
        if problem is not None:
            raise problem
        return batch

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            self._close_iterator()
            return
        self._requests.put(None)
        if not self._hangs:
            thread.join(self._timeout_s)  # after Ctrl-C it may still wait for the loader

    def _work(self) -> None:
        while (stream := self._requests.get()) is not None:
            try:
                with self._device.use(stream):
                    self._results.put((next(self._iterator), None))
            except BaseException as problem:  # `__next__` raises it
                self._results.put((None, problem))
                return
        self._close_iterator()

    def _close_iterator(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()
