"""How `--help` looks: as in other click programs, with the options in groups.

Typer's own layout draws boxes, which leave half of 80 columns for the text, and names types as
Python does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

#: Types as click writes them. Typer writes `<int>`; a list is an option to repeat.
_TYPES = {"int": "INTEGER", "float": "FLOAT", "str": "TEXT", "path": "PATH", "dir": "DIRECTORY"}
#: What click takes for one word stays on one line.
_GLUE = str.maketrans({" ": "\N{NO-BREAK SPACE}", "-": "\N{NON-BREAKING HYPHEN}"})
_UNGLUE = {ord(glued): chr(plain) for plain, glued in _GLUE.items()}
_WHOLE = 44  # longer defaults are wrapped


class HelpfulCommand(TyperCommand):
    """A command whose help has one section for each panel of options."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None)
            record = param.get_help_record(ctx)
            if record is not None:
                name, text = record
                name = _name(param) if is_argument else _plain_types(name)
                sections.setdefault(title or "Options", []).append((name, _glued(text)))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        formatter.buffer[:] = [piece.translate(_UNGLUE) for piece in formatter.buffer]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_lines(self.epilog, formatter)


class HelpfulGroup(TyperGroup):
    """A program whose commands are listed in groups: first those for everybody's scripts."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None
            title = getattr(command, "rich_help_panel", None)
            rows = sections.setdefault(title if isinstance(title, str) else "Commands", [])
            rows.append((name, command.get_short_help_str(formatter.width)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_lines(self.epilog, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Print "interrupted" on Ctrl-C. Typer alone would print nothing."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _usage(argument: Any) -> str:
    """An argument in the usage line: FILE, [FILE] or [FILE]..."""
    name = _name(argument)
    if " " in name:  # it is written out
        return name
    name = name if argument.required else f"[{name}]"
    return name if argument.nargs == 1 else f"{name}..."


def _plain_types(name: str) -> str:
    """`--steps <int>` as `--steps INTEGER`; choices, as in `<stop|continue>`, in brackets."""

    def plain(found: re.Match[str]) -> str:
        kind = re.sub(r"^list\[(\w+)\]$", r"\1", found[1]).lower()
        return _TYPES.get(kind, f"[{kind}]")

    return re.sub(r"<([^>]+)>", plain, name)


def _glued(text: str) -> str:
    """The text, with each option in it whole, and "[default: …]" at the end if it is short."""
    text = re.sub(r" *\[required\]$", "", text)
    text = re.sub(r"--[a-z-]+", lambda found: found[0].translate(_GLUE), text)
    found = re.search(r"\[default: .*\]$", text)
    if found is None or len(found[0]) > _WHOLE:
        return text
    return text[: found.start()] + found[0].translate(_GLUE)


def _write_lines(text: str | None, formatter: Any) -> None:
    """Write the lines as they are: they are commands to copy."""
    lines: Iterable[str] = (text or "").strip().splitlines()
    formatter.write("\n")
    for line in lines:
        formatter.write(f"  {line}\n" if line.startswith("$ ") else f"{line}\n")
