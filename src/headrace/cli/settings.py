"""Command-line options from the fields of a settings class: type, default and help text."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from headrace.schema import Checked, is_union


def with_settings(
    settings: type[Checked], panels: Mapping[str, Sequence[str]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the `**given` of a command by an option for each field that is not a parameter.

    `panels` maps the title of each help panel to its fields. An option that was not given has the
    field's default; `options.is_typed` says whether it was given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = typing.get_type_hints(command, include_extras=True)
        parameters = [
            parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=own[name])
            for name, parameter in signature(command).parameters.items()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        hints = typing.get_type_hints(settings)
        for field in dataclasses.fields(settings):
            if field.name not in own:
                panel = next(title for title, names in panels.items() if field.name in names)
                parameters.append(_parameter(field, hints[field.name], panel))
        # Typer reads the options from the signature.
        command.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(field: dataclasses.Field[Any], hint: Any, panel: str) -> Parameter:
    if is_union(hint):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) in (typing.Literal, tuple):  # a list is text with commas
        hint = str
    default = None if field.default == () else field.default
    flag = f"--{field.name.replace('_', '-')}"
    if hint is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    option = typer.Option(
        flag,
        help=field.metadata["meaning"],
        show_default=field.metadata.get("unset") or True,
        rich_help_panel=panel,
    )
    kind: Any = hint if default is not None else hint | None
    annotation = Annotated[kind, option]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
