"""Opens text files as they come: compressed or not, in UTF-8 or UTF-16.

The content decides, not the name. What is no text file is refused by name: a FIFO or a device,
which could block forever, an archive, a Parquet file, a web page.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError
from headrace.schema import require_regular_file

#: A longer line is malformed: it is no sentence, and could fill the memory.
MAX_LINE_BYTES = 1 << 20
#: Name endings that are left out when the format is looked up.
COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst")

_HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 22
_MAX_WHOLE_BYTES = 1 << 31
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")  # text may begin with "BZh", too
# UTF-32 first: its mark begins like that of UTF-16.
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_FOREIGN = {
    b"PK\x03\x04": "a zip archive or an office document; unpack it, or save it as CSV",
    b"PAR1": "a Parquet file; save it as JSON lines or CSV",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"Rar!": "a rar archive; unpack it",
    b"%PDF": "a PDF file; save it as text",
    b"SQLite format 3": "an SQLite database; save its pairs as CSV",
    b"ARROW1": "an Arrow file; save it as JSON lines or CSV",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"<!DOCTYPE": "a web page; download the file itself",
    b"<!doctype": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
    b"<?xml": "XML, such as TMX; save it as TSV or JSON lines",
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull`",
}
# What reading a compressed file raises if its content is cut or damaged.
_DAMAGED: tuple[type[BaseException], ...] = (
    *(gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError),
)


def head(path: Path) -> bytes:
    """The first bytes of a text file, decompressed, in UTF-8. Raises if it is no text file."""
    with _reading(path), _open(path) as file:
        raw = file.read(_HEAD_BYTES)
    for begin, found in _FOREIGN.items():
        if raw.startswith(begin):
            raise CorpusError(f"{path}: is {found}")
    if raw[257:262] == b"ustar":
        raise CorpusError(f"{path}: is a tar archive; unpack it")
    encoding = _encoding(raw)
    if encoding is not None:
        return raw.decode(encoding, errors="replace").removeprefix("\ufeff").encode()
    start = raw[:1000]
    if len(start) > 8 and max(start[0::2].count(0), start[1::2].count(0)) > len(start) // 4:
        raise CorpusError(
            f"{path}: has a zero in every other byte, as UTF-16 has; expected UTF-8, or UTF-16 "
            "with a byte-order mark. Save it as UTF-8"
        )
    return raw.removeprefix(codecs.BOM_UTF8)


def packing(path: Path) -> str:
    """How the text is stored, if not as plain UTF-8: "gzip", "UTF-16" or "gzip, UTF-16"."""
    with _reading(path):
        with path.open("rb") as file:
            compression = _compression(file.read(10))
        with _open(path) as file:
            encoding = _encoding(file.read(4))
    return ", ".join(name for name in (compression, encoding) if name)


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines in UTF-8, without their line ends.

    Only \\n ends a line: Unicode's other separators may occur inside a sentence. Of a line of more
    than MAX_LINE_BYTES the beginning is yielded, one byte longer than that.
    """
    with _reading(path), _open(path) as file:
        encoding = _encoding(file.peek(4)[:4])
        if encoding is None:
            if file.peek(3).startswith(codecs.BOM_UTF8):
                file.read(3)
            yield from _lines_of(file)
            return
        with io.TextIOWrapper(file, encoding=encoding, newline="\n") as text:
            yield from (line.encode() for line in _lines_of(text))


def whole_text(path: Path) -> bytes:
    """All of a file, in UTF-8."""
    parts: list[bytes] = []
    size = 0
    with _reading(path), _open(path) as file:
        while part := file.read(_CHUNK_BYTES):
            size += len(part)
            if size > _MAX_WHOLE_BYTES:
                raise CorpusError(
                    f"{path}: has more than {_MAX_WHOLE_BYTES:,} bytes; expected a smaller JSON "
                    "file, or one record per line"
                )
            parts.append(part)
        content = b"".join(parts)
        encoding = _encoding(content[:4])
        if encoding is not None:
            return content.decode(encoding).removeprefix("\ufeff").encode()
    return content.removeprefix(codecs.BOM_UTF8)


def _lines_of(file: Any) -> Iterator[Any]:
    readline, limit = file.readline, MAX_LINE_BYTES + 1
    ends: Any = "\r\n" if isinstance(file, io.TextIOBase) else b"\r\n"
    while line := readline(limit):
        if len(line) == limit:  # read on to the end of the line
            rest = line
            while len(rest) == limit and not rest.endswith(ends[1:]):
                rest = readline(limit)
        yield line.rstrip(ends)


def _open(path: Path) -> io.BufferedReader:
    """Open the file for reading its decompressed content."""
    require_regular_file(path, CorpusError)
    with path.open("rb") as file:
        compression = _compression(file.read(10))
    if compression is None:
        return path.open("rb")
    openers: dict[str, Callable[[Path], Any]] = {
        "gzip": gzip.open,
        "bzip2": bz2.open,
        "xz": lzma.open,
        "zstd": _open_zstd,
    }
    return io.BufferedReader(openers[compression](path), 1 << 16)


def _open_zstd(path: Path) -> Any:
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return _ZstandardFile(path, module) if name == "zstandard" else module.open(path, "rb")
    raise CorpusError(
        f"{path}: is compressed with zstd, which this Python cannot read; "
        "run `pip install zstandard`, or decompress it"
    )


class _ZstandardFile(io.RawIOBase):
    """Decompresses a file with the package zstandard, whose own reader takes a file that was cut
    off for a complete one."""

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._file = path.open("rb")
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._text = memoryview(b"")
        self._is_inside = False  # of a frame, whose end must come

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            packed = b""
            if self._frame.eof:  # a file may have several frames
                packed = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
                self._is_inside = False
            packed = packed or self._file.read(_HEAD_BYTES)
            if not packed:
                if self._is_inside:
                    raise EOFError("it ends within a frame")
                return 0
            self._is_inside = True
            self._text = memoryview(self._frame.decompress(packed))
        size = min(len(self._text), len(buffer))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _compression(begin: bytes) -> str | None:
    if begin.startswith(b"BZh") and begin[4:10] in _BZIP2_BLOCKS:
        return "bzip2"
    return next((name for magic, name in _COMPRESSIONS.items() if begin.startswith(magic)), None)


def _encoding(begin: bytes) -> str | None:
    return next((name for mark, name in _ENCODINGS.items() if begin.startswith(mark)), None)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of the system, of decompression and of UTF-16 into a CorpusError."""
    try:
        yield
    except CorpusError:
        raise
    except UnicodeError as problem:
        reason = getattr(problem, "reason", problem)
        raise CorpusError(f"{path}: is not complete UTF-16 or UTF-32 ({reason})") from problem
    except _DAMAGED as problem:
        raise CorpusError(f"{path}: is not a complete compressed file ({problem})") from problem
    except OSError as problem:
        # bz2 raises a plain OSError for damaged data.
        reason = problem.strerror or f"damaged: {problem}"
        raise CorpusError(f"{path}: cannot be read ({reason})") from problem
    except Exception as problem:  # zstd modules have errors of their own
        if type(problem).__name__ != "ZstdError":
            raise
        raise CorpusError(f"{path}: is not a complete compressed file ({problem})") from problem
