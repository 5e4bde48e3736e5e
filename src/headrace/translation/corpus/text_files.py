"""Opens text files as they come: compressed or not, in UTF-8 or UTF-16. The content decides, not
the name."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError
from headrace.extras import install_command
from headrace.schema import require_regular_file

#: A longer line is malformed: it is no sentence, and could fill the memory.
MAX_LINE = 1 << 20
#: Name endings that are left out when the format is looked up.
COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst")

_HEAD_BYTES = 1 << 16
_SAMPLE_ROWS = 100
_MAYBE_CUT = 1 << 14  # characters; a longer beginning may end within a line
_CHUNK_BYTES = 1 << 20
# UTF-32 first: its mark begins like that of UTF-16.
_ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_FOREIGN = {
    b"PK\x03\x04": "a zip archive or an office document; unpack it, or save it as CSV",
    b"PAR1": "a Parquet file; save it as JSON lines or CSV",
    b"%PDF": "a PDF file; save it as text",
    b"<!DOCTYPE": "a web page; download the file itself",
    b"<!doctype": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
    b"<?xml": "XML, such as TMX; save it as TSV or JSON lines",
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull`",
}


def head(path: Path) -> str:
    """The beginning of a text file. Raises if it is no text file."""
    with _reading(path), _opener(path)(path, "rb") as file:
        begin = file.read(_HEAD_BYTES)
    for mark, found in _FOREIGN.items():
        if begin.startswith(mark):
            raise CorpusError(f"{path}: is {found}")
    encoding = _encoding(begin)
    if encoding == "utf-8-sig" and b"\0" in begin:
        raise CorpusError(
            f"{path}: has zero bytes; expected UTF-8, or UTF-16 with a byte-order mark. If it is "
            "an archive, unpack it; else save it as UTF-8 text"
        )
    text: str = begin.decode(encoding, errors="replace").removeprefix("\ufeff")
    return text


def sample_lines(path: Path) -> list[str]:
    """The first lines that are not blank, without one that may be cut off."""
    text = head(path)
    found = text.split("\n")
    if len(text) >= _MAYBE_CUT and len(found) > 1:
        found.pop()
    return [line.rstrip("\r") for line in found if line.strip()][:_SAMPLE_ROWS]


def lines(path: Path) -> Iterator[str]:
    """The lines, without their line ends. `line_problem` says what is wrong with one.

    Only \\n ends a line: Unicode's other separators may occur inside a sentence. Of a line of more
    than MAX_LINE characters the beginning is yielded, one character longer than that.
    """
    with _reading(path), _open_text(path) as file:
        while line := file.readline(MAX_LINE + 1):
            rest = line
            while len(rest) > MAX_LINE and not rest.endswith("\n"):
                rest = file.readline(MAX_LINE + 1)
            yield line.rstrip("\r\n")


def whole_text(path: Path) -> str:
    """All of a file. Raises if it is not UTF-8."""
    with _reading(path), _open_text(path) as file:
        text: str = file.read()
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        number = text.count("\n", 0, problem.start) + 1
        why = line_problem(text.split("\n")[number - 1][:MAX_LINE])
        raise CorpusError(f"{path}:{number}: {why}") from None
    return text


def line_problem(line: str) -> str | None:
    """Why a line cannot be used, if it cannot."""
    if len(line) > MAX_LINE:
        return f"is longer than {MAX_LINE:,} characters; expected one sentence, or one pair"
    try:
        line.encode()
    except UnicodeEncodeError as problem:  # a byte that `surrogateescape` has kept
        return (
            f"is not UTF-8 (byte {ord(line[problem.start]) & 0xFF:#04x} at column "
            f"{problem.start + 1}); expected UTF-8 text. Convert it from its encoding, such as "
            "iconv -f GBK -t UTF-8"
        )
    return None


def _open_text(path: Path) -> Any:
    opener = _opener(path)
    with opener(path, "rb") as file:
        encoding = _encoding(file.read(4))
    # A wrong byte in UTF-8 spoils one line; in UTF-16 nobody knows where the next line begins.
    errors = "surrogateescape" if encoding == "utf-8-sig" else "strict"
    return opener(path, "rt", encoding=encoding, errors=errors, newline="\n")


def _opener(path: Path) -> Callable[..., Any]:
    require_regular_file(path, CorpusError)
    with path.open("rb") as file:
        begin = file.read(10)
    if begin.startswith(b"BZh") and begin[4:] == b"1AY&SY":  # text may begin with "BZh", too
        return bz2.open
    openers: dict[bytes, Callable[..., Any]] = {
        b"\x1f\x8b": gzip.open,
        b"\xfd7zXZ\x00": lzma.open,
        b"\x28\xb5\x2f\xfd": _open_zstd,
    }
    return next((found for mark, found in openers.items() if begin.startswith(mark)), open)


def _open_zstd(path: Path, mode: str, **options: Any) -> Any:
    try:
        import zstandard
    except ImportError as problem:
        raise CorpusError(
            f"{path}: is compressed with zstd; run {install_command('zstandard')}, or decompress it"
        ) from problem
    frame, parts = None, []
    with path.open("rb") as packed:
        while chunk := packed.read(_CHUNK_BYTES):
            while chunk:  # a file may have several frames
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    parts.append(frame.decompress(chunk))
                except zstandard.ZstdError as problem:
                    raise EOFError(str(problem)) from problem
                chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:  # the package's own reader takes a file that was cut off for a whole one
        raise EOFError("it ends within a frame")
    file = io.BytesIO(b"".join(parts))
    return io.TextIOWrapper(file, **options) if mode == "rt" else file


def _encoding(begin: bytes) -> str:
    return next((name for mark, name in _ENCODINGS.items() if begin.startswith(mark)), "utf-8-sig")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of the system, of decompression and of UTF-16 into a CorpusError."""
    try:
        yield
    except UnicodeError as problem:
        reason = getattr(problem, "reason", problem)
        raise CorpusError(f"{path}: is not complete UTF-16 or UTF-32 ({reason})") from problem
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as problem:
        raise CorpusError(f"{path}: is not a complete compressed file ({problem})") from problem
    except OSError as problem:
        # bz2 raises a plain OSError for damaged data.
        reason = problem.strerror or f"damaged: {problem}"
        raise CorpusError(f"{path}: cannot be read ({reason})") from problem
