"""Batches of a script's DataLoaders, copied to the device ahead of the script's own `.to(device)`.

    worker   ..[load N+2]..
    copies   ..[copy N+1]......[copy N+2]..     a stream of its own
    script   ..[ step N     ][ step N+1    ]..  `x.to(device)` finds the copy made

The script gets its host tensors as always. Two batches in a row show which of their tensors it
moves, unchanged, with `.to(device)` or `.cuda()`. From then on these are copied when a batch is
fetched, one batch ahead, and the script's call returns the copy. A loader without processes makes
its batches in the script's own process, where its random numbers and its work must stay where they
are: it is not asked for batches ahead. Then, and for any other tensor of the host, `.to(device)` is
a copy through pinned memory, which the host does not wait for.

Who writes to a tensor in place before moving it gets what was written: the tensor's version says
so. Writing through NumPy has no version, so now and then the copy is compared with the tensor.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.weak import WeakIdKeyDictionary

from headrace.data import Sender, batch_tensors
from headrace.device import Device, Stream
from headrace.records import RunPart
from headrace.replacing import replaced
from headrace.run.batches import (
    BatchLine,
    FetchedAhead,
    HostTensor,
    LoaderPass,
    LookAhead,
    ScriptUse,
    may_look_ahead,
)
from headrace.run.moves import Move, copy_aside, watch_moves
from headrace.run.parts import line_record
from headrace.source_lines import Site, script_line


class ScriptLoaders:
    """Watches the DataLoaders of a script, and its moves of tensors. `device_for` returns the
    device that graphs run on, or None; `warn` tells the user."""

    def __init__(
        self,
        device_for: Callable[[torch.device], Device | None],
        warn: Callable[[str], object],
    ) -> None:
        self._device_for, self._warn = device_for, warn
        self._process = os.getpid()
        self._lines: dict[Site, BatchLine] = {}
        self._uses = WeakIdKeyDictionary()
        self._passes: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self._known: dict[int, HostTensor] = {}
        self._senders: dict[tuple[Device, Stream], Sender] = {}
        self._others = 0
        self._is_training = False

    def training_begins(self) -> None:
        """Speed up moves from now on. Before, the script moves weights and whole data sets."""
        self._is_training = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        iterators: Any = _BaseDataLoaderIter
        take, reset = iterators.__next__, iterators._reset

        def next_batch(iterator: Any) -> Any:
            if os.getpid() != self._process:
                return take(iterator)
            return self._next(iterator, take)

        def begin_pass(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            self._passes.pop(iterator, None)  # persistent workers keep theirs
            return reset(iterator, *args, **kwargs)

        with ExitStack() as stack:
            stack.enter_context(replaced(iterators, "__next__", next_batch))
            stack.enter_context(replaced(iterators, "_reset", begin_pass))
            stack.enter_context(watch_moves(self._device_for, self._take))
            yield
        self._passes.clear()
        self._known.clear()

    # --- batches ----------------------------------------------------------------------------------

    def _next(self, iterator: Any, take: Callable[[Any], Any]) -> Any:
        one = self._passes.get(iterator)
        if one is None:
            one = self._passes[iterator] = self._begin(iterator)
        one.plan.next_batch()
        wishes = one.plan.wishes() if one.may_look_ahead else {}
        one.finish_look()
        if not one.waiting and one.error is None:
            one.waiting.append(self._fetch(one.plan, take(iterator), {}))
        if wishes and len(one.waiting) < 2 and one.error is None:
            try:
                look = one.looks(LookAhead(iterator))
                batch = look.take(lambda: take(iterator))
                one.waiting.append(self._fetch(one.plan, batch, wishes))
            except (Exception, StopIteration) as problem:
                one.failed(problem)
        if not one.waiting:
            one.raise_error()
        fetched = one.waiting.popleft()
        one.plan.handed_over()
        fetched.order()
        return fetched.batch

    def _begin(self, iterator: Any) -> LoaderPass:
        return LoaderPass(self._use_of(iterator._dataset), may_look_ahead(iterator))

    def _use_of(self, dataset: Any) -> ScriptUse:
        """What is known of a data set. One that has no weak references, such as a list, is learned
        anew in each pass: the next one may have its address."""
        has_references = type(dataset).__weakrefoffset__ != 0
        found: ScriptUse | None = self._uses.get(dataset) if has_references else None
        if found is None:
            site = script_line()
            found = ScriptUse(self._lines.setdefault(site, BatchLine(site)))
            if has_references:
                self._uses[dataset] = found
        return found

    def _fetch(self, plan: ScriptUse, batch: Any, wishes: dict[int, Device]) -> FetchedAhead:
        fetched = FetchedAhead(batch)
        tensors = batch_tensors(batch)
        watched = [(at, one) for at, one in enumerate(tensors) if type(one) is torch.Tensor]
        for at, tensor in watched:
            if tensor.is_cpu:
                content = tensor.clone() if plan.is_compared else None
                self._learn_of(tensor, at, plan, content)
        for device in {id(one): one for one in wishes.values()}.values():
            here = [
                self._known[id(one)]
                for at, one in watched
                if wishes.get(at) is device and id(one) in self._known
            ]
            if here:
                self._copy(fetched, here, device)
        return fetched

    def _learn_of(
        self, tensor: torch.Tensor, at: int, plan: ScriptUse, content: torch.Tensor | None
    ) -> None:
        key = id(tensor)
        reference = weakref.ref(tensor, lambda _: self._known.pop(key, None))
        self._known[key] = HostTensor(reference, tensor._version, at, plan, content)

    def _copy(self, fetched: FetchedAhead, these: list[HostTensor], device: Device) -> None:
        """Start the copies of a batch's tensors."""
        sources = [tensor for one in these if (tensor := one.tensor()) is not None]
        owner = device.current_stream()
        sender = self._senders.get((device, owner))
        if sender is None:
            sender = Sender(device, owner, pin=True, runs_on_owner=True)
            self._senders[device, owner] = sender
        ready = device.event()
        copies, _ = sender.send(list(sources), device.stream("transfer"), ready)
        fetched.copied(owner, ready)
        for one, source, copy in zip(these, sources, copies, strict=True):
            one.copied(copy, device, owner, ready if device.is_pinned(source) else None)

    # --- moves ------------------------------------------------------------------------------------

    def _take(self, move: Move) -> torch.Tensor | None:
        """The result of a move: a copy that is there already, or one through pinned memory."""
        known = self._known.get(id(move.tensor))
        if known is not None and known.tensor() is move.tensor:
            found = self._found(known, move)
            if found is not None:
                known.plan.line.count(was_there=True)
                return found
        if not self._is_training or os.getpid() != self._process:
            return None
        aside = copy_aside(move)
        if aside is not None and known is not None:
            known.plan.line.count(was_there=False)
        elif aside is not None:
            self._others += 1
        return aside

    def _found(self, known: HostTensor, move: Move) -> torch.Tensor | None:
        tensor, device, plan = move.tensor, move.device, known.plan
        copy, content = known.take()
        is_same = tensor._version == known.version
        if is_same and content is not None:
            is_same = _are_equal(content, tensor)
            if not is_same and copy is not None:
                self._warn(
                    "the script writes to a batch in a way that PyTorch does not see (NumPy, say) "
                    "before it moves it: batches are no longer copied ahead, and the last "
                    "copies may have been the old content"
                )
            if not is_same:
                plan.stop("the script writes to its batches before it moves them")
        if not is_same:
            return None
        plan.was_moved(known.position, device)
        if copy is None or known.device is not device:
            return None
        if known.owner is not device.current_stream():
            return None
        if known.ready is not None and move.waits:
            device.wait(known.ready, "copy")
        return copy

    def records(self) -> list[RunPart]:
        """What became of the loaders whose batches the script has moved, by the script's line."""
        found = []
        for line in self._lines.values():
            if not line.ahead and not line.aside:
                continue
            eager = {"copied when the script moves it": line.aside} if line.aside else {}
            found.append(RunPart("data", "DataLoader", line_record(line.site), line.ahead,
                                 eager=eager, why=line.off))  # fmt: skip
        return found


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have the same bits."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )
