"""Options made from the fields of a settings class: type, default and help text stand there."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from headrace.schema import Checked


def with_settings(
    settings: type[Checked], panels: Mapping[str, Sequence[str]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's `**given` by one option for each field that it has no parameter for.

    `panels` maps the title of a help panel to its fields. An option that is not typed has the
    field's default; `options.is_typed` tells the two apart.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = typing.get_type_hints(command, include_extras=True)
        parameters = [
            known.replace(kind=Parameter.KEYWORD_ONLY, annotation=own[name])
            for name, known in signature(command).parameters.items()
            if known.kind is not Parameter.VAR_KEYWORD
        ]
        hints = typing.get_type_hints(settings)
        for known in dataclasses.fields(settings):
            if known.name not in own:
                panel = next(title for title, names in panels.items() if known.name in names)
                parameters.append(_parameter(known, hints[known.name], panel))
        # Typer reads the options from the signature.
        command.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _parameter(known: dataclasses.Field[Any], hint: Any, panel: str) -> Parameter:
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) in (typing.Literal, tuple):  # a list is typed with commas
        hint = str
    default = None if known.default == () else known.default
    flag = f"--{known.name.replace('_', '-')}"
    if hint is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    option = typer.Option(
        flag,
        help=known.metadata["meaning"],
        show_default=known.metadata.get("unset") or True,
        rich_help_panel=panel,
    )
    kind: Any = hint if default is not None else hint | None
    annotation = Annotated[kind, option]
    return Parameter(known.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
