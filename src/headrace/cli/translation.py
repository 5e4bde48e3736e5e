"""The translation commands: train, evaluate, translate, prepare. They parse, call and print."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.bench import typed_wrong
from headrace.errors import HeadraceError, TranslationError
from headrace.runs import RunFolder
from headrace.translation import SECTIONS, TrainSettings, stored_values

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
Scored = Annotated[
    list[Path] | None,
    typer.Argument(help="Sentence pairs; none: the run's own held-out ones.", show_default=False),
]
_RUNS = Path("runs/train")
Cache = Annotated[Path | None, typer.Option(help="Where prepared text is kept.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(_with_settings(train))
    app.command()(evaluate)
    app.command()(translate)
    app.command()(prepare)


def train(
    data: list[Path] | None,
    project: Path | None,
    name: str | None,
    resume: Path | None,
    config: Path | None,
    cache: Path | None,
    quiet: bool,
    **given: Any,
) -> None:
    """Train a translation model, and translate with it what it never saw.

    Without DATA, on the built-in corpus. What is not given is as `--config` says, else as usual.
    Ctrl-C saves and says how to go on; `--resume RUN` needs no other option.
    """
    from headrace.parallel import launched
    from headrace.translation import Trainer

    given = {key: value for key, value in given.items() if value is not None}
    if data:
        given["data"] = tuple(str(path.absolute()) for path in data)
    if "weights" in given:
        given["weights"] = str(Path(given["weights"]).absolute())
    with typed_wrong():
        if "tokens" in given and "sentences" in given:
            raise TranslationError(
                f"--tokens {given['tokens']} and --sentences {given['sentences']}: a batch is "
                "measured by one of them; leave out the other"
            )
        if resume is not None:
            others = {"name": name, "config": config, **given}
            require_alone(resume, project, others, TranslationError)
            settings = TrainSettings.read(RunFolder.open(resume).config)
        else:
            stored = stored_values(config) if config is not None else {}
            settings = TrainSettings.from_dict(stored | given, where=str(config or "settings"))
    with launched(settings.rank_timeout) as ranks:
        how: dict[str, Any] = {"cache": cache, "quiet": quiet, "ranks": ranks}
        with typed_wrong():
            if resume is not None:
                trainer = Trainer.resume(resume, **how)
            else:
                trainer = Trainer.create(settings, project=project or _RUNS, name=name, **how)
        result = trainer.run()
    if result.stopped is not None:
        asked = 0 if trainer.settings.stop_code == "zero" else 143
        raise typer.Exit(130 if result.stopped == "SIGINT" else asked)
    if not ranks.is_first:
        return
    assert result.scores is not None
    for source, reference, found in [] if quiet else result.examples:
        typer.echo(f"\n  {source}\n= {reference}\n> {found}")
    typer.echo(f"\n{result.updates:,} updates; weights, metrics and state in {result.folder.path}")
    if result.folder.report.exists():
        typer.echo(f"report {result.folder.report}")
    typer.echo(f"chrF {result.scores.chrf:.1f}   {result.scores.chrf_signature}")
    typer.echo(f"signature {result.scores.bleu_signature}")
    typer.echo(f"BLEU {result.scores.bleu:.1f}")


def evaluate(
    run: Run,
    data: Scored = None,
    split: Annotated[
        str | None, typer.Option(help="valid or test; none: test if there is one.")
    ] = None,
    weights: Weights = "best",
    beam: Beam = None,
    device: DeviceName = "auto",
    lowercase: Annotated[bool, typer.Option(help="Also BLEU of everything in lower case.")] = False,
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Score a trained model: BLEU and chrF, with their signatures.

    Without DATA, on the held-out sentences of the corpus it was trained on.
    """
    from headrace.translation import TrainedModel, prepared_for, read_pairs

    if split not in (None, "valid", "test"):
        raise TranslationError(f"split = {split!r}: expected valid or test")
    model = TrainedModel.load(run, weights=weights, device=device)
    settings = model.settings
    if data:
        split = split or "test"
        pairs = read_pairs(
            data if len(data) > 1 else data[0],
            src=settings.src,
            trg=settings.trg,
            split=split,
            skip_bad=settings.skip_bad,
        )
    else:
        prepared = prepared_for(settings, cache)
        split = split or ("test" if "test" in prepared.splits else "valid")
        pairs = prepared.texts(split)
    scores, _ = model.score(pairs, beam=beam, lowercase=lowercase, watch=_watch(quiet))
    typer.echo(f"{len(pairs):,} sentences of {split}, {weights} weights")
    typer.echo(f"chrF {scores.chrf:.2f}   {scores.chrf_signature}")
    if scores.bleu_lower is not None:
        typer.echo(f"BLEU {scores.bleu_lower:.2f} in lower case")
    typer.echo(f"signature {scores.bleu_signature}")
    typer.echo(f"BLEU {scores.bleu:.2f}")


