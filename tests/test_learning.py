"""`benchmarks/measurements/learning.py` compares like with like: the plain model and loop are the
trainer's."""

from __future__ import annotations

import importlib
import multiprocessing.dummy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.device import open_device
from headrace.translation import ModelSettings, TrainSettings, Translator, greedy
from support.paths import BENCHMARKS
from support.translation.trainers import SMALL


@pytest.fixture(scope="module")
def learning() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("measurements", "inputs", "tools"):
            patch.syspath_prepend(BENCHMARKS / folder)
        yield importlib.import_module("learning")


@pytest.fixture
def contest(learning: ModuleType, corpus: Path, tmp_path: Path) -> Any:
    changes = {"data": str(corpus / "pairs.tsv"), "monitor": False, "plan": "pipeline"}
    return learning.Contest(TrainSettings.from_dict({**SMALL, **changes}), tmp_path, quiet=True)


def test_without_dropout_both_have_the_same_losses(learning: ModuleType, contest: Any) -> None:
    found = learning.losses(contest, 15)  # more than an epoch
    assert len(found["losses"]["plain"]) == 15
    assert found["largest relative difference of the first"][15] < 1e-5
    assert found["last loss"]["headrace"] < 0.97 * found["first loss"]["headrace"]
    assert "first 15" in learning.losses_table(found)


def test_the_turns_have_the_same_batches(learning: ModuleType, contest: Any) -> None:
    found = learning.speed(contest, rounds=2, block=3, warm_up=2)
    turns = found["in turns"]
    assert [len(turns[name]["all"]) for name in ("ratio", "plain tokens/s")] == [2, 2]
    assert found["alone"]["updates"] == 13
    assert "plain loop: steps only" in learning.speed_table(found)
    with pytest.raises(SystemExit, match="the epoch has only 13 batches"):
        learning.in_turns(contest, rounds=4, block=3, warm_up=2)


def test_both_learn(learning: ModuleType, contest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread in place of the second process, whose start would take seconds.
    monkeypatch.setattr(learning, "get_context", lambda _: multiprocessing.dummy)
    found = learning.bleu(contest)
    for who in ("headrace", "plain"):
        first, second = (line["valid loss"][who] for line in found["epochs"])
        assert second < first
    assert found["test BLEU"]["word for word"] > 20
    assert "word for word" in learning.bleu_table(found)


@pytest.mark.parametrize("joint", [False, True])
def test_a_plain_copy_computes_and_translates_the_same(learning: ModuleType, joint: bool) -> None:
    torch.manual_seed(0)
    sizes = ModelSettings(16, 2, 2, 1, 32, dropout=0.0, max_length=32)
    ours = Translator(sizes, 21 if joint else 30, 21, joint=joint)  # 21 rows are filled up to 24
    plain = learning.plain_copy(ours)
    src, trg = torch.randint(4, 21, (5, 9)), torch.randint(4, 21, (5, 7))
    src[1, 6:] = src[3, 2:] = 0
    torch.testing.assert_close(plain(src, trg), ours(src, trg), rtol=1e-4, atol=1e-5)
    sentences = [row[row.ne(0)].tolist() for row in src]
    assert learning.translate_greedily(plain, sentences, rows=2) == greedy(
        ours, src, open_device("cpu")
    )


def test_word_for_word_learns_a_dictionary(learning: ModuleType, contest: Any) -> None:
    words = learning.WordForWord(learning._training_text(contest.parts()))
    assert words.dictionary["three"] == "drei"
    assert words.translate(["two five, maybe three"]) == ["zwei fünf , maybe drei"]
