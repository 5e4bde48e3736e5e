"""Every error Headrace raises on purpose.

HeadraceError
├── DeviceError
│   ├── DeviceNotFoundError     the device is unknown, or not on this machine
│   ├── DeviceMismatchError     a stream, event or tensor belongs to another device
│   ├── EventNotRecordedError   an event was waited for before it was recorded
│   ├── StreamIndexError        no stream with this index or role (also an IndexError)
│   ├── CaptureError            a step cannot be captured as a graph
│   ├── NotEmulatedError        fake_cuda() cannot emulate this (also an AttributeError)
│   ├── OutOfMemoryError        a step does not fit on the device (also a RuntimeError)
│   └── ClosedError             an object was used after close()
├── PlanError                   a plan or plan file is not valid (also a ValueError)
├── DeferredError               a value is not a single number (also a ValueError)
├── StepError                   the engine cannot train with what it was given
│   └── NonFiniteError          a loss or gradient was NaN or infinite, and on_nonfinite says stop
├── LoaderError                 the loader hangs, or one of its processes died
├── CorpusError                 text or prepared data cannot be read or used (also a ValueError)
├── TranslationError            a translation setting or input is not valid (also a ValueError)
├── RunError                    a run folder, or a file in it, cannot be used
├── RanksError                  the ranks cannot connect, or do not agree
├── CheckpointError             a checkpoint or weight file cannot be written or read
├── MissingPackageError         an optional package is not installed
├── ProgramError                a script cannot be run or diagnosed (also a ValueError)
├── BenchError                  a workload, bench setting or result is not valid (also a ValueError)
│   ├── UnknownWorkError        there is no workload of this name
│   └── WorkOptionError         a workload does not accept this option or value
├── TuneError                   tune cannot run with these settings (also a ValueError)
├── ReportError                 a report cannot be made from this result (also a ValueError)
└── RaceError                   the fake device found a stream race (also an AssertionError)

A message says what failed, what was found, what was expected and what to do. Any other exception is
either an error in the user's own code, which Headrace passes on unchanged, or a bug in Headrace.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# Causes that no other command line would fix: full disk, quota, broken disk, too many open files.
_MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class HeadraceError(Exception):
    """Base of all errors that Headrace raises on purpose."""

    #: The command line's exit code for this error: 2 if what was typed is wrong, else 1.
    exit_code: int = 1


@contextmanager
def usage_errors() -> Iterator[None]:
    """Make errors inside the block usage errors, which end the program with exit code 2.

    A damaged checkpoint or weight file, and a failure of the machine, stay failures.
    """
    try:
        yield
    except HeadraceError as problem:
        cause = problem.__cause__
        failed = isinstance(cause, OSError) and cause.errno in _MACHINE_ERRORS
        if not failed and not isinstance(problem, CheckpointError):
            problem.exit_code = 2
        raise


class DeviceError(HeadraceError):
    """Base of the errors about a device, its streams, events or memory."""


class DeviceNotFoundError(DeviceError):
    """The requested device is unknown, or not on this machine."""


class DeviceMismatchError(DeviceError):
    """A stream, event or tensor was used with a device that it does not belong to."""


class EventNotRecordedError(DeviceError):
    """An event was queried or waited for before it was recorded.

    CUDA reports such an event as done, so nobody would notice the missing record.
    """


class StreamIndexError(DeviceError, IndexError):
    """The stream manager has no stream with this index or role."""


class CaptureError(DeviceError):
    """A step could not be captured as a graph.

    The process is unharmed, its random state included, but graphs that were captured earlier must
    not be replayed any more.
    """


class OutOfMemoryError(DeviceError, RuntimeError):
    """A step does not fit in the device's memory. The message says what occupies the memory, and
    what to change."""


class NotEmulatedError(DeviceError, AttributeError):
    """A program in `fake_cuda()` used a part of CUDA that only a GPU has."""


class ClosedError(DeviceError):
    """An object was used after `close()`."""


class PlanError(HeadraceError, ValueError):
    """A field of a plan, or a plan file, is not valid."""


class DeferredError(HeadraceError, ValueError):
    """A value to be deferred is not a single number."""


class StepError(HeadraceError):
    """The engine cannot train with the loss, batch, model, optimizer or scheduler it was given."""


class NonFiniteError(StepError):
    """A batch's loss, or the gradients of an update, were NaN or infinite, and `on_nonfinite` ends
    the run for it. `epoch` and `batch` say where, from 0; the message counts from 1."""

    def __init__(self, message: str, *, epoch: int, batch: int) -> None:
        super().__init__(message)
        self.epoch, self.batch = epoch, batch


class LoaderError(HeadraceError):
    """The loader produced no batch within `loader_timeout`, or one of its processes died."""


class CorpusError(HeadraceError, ValueError):
    """Parallel text, a vocabulary or a prepared folder cannot be read, or cannot be trained on."""


class TranslationError(HeadraceError, ValueError):
    """A setting or input is not valid for the translation model, its schedule, search or score."""


class RunError(HeadraceError):
    """A run folder, or a file in it, cannot be created, read, written or locked."""


class CheckpointError(HeadraceError):
    """A checkpoint or weight file cannot be written or read."""


class RanksError(HeadraceError):
    """The ranks of a run could not connect, or do not agree with each other."""


class MissingPackageError(HeadraceError):
    """A command needs a package that is not installed. The message says which extra has it."""


class ProgramError(HeadraceError, ValueError):
    """A script or module is not there, or an option of `diagnose` is not valid."""


class BenchError(HeadraceError, ValueError):
    """A workload cannot be run, a bench setting is not valid, or a result cannot be read."""


class UnknownWorkError(BenchError):
    """There is no built-in work, module, file or function of this name."""

    exit_code = 2  # a usage error, as for any unknown name


class WorkOptionError(BenchError):
    """A workload does not accept an option or value that was given with `--set`."""

    exit_code = 2  # a usage error, as for any wrong option


class TuneError(HeadraceError, ValueError):
    """`tune` cannot search with these settings or this workload."""


class ReportError(HeadraceError, ValueError):
    """A stored result cannot be read, or a report cannot be written."""


class RaceError(HeadraceError, AssertionError):
    """The fake device found a stream race: two accesses to the same memory that no edge orders. The
    message lists all of them."""