def translate(
    run: Run,
    sentences: Annotated[
        list[str] | None, typer.Argument(help="Sentences; none: one a line from stdin.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A text file, one sentence a line.")
    ] = None,
    weights: Weights = "best",
    beam: Beam = None,
    device: DeviceName = "auto",
) -> None:
    """Translate: one line of output for each sentence, in their order."""
    from headrace.translation import TrainedModel

    if file is not None and sentences:
        raise TranslationError("sentences were given and a file too: expected one of them")
    if file is not None:
        try:
            # Only a newline ends a line, as in a corpus: one line of output for each.
            text = file.read_bytes().decode("utf-8-sig")
        except OSError as problem:
            raise TranslationError(f"{file}: cannot be read ({problem.strerror})") from problem
        except UnicodeDecodeError as problem:
            number = problem.object.count(b"\n", 0, problem.start) + 1
            raise TranslationError(f"{file}:{number}: is not UTF-8 text ({problem})") from problem
        given = text.removesuffix("\n").split("\n") if text else []
    elif sentences:
        given = sentences
    else:
        given = [line.rstrip("\n") for line in sys.stdin]
    for number, line in enumerate(given, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            raise TranslationError(f"sentence {number}: is not UTF-8 text")
    model = TrainedModel.load(run, weights=weights, device=device)
    for line in model.translate(given, beam=beam):
        typer.echo(line)


def prepare(
    data: Data = None,
    src: Annotated[str, typer.Option(help="The side that is translated.")] = "zh",
    trg: Annotated[str, typer.Option(help="The side it is translated into.")] = "en",
    vocabulary: Annotated[int, typer.Option(help="Pieces of each vocabulary, at most.")] = 8000,
    joint: Annotated[bool, typer.Option(help="One vocabulary for both sides.")] = False,
    max_length: Annotated[int, typer.Option(help="Tokens of a side, at most.")] = 60,
    skip_bad: Annotated[bool, typer.Option(help="Count malformed lines; go on.")] = False,
    cache: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Read a corpus, make its vocabularies and encode it; `train` does it when needed."""
    from headrace.translation import prepared_for

    settings = TrainSettings(
        data=tuple(str(path) for path in data or ()),
        src=src,
        trg=trg,
        vocabulary=vocabulary,
        joint=joint,
        max_length=max_length,
        skip_bad=skip_bad,
    )
    found = prepared_for(settings, cache)
    if not quiet:
        typer.echo(found.table())
    typer.echo(str(found.folder))


def require_alone(
    resume: Path, project: Path | None, given: Mapping[str, object], error: type[HeadraceError]
) -> None:
    """`--resume` needs nothing else: name all else that was typed, as it was typed."""
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


def _watch(quiet: bool) -> Callable[[int, int], object] | None:
    if quiet or not sys.stderr.isatty():
        return None
    return lambda done, total: typer.echo(
        f"\r{done:,}/{total:,}" + ("\n" if done == total else ""), err=True, nl=False
    )


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each of the run's settings, with its meaning as help."""
    own = [
        _option("data", Data, None),
        _option("project", _typed(Path | None, f"Where runs are made; none: {_RUNS}."), None),
        _option("name", _typed(str | None, "The run's name; none: exp, exp2, …"), None),
        _option("resume", _typed(Path | None, "Go on with this run."), None),
        _option("config", _typed(Path | None, "A YAML file of the options below."), None),
        _option("cache", Cache, None),
        _option("quiet", Quiet, False),
    ]
    hints = typing.get_type_hints(TrainSettings)
    for known in dataclasses.fields(TrainSettings):
        if known.name != "data":
            own.append(_option(known.name, _setting(known, hints[known.name]), None))
    command.__signature__ = Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    return command


def _option(name: str, annotation: Any, default: object) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typed(kind: Any, meaning: str) -> Any:
    return Annotated[kind, typer.Option(help=meaning)]


def _setting(known: dataclasses.Field[Any], hint: Any) -> Any:
    """An option that is None unless it is given; its help says what is then."""
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
