"""A stream on a full disk."""

from __future__ import annotations

import io


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")
