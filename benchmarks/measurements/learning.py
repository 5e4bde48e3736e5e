"""`headrace train` beside a plain `nn.Transformer` loop: the same losses, speed and BLEU?

    python benchmarks/measurements/learning.py --data FOLDER [--part losses|speed|bleu]
        [--pairs N] [--epochs N] [--out FILE]

FOLDER is a corpus for `headrace train`, such as Multi30k; `--config` has the settings. Both train
on the same token ids in the same batches, with the same recipe, on two CPU cores (`--threads`), and
start from the same weights. `headrace train` runs with all that it does: progress line, metrics,
monitor, watchdog, checkpoints, validation, samples, the final score and the report. The plain loop
(`plain_transformer.py`) does nothing but train.

losses  The loss of each of the first `--steps` updates, without dropout: the relative difference.
bleu    Train to the end, with dropout: training loss, validation loss and BLEU (greedy, sacreBLEU)
        of each epoch; BLEU of the test split; and that of a word-for-word translation
        (`word_for_word.py`). Random numbers are drawn in another order, so the curves are alike,
        not equal. Both train at the same time, each in a process with half of the threads.
speed   Target tokens per second. First in turns: a block of batches in a running `headrace train`,
        then the same block in the plain loop, in one process. No checkpoint is written meanwhile;
        the monitor's and the watchdog's threads run all the time. Then each alone, one after the
        other: a whole `headrace train` of one epoch, and an epoch of the plain loop. This part
        needs a quiet machine; the others do not.

Each part is stored in `--out` with its command. Parts that are already in the file stay there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save, table
from plain_transformer import PlainLoop, plain_copy, target_tokens, translate_greedily
from word_for_word import WordForWord

from headrace.engine import Engine
from headrace.lifecycle import read_metrics
from headrace.translation import (
    EOS,
    TrainedModel,
    Trainer,
    TrainResult,
    TrainSettings,
    prepared_for,
    read_corpus,
    stored_values,
)
from headrace.translation.build import RunParts, build_run
from headrace.translation.score import score

CONFIG = Path(__file__).resolve().parents[1] / "inputs" / "learning.yaml"
PARTS = ("losses", "bleu", "speed")
Pair = tuple[str, str]
Row = dict[str, Any]


class Contest:
    """The settings that both share, and a folder for runs and the prepared corpus."""

    def __init__(self, settings: TrainSettings, work: Path, *, quiet: bool = False) -> None:
        self.settings, self.work, self._quiet = settings, work, quiet

    def train(self, name: str, **changes: Any) -> TrainResult:
        """What `headrace train` does."""
        result = Trainer.create(
            self.settings.replace(**changes),
            project=self.work / "runs",
            name=name,
            cache=self.work / "cache",
            quiet=self._quiet,
        ).run()
        if result.stopped is not None:
            raise SystemExit(f"stopped by {result.stopped}")
        return result

    def parts(self, **changes: Any) -> RunParts:
        """The parts that `train` makes of the same settings: the initial weights, the batches."""
        settings = self.settings.replace(**changes)
        return build_run(settings, prepared_for(settings, self.work / "cache"))

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)


def batches_of(parts: RunParts, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    parts.loader.sampler.set_epoch(epoch)
    return iter(parts.loader)


@contextmanager
def engine_steps(replacement: Callable[..., Iterator[Any]]) -> Iterator[None]:
    """Inside the block the trainer iterates over `replacement(engine, steps)`, where `steps` is
    what `engine.steps` returns."""
    original = Engine.steps

    def steps(engine: Engine, *arguments: Any, **options: Any) -> Iterator[Any]:
        return replacement(engine, original(engine, *arguments, **options))

    with mock.patch.object(Engine, "steps", steps):
        yield


# --- losses ---------------------------------------------------------------------------------------


def losses(contest: Contest, steps: int) -> Row:
    """The losses of the first updates of both, without dropout."""
    ours: list[float] = []

    def kept(engine: Engine, progress: Iterator[Any]) -> Iterator[Any]:
        yield from progress
        assert engine.last_result is not None
        ours.extend(engine.last_result.losses)

    contest.say(f"losses: headrace train, {steps} updates without dropout")
    with engine_steps(kept):
        contest.train("losses", dropout=0.0, max_steps=steps, epochs=steps, beam=1)
    parts = contest.parts(dropout=0.0)
    loop = PlainLoop(plain_copy(parts.model), parts.settings)
    plain: list[float] = []
    epoch = 0
    contest.say("losses: the plain loop")
    while len(plain) < steps:
        for src, trg in batches_of(parts, epoch):
            plain.append(loop.step(src, trg))
            if len(plain) == steps:
                break
        epoch += 1
    apart = [abs(a - b) / b for a, b in zip(ours, plain, strict=True)]
    marks = sorted({n for n in (1, 10, 50, 100, 200, 500, 1000) if n < steps} | {steps})
    return {
        "updates": steps,
        "largest relative difference of the first": {n: max(apart[:n]) for n in marks},
        "first loss": {"headrace": ours[0], "plain": plain[0]},
        "last loss": {"headrace": ours[-1], "plain": plain[-1]},
        "losses": {
            "headrace": [round(loss, 6) for loss in ours],
            "plain": [round(loss, 6) for loss in plain],
        },
    }


def losses_table(found: Row) -> str:
    apart = found["largest relative difference of the first"]
    rows = {
        f"first {count}": {"largest relative difference": f"{value:.1e}"}
        for count, value in apart.items()
    }
    return table(rows)


# --- BLEU -----------------------------------------------------------------------------------------


def bleu(contest: Contest) -> Row:
    """Loss and BLEU by epoch of both, and the BLEU of a word-for-word translation."""
    settings = contest.settings
    parts = contest.parts()  # prepares the corpus, which both then find in the cache
    contest.say(f"bleu: headrace train and the plain loop, {settings.epochs} epochs")
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    spawn = get_context("spawn")
    with spawn.Pool(1, torch.set_num_threads, (max(1, threads // 2),)) as process:
        plain = process.apply_async(plain_epochs, (contest,))
        result = contest.train("bleu")
        rows = plain.get()
    torch.set_num_threads(threads)
    assert result.scores is not None
    lines = [line for line in read_metrics(result.folder.metrics) if line["kind"] == "epoch"]
    trained = TrainedModel.load(result.folder.path, weights="last", device="cpu")
    contest.say("bleu: the word-for-word translation")
    words = WordForWord(_training_text(parts))
    valid, test = _scored_pairs(parts)
    return {
        "pairs": len(parts.data.splits["train"]),
        "parameters": sum(weight.numel() for weight in parts.model.parameters()),
        "settings": _changed_settings(settings),
        "epochs": [
            {
                "epoch": number,
                "loss": {"headrace": line["loss"], "plain": row["loss"]},
                "valid loss": {"headrace": line["valid_loss"], "plain": row["valid loss"]},
                "BLEU": {"headrace": line["bleu"], "plain": row["BLEU"]},
            }
            for number, (line, row) in enumerate(zip(lines, rows["epochs"], strict=True), 1)
        ],
        "valid BLEU word for word": _word_for_word_bleu(words, valid, settings),
        "test BLEU": {
            "headrace, last weights, greedy": trained.score(test, beam=1)[0].bleu,
            "plain, last weights, greedy": rows["test"],
            f"headrace, best weights, beam {settings.beam}": result.scores.bleu,
            "word for word": _word_for_word_bleu(words, test, settings),
        },
        "signature": result.scores.bleu_signature,
    }


def plain_epochs(contest: Contest) -> Row:
    """Train the plain loop for all epochs: losses and BLEU by epoch, and BLEU of test."""
    settings, parts = contest.settings, contest.parts()
    valid, test = _scored_pairs(parts)
    loop = PlainLoop(plain_copy(parts.model), settings)
    torch.manual_seed(settings.seed)
    rows = []
    for epoch in range(settings.epochs):
        total = tokens = 0.0
        for src, trg in batches_of(parts, epoch):
            weight = target_tokens(trg)
            total, tokens = total + loop.step(src, trg) * weight, tokens + weight
        row = {
            "loss": total / tokens,
            "valid loss": loop.valid_loss(parts.valid_loader),
            "BLEU": _plain_bleu(loop, parts, valid),
        }
        contest.say(
            f"bleu: plain loop, epoch {epoch + 1}/{settings.epochs}: loss {row['loss']:.4f}, "
            f"valid {row['valid loss']:.4f}, BLEU {row['BLEU']:.2f}"
        )
        rows.append(row)
    return {"epochs": rows, "test": _plain_bleu(loop, parts, test)}


def _scored_pairs(parts: RunParts) -> tuple[list[Pair], list[Pair]]:
    """What the trainer translates after each epoch, and in the end: test, if there is one."""
    valid = parts.data.texts("valid")
    test = parts.data.texts("test") if "test" in parts.data.splits else valid
    return valid[: parts.settings.valid_sentences], test


def _word_for_word_bleu(words: WordForWord, pairs: list[Pair], settings: TrainSettings) -> float:
    return _bleu_of(words.translate(src for src, _ in pairs), pairs, settings)


def _plain_bleu(loop: PlainLoop, parts: RunParts, pairs: list[Pair]) -> float:
    source, target = parts.data.vocabularies
    ids = [[*line, EOS] for line in source.encode([src for src, _ in pairs])]
    found = target.decode(translate_greedily(loop.model, ids))
    return _bleu_of(found, pairs, parts.settings)


def _bleu_of(found: list[str], pairs: list[Pair], settings: TrainSettings) -> float:
    return score(found, [trg for _, trg in pairs], language=settings.trg).bleu


def _training_text(parts: RunParts) -> list[Pair]:
    """The sentence pairs that were trained on, from their ids."""
    source, target = parts.data.vocabularies
    pairs = parts.data.splits["train"]
    ids = [pairs[at] for at in range(len(pairs))]
    return list(
        zip(source.decode([s for s, _ in ids]), target.decode([t for _, t in ids]), strict=True)
    )


def _changed_settings(settings: TrainSettings) -> Row:
    """The settings that differ from the defaults, without the path of the corpus."""
    usual = TrainSettings().to_dict()
    return {
        name: value
        for name, value in settings.to_dict().items()
        if name != "data" and value != usual[name]
    }


def bleu_table(found: Row) -> str:
    def row(figures: dict[str, dict[str, float]]) -> Row:
        return {
            f"{name}, {who}": f"{figures[name][who]:.2f}"
            for name in ("loss", "valid loss", "BLEU")
            for who in ("headrace", "plain")
        }

    epochs = {f"epoch {line['epoch']}": row(line) for line in found["epochs"]}
    tests = {name: {"test BLEU": f"{value:.2f}"} for name, value in found["test BLEU"].items()}
    word_for_word = f"word for word: BLEU {found['valid BLEU word for word']:.2f} on valid"
    return "\n".join((table(epochs), word_for_word, table(tests)))


# --- speed ----------------------------------------------------------------------------------------


def speed(contest: Contest, *, rounds: int, block: int, warm_up: int = 40) -> Row:
    """Target tokens per second of both, in turns and each alone."""
    return {
        "in turns": in_turns(contest, rounds=rounds, block=block, warm_up=warm_up),
        "alone": alone(contest),
    }


def in_turns(contest: Contest, *, rounds: int, block: int, warm_up: int) -> Row:
    """A block of batches in `headrace train`, then the same block in the plain loop, and so on."""
    parts = contest.parts()
    batches = batches_of(parts, 0)
    loop = PlainLoop(plain_copy(parts.model), parts.settings)
    count = len(parts.loader)
    if warm_up + rounds * block > count:
        raise SystemExit(
            f"{rounds} rounds of {block} batches and {warm_up} to warm up: the epoch has only "
            f"{count} batches; give fewer --rounds, or more --pairs"
        )
    found: list[Row] = []

    def plain_block(size: int) -> tuple[int, float, float]:
        begun, begun_cpu, tokens = time.perf_counter(), time.process_time(), 0
        for _ in range(size):
            src, trg = next(batches)
            loop.step(src, trg)
            tokens += target_tokens(trg)
        return tokens, time.perf_counter() - begun, time.process_time() - begun_cpu

    def taking_turns(_: Engine, progress: Iterator[Any]) -> Iterator[Any]:
        end, size = warm_up, warm_up
        begun, begun_cpu = time.perf_counter(), time.process_time()
        for number, info in enumerate(progress, 1):
            yield info  # the trainer does the rest of the step before it asks for the next one
            if number < end:
                continue
            wall, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
            tokens, plain_wall, plain_cpu = plain_block(size)
            if size == block:
                found.append(
                    {
                        "headrace tokens/s": tokens / wall,
                        "plain tokens/s": tokens / plain_wall,
                        "ratio": plain_wall / wall,
                        "ratio of CPU time": plain_cpu / cpu,
                    }
                )
                contest.say(f"speed: round {len(found)}/{rounds}: {found[-1]['ratio']:.3f} ×")
            end, size = end + block, block
            begun, begun_cpu = time.perf_counter(), time.process_time()

    contest.say(f"speed: in turns, {rounds} rounds of {block} batches each")
    # No checkpoint: a thread would still write it in the plain loop's turn.
    with engine_steps(taking_turns):
        contest.train(
            "turns", max_steps=warm_up + rounds * block, save_every=1e9, valid_sentences=0, beam=1
        )
    return {
        "rounds": rounds,
        "batches per block": block,
        **{
            name: {
                "median": statistics.median(row[name] for row in found),
                "low": min(row[name] for row in found),
                "high": max(row[name] for row in found),
                "all": [round(row[name], 4) for row in found],
            }
            for name in found[0]
        },
    }


def alone(contest: Contest) -> Row:
    """The rate of a whole `headrace train` of one epoch, and of the plain loop on its batches."""
    parts = contest.parts()  # the corpus is in the cache now
    steps_s = 0.0

    def timed(_: Engine, progress: Iterator[Any]) -> Iterator[Any]:
        nonlocal steps_s
        begun = time.perf_counter()
        yield from progress
        steps_s = time.perf_counter() - begun

    contest.say(f"speed: headrace train alone, {len(parts.loader)} updates")
    begun = time.perf_counter()
    with engine_steps(timed):
        result = contest.train("alone", epochs=1)
    whole_s = time.perf_counter() - begun
    (line,) = (line for line in read_metrics(result.folder.metrics) if line["kind"] == "epoch")
    validation_s = line["validation_s"]
    contest.say("speed: the plain loop alone")
    loop = PlainLoop(plain_copy(parts.model), parts.settings)
    begun, tokens = time.perf_counter(), 0
    for src, trg in batches_of(parts, 0):
        loop.step(src, trg)
        tokens += target_tokens(trg)
    plain_s = time.perf_counter() - begun
    return {
        "updates": result.updates,
        "target tokens": tokens,
        "tokens/s": {
            "plain loop: steps only": tokens / plain_s,
            "headrace: steps, with metrics and the checkpoints written meanwhile": (
                tokens / steps_s
            ),
            "headrace: the same and validation": tokens / (steps_s + validation_s),
            "headrace: the whole command, with the final score and the report": tokens / whole_s,
        },
        "seconds": {
            "plain steps": plain_s,
            "headrace steps": steps_s,
            "validation": validation_s,
            "the whole command": whole_s,
        },
    }


def speed_table(found: Row) -> str:
    turns = {
        name: {key: f"{found['in turns'][name][key]:,.3f}" for key in ("median", "low", "high")}
        for name in ("headrace tokens/s", "plain tokens/s", "ratio", "ratio of CPU time")
    }
    rates = {name: {"tokens/s": f"{n:,.0f}"} for name, n in found["alone"]["tokens/s"].items()}
    return "\n".join((table(turns), table(rates)))


# --- the command ----------------------------------------------------------------------------------


def subset(data: Path, settings: TrainSettings, pairs: int, folder: Path) -> Path:
    """The first `pairs` training pairs of a corpus, with its valid and test splits, as files."""
    corpus = read_corpus(data, src=settings.src, trg=settings.trg)
    folder.mkdir()
    for split, texts in corpus.splits.items():
        kept = texts[:pairs] if split == "train" else texts
        for side, language in enumerate((settings.src, settings.trg)):
            lines = "".join(f"{pair[side]}\n" for pair in kept)
            (folder / f"{split}.{language}").write_text(lines, encoding="utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="corpus with valid and test")
    parser.add_argument("--config", type=Path, default=CONFIG, help="settings for both")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--pairs", type=int, help="train on the first N pairs only")
    parser.add_argument("--epochs", type=int, help="epochs of the part bleu")
    parser.add_argument("--steps", type=int, default=200, help="updates of the part losses")
    parser.add_argument("--rounds", type=int, default=16, help="rounds of the part speed")
    parser.add_argument("--block", type=int, default=15, help="batches per turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = header("learning.py") | {"threads": arguments.threads}
    about["command"] = about["command"].replace(str(arguments.data), arguments.data.name)
    with tempfile.TemporaryDirectory(prefix="headrace-learning-") as work:
        # Named, since `Contest.parts` builds a run without the trainer, which would choose it.
        values = {"plan": "pipeline"} | stored_values(arguments.config)
        settings = TrainSettings.from_dict(values | {"data": str(arguments.data.absolute())})
        if arguments.epochs is not None:
            settings = settings.replace(epochs=arguments.epochs)
        if arguments.pairs is not None:
            data = subset(arguments.data, settings, arguments.pairs, Path(work) / "corpus")
            settings = settings.replace(data=(str(data),))
        contest = Contest(settings, Path(work))
        texts = []
        for part in arguments.part or PARTS:
            if part == "losses":
                found = losses(contest, arguments.steps)
                texts.append(losses_table(found))
            elif part == "bleu":
                found = bleu(contest)
                texts.append(bleu_table(found))
            else:
                found = speed(contest, rounds=arguments.rounds, block=arguments.block)
                texts.append(speed_table(found))
            save(arguments.out, _stored(arguments.out) | {part: about | found})
    print("\n".join(texts))


def _stored(path: Path | None) -> Row:
    if path is None or not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
