"""What stands around a run: a watch for hung steps, a limit to stopping, and how to go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.data import end_workers, loader_error
from headrace.device import Device
from headrace.engine import NonFinitePolicy
from headrace.errors import (
    CheckpointError,
    LoaderError,
    NonFiniteError,
    OutOfMemoryError,
    TranslationError,
)
from headrace.parallel import end_children
from headrace.plan import Plan
from headrace.runs import RunFolder, Watchdog
from headrace.translation.settings import TrainSettings

# After these a run can be gone on with; any other error is a bug, or of its settings.
_GOES_ON = (LoaderError, OutOfMemoryError, NonFiniteError, CheckpointError)


def check(settings: TrainSettings, plan: Plan) -> None:
    """Raise for policies that this run cannot have, before there is anything of it."""
    NonFinitePolicy.of(settings.on_nonfinite)
    if settings.on_oom == "halve" and plan.graphs != "off":
        raise TranslationError(
            f"on_oom = halve: plan {plan.name} has graphs, whose memory is taken when they are "
            "captured: expected a plan without"
        )


class Guards:
    """Those of one run. `tell` shows a line to whoever watches it."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: RunFolder,
        tell: Callable[[str], object],
        rank: int = 0,
    ) -> None:
        self._settings, self._folder, self._tell = settings, folder, tell
        self._rank = rank
        self.go_on = f"go on with: headrace train --resume {folder.path}"

    def watchdog(self, device: Device) -> Watchdog:
        told = self._settings
        name = f"hang-rank-{self._rank}.txt" if self._rank else "hang.txt"
        file = self._folder.path / name
        return Watchdog(device, told.hang_after, file=file, abort=told.hang_abort)

    def overdue(self) -> None:
        """The grace time after SIGTERM is over, and the step or the writing is not."""
        self._tell(
            f"{self._settings.grace:g} s after SIGTERM it is not done: leaving now; {self.go_on}"
        )
        end_children()
        os._exit(128 + signal.SIGTERM)

    @contextmanager
    def telling(self, loader: Any, updates: Callable[[], int]) -> Iterator[None]:
        """However the run ends, the loader's processes do, too. An error that training can go on
        after is followed by how to."""
        try:
            yield
        except Exception as problem:
            known = loader_error(problem) or problem
            if isinstance(known, _GOES_ON):
                self._tell(f"ended by an error after {updates():,} updates; {self.go_on}")
            if known is not problem:
                raise known from problem
            raise
        finally:
            end_workers(loader)
