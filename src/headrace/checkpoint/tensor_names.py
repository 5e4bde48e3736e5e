"""The names of a state's tensors in their file."""

from __future__ import annotations

import re

from headrace.checkpoint import tensor_file

#: The keys that lead from the state to a value.
StatePath = tuple[str | int, ...]


# In a tensor's name "/" separates keys and "[" begins an int; a lone surrogate is not UTF-8.
_ESCAPED = re.compile("[~/\\[\ud800-\udfff]")


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tensor_name(path: StatePath) -> str:
    """The name of the tensor at a path, unique: `optimizer/state/[0]/exp_avg`."""
    parts = (f"[{key}]" if isinstance(key, int) else _escape(key) for key in path)
    name = "/".join(parts)
    return name if name != tensor_file.METADATA else f"~{ord(name[0]):x};{name[1:]}"


def _escape(key: str) -> str:
    return _ESCAPED.sub(lambda found: f"~{ord(found[0]):x};", key)
