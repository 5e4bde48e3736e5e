"""`headrace train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.options import Cache, Data, Quiet, require_resume_alone, usage_errors
from headrace.cli.settings import with_settings
from headrace.errors import TranslationError
from headrace.runs import RunFolder
from headrace.translation import TrainSettings, stored_values

_RUNS = Path("runs/train")


@with_settings
def train(
    data: Data = None,
    project: Annotated[
        Path | None, typer.Option(help=f"Where runs are made; none: {_RUNS}.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name; none: exp, exp2, …")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of the options below.")] = None,
    cache: Cache = None,
    quiet: Quiet = False,
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
    with usage_errors():
        if "tokens" in given and "sentences" in given:
            raise TranslationError(
                f"--tokens {given['tokens']} and --sentences {given['sentences']}: a batch is "
                "measured by one of them; leave out the other"
            )
        if resume is not None:
            others = {"name": name, "config": config, **given}
            require_resume_alone(resume, project, others, TranslationError)
            settings = TrainSettings.read(RunFolder.open(resume).config)
        else:
            stored = stored_values(config) if config is not None else {}
            settings = TrainSettings.from_dict(stored | given, where=str(config or "settings"))
    with launched(settings.rank_timeout) as ranks:
        how: dict[str, Any] = {"cache": cache, "quiet": quiet, "ranks": ranks}
        with usage_errors():
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
