"""The worker processes of a DataLoader: how they end, and what their errors mean."""

from __future__ import annotations

import re
import traceback
from typing import Any

from headrace.errors import LoaderError

_OUT_OF_MEMORY = "has the machine run out of memory? Fewer workers need less"


def end_workers(loader: Any) -> None:
    """End the worker processes of a DataLoader with `persistent_workers`. Otherwise an error whose
    traceback refers to the loader would keep them alive."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None


def _raised_in_multiprocessing(problem: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("multiprocessing.")


def loader_error(problem: BaseException) -> LoaderError | None:
    """A one-line error for a DataLoader's error about its worker processes; None for others."""
    text = " ".join(str(problem).split())
    died = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", text)
    if isinstance(problem, RuntimeError) and died is not None:
        return LoaderError(f"a loader process ({died[1]}) {died[2].rstrip('. ')}: {_OUT_OF_MEMORY}")
    if isinstance(problem, ConnectionError | EOFError) and _raised_in_multiprocessing(problem):
        # It died while it handed over a tensor, before PyTorch noticed.
        return LoaderError(f"a loader process exited unexpectedly ({text}): {_OUT_OF_MEMORY}")
    if isinstance(problem, RuntimeError) and text.startswith("DataLoader timed out"):
        return LoaderError(f"{text}: a loader process hangs, or loader_timeout is too short")
    if text.startswith("Caught ") and "DataLoader worker process" in text:
        lines = [line for line in str(problem).splitlines() if line.strip()]
        return LoaderError(f"a loader process raised {lines[-1].strip()}")
    return None
