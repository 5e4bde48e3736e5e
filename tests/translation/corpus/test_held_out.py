"""An honest split: train has no held-out sentence, on either side."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CorpusError
from headrace.translation import read_corpus
from headrace.translation.corpus.corpus_report import SplitCounts, corpus_warnings, describe_novelty
from headrace.translation.corpus.held_out import choose_held_out, count_shared

Pairs = list[tuple[str, str]]


def tatoeba(size: int, seed: int = 0) -> Pairs:
    """Different pairs in which many sentences have several translations, as in Tatoeba."""
    rng = random.Random(seed)
    found: dict[tuple[str, str], None] = {}
    while len(found) < size:
        src = f"sentence {int(rng.expovariate(1 / size))}"
        found[src, f"{src} in French, version {rng.randrange(3)}"] = None
        if rng.random() < 0.1:
            found["Go.", f"Va {len(found)} !"] = None  # one source, very many translations
    return list(found)


@pytest.mark.parametrize("size", [60, 500, 6000])
def test_about_two_per_cent_are_held_out_and_shared_with_nothing(size: int) -> None:
    pairs = tatoeba(size)
    held, lost = choose_held_out(pairs)
    assert not lost
    assert size * 0.01 <= len(held) <= size * 0.03 + 3
    train = [pair for pair in pairs if pair not in set(held)]
    assert count_shared(train, {"valid": held}) == (0, {"valid": 0})
    assert "Go." not in {src for src, _ in held}  # that group is too large
    shuffled = random.Random(1).sample(pairs, len(pairs))
    assert choose_held_out(shuffled) == (held, lost)


def test_pairs_with_repeated_sentences_are_held_out_as_often_as_others() -> None:
    twins = [(f"a{n}", f"{m}b{n}") for n in range(5000) for m in range(2)]
    singles = [(f"c{n}", f"d{n}") for n in range(10_000)]
    held, _ = choose_held_out(twins + singles)
    share = sum(src.startswith("a") for src, _ in held) / len(held)
    assert 0.4 < share < 0.6


def test_a_corpus_that_is_one_group_gives_up_a_few_pairs() -> None:
    chain = [(f"s{n // 2}", f"t{(n + 1) // 2}") for n in range(400)]
    held, lost = choose_held_out(chain)
    assert len(held) == 8
    assert 8 <= len(lost) <= 16
    singles = [(f"x{n}", f"y{n}") for n in range(3)]  # they would be too few
    more, _ = choose_held_out(chain + singles)
    assert len(more) == 8
    assert set(singles) <= set(more)
    assert count_shared(set(chain) - set(held) - lost, {"valid": held})[0] == 0


def test_pairs_that_all_share_a_sentence_cannot_be_split(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"same\t{n}\n" for n in range(50)))
    with pytest.raises(CorpusError, match="its 50 pairs share sentences with each other, so no va"):
        read_corpus(path, src="en", trg="fr")


few = st.integers(0, 12).map(str)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(few, few), unique=True, max_size=60))
def test_any_corpus(pairs: Pairs) -> None:
    held, lost = choose_held_out(pairs)
    train = set(pairs) - set(held) - lost
    assert count_shared(train, {"valid": held}) == (0, {"valid": 0})
    assert len(set(held)) == len(held)
    assert not lost & set(held)
    assert {*held, *lost} <= set(pairs)
    assert not held or len(train) >= len(pairs) // 2 - 1


def test_given_splits_are_checked_and_kept(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("a\t1\nb\t2\nc\t3\nd\t4\ne\t5\n")
    (tmp_path / "valid.tsv").write_text("a\t1\nb\t9\nx\ty\n")
    (tmp_path / "test.tsv").write_text("z\t3\nz\t5\n")
    corpus = read_corpus(tmp_path, src="en", trg="fr")
    assert corpus.counts == {
        "train": SplitCounts(read=5, overlap=1, shared=3, pairs=4),
        "valid": SplitCounts(read=3, shared=1, pairs=3),
        "test": SplitCounts(read=2, shared=2, pairs=2),
    }
    assert corpus.table().splitlines()[0].split() == ["split", "read", "overlap", "shared", "pairs"]
    assert describe_novelty("valid", corpus.counts) == (
        "valid: 1 of 3 pairs have a source or a target sentence that train has, too; "
        "expect a lower score on new text"
    )
    assert [warning.partition(" have ")[0] for warning in corpus_warnings(corpus.counts)] == [
        "valid: 1 of 3 pairs",
        "test: 2 of 2 pairs",
    ]


def test_what_was_never_seen_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"s{n}\tt{n}\n" for n in range(100)))
    counts = read_corpus(path, src="en", trg="fr").counts
    assert corpus_warnings(counts) == []
    assert describe_novelty("valid", counts) == (
        "valid: none of its 2 pairs shares a sentence with train"
    )


@pytest.mark.parametrize(("identical", "warned"), [(5, False), (30, True)])
def test_source_identical_to_target(tmp_path: Path, identical: int, warned: bool) -> None:
    (tmp_path / "valid.tsv").write_text("x\ty\n")
    (tmp_path / "train.tsv").write_text(
        "".join(f"s{n}\t{'s' if n < identical else 't'}{n}\n" for n in range(100))
    )
    counts = read_corpus(tmp_path, src="en", trg="fr").counts
    assert counts["train"].identical == identical
    assert corpus_warnings(counts) == warned * [
        "train: in 30 of 100 pairs source and target are the same text, which teaches the model to "
        "copy; expected translations. Check your files"
    ]


@pytest.mark.parametrize(("too_long", "warned"), [(10, False), (11, True)])
def test_many_pairs_that_are_too_long_are_warned_about(too_long: int, warned: bool) -> None:
    counts = {
        "train": SplitCounts(read=100, too_long=too_long, pairs=100 - too_long),
        "valid": SplitCounts(held_out=2, too_long=2),
    }
    assert corpus_warnings(counts) == warned * [
        "train: 11 of 100 pairs are too long and are not trained on; a larger --max-length keeps "
        "them, and a larger --vocabulary makes them shorter"
    ]


def test_many_malformed_lines_are_warned_about(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    for bad, warned in ((10, False), (12, True)):
        path.write_text("".join(f"s{n}\tt{n}\n" for n in range(100)) + "one column\n" * bad)
        counts = read_corpus(path, src="en", trg="fr", skip_bad=True).counts
        assert counts["train"].malformed == bad
        assert corpus_warnings(counts) == warned * [
            "train: 12 of 112 lines are malformed and were left out (skip_bad); expected a few. "
            "Without --skip-bad the first one is an error that says what is wrong"
        ]
