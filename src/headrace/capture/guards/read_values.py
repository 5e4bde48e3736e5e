"""The values that a function's code reads, in places that it names, compared before each replay."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.capture.reading.comparison import Comparison
from headrace.capture.reading.known import Known
from headrace.capture.reading.places import Place
from headrace.capture.reading.reading import Reader
from headrace.capture.state.state import StepState
from headrace.parallel import unwrap
from headrace.source_lines import Site


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A value that has changed: its name, and the line that changes or names it. As text, it says
    why the step cannot be captured and what to do."""

    name: str
    line: Site | None
    has_tensors: bool

    def __str__(self) -> str:
        where = "" if self.line is None else f" ({self.line})"
        if self.name.endswith(".training"):
            remedy = "call train() and eval() between epochs, not between the batches of one"
        elif self.name.endswith(".last_epoch"):
            remedy = "call the scheduler's step() in the loop, after the step"
        elif self.has_tensors:
            remedy = "keep the same tensor and write to it in place, with copy_()"
        else:
            remedy = "make it a tensor on the device and write to it in place, with fill_()"
        return (
            f"{self.name} changes from batch to batch{where}, and a graph would repeat the value "
            f"it was captured with: {remedy}"
        )


class ReadValues:
    """A snapshot of the places that a step's function, modules and optimizers read."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._read()

    def _read(self) -> None:
        state = self._state
        self.reader = reader = Reader(state.device.holds, state.function)
        modules = tuple(map(unwrap, state.modules))
        first = tuple(Known(one, type(one).__name__) for one in modules[: state.passes_model])
        reader.function(state.function, first)
        for one in (*modules, *state.optimizers):
            reader.owner(one)
        self._compile()

    def _compile(self) -> None:
        comparison = Comparison()
        for place in self.reader.places:
            place.compare_in(comparison)
        self._holds = comparison.compile()

    def changed(self) -> ChangedValue | None:
        """The first value that differs from the snapshot. If there is one, take a new snapshot."""
        if self._holds():
            return None
        differing = [place for place in self.reader.places if not place.is_same()]
        changed = next((place for place in differing if place.has_changed()), None)
        described = None if changed is None else self._describe(changed)
        if changed is not None:
            self._read()
        else:
            for place in differing:
                place.compare_by_value()
            self._compile()
        return described

    def changed_so_far(self) -> ChangedValue | None:
        """Like `changed`, but keeps the snapshot, so that `restore` can still undo the change."""
        places = () if self._holds() else self.reader.places
        changed = next((place for place in places if place.has_changed()), None)
        return None if changed is None else self._describe(changed)

    def _describe(self, place: Place) -> ChangedValue:
        return ChangedValue(place.name, self.reader.places.line_of(place), place.has_tensors())

    def restore(self) -> None:
        """Set all values back to the snapshot, after a step that does not count."""
        if not self._holds():
            for place in self.reader.places:
                place.restore()
