"""Graphs: device work that is recorded once and then launched as one."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from headrace.source_lines import Site


class Graph(abc.ABC):
    """Device work that `Device.capture` recorded. Capturing does not run it.

    A replay reads and writes the same memory as the capture: copy new inputs into the captured
    ones first. The next replay overwrites the results.
    """

    @abc.abstractmethod
    def replay(self) -> None:
        """Launch it on the current stream. The host does not wait."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the graph. The pool can reuse its memory at once; the device gets it back when all
        graphs of the pool are closed."""


@dataclass(slots=True)
class CaptureQuery:
    """Code that asks PyTorch whether its work is being captured, and what it is answered.

    Some libraries run other code in a capture than outside of one: transformers reads a padding
    mask back to the host only outside. A trial run that answers "yes" runs what a capture would
    run. `answer` is given outside captures, or `in_captures` as well; `asked` says whether anybody
    has asked.
    """

    answer: bool = False
    asked: bool = False
    in_captures: bool = False
    #: Set while code runs that must get the true answer: an optimizer's step refuses a capture if
    #: it was not made capturable.
    is_paused: bool = False

    def ask(self) -> bool:
        """The answer, where it is not the truth."""
        if self.is_paused:
            return False
        self.asked = True
        return self.answer


_HOST_COPY = "host memory is copied to the device"
_HOST_WAIT = "the host waits for the device"
_READ = "aten::_local_scalar_dense"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something in a step that a graph could not repeat, its line, and what to do about it."""

    what: str
    site: Site | None
    remedy: str

    @property
    def may_be_copy(self) -> bool:
        """Whether a copy from the host meets it: such a copy may wait, too."""
        is_wait = self.what.startswith(_HOST_WAIT) and _READ not in self.what
        return is_wait or self.what == _HOST_COPY

    @property
    def may_be_read(self) -> bool:
        """Whether the host reads a number from the device."""
        return self.what == _HOST_WAIT or (self.what.startswith(_HOST_WAIT) and _READ in self.what)

    def __str__(self) -> str:
        where = "" if self.site is None else f" at {self.site}"
        return f"{self.what}{where}: {self.remedy}"


def host_wait(site: Site, operation: str = "") -> Obstacle:
    """A line at which the host waits for the device, in `operation` if that is known."""
    return Obstacle(
        f"{_HOST_WAIT}{f' ({operation})' if operation else ''}",
        site,
        "keep the value on the device, without .item(), .cpu(), print(), `if tensor:` or a "
        "boolean mask as index",
    )


def host_copy(site: Site) -> Obstacle:
    """A line that copies host memory to the device."""
    return Obstacle(
        _HOST_COPY,
        site,
        "make the tensor on the device, once and outside the step, or let the loader "
        "return it in the batch",
    )


def host_draw(generator: str, site: Site | None = None) -> Obstacle:
    """Random numbers drawn from a generator of the host, at a line if that is known."""
    return Obstacle(
        f"the step draws random numbers from {generator}, on the host",
        site,
        "draw them on the device (torch.rand(…, device=…)), or in the loader",
    )


def torch_draw(site: Site | None = None) -> Obstacle:
    """Random numbers drawn from PyTorch's generator of the host."""
    return host_draw("torch's CPU generator", site)
