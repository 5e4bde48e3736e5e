"""The settings of a training run as options of a command."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from headrace.translation import SECTIONS, TrainSettings


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's `**given` by an option for each setting that it has no parameter for.

    Typer reads the options from the signature. Each is None unless it was given.
    """
    own = typing.get_type_hints(command, include_extras=True)
    parameters = [
        known.replace(kind=Parameter.KEYWORD_ONLY, annotation=own[name])
        for name, known in signature(command).parameters.items()
        if known.kind is not Parameter.VAR_KEYWORD
    ]
    hints = typing.get_type_hints(TrainSettings)
    for known in dataclasses.fields(TrainSettings):
        if known.name not in own:
            option = _option(known, hints[known.name])
            parameters.append(
                Parameter(known.name, Parameter.KEYWORD_ONLY, default=None, annotation=option)
            )
    command.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _option(known: dataclasses.Field[Any], hint: Any) -> Any:
    """Its help is the setting's meaning, with the default in brackets."""
    usual = "" if known.default is None else f" ({_shown(known.default)})"
    meaning = known.metadata["meaning"]
    if typing.get_origin(hint) is typing.Literal:
        meaning = f"{meaning} ({', '.join(typing.get_args(hint))})"
        hint = str
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    flag = f"--{known.name.replace('_', '-')}"
    if hint is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    panel = next(title for title, names in SECTIONS.items() if known.name in names)
    return Annotated[hint | None, typer.Option(flag, help=meaning + usual, rich_help_panel=panel)]


def _shown(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value}"
