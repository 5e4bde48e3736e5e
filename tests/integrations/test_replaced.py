"""Methods of one object, replaced and put back."""

from __future__ import annotations

import inspect
from typing import Any

from headrace.integrations.replaced import ReplacedMethods


class Owner:
    def method(self) -> str:
        return "its own"


def test_methods_come_back_as_they_were() -> None:
    owner: Any = Owner()
    with_one: Any = Owner()
    with_one.method = kept = lambda: "the instance's"
    replaced = ReplacedMethods()
    for one in (owner, with_one):
        replaced.replace(one, "method", lambda: "first")
        replaced.replace(one, "method", lambda: "second")
    assert (owner.method(), Owner().method()) == ("second", "its own")
    replaced.undo()
    assert vars(owner) == {}
    assert with_one.method is kept


def test_what_somebody_has_replaced_since_stays() -> None:
    owner: Any = Owner()
    replaced = ReplacedMethods()
    replaced.replace(owner, "method", lambda: "ours")
    owner.method = later = lambda: "later"
    replaced.undo()
    assert owner.method is later


class Other:
    def method(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments


def test_a_method_gets_the_signature_of_what_it_replaces() -> None:
    owner: Any = Owner()
    ReplacedMethods().replace(owner, "method", Other().method)
    assert owner.method(1, 2) == (1, 2)
    assert not inspect.signature(owner.method).parameters
