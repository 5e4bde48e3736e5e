"""Where things are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Headrace's folder in the user's cache: `$XDG_CACHE_HOME/headrace`, or `~/.cache/headrace`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
