"""Training a vocabulary in a child: the same bytes, ended by Ctrl-C, bounded in time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import CorpusError
from headrace.translation.corpus import sentencepiece_trainer
from headrace.translation.corpus.prepare import prepared_for
from headrace.translation.corpus.toy.generator import builtin_corpus
from headrace.translation.corpus.vocabulary import Vocabulary
from headrace.translation.settings import TrainSettings

TEXT = [text for pair in builtin_corpus(size=300).splits["train"] for text in pair]


def test_a_child_makes_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Vocabulary.train(TEXT, 500)
    monkeypatch.setattr(sentencepiece_trainer, "_IN_PROCESS_CHARACTERS", 0)
    assert Vocabulary.train(TEXT, 500) == here
    # Sizes that SentencePiece refuses at first are found in a child, too.
    assert len(Vocabulary.train(["a", "b c"], 1000)) < 1000


def test_a_child_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sentencepiece_trainer, "_IN_PROCESS_CHARACTERS", 0)
    program = tmp_path / "dies.py"
    program.write_text("import os, sys; sys.stderr.write('out of memory'); os._exit(9)")
    monkeypatch.setattr(sentencepiece_trainer, "__file__", str(program))
    with pytest.raises(CorpusError, match="its process ended with code 9: out of memory"):
        Vocabulary.train(TEXT, 500)


# Trains on random text, which takes long, with a child that says when it has begun.
LONG = """
import random, sys
from headrace.translation.corpus import sentencepiece_trainer
from headrace.translation.corpus.vocabulary import Vocabulary

begun = sentencepiece_trainer.subprocess.Popen
def popen(*args, **kwargs):
    child = begun(*args, **kwargs)
    print(child.pid, flush=True)
    return child
sentencepiece_trainer.subprocess.Popen = popen
rng = random.Random(0)
Vocabulary.train(["".join(rng.choices("abcdef ", k=900)) for _ in range(1500)], 8000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_end_the_child(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        begun = time.monotonic()
        parent.send_signal(number)
        parent.wait(10)
    descriptor = _pidfd(child)
    if descriptor is not None:  # it is ending: wait until it is gone
        assert select.select([descriptor], [], [], 10)[0]
        os.close(descriptor)
    assert time.monotonic() - begun < 10


def _pidfd(child: int) -> int | None:
    try:
        return os.pidfd_open(child)
    except ProcessLookupError:
        return None


def test_lines_that_repeat_themselves_take_seconds(tmp_path: Path) -> None:
    """One line of 50,000 repeated words took SentencePiece over 200 s, 300 of 190 took 22 s."""
    lines = [f"number {n} of {n * 7 % 13}\tNummer {n} von {n * 7 % 13}\n" for n in range(100)]
    lines.append("word " * 50_000 + "\t" + "Wort " * 50_000 + "\n")
    lines += [f"w{n % 26}q{n // 26} " * 150 + "\t" + "ab" * (300 + n) + "\n" for n in range(100)]
    path = tmp_path / "a.tsv"
    path.write_text("".join(lines))
    for longest in (60, 60_000):
        begun = time.monotonic()
        settings = TrainSettings((str(path),), src="en", trg="de", max_length=longest)
        prepared = prepared_for(settings, tmp_path / "c")
        assert time.monotonic() - begun < 10
        assert sum(counts.pairs + counts.too_long for counts in prepared.counts.values()) == 201
