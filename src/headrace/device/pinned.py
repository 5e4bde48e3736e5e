"""A pool of pinned host memory, whose buffers are reused only after the copies that use them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from headrace.errors import ClosedError, DeviceError
from headrace.schema import require_whole

if TYPE_CHECKING:
    from headrace.device.base import Event

_SMALLEST_BYTES = 512


class PinnedBuffer:
    """Pinned memory from a `PinnedPool`.

    buffer = device.pinned.take(nbytes)
    staging = buffer.view((30, 60), torch.int64)
    ...                                  # fill it, start the copy, record an event
    buffer.release(after=event)          # reused only once the event has passed
    """

    def __init__(self, pool: PinnedPool, memory: torch.Tensor) -> None:
        self._pool = pool
        self._memory: torch.Tensor | None = memory
        self.nbytes = memory.numel()

    def view(
        self, shape: Sequence[int], dtype: torch.dtype, *, offset_bytes: int = 0
    ) -> torch.Tensor:
        """The buffer's bytes from `offset_bytes` on, as a tensor of that shape and dtype."""
        if self._memory is None:
            raise ClosedError("a pinned buffer was used after its release")
        for index, size in enumerate(shape):
            require_whole(f"shape[{index}]", size, 0, DeviceError)
        require_whole("offset_bytes", offset_bytes, 0, DeviceError)
        needed = offset_bytes + math.prod(shape) * dtype.itemsize
        if needed > self.nbytes:
            raise DeviceError(
                f"a view of {tuple(shape)} {dtype} at byte {offset_bytes} needs {needed} bytes; "
                f"the pinned buffer has {self.nbytes}"
            )
        if offset_bytes % dtype.itemsize:
            raise DeviceError(
                f"offset_bytes = {offset_bytes}: expected a multiple of {dtype.itemsize} "
                f"for {dtype}"
            )
        return self._memory[offset_bytes:needed].view(dtype).view(tuple(shape))

    def release(self, *, after: Event | None = None) -> None:
        """Return the memory to the pool. It is reused only once the event `after` has passed: pass
        the event that was recorded behind the copy from (or to) this buffer."""
        if self._memory is None:
            raise ClosedError("a pinned buffer was released twice")
        if after is not None:
            after._require_recorded("given to PinnedBuffer.release")
        memory, self._memory = self._memory, None
        self._pool._give_back(memory, after)


class PinnedPool:
    """Pinned buffers, reused by size. Pinning is slow, so they are kept until `close`. Sizes are
    rounded up to powers of two, as PyTorch does."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._in_flight: dict[int, list[tuple[Event, torch.Tensor]]] = {}
        self._lent = 0
        self._held_bytes = 0

    def take(self, nbytes: int) -> PinnedBuffer:
        """A buffer of at least `nbytes`: a free one, or newly pinned memory.

        Does not wait for copies: a buffer whose copy still runs is not free.
        """
        require_whole("nbytes", nbytes, 0, DeviceError)
        size = max(_SMALLEST_BYTES, 1 << max(0, nbytes - 1).bit_length())
        with self._lock:
            if not self._free.get(size):  # asking the events takes longer than taking a buffer
                self._collect(size)
            free = self._free.get(size)
            memory = free.pop() if free else None
            self._lent += memory is not None
        if memory is None:
            # Not under the lock: this is slow, and another thread may want a buffer that is free.
            memory = self._allocate(size)
            with self._lock:
                self._held_bytes += size
                self._lent += 1
        return PinnedBuffer(self, memory)

    @property
    def held_bytes(self) -> int:
        """All memory that this pool has pinned, in use or free."""
        return self._held_bytes

    @property
    def lent(self) -> int:
        """Buffers taken and not yet released."""
        return self._lent

    def close(self) -> None:
        """Free the buffers that are not in use. The others stay valid until they are released."""
        with self._lock:
            for size in list(self._in_flight):
                self._collect(size)
            for size, free in self._free.items():
                self._held_bytes -= size * len(free)
            self._free.clear()

    def _give_back(self, memory: torch.Tensor, after: Event | None) -> None:
        size = memory.numel()
        with self._lock:
            self._lent -= 1
            if after is None:
                self._free.setdefault(size, []).append(memory)
            else:
                self._in_flight.setdefault(size, []).append((after, memory))

    def _collect(self, size: int) -> None:
        """Mark buffers of `size` whose copies are done as free."""
        still_running = []
        for event, memory in self._in_flight.pop(size, ()):
            if event.query():
                self._free.setdefault(size, []).append(memory)
            else:
                still_running.append((event, memory))
        if still_running:
            self._in_flight[size] = still_running
