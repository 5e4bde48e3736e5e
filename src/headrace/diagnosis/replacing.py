"""Replace an attribute of PyTorch's inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` inside the block. An attribute that the owner inherits is removed again. If
    somebody else has replaced it meanwhile, that stays."""
    is_own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is not value:
            pass
        elif is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
