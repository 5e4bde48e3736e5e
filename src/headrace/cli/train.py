"""`headrace train`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import (
    Cache,
    Data,
    Quiet,
    is_typed,
    note_default_languages,
    require_resume_alone,
)
from headrace.cli.output import end_program, print_line
from headrace.cli.settings import with_settings
from headrace.errors import TranslationError, usage_errors
from headrace.extras import require
from headrace.lifecycle import RunFolder
from headrace.text_table import counted
from headrace.translation import CHANGED_BY_RESUME, SECTIONS, TrainSettings, stored_values

if TYPE_CHECKING:
    from headrace.translation import TrainResult

EXAMPLE = """\
Examples:
$ headrace train --preset tiny --epochs 5        # the built-in corpus
$ headrace train corpus.tsv --src de --trg en    # your own sentence pairs
$ headrace train corpus.tsv --time-limit 30m     # train for half an hour
$ headrace train --resume runs/train/exp         # continue an interrupted run
$ headrace train --resume runs/train/exp --epochs 20  # more epochs
$ torchrun --nproc-per-node 8 -m headrace train  # on 8 GPUs
"""


@with_settings(TrainSettings, SECTIONS)
def train(
    context: typer.Context,
    data: Data = None,
    data_option: Annotated[
        list[Path] | None,
        typer.Option("--data", help="The same as DATA. Repeatable.", show_default=False),
    ] = None,
    project: Annotated[Path, typer.Option(help="Folder for new runs.")] = Path("runs/train"),
    name: Annotated[
        str | None, typer.Option(help="Name of the run.", show_default="exp, exp2, …")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue this run. Of its settings, --epochs, --time-limit, --patience and "
            "--samples may be changed."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Read the settings below from this YAML file.")
    ] = None,
    cache: Cache = None,
    quiet: Quiet = False,
    **given: Any,
) -> None:
    """Train a translation model and score it on the test set.

    Options not given here are read from --config; the rest keep their
    defaults. Ctrl-C saves a checkpoint and prints the command that resumes
    the run.
    """
    require("headrace train", "sentencepiece", "sacrebleu")
    from headrace.parallel import join_ranks
    from headrace.translation import Trainer

    given = {key: value for key, value in given.items() if is_typed(context, key)}
    if data and data_option:
        raise typer.BadParameter("expected the files once: as DATA or as --data", param_hint="DATA")
    data = data or data_option
    if data:
        given["data"] = tuple(map(str, data))
    with usage_errors():
        if "tokens" in given and "sentences" in given:
            raise TranslationError(
                f"--tokens {given['tokens']} and --sentences {given['sentences']}: expected one of "
                "them to set the batch size; leave out the other"
            )
        if resume is not None:
            changes = {key: given.pop(key) for key in CHANGED_BY_RESUME if key in given}
            others = {"name": name, "config": config, **given}
            elsewhere = project if is_typed(context, "project") else None
            require_resume_alone(resume, elsewhere, others, TranslationError)
            settings = TrainSettings.read(RunFolder.open(resume).config)
        else:
            stored = stored_values(config) if config is not None else {}
            settings = TrainSettings.from_dict(stored | given, where=str(config or "settings"))
    with join_ranks(settings.rank_timeout) as ranks:
        common: dict[str, Any] = {"cache": cache, "quiet": quiet, "ranks": ranks}
        with usage_errors():
            if resume is not None:
                trainer = Trainer.resume(resume, changes=changes, **common)
            else:
                trainer = Trainer.create(settings, project=project, name=name, **common)
        if resume is None and config is None and ranks.is_first and not quiet:
            note_default_languages(context, data, settings.src, settings.trg)
        if ranks.several:
            ranks.resume_with(f"headrace train --resume {trainer.folder.path}")
        result = trainer.run()
    exit_code = 0
    if result.stopped is not None:
        sigterm_code = 0 if trainer.settings.stop_code == "zero" else 143
        exit_code = 130 if result.stopped == "SIGINT" else sigterm_code
    elif ranks.is_first:
        _print_scores(result, [] if quiet else result.examples)
    # At once: with gloo, Python's own exit has aborted now and then after all was written. Probably
    # one of gloo's threads still needed Python.
    end_program(exit_code, at_once=ranks.several)


def _print_scores(result: TrainResult, examples: Iterable[tuple[str, str, str]]) -> None:
    scores = result.scores
    assert scores is not None
    for source, reference, found in examples:
        print_line(f"\n  {source}\n= {reference}\n> {found}")
    updates = counted(result.updates, "update")
    print_line(f"\n{updates}; weights, metrics and state in {result.folder.path}")
    if result.folder.report.exists():
        print_line(f"report {result.folder.report}")
    if scores.scored_on:
        print_line(scores.scored_on)
    print_line(f"chrF {scores.chrf:.1f}   {scores.chrf_signature}")
    print_line(f"signature {scores.bleu_signature}")
    print_line(f"BLEU {scores.bleu:.1f}")
