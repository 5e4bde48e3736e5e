"""Every error Headrace raises on purpose.

HeadraceError
├── DeviceError
│   ├── DeviceNotFoundError     asked for a device that is not here
│   ├── DeviceMismatchError     an object of one device was given to another
│   ├── EventNotRecordedError   an event was waited for before anything recorded it
│   ├── StreamIndexError        no stream of that index or role (also an IndexError)
│   ├── CaptureError            work that could not be captured as a graph
│   ├── OutOfMemoryError        a step that does not fit on the device (also a RuntimeError)
│   └── ClosedError             used after close
├── PlanError                   a plan or plan file that cannot be run (also a ValueError)
├── DeferredError               a value that cannot be deferred (also a ValueError)
├── StepError                   a loss, batch, optimizer or scheduler that no step can be made of
│   └── NonFiniteError          a loss or gradient was NaN or infinite, and that was to be the end
├── LoaderError                 the loader hangs, or one of its processes died
├── CorpusError                 text or prepared data that is of no use (also a ValueError)
├── TranslationError            no model, search or score can be made of it (also a ValueError)
├── RunError                    a run folder, or a file in it, cannot be used
├── RanksError                  processes that cannot train together
├── CheckpointError             a checkpoint or weight file that cannot be written or read
├── BenchError                  a work or result file that is of no use (also a ValueError)
│   └── WorkOptionError         a work has no such option, or not of that kind
├── TuneError                   a search for a plan that cannot be made (also a ValueError)
├── ReportError                 a result that no report can be made of (also a ValueError)
└── RaceError                   the fake device saw unordered accesses (also an AssertionError)

A message names what was asked for, what was found and what was expected. Anything else that
escapes is a bug of Headrace, or an error of the user's own code passed on as itself.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors that Headrace raises on purpose."""

    #: What the program ends with.
    exit_code = 1


class DeviceError(HeadraceError):
    """Something about a device, its streams, events or memory."""


class DeviceNotFoundError(DeviceError):
    """The device that was asked for is unknown, or not on this machine."""


class DeviceMismatchError(DeviceError):
    """A stream, event or tensor belongs to another device than the one it was used with."""


class EventNotRecordedError(DeviceError):
    """An event was queried or waited for before anything recorded it.

    CUDA itself answers "done" to such a wait, so the missing record would go unnoticed.
    """


class StreamIndexError(DeviceError, IndexError):
    """A stream manager has no stream of that index or role."""


class CaptureError(DeviceError):
    """Work could not be captured as a graph. The process is as healthy as before, random state
    included, but graphs captured earlier must not be replayed any more."""


class OutOfMemoryError(DeviceError, RuntimeError):
    """A step found no memory on the device. The message says what holds it, and what to change."""


class ClosedError(DeviceError):
    """An object was used after its `close()`."""


class PlanError(HeadraceError, ValueError):
    """A plan's field, or a plan file, is not valid."""


class DeferredError(HeadraceError, ValueError):
    """What was pushed is no single number."""


class StepError(HeadraceError):
    """The loss, batch, optimizer or scheduler given to an engine does not make a training step."""


class NonFiniteError(StepError):
    """A batch's loss, or the gradients of an update, were NaN or infinite."""

    def __init__(self, message: str, *, epoch: int, batch: int) -> None:
        super().__init__(message)
        self.epoch, self.batch = epoch, batch


class LoaderError(HeadraceError):
    """The loader has given no batch for too long, or one of its processes has died."""


class CorpusError(HeadraceError, ValueError):
    """Parallel text, a vocabulary or a prepared folder that cannot be read or trained on."""


class TranslationError(HeadraceError, ValueError):
    """A setting or input that no translation model, schedule, search or score can be made of."""


class RunError(HeadraceError):
    """A run folder, or a file in it, cannot be made, read, written or locked."""


class CheckpointError(HeadraceError):
    """A checkpoint, or file of weights, cannot be made of a state, written, or read back."""


class RanksError(HeadraceError):
    """The processes of a run did not find each other, or do not agree."""


class BenchError(HeadraceError, ValueError):
    """A work that cannot be run, a benchmark's settings, or a result that cannot be read."""


class WorkOptionError(BenchError):
    """A value given to a work (`--set`) that the work does not take."""

    exit_code = 2  # typed wrong


class TuneError(HeadraceError, ValueError):
    """Settings, a work or a journal with which no plan can be searched for."""


class ReportError(HeadraceError, ValueError):
    """A stored result that cannot be read, or a report that cannot be written."""


class RaceError(HeadraceError, AssertionError):
    """The fake device found accesses that nothing orders. The message lists all of them."""
