"""Versions of frameworks that the integrations were tested with."""

from __future__ import annotations

import logging
import re
from importlib import metadata

log = logging.getLogger("headrace")

#: The first and the last version of each package that the tests, on a GPU or without, have used.
TESTED = {
    "accelerate": ("1.15", "1.15"),
    "lightning": ("2.6", "2.6"),
    "transformers": ("5.17", "5.22"),
}
_told: set[str] = set()


def warn_if_untested(package: str) -> None:
    """Log once if the installed version of a package is older or newer than what was tested."""
    found = metadata.version(package)
    first, last = TESTED[package]
    if package in _told or _numbers(first) <= _numbers(found) <= _numbers(last):
        return
    _told.add(package)
    log.warning(
        "%s %s is installed, and Headrace is tested with %s to %s: compare the first losses with "
        "those of a run without it",
        *(package, found, first, last),
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The major and the minor version."""
    return tuple(int(one) for one in re.findall(r"\d+", version)[:2])
