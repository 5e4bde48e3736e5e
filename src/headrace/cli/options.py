"""Options that several commands share, and checks that end a mistyped command with exit code 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.atomic_files import is_special
from headrace.errors import BenchError, HeadraceError, TranslationError, usage_errors

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only warnings and the final result.")
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Run folder that `headrace train` created.", show_default=False
    ),
]
Weights = Annotated[str, typer.Option(help="best, last, averaged, or a .safetensors file.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, …")]
Beam = Annotated[
    int | None,
    typer.Option(
        min=1, max=1000, metavar="INTEGER", help="Beam size.", show_default="the run's --beam"
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Files or a folder of sentence pairs: JSON, JSON Lines, TSV, CSV or two text files, "
        "also compressed.",
        show_default="the built-in Chinese–English corpus",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Folder for prepared corpora.",
        show_default="~/.cache/headrace/text",
    ),
]
Work = Annotated[
    str,
    typer.Option(
        help="Workload to train: translation, resnet, mlp, or your own as your_module:make_work.",
        rich_help_panel="Workload",
    ),
]
WorkOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set an option of the workload, as in --set batch=64. Repeatable.",
        rich_help_panel="Workload",
    ),
]

Program = Annotated[
    list[str],
    typer.Argument(
        metavar="PROGRAM [ARGS]...",
        help="The script to run (with -m: the module), then its own arguments.",
        show_default=False,
    ),
]
AsModule = Annotated[bool, typer.Option("-m", help="Run a module, as `python -m` does.")]
#: For commands that run a program: what follows its name belongs to the program.
PROGRAM_SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,
    "ignore_unknown_options": False,
    "help_option_names": ["-h", "--help"],
}


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line, as opposed to having its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def note_default_languages(
    context: typer.Context, data: Sequence[object] | None, src: str, trg: str
) -> None:
    """Say that a user's files are read as pairs of the default languages, if these were not
    given."""
    missing = [f"--{name}" for name in ("src", "trg") if not is_typed(context, name)]
    if data and missing:
        given = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given"
        typer.echo(f"note: {given}: the pairs are taken for {src} and {trg}", err=True)


def work_errors(work: str) -> AbstractContextManager[None]:
    """Like `usage_errors`, for finding a built-in workload. An error in a user's own module is no
    usage error."""
    return nullcontext() if ":" in work else usage_errors()


def parse_set_options(given: list[str]) -> dict[str, Any]:
    """Parse options of the form `--set name=value`. Each value is YAML."""
    import yaml

    found: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{option}: expected name=value", param_hint="--set")
        if name.strip() in found:
            raise typer.BadParameter(
                f"{name.strip()}: given twice; expected each option once", param_hint="--set"
            )
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            raise typer.BadParameter(
                f"{option}: the value is not YAML; expected a number, a word or a list, in quotes "
                "if it has special characters",
                param_hint="--set",
            ) from None
        if isinstance(read, str):
            with contextlib.suppress(ValueError):  # YAML reads 1e-3 as text
                read = float(read)
        found[name.strip()] = read
    return found


def parse_list(text: str | None) -> list[str] | None:
    """Split a list at its commas."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def check_output_file(out: Path) -> None:
    """Raise an error if `out` cannot be written. Call this before a long measurement."""
    if out.is_dir():
        raise BenchError(f"{out}: is a folder; expected the path of a file for the result")
    _check_writable(out, BenchError)


def check_output_folder(out: Path) -> None:
    """Raise an error if there is something at `out` already, or if it cannot be written."""
    if out.exists():
        raise TranslationError(f"{out}: already exists; expected the path of a new folder (--out)")
    _check_writable(out, TranslationError)


def _check_writable(out: Path, error: type[HeadraceError]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise error(f"{out}: cannot be written ({problem.strerror})") from problem
    if is_special(out):  # it is written to, not replaced
        if not os.access(out, os.W_OK):
            raise error(f"{out}: cannot be written (no write permission)")
    elif not os.access(out.resolve().parent, os.W_OK):
        raise error(f"{out}: cannot be written (no write permission for its folder)")


def require_resume_alone(
    resume: Path, project: Path | None, given: Mapping[str, object], error: type[HeadraceError]
) -> None:
    """Raise an error that names the options given besides `--resume`, if there are any."""
    is_same = project is not None and project.resolve() == resume.resolve().parent
    others = {"project": None if is_same else project, **given}
    named = [
        name.upper() if name == "data" else f"--{name.replace('_', '-')}"
        for name, value in others.items()
        if value is not None
    ]
    if named:
        raise error(
            f"--resume {resume} takes its settings from config.yaml: leave out {', '.join(named)}, "
            "or edit that file"
        )
