"""Tracked storages: what is known of a tensor's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from headrace.races.actors import Actor, Clock, Host
from headrace.races.entries import Entries
from headrace.races.frames import Frames
from headrace.races.race import Access
from headrace.source_lines import Site, short_path

if TYPE_CHECKING:
    from headrace.fake.graph_pools import GraphPool

# PyTorch's allocator serves requests up to 1 MiB and larger ones from separate pools: memory freed
# in one pool is never handed out in the other. Within a pool it splits free blocks and merges
# neighbors, so a freed block can become part of a request of any size.
_SMALL_POOL_BYTES = 1 << 20


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor."""
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else id(tensor)


def memory_key(tensor: torch.Tensor) -> int:
    """`storage_key` where PyTorch's function modes are off and the tensor has a storage."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True)
class Storage:
    """A tracked tensor storage. `home` is "device", "pinned", "pool" for the tensor that represents
    a graph pool's memory, or "random state" for that of all graphs. `recorded_streams` are those of
    `record_stream`, by number."""

    home: str
    owner: Actor
    allocated_at: Site
    #: The user's calls that allocated it, the innermost first.
    allocated_by: Frames
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    address: int
    entries: Entries = field(default_factory=Entries)
    recorded_streams: set[int] = field(default_factory=set)
    #: The graphs' pool that it was allocated in, by a capture: any stream may use it first, and it
    #: is never handed out again.
    pool: GraphPool | None = None
    #: The thread that made it, and what that thread knew then. None until there are two threads.
    made: tuple[Host, Clock] | None = None

    @property
    def size_class(self) -> str:
        """Which of the allocator's two pools it comes from."""
        return "small" if self.nbytes <= _SMALL_POOL_BYTES else "large"

    def was_made(self, host: Host) -> None:
        """All operations that make it are launched, by this thread."""
        self.made = host, dict(host.clock)

    def moves(self, nbytes: int, address: int) -> None:
        """It has another size, and other memory."""
        self.nbytes = nbytes
        self.address = address

    def is_allocated(self, owner: Actor, site: Site, frames: Frames) -> None:
        """It is allocated anew."""
        self.owner = owner
        self.allocated_at = site
        self.allocated_by = frames
        self.recorded_streams = set()

    def forget_entries(self) -> None:
        self.entries = Entries()

    def allocation(self) -> Access:
        """The allocation, as an access."""
        return Access(
            self.allocated_at,
            self.owner.name,
            "allocation",
            writes=True,
            frames=self.allocated_by,
        )

    def __str__(self) -> str:
        line = f"{short_path(self.allocated_at.file)}:{self.allocated_at.line}"
        if self.home == "random state":
            return "the random state that captured graphs read"
        if self.home == "pool":
            return f"a graph pool in device memory, allocated at {line}"
        place = "pinned host memory" if self.home == "pinned" else "device memory"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"a {tuple(self.shape)} {dtype} tensor in {place}, allocated at {line}"
