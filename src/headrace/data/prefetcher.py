"""Wraps a loader, so that its batches arrive on the device before they are needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from headrace.data.cache import BatchCache
from headrace.data.loader_rng import LoaderRng
from headrace.data.loader_state import as_stateful
from headrace.data.prefetch_pass import PrefetchIterator, StatefulIterator
from headrace.device import Device, Stream, open_device
from headrace.errors import PlanError
from headrace.schema import require_whole


def prefetch(
    loader: Iterable[Any],
    device: Device | str | torch.device = "auto",
    depth: int = 2,
    *,
    pin: bool = True,
    loader_timeout: float = 0,
) -> Prefetcher:
    """Wrap a loader so that its batches arrive on `device` ahead of use.

        for batch in prefetch(loader, "cuda"):
            loss = model(batch)

    `depth` is how many batches are copied ahead of the one in use; with 0 each is copied when the
    loop asks for it. The loader may be any iterable, and its batches may be nested; each `for` loop
    begins a new pass. With `pin=False` batches are not staged in pinned memory: the host waits for
    each copy from pageable memory. If the loader produces no batch for `loader_timeout` seconds, a
    `LoaderError` is raised; 0 waits forever.

    The result has the loader's length and its public attributes (`dataset`, `sampler`,
    `batch_size`, `set_epoch` and so on), so libraries can use it in the loader's place. If the
    loader has a `state_dict`, so has the result: the state after the batch that the loop received
    last, however many were fetched since.
    """
    kind = Prefetcher if as_stateful(loader) is None else StatefulPrefetcher
    return kind(loader, open_device(device), depth, pin=pin, loader_timeout=loader_timeout)


def unwrap_prefetcher(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader inside a `Prefetcher`, unless that has a timeout.

    For the engine, which prefetches itself. With two prefetchers it would not know the random
    states before each batch.
    """
    while isinstance(loader, Prefetcher) and not loader.loader_timeout:
        loader = loader.loader
    return loader


class Prefetcher:
    """What `prefetch` returns: an iterable over batches on the device.

    `transfers` are the streams that copy, in turn. `owner` is the stream that reads the batches; by
    default, the current stream when the loop begins. With `runs_on_owner` the caller promises that
    the owner is the current stream whenever it asks for a batch. `loader_rng` is for an engine's
    pass, which can be resumed; such a `Prefetcher` is iterated over once.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Device | str | torch.device,
        depth: int = 2,
        *,
        pin: bool = True,
        transfers: tuple[Stream, ...] = (),
        owner: Stream | None = None,
        runs_on_owner: bool = False,
        cache: BatchCache | None = None,
        loader_timeout: float = 0,
        loader_rng: LoaderRng | None = None,
    ) -> None:
        if not loader_timeout >= 0:
            raise PlanError(f"loader_timeout = {loader_timeout!r}: expected seconds, 0 or more")
        require_whole("depth", depth, 0, PlanError)
        self.loader = loader
        self.device = open_device(device)
        self.depth = depth
        self.pin = pin
        self.transfers = transfers or (self.device.stream("transfer"),)
        self.owner = owner
        self.runs_on_owner = runs_on_owner
        self.cache = cache
        self.loader_timeout = loader_timeout
        self.loader_rng = loader_rng

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> PrefetchIterator:
        return PrefetchIterator(self)

    def states_to_replay(self) -> list[dict[str, Any]]:
        """In a resumed pass: the random states from which batches are still to be drawn again."""
        return [] if self.loader_rng is None else [*self.loader_rng.to_replay]

    def __getattr__(self, name: str) -> Any:
        """The loader's public attributes, unless this class has one of that name."""
        # Not `self.loader`: while `copy` or `pickle` make an object it has none, and this would
        # recurse.
        if "loader" not in self.__dict__ or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        loader = self.__dict__["loader"]
        try:
            return getattr(loader, name)
        except AttributeError as problem:
            raise AttributeError(
                f"neither {type(self).__name__!r} nor its loader, a {type(loader).__name__!r}, "
                f"has an attribute {name!r}"
            ) from problem


class StatefulPrefetcher(Prefetcher):
    """A `Prefetcher` of a loader with a `state_dict`. Its own `state_dict` is the loader's state
    after the batch handed out last, not after those fetched ahead."""

    def __init__(
        self, loader: Iterable[Any], device: Device, depth: int = 2, **options: Any
    ) -> None:
        super().__init__(loader, device, depth, **options)
        self._stateful: Any = loader
        self._handed_out: tuple[Any] | None = None  # the state, once a pass has begun

    def state_dict(self) -> Any:
        """The loader's state after the batch handed out last; before any pass, its state now."""
        return self._stateful.state_dict() if self._handed_out is None else self._handed_out[0]

    def load_state_dict(self, state_dict: Any) -> None:
        self._stateful.load_state_dict(state_dict)
        self._handed_out = None

    def __iter__(self) -> PrefetchIterator:
        return StatefulIterator(self)

    def note(self, state: Any) -> None:
        self._handed_out = (state,)
