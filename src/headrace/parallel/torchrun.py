"""Ranks that `torchrun` (or Slurm, with the same variables) has started.

    $ torchrun --nproc-per-node 8 -m headrace train …

A rank that fails says so under its number, leaves its error where torchrun looks for it, and ends
at once: torchrun then ends the others, and what waits for the failed one is told that it is gone.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from headrace.device import available_devices
from headrace.errors import DeviceNotFoundError, HeadraceError, RanksError
from headrace.parallel.children import end_children
from headrace.parallel.ranks import SINGLE, Ranks

#: Longer than any rank ever waits for another: for rank 0 to prepare a corpus, say.
TIMEOUT_S = 1800.0
# What is said of a rank that is gone, in the words of gloo, NCCL and TCPStore.
_GONE = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe", "nccl")


def is_launched() -> bool:
    """Whether this process was started as one of several, or as one of one."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


@contextmanager
def launched(timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """The ranks that this process was started among; alone, the single one.

    `timeout_s` is how long a rank waits for another that does not answer.
    """
    if not is_launched():
        yield SINGLE
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        dist.init_process_group(_backend(), timeout=timedelta(seconds=timeout_s))
    except (ValueError, RuntimeError) as problem:
        raise RanksError(
            f"rank {rank} of {size} did not meet the others: {_first_line(problem)}"
        ) from problem
    try:
        yield Ranks.of(dist.group.WORLD, timeout_s=timeout_s)
    except BaseException as problem:
        if size == 1:
            raise
        _end_rank(rank, problem)
    dist.destroy_process_group()


def own_device(name: str) -> str:
    """The device of this rank, where each has one of its own: `cuda` is `cuda:1` on the second."""
    kind, _, index = (available_devices()[0] if name == "auto" else name).partition(":")
    if not is_launched() or kind == "cpu":
        return name
    if index and name != "auto":
        raise DeviceNotFoundError(
            f"device = {name}: each rank takes one of its own; expected {kind}, or auto"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    own = f"{kind}:{local}"
    if own in available_devices():
        torch.accelerator.set_device_index(local)
    return own


def _backend() -> str:
    """Host memory is always gloo's; an accelerator has one of its own."""
    kind = available_devices()[0].partition(":")[0]
    if kind == "cpu":
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def _end_rank(rank: int, problem: BaseException) -> NoReturn:
    """Say what went wrong and end. Not by way of Python's own end, which would wait for threads
    that wait for other ranks."""
    if isinstance(problem, SystemExit):
        code = problem.code if isinstance(problem.code, int) else int(problem.code is not None)
        _leave(code)
    if isinstance(problem, KeyboardInterrupt):
        _leave(130)
    gone = _is_gone(problem)
    if isinstance(problem, HeadraceError):
        sys.stderr.write(f"error: rank {rank}: {problem}\n")
    elif gone:
        sys.stderr.write(
            f"error: rank {rank}: another rank has ended or does not answer, and says why itself "
            f"({_first_line(problem)})\n"
        )
    else:
        problem.add_note(f"This was rank {rank}.")
        traceback.print_exception(problem)
    if not gone:  # the one that is has the error that torchrun is to show
        _record(problem)
    _leave(1)


def _leave(code: int) -> NoReturn:
    end_children()  # a loader's workers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_gone(problem: BaseException) -> bool:
    if isinstance(problem, dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError):
        return True
    text = str(problem).lower()
    return isinstance(problem, RuntimeError) and any(words in text for words in _GONE)


def _record(problem: BaseException) -> None:
    """Leave the error where torchrun looks for it, and shows it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(problem, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(problem)


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0][:200] if lines else type(problem).__name__
