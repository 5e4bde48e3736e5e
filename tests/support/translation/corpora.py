"""A small corpus."""

from __future__ import annotations

from pathlib import Path


def write_corpus(folder: Path) -> None:
    """Write 200 pairs of short sentences into `folder / "pairs.tsv"`."""
    numbers = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    lines = [
        f"{words[a]} and {words[b]} or {words[c]}\t{numbers[a]} und {numbers[b]} oder {numbers[c]}"
        for a in range(10)
        for b in range(5)
        for c in range(4)
    ]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
