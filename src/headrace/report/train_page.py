"""The values of a training run's page, `templates/train.html`."""

from __future__ import annotations

from typing import Any

from headrace.records import TrainingRun
from headrace.report.charts import Cells, Table, figure, table
from headrace.report.environment import entries
from headrace.report.figures import number, score, seconds, share, size
from headrace.report.page import Stat, Summary, render_page
from headrace.report.thinning import evenly_spaced
from headrace.report.train_charts import (
    bleu_chart,
    epochs_table,
    known_columns,
    run_gpu,
    run_losses,
    run_use,
    run_waits,
    speed_chart,
)
from headrace.text_table import counted

_MAX_SAMPLED_EPOCHS = 5
_EARLY = {
    "time limit": "The time limit ended it before its last epoch; --resume trains on.",
    "patience": "It ended early, because its validation score did not get better (--patience).",
}


def train_page(run: TrainingRun, source: str) -> str:
    """The page of a training run."""
    settings = run.settings
    pair = f"{settings.get('src', '?')} → {settings.get('trg', '?')}"
    model = f"{settings.get('preset', '')} model, plan {settings.get('plan', '?')}"
    losses, use = run_losses(run), run_use(run)
    values = {
        "source": source,
        "kicker": " · ".join(("training run", run.path.name, pair, model)),
        "summary": _summary(run),
        "losses": losses,
        "bleu": bleu_chart(run),
        "speed": speed_chart(run),
        "waits": run_waits(run),
        "use": use,
        "gpu": run_gpu(run),
        "examples": run.finished.examples if run.finished is not None else (),
        "samples": _samples(run),
        "src": str(settings.get("src", "")),
        "trg": str(settings.get("trg", "")),
        "epochs": epochs_table(run, known_columns(run)) if run.epochs else None,
        "path": str(run.path),
        "weights": _weights(run),
        "run_settings": entries(settings),
    }
    has_lines = losses is not None or bool(run.epochs) or bool(use["charts"])
    return render_page("train.html", values, has_lines=has_lines)


def _summary(run: TrainingRun) -> Summary:
    last = run.epochs[-1] if run.epochs else None
    sentences = []
    if last is not None and last.data_wait_share is not None:
        sentences.append(_waiting_words(last.data_wait_share, last.host_blocked_share))
    if run.busy is not None and run.busy.busy_share is not None:
        sentences.append(
            f"In a profiler window the GPU was busy {share(run.busy.busy_share)} of the time."
        )
    done = counted(run.updates, "update")
    if run.finished is not None:
        final = run.finished.scores
        value, label = score(final.bleu), f"BLEU, chrF {score(final.chrf)}"
        headline = f"BLEU {score(final.bleu)} after {counted(len(run.epochs), 'epoch')}, {done}"
        if run.finished.ended_early in _EARLY:
            sentences.append(_EARLY[run.finished.ended_early])
    else:
        sentences.append(f"Continue with: headrace train --resume {run.path}")
        headline = (
            f"Not finished: {done} so far" if run.updates else "Not begun: nothing measured yet"
        )
        if last is not None and last.bleu is not None:
            value, label = score(last.bleu), "BLEU on a sample of validation sentences"
        else:
            loss = last.loss if last is not None else run.steps[-1].loss if run.steps else None
            value, label = number(loss), "loss"
    return Summary(headline, value, label, sentences, _stats(run))


def _waiting_words(data: float, blocked: float | None) -> str:
    if data > 0.1:
        return (
            f"The loop waited for data {share(data)} of the last epoch: more loader workers "
            "(--workers) would make it faster."
        )
    device = "" if blocked is None else f", and for the device {share(blocked)}"
    return (
        f"Data was ready when needed: the loop waited for it {share(data)} of the last epoch"
        f"{device}."
    )


def _stats(run: TrainingRun) -> list[Stat]:
    if not run.epochs:
        return []
    last = run.epochs[-1]
    stats = [Stat("Loss, last epoch", number(last.loss))]
    if last.valid_loss is not None:
        stats.append(Stat("Validation loss", number(last.valid_loss)))
    if last.tokens_per_s is not None:
        stats.append(Stat("Tokens per second", number(last.tokens_per_s)))
    if last.data_wait_share is not None:
        stats.append(Stat("Waiting for data", share(last.data_wait_share)))
    if run.busy is not None and run.busy.busy_share is not None:
        stats.append(Stat("GPU busy", share(run.busy.busy_share)))
    if last.peak_memory_bytes:
        stats.append(Stat("Peak memory", size(last.peak_memory_bytes)))
    if run.uses:
        stats.append(Stat("Monitored for", seconds(run.uses[-1].at_s)))
    return stats


def _samples(run: TrainingRun) -> list[dict[str, Any]]:
    """The held-out sentences that were translated after each epoch, with their translations after
    some of the epochs: the first, the last, and others between."""
    epochs = [epoch for epoch in run.epochs if epoch.samples]
    if not epochs:
        return []
    chosen = [epochs[at] for at in evenly_spaced(len(epochs), _MAX_SAMPLED_EPOCHS)]
    found: list[dict[str, Any]] = []
    for source, reference, _ in chosen[-1].samples or ():
        translations = [
            (f"epoch {epoch.epoch + 1}", one[2])
            for epoch in chosen
            for one in epoch.samples or ()
            if one[:2] == (source, reference)
        ]
        found.append({"source": source, "reference": reference, "translations": translations})
    return found


def _weights(run: TrainingRun) -> Table | None:
    files: list[Cells] = [
        [str(run.path / name), figure(float(size_), size)] for name, size_ in run.weights
    ]
    return table("Files of weights", ("file", "size"), files) if files else None
