"""The end flag of a loader that Accelerate has prepared."""

from __future__ import annotations

import inspect
from typing import Any


class EndFlag:
    """The flag `end_of_dataloader` of a loader prepared by Accelerate.

    The loader sets it when it yields its last batch, and Accelerate's gradient accumulation reads
    it in the training loop. The loop may be several batches behind, so the flag is held back until
    the last batch is handed out.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.held_back = False

    @classmethod
    def of(cls, loader: Any) -> EndFlag | None:
        # Statically: a wrapper that forwards the loader's attributes has no flag of its own.
        value = inspect.getattr_static(loader, "end_of_dataloader", None)
        return cls(loader) if isinstance(value, bool) else None

    def hold_back(self) -> None:
        if self._loader.end_of_dataloader:
            self._loader.end_of_dataloader, self.held_back = False, True

    def release(self) -> None:
        if self.held_back:
            self._loader.end_of_dataloader = True
