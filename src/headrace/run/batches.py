"""Batches of a loader on their way to the script, and what it does with them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from headrace.device import Device, Event, Stream
from headrace.source_lines import Site

#: So many batches in a row must show the same before their tensors are copied ahead.
_LEARNED_FROM = 2
#: At these batches of a data set, and then at each thousandth, copies are compared with what the
#: script moves.
_COMPARED_AT = (10, 30, 100, 300)
_COMPARED_EVERY = 1000


@dataclass(slots=True)
class BatchLine:
    """A line of the script that asks loaders for batches: how many of their tensors were there when
    the script moved them, and how many were copied then. `off` says why batches are not copied
    ahead."""

    site: Site
    ahead: int = 0
    aside: int = 0
    off: str | None = None

    def count(self, *, was_there: bool) -> None:
        """The script has got a tensor on the device, which was there already or was copied."""
        self.ahead += was_there
        self.aside += not was_there

    def stopped(self, why: str) -> None:
        self.off = why


@dataclass(slots=True)
class ScriptUse:
    """What the script does with the batches of one data set. `moved` are the positions of the
    tensors that it has moved in the batch that it has now, with their devices, and `streaks` in how
    many batches in a row it has done so."""

    line: BatchLine
    moved: dict[int, Device] = field(default_factory=dict)
    streaks: dict[int, tuple[Device, int]] = field(default_factory=dict)
    batches: int = 0
    is_off: bool = False
    #: Whether the script has a batch.
    is_out: bool = False

    def next_batch(self) -> None:
        """The script asks for its next batch: it has moved what it moves of the last one."""
        if not self.is_out:
            return
        self.is_out = False
        self.streaks = {
            at: (device, 1 + self._streak(at, device)) for at, device in self.moved.items()
        }
        self.moved = {}
        self.batches += 1

    def _streak(self, at: int, device: Device) -> int:
        before, streak = self.streaks.get(at, (device, 0))
        return streak if before is device else 0

    def wishes(self) -> dict[int, Device]:
        """The positions of the tensors to copy ahead."""
        if self.is_off:
            return {}
        return {at: device for at, (device, n) in self.streaks.items() if n >= _LEARNED_FROM}

    def handed_over(self) -> None:
        """The script has got a batch."""
        self.is_out = True

    def was_moved(self, at: int, device: Device) -> None:
        """The script has moved a tensor of its batch, with the content that it was fetched with."""
        self.moved[at] = device

    def stop(self, why: str) -> None:
        """Copy nothing ahead any more."""
        self.is_off = True
        self.line.stopped(why)

    @property
    def is_compared(self) -> bool:
        at = self.batches
        return at <= _LEARNED_FROM + 1 or at in _COMPARED_AT or at % _COMPARED_EVERY == 0


@dataclass(slots=True)
class HostTensor:
    """A tensor of a batch that the script has got, or will get next. `copy` is on its device
    already; `content` is what it held when it was fetched, if that is compared."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    position: int
    plan: ScriptUse
    content: torch.Tensor | None = None
    copy: torch.Tensor | None = None
    #: Of the copy.
    device: Device | None = None
    owner: Stream | None = None
    #: If the copy is from memory that the script may write to.
    ready: Event | None = None

    def copied(
        self, copy: torch.Tensor, device: Device, owner: Stream, ready: Event | None
    ) -> None:
        self.copy, self.device, self.owner, self.ready = copy, device, owner, ready

    def take(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The copy and the content, once."""
        found = self.copy, self.content
        self.copy = self.content = None
        return found


class FetchedAhead:
    """A batch, and the event after its copies."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._owner: Stream | None = None
        self._ready: Event | None = None

    def copied(self, owner: Stream, ready: Event) -> None:
        self._owner, self._ready = owner, ready

    def order(self) -> None:
        """Let the owner of the copies' memory wait for them: before they are used, or freed."""
        owner, self._owner = self._owner, None
        if owner is not None and self._ready is not None:
            owner.wait_event(self._ready)

    def __del__(self) -> None:
        self.order()


@dataclass(slots=True)
class LoaderPass:
    """An iterator of a loader: what was fetched ahead of the script, or the error that came."""

    plan: ScriptUse
    may_look_ahead: bool
    waiting: deque[FetchedAhead] = field(default_factory=deque)
    error: BaseException | None = None
    #: Of the batch that waits, or the error.
    look: LookAhead | None = None

    def looks(self, look: LookAhead) -> LookAhead:
        self.look = look
        return look

    def finish_look(self) -> None:
        """The script asks for what was fetched ahead."""
        look, self.look = self.look, None
        if look is not None:
            look.finish()

    def failed(self, problem: BaseException) -> None:
        """A batch could not be fetched ahead: the script gets the error when it asks for it."""
        self.error = problem

    def raise_error(self) -> None:
        error, self.error = self.error, None
        assert error is not None
        try:
            raise error
        finally:
            del error


def may_look_ahead(iterator: Any) -> bool:
    """Whether a batch can be fetched early without another effect: it is made in another process.
    Workers that yield until they end ask for more themselves; if they stay for another pass, a
    batch more would show in it."""
    if not iterator._num_workers:
        return False
    return iterator._dataset_kind == _DatasetKind.Map or not iterator._persistent_workers


class LookAhead:
    """Takes a batch from an iterator before the script asks for it. What the iterator would ask its
    workers for next, it asks for when the script gets the batch: so samples are drawn, and workers
    work, as in the script alone."""

    def __init__(self, iterator: Any) -> None:
        self._ask: Any = iterator._try_put_index
        self._defers = iterator._dataset_kind == _DatasetKind.Map
        self._deferred = 0
        self._attributes = vars(iterator)

    def take(self, take: Callable[[], Any]) -> Any:
        if not self._defers:
            return take()
        self._attributes["_try_put_index"] = self._defer
        try:
            return take()
        finally:
            del self._attributes["_try_put_index"]

    def _defer(self) -> None:
        self._deferred += 1

    def finish(self) -> None:
        """The script gets the batch."""
        for _ in range(self._deferred):
            self._ask()
        self._deferred = 0
