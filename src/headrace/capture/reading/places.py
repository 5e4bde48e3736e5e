"""Places where Python keeps what a step reads, and what they held when they were last looked at."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from headrace.capture.reading.comparison import Comparison, has_items, listed
from headrace.capture.reading.contents import (
    contents_of,
    holds_tensors,
    refill,
    restore_generator,
    same_value,
)
from headrace.source_lines import Site

ABSENT = object()


@dataclass(eq=False)
class Place:
    """A place. `read_at` is the first line that reads it, `stored_at` one that changes it."""

    kind: str
    owner: Any
    key: Any
    name: str
    read_at: Site | None
    stored_at: Site | None = None
    value: Any = None
    of_class: type | None = None
    is_by_value: bool = False

    def now(self) -> Any:
        """What the place holds; `ABSENT` for nothing."""
        try:
            if self.kind == "entry":
                return self.owner[self.key]
            if self.kind == "attribute":
                return getattr(self.owner, self.key)
        except Exception:  # no such key, or the user's code says in its own way that there is none
            return ABSENT
        return listed(self.owner) if self.kind == "items" else contents_of(self.owner)

    def note(self) -> None:
        """Take what the place holds now for what it should hold."""
        self.value = self.now()

    def is_same(self) -> bool:
        """Whether it still holds the same object; what is compared by content, the same content."""
        if self.kind == "items":
            return has_items(self.owner, *self.value)
        now = self.now()
        return now is self.value or (self.kind == "contents" and bool(now == self.value))

    def has_changed(self) -> bool:
        """Whether it holds another value, which takes longer to say: objects may be equal."""
        if self.kind != "items":
            now = self.now()
            return now is not self.value and not same_value(now, self.value)
        (keys, items), (keys_before, items_before) = listed(self.owner), self.value
        return not same_value(keys, keys_before) or not same_value(items, items_before)

    def compare_by_value(self) -> None:
        """It has got another object of equal value, and may get more of them."""
        self.is_by_value = True

    def restore(self) -> None:
        """Put back what the place held."""
        if self.is_same():
            return
        if self.kind == "contents":
            restore_generator(self.owner, self.value)
        elif self.kind == "items":
            refill(self.owner, *self.value)
        elif self.kind == "entry" and self.of_class is not None:
            if self.value is ABSENT:
                delattr(self.of_class, self.key)
            else:
                setattr(self.of_class, self.key, self.value)
        elif self.kind == "entry":
            if self.value is ABSENT:
                del self.owner[self.key]
            else:
                self.owner[self.key] = self.value
        elif self.value is ABSENT:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, self.value)

    def has_tensors(self) -> bool:
        return holds_tensors(listed(self.owner)[1] if self.kind == "items" else self.now())

    def compare_in(self, comparison: Comparison) -> None:
        if self.is_by_value:
            comparison.result(self.has_changed, False)
        elif self.kind == "items":
            comparison.items(self.owner, *self.value)
        elif self.kind == "contents":
            owner = self.owner
            comparison.result(lambda: contents_of(owner), self.value)
        elif self.value is ABSENT:
            if self.kind == "entry":
                comparison.absent(self.owner, self.key)
            else:
                comparison.result(lambda: self.now() is ABSENT, True)
        elif self.kind == "entry":
            comparison.entry(self.owner, self.key, self.value)
        else:
            comparison.attribute(self.owner, self.key, self.value)


class Places:
    """All places of a step, each once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, Any], Place] = {}
        self._changed_at: dict[int, Site | None] = {}
        #: The line that is being walked: it reads, or writes, what is added.
        self.line: Site | None = None

    def __iter__(self) -> Iterator[Place]:
        return iter(self._found.values())

    def reach(self, line: Site | None) -> None:
        """The walk goes on at this line."""
        self.line = line

    def _add(self, kind: str, owner: Any, key: Any, name: str, of: type | None = None) -> Place:
        # A class gives another view of its attributes each time.
        place = self._found.get((kind, id(owner if of is None else of), key))
        if place is None:
            place = Place(kind, owner, key, name, self.line, of_class=of)
            place.note()
            self._found[kind, id(owner if of is None else of), key] = place
        place.read_at = place.read_at or self.line
        return place

    def entry(self, mapping: Any, key: Any, name: str, *, kind: type | None = None) -> None:
        """An item of a mapping or list, or an attribute in an object's, or a class's, dict."""
        self._add("entry", mapping, key, name, kind)

    #: A key that the mapping does not have: it may appear.
    absent = entry

    def attribute(self, owner: Any, name: str, full: str) -> Any:
        """What is read with `owner.name`: a slot, a cell's content. Returns it, or `ABSENT`."""
        return self._add("attribute", owner, name, full).value

    def items(self, container: Any, name: str) -> None:
        """The items of a container."""
        self._add("items", container, None, name)

    def contents(self, value: Any, name: str) -> None:
        """The numbers in an array or a tensor on the host."""
        if contents_of(value) is not None:
            self._add("contents", value, None, name)

    def function(self, function: types.FunctionType, name: str) -> None:
        """A function's code and default arguments."""
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            self._add("attribute", function, part, f"{function.__name__}.{part}")
        if function.__kwdefaults__:
            self.items(function.__kwdefaults__, f"{function.__name__}.__kwdefaults__")

    def stored(self, owner: Any, key: Any, name: str) -> None:
        """Code writes to a place."""
        kind = "attribute" if isinstance(owner, types.CellType) else "entry"
        self._add(kind, owner, key, name).stored_at = self.line

    def mark_stored(self, owner: Any, name: str, full: str) -> None:
        """Code assigns an attribute. Where it is kept was noted when it was looked up."""
        dicts = [getattr(owner, "__dict__", None)]
        if isinstance(owner, torch.nn.Module):
            dicts += [owner._parameters, owner._buffers]
        for one in dicts:
            place = self._found.get(("entry", id(one), name))
            if place is not None:
                place.stored_at = place.stored_at or self.line
        for key in (("attribute", id(owner), name), ("entry", id(owner), name)):  # a slot, a class
            if (place := self._found.get(key)) is not None:
                place.stored_at = place.stored_at or self.line

    def leave_out(self, key: str, owners: Iterable[Any]) -> None:
        """Compare nothing that has this key, or these owners: the caller does."""
        known = set(map(id, owners))
        self._found = {
            at: one for at, one in self._found.items() if at[2] != key and at[1] not in known
        }

    def changed_at(self, container: Any) -> None:
        """Code changes the items of a container."""
        self._changed_at.setdefault(id(container), self.line)

    def line_of(self, place: Place) -> Site | None:
        """The line that changes a place, else the first one that reads it."""
        return place.stored_at or self._changed_at.get(id(place.owner)) or place.read_at
