"""What a checkpoint's `state.json` holds: read, checked, and written as bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpoint.tensor_file import FileDigest
from headrace.errors import CheckpointError
from headrace.schema import Fields, Invalid, read_json

FORMAT = "headrace-checkpoint"


VERSION = 1


STATE_FILE = "state.json"


TENSOR_FILE = "tensors.safetensors"


_RANK_FILE = re.compile(r"tensors-\d{5,}-of-\d{5,}\.safetensors")


def state_json(content: Mapping[str, Any]) -> bytes:
    head = {"format": FORMAT, "version": VERSION, "sha256": checksum(content)}
    return _dumps({**head, "content": content}).encode() + b"\n"


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def checksum(content: object) -> str:
    return hashlib.sha256(_dumps(content).encode()).hexdigest()


def read_content(path: Path) -> dict[str, Any]:
    """The `content` of state.json."""
    file = path / STATE_FILE
    document = read_json(file, CheckpointError, max_bytes=None)
    if document.values.get("format") != FORMAT:
        raise document.problem("format", repr(FORMAT))
    version = document.values.get("version")
    if version != VERSION or isinstance(version, bool):
        raise document.problem("version", f"{VERSION}, which this Headrace reads")
    content = dict(document.section("content").values)
    if _checksum_or_none(content) != document.values.get("sha256"):
        raise CheckpointError(f"{file} does not match its own checksum: the file was changed")
    return content


def _checksum_or_none(content: object) -> str | None:
    try:
        return checksum(content)
    except (ValueError, RecursionError):  # NaN, which no checkpoint contains, or nested too deeply
        return None


def tensor_files(path: Path, content: dict[str, Any]) -> list[tuple[Path, FileDigest]]:
    """The tensor files with their sizes and checksums: one, or one for each rank that wrote."""
    fields = Fields(content, str(path / STATE_FILE), CheckpointError, "content")
    described = fields.children("files") or [fields.section("tensors")]
    files = [one.record(_TensorFile) for one in described]
    return [(path / file.name, FileDigest(file.bytes, file.sha256)) for file in files]


@dataclass(frozen=True, slots=True)
class _TensorFile:
    """A tensor file as state.json describes it."""

    bytes: int
    sha256: str
    name: str = TENSOR_FILE

    def invalid(self) -> Invalid | None:
        if self.name == TENSOR_FILE or _RANK_FILE.fullmatch(self.name):
            return None
        return Invalid("name", self.name, "tensors-00000-of-00008.safetensors or its like")


def unreadable(path: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} cannot be read: {problem}")
