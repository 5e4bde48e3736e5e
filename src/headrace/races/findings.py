"""Races as a person reads them: source lines, calls, names, the missing call, and how often."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from types import CodeType

from headrace.races.checker import Checker
from headrace.races.frames import without_generated
from headrace.races.history import Picture
from headrace.races.race import Access, Race
from headrace.races.source import source_line
from headrace.source_lines import Site, is_user_code, short_path

_MAX_SHOWN_FRAMES = 6


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of the user's: its place, the function around it, and its text."""

    site: Site
    function: str
    text: str
    #: "backward of" for the line of a forward operation.
    role: str = ""

    def __str__(self) -> str:
        where = f"{short_path(self.site.file)}:{self.site.line}"
        inside = f" in {self.function}" if self.function else ""
        return f"{self.role} {where}{inside}".strip()


@dataclass(frozen=True, slots=True)
class Finding:
    """The races between the same two lines. `race` is the first of them, `times` counts all.

    `first` and `second` are the calls that led to the two accesses, the innermost line first.
    """

    race: Race
    times: int
    first: tuple[CodeLine, ...]
    second: tuple[CodeLine, ...]
    picture: Picture
    made_at: Mapping[str, Site] = field(default_factory=dict)

    def describe(self, access: Access) -> str:
        """What an access does, and where, without its line."""
        does = "writes" if access.writes else "reads"
        if access.on_host:
            return f"{access.operation} {does} it on {access.where}"
        made = self.made_at.get(access.where)
        place = "" if made is None else f" (made at {short_path(made.file)}:{made.line})"
        return f"{access.operation} {does} it on stream {access.where!r}{place}"

    def __str__(self) -> str:
        race, parts = self.race, []
        memory = race.tensor if race.freed is None else race.freed.tensor
        parts.append(f"race ({race.kind}) on {memory}")
        if race.freed is not None:
            parts.append(f"  freed, and its memory handed out again as {race.tensor}")
        for title, access, lines in (
            ("first:  ", race.first, self.first),
            ("second: ", race.second, self.second),
        ):
            parts.append(f"  {title} {self.describe(access)}")
            parts += _listed(lines)
        missing = race.missing.replace(", or ", ",\n        or ")
        parts.append("  missing: " + missing.replace(", and then ", ",\n        and then "))
        if self.times > 1:
            parts.append(f"  seen {self.times} times")
        return "\n".join(parts)


def _listed(lines: Sequence[CodeLine]) -> list[str]:
    width = max((len(str(line)) for line in lines), default=0)
    return [f"      {line!s:{width}}  {line.text}" for line in lines]


def find(
    checker: Checker, pictures: Sequence[Picture], made_at: Mapping[str, Site]
) -> list[Finding]:
    """One finding for each two lines. `pictures` has one for each of the checker's races, and
    `made_at` the line that made a stream, by its name."""
    found: dict[tuple[object, ...], Finding] = {}
    times = checker.times
    for race, picture in zip(checker.races, pictures, strict=True):
        lines = tuple(
            (access.site, access.where.partition(" #")[0])  # a line may make several streams
            for access in (race.first, race.second)
        )
        if lines in found:
            known = found[lines]
            found[lines] = replace(known, times=known.times + times(race))
        else:
            found[lines] = Finding(
                race,
                times(race),
                _code_lines(race.first),
                _code_lines(race.second),
                picture,
                {name: made_at[name] for name in picture.lanes() if name in made_at},
            )
    return list(found.values())


def race_report(findings: Sequence[Finding]) -> str:
    """All findings as one text."""
    head = f"{len(findings)} race{'s' if len(findings) != 1 else ''} found"
    text = "\n\n".join([head, *map(str, findings)])
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def _code_lines(access: Access) -> tuple[CodeLine, ...]:
    """The lines of an access: what its graph captured or its backward belongs to, and the calls
    that led to it."""
    lines = []
    for code, instruction in without_generated(access.frames)[:_MAX_SHOWN_FRAMES]:
        line = _line_number(code, instruction)
        site = Site(code.co_filename, line)
        function = "" if code.co_name == "<module>" else code.co_name
        lines.append(CodeLine(site, function, source_line(site)))
    if not lines or lines[0].site != access.site:
        captured = [] if access.captured_at is None else lines
        # Of a graph that Headrace captured, without the way from there to the step.
        captured = list(takewhile(lambda line: is_user_code(line.site.file), captured)) or captured
        lines = [CodeLine(access.site, "", source_line(access.site)), *captured]
    if access.forward_site is not None:
        forward = CodeLine(access.forward_site, "", source_line(access.forward_site), "backward of")
        lines.insert(1, forward)
    return tuple(lines)


def _line_number(code: CodeType, instruction: int) -> int:
    line = next(islice(code.co_positions(), instruction // 2, None))[0]
    return line or code.co_firstlineno
