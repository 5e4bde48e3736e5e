"""Options of several commands, and the checks that end a mistyped command with exit code 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.errors import BenchError, HeadraceError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Warnings, the last epoch and the result alone.")
]
Run = Annotated[
    Path, typer.Argument(help="A run's folder, as `train` made it.", show_default=False)
]
Weights = Annotated[str, typer.Option(help="best, last, averaged, or a .safetensors file.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, …")]
Beam = Annotated[int | None, typer.Option(help="Hypotheses; none: as the run was told.")]
Data = Annotated[
    list[Path] | None,
    typer.Argument(
        help="A file or folder of sentence pairs (JSON, JSON lines, TSV, two text files; also "
        ".gz); none: the built-in Chinese–English corpus.",
        show_default=False,
    ),
]
Cache = Annotated[Path | None, typer.Option(help="Where prepared text is kept.")]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Inside the block an error is the command line's: it ends the program with exit code 2, as
    typer's own do."""
    try:
        yield
    except HeadraceError as problem:
        problem.exit_code = 2
        raise


def work_errors(work: str) -> AbstractContextManager[None]:
    """The same while a work is looked up; but a function of the user's may fail by itself."""
    return nullcontext() if ":" in work else usage_errors()


def parse_set_options(given: list[str]) -> dict[str, Any]:
    """What `--set name=value` says, each value read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{one}: expected name=value", param_hint="--set")
        if name.strip() in found:
            raise typer.BadParameter(f"{name.strip()} was given before", param_hint="--set")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            raise typer.BadParameter(
                f"{one}: the value is not YAML; expected a number, a word or a list, in quotes if "
                "need be",
                param_hint="--set",
            ) from None
        if isinstance(read, str):
            with contextlib.suppress(ValueError):  # YAML takes 1e-3 for text, people do not
                read = float(read)
        found[name.strip()] = read
    return found


def parse_list(text: str | None) -> list[str] | None:
    """Words with commas between them."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def check_output_file(out: Path) -> None:
    """Raise unless a result can be written there: before anything is measured for minutes."""
    if out.is_dir():
        raise BenchError(f"{out}: is a folder: expected a file to write the result to")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BenchError(f"{out}: cannot be written ({problem.strerror})") from problem
    if not os.access(out.parent, os.W_OK):
        raise BenchError(f"{out}: cannot be written (no permission for its folder)")


def require_resume_alone(
    resume: Path, project: Path | None, given: Mapping[str, object], error: type[HeadraceError]
) -> None:
    """Raise if `--resume` was typed with other options, and name them as they were typed."""
    is_there = project is not None and project.resolve() == resume.resolve().parent
    others = {"project": None if is_there else project, **given}
    named = [
        name.upper() if name == "data" else f"--{name.replace('_', '-')}"
        for name, value in others.items()
        if value is not None
    ]
    if named:
        raise error(
            f"--resume {resume} goes on as its config.yaml says: leave out {', '.join(named)}, or "
            "edit that file"
        )
