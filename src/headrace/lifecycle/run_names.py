"""Names of run folders."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from headrace.errors import RunError

_MAX_NAME_BYTES = 200  # file systems allow 255
# Separators, the colon of Windows drives, and invisible characters (line ends, surrogates, NUL).
_NOT_IN_NAMES = re.compile(r"[/\\:\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def require_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        wrong = "it is empty" if name == "" else "it is not text"
    elif _NOT_IN_NAMES.search(name):
        wrong = "it contains a separator, a colon or an invisible character"
    elif name.startswith("."):
        wrong = "it starts with a dot"
    elif name != name.strip():
        wrong = "it starts or ends with a space"
    elif len(name.encode()) > _MAX_NAME_BYTES:
        wrong = f"it is longer than {_MAX_NAME_BYTES} bytes"
    else:
        return
    shown = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:80]}…"
    raise RunError(
        f"{shown} is not a valid run name: {wrong}; expected a plain folder name, such as "
        "'small' or 'lr=3e-4' (--project sets the folder that it is created in)"
    )


def first_free(project: Path) -> Path:
    for name in itertools.chain(["exp"], (f"exp{number}" for number in itertools.count(2))):
        try:
            (project / name).mkdir()  # succeeds in one process only
        except FileExistsError:
            continue
        return project / name
    raise AssertionError("unreachable")
