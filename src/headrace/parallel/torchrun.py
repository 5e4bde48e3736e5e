"""Joining the ranks that `torchrun` (or Slurm, with the same environment variables) has started.

    $ torchrun --nproc-per-node 8 -m headrace train …

A rank that fails prints its number and error, writes the error to torchrun's error file, and exits
at once. Torchrun then ends the others; a rank that was waiting for the failed one says so. If a
signal killed a rank, another rank of the same machine names it (`rank_watch.py`).
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from headrace.child_processes import exit_with_children
from headrace.device import Ledger, available_devices
from headrace.errors import DeviceNotFoundError, HeadraceError, RanksError
from headrace.parallel.rank_watch import RankWatch, show_error
from headrace.parallel.ranks import SINGLE, Ranks

#: Longer than any rank has to wait for another, for instance while rank 0 prepares a corpus.
TIMEOUT_S = 1800.0
# How gloo, NCCL and TCPStore report that another rank is gone.
_LOST_RANK = (
    "connection closed",
    "connection reset",
    "timed out",
    "timeout",
    "broken pipe",
    "nccl",
)
# How long a rank that lost another waits for the watch to say which. It knows within milliseconds.
_NAMING_S = 2.0


def is_launched() -> bool:
    """Whether torchrun or the like started this process, even if it is the only one."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


@contextmanager
def join_ranks(timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Join the ranks that this process was launched with, or yield `SINGLE` if there are none.

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
            f"rank {rank} of {size} could not connect to the others: {_first_line(problem)}"
        ) from problem
    ranks = Ranks.of(dist.group.WORLD, timeout_s=timeout_s)
    if size == 1:
        yield ranks
    else:
        try:
            processes = _processes_here(ranks)
            watch = RankWatch(rank, processes, lambda text: show_error(_with_resume(text, ranks)))
        except BaseException as problem:
            _exit_failed(ranks, None, problem)
        with watch:
            try:
                yield ranks
            except BaseException as problem:
                _exit_failed(ranks, watch, problem)
    dist.destroy_process_group()


def rank_device(name: str) -> str:
    """This rank's own device: for `cuda`, the rank with LOCAL_RANK=1 gets `cuda:1`."""
    kind, _, index = (available_devices()[0] if name == "auto" else name).partition(":")
    if not is_launched() or kind == "cpu":
        return name
    if index and name != "auto":
        raise DeviceNotFoundError(
            f"device = {name}: each rank uses a device of its own; expected {kind} or auto"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    own = f"{kind}:{local}"
    if own in available_devices():
        torch.accelerator.set_device_index(local)
    return own


def _backend() -> str:
    """Gloo for host memory, and the accelerator's own backend if there is one."""
    kind = available_devices()[0].partition(":")[0]
    if kind == "cpu":
        return "gloo"
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def _processes_here(ranks: Ranks) -> dict[int, int]:
    """The process ids of the ranks that this rank's launcher has started, by rank."""
    own: list[Any] = [platform.node(), _pid_namespace(), os.getppid(), os.getpid()]
    found = ranks.all_gather(own, Ledger())
    return {
        rank: process for rank, (*launcher, process) in enumerate(found) if launcher == own[:-1]
    }


def _pid_namespace() -> int:
    """Which processes share their ids with this one: two containers may have the same name."""
    namespace = Path("/proc/self/ns/pid")
    return namespace.stat().st_ino if namespace.exists() else 0


def _with_resume(text: str, ranks: Ranks) -> str:
    return f"{text}; resume with: {ranks.resume_command}" if ranks.resume_command else text


def _exit_failed(ranks: Ranks, watch: RankWatch | None, problem: BaseException) -> NoReturn:
    """Print what went wrong and exit at once. Python's own exit would wait for threads that
    wait for other ranks."""
    if isinstance(problem, SystemExit):
        code = problem.code if isinstance(problem.code, int) else int(problem.code is not None)
        _exit_now(code)
    if isinstance(problem, KeyboardInterrupt):
        _exit_now(130)
    lost_rank = _is_lost_rank(problem)
    if isinstance(problem, HeadraceError):
        show_error(f"rank {ranks.rank}: {problem}")
    elif lost_rank:
        # The watch has printed which rank was killed, if one was.
        if watch is None or not watch.killed(_NAMING_S):
            show_error(f"rank {ranks.rank}: {_lost_rank_text(ranks, watch, problem)}")
    else:
        problem.add_note(f"This was rank {ranks.rank}.")
        traceback.print_exception(problem)
    if not lost_rank:  # else torchrun shows the error of the rank that failed first
        _record_for_torchrun(problem)
    _exit_now(problem.exit_code if isinstance(problem, HeadraceError) else 1)


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    exit_with_children(code)  # a loader's workers


def _lost_rank_text(ranks: Ranks, watch: RankWatch | None, problem: BaseException) -> str:
    who = "another rank has ended or does not answer"
    if watch is not None and watch.ended:
        who = f"ended: rank {', '.join(map(str, watch.ended))}"
    text = f"{who}; see its own error, or torchrun's summary below ({_first_line(problem)})"
    return _with_resume(text, ranks)


def _is_lost_rank(problem: BaseException) -> bool:
    """Whether this error means that another rank has ended or does not answer."""
    if isinstance(problem, dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError):
        return True
    text = str(problem).lower()
    return isinstance(problem, RuntimeError) and any(words in text for words in _LOST_RANK)


def _record_for_torchrun(problem: BaseException) -> None:
    """Write the error to the file from which torchrun shows it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(problem, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(problem)


def _first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0][:200] if lines else type(problem).__name__
