"""What was read and left out of a corpus: counts, and what a user should know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.text_table import counted, text_table

_MAX_IDENTICAL_SHARE = 0.1
_MAX_MALFORMED_SHARE = 0.1
_MAX_TOO_LONG_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """How many pairs of a split were read, dropped (by reason) and kept (`pairs`)."""

    read: int = 0
    malformed: int = 0  # with skip_bad; without it the first one is an error
    empty: int = 0  # one side has no text
    duplicates: int = 0  # in train: repeats of a pair
    overlap: int = 0  # in train: pairs that are also in valid or test, or too close to them
    held_out: int = 0  # moved from train to valid
    too_long: int = 0  # in tokens; counted when the text is encoded
    identical: int = 0  # kept, though source and target are the same text
    #: Kept, though the source or the target alone also stands on the other side of the split: of
    #: train in valid or test, of valid and test in train.
    shared: int = 0
    pairs: int = 0


def counts_table(counts: Mapping[str, SplitCounts]) -> str:
    """A text table with one row per split, without columns that are all 0."""
    names = [
        known.name
        for known in dataclasses.fields(SplitCounts)
        if known.name in ("read", "pairs") or any(getattr(c, known.name) for c in counts.values())
    ]
    rows = [(split, *[getattr(count, n) for n in names]) for split, count in counts.items()]
    return text_table(("split", *[name.replace("_", " ") for name in names]), rows)


def describe_novelty(split: str, counts: Mapping[str, SplitCounts]) -> str:
    """What "never seen in training" means for the pairs of a scored split, in one sentence."""
    scored = counts[split].pairs + counts[split].too_long
    return describe_shared(split, counts[split].shared, scored)


def describe_shared(name: str, shared: int, scored: int) -> str:
    """How many of the `scored` pairs of `name` have a sentence that train has, too."""
    if not shared:
        return f"{name}: none of its {counted(scored, 'pair')} shares a sentence with train"
    return (
        f"{name}: {shared:,} of {scored:,} pairs have a source or a target sentence that train "
        "has, too; expect a lower score on new text"
    )


def corpus_warnings(counts: Mapping[str, SplitCounts]) -> list[str]:
    """What a user should know about a corpus before believing its scores."""
    found = [
        f"{describe_novelty(split, counts)}. To fix it, remove such pairs from your train files "
        f"(there are {counts['train'].shared:,})"
        for split in counts
        if split != "train" and counts[split].shared
    ]
    for split, count in counts.items():
        if count.malformed > _MAX_MALFORMED_SHARE * count.read:
            found.append(
                f"{split}: {count.malformed:,} of {count.read:,} lines are malformed and were left "
                "out (skip_bad); expected a few. Without --skip-bad the first one is an error that "
                "says what is wrong"
            )
        kept = count.pairs + count.too_long
        if split == "train" and count.too_long > _MAX_TOO_LONG_SHARE * kept:
            found.append(
                f"{split}: {count.too_long:,} of {kept:,} pairs are too long and are not trained "
                "on; a larger --max-length keeps them, and a larger --vocabulary makes them shorter"
            )
        if count.identical > _MAX_IDENTICAL_SHARE * kept:
            found.append(
                f"{split}: in {count.identical:,} of {kept:,} pairs source and target are the same "
                "text, which teaches the model to copy; expected translations. Check your files"
            )
    return found
