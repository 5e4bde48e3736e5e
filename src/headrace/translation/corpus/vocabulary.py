"""Subword vocabularies: text to ids and back, with SentencePiece.

Any text can be encoded: characters without a piece are spelled in bytes. One character does not
survive: U+2581, with which SentencePiece marks spaces, is decoded as a space.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError
from headrace.schema import require_regular_file
from headrace.translation.corpus.sentencepiece_trainer import train_model

PAD, UNK, BOS, EOS = range(4)
# The four special ids and 256 bytes.
_RESERVED = 4 + 256
# The share of the text whose characters get a piece, as SentencePiece advises for Chinese. Rarer
# characters are spelled in bytes.
_COVERAGE = 0.9995
_MAX_SENTENCES = 1_000_000
# The time of SentencePiece grows with the square of a line's length if the line repeats itself. So
# all lines are cut to so many characters, and lines that compress to a quarter to far fewer.
_MAX_CHARACTERS = 2_000
_MAX_REPETITIVE_CHARACTERS = 100
#: No piece has more characters. SentencePiece's own default.
MAX_PIECE_LENGTH = 16
_OPTIONS = {
    "model_type": "unigram",
    "hard_vocab_limit": False,
    "character_coverage": 1.0,
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",  # the corpus is already NFC-normalized
    "max_sentence_length": 1 << 20,
    "max_sentencepiece_length": MAX_PIECE_LENGTH,
    "num_threads": 16,  # fixed, because the model depends on it
    "pad_id": PAD,
    "unk_id": UNK,
    "bos_id": BOS,
    "eos_id": EOS,
    "minloglevel": 3,
}


class Vocabulary:
    """A SentencePiece model with `pad` = 0, `unk` = 1, `bos` = 2, `eos` = 3."""

    pad, unk, bos, eos = PAD, UNK, BOS, EOS

    def __init__(self, model: bytes, *, where: str = "vocabulary") -> None:
        import sentencepiece

        self.model = model
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            if not model:
                raise RuntimeError("it is empty")
            self._pieces.LoadFromSerializedProto(model)
        except (RuntimeError, ValueError) as problem:  # the message may not decode
            raise CorpusError(f"{where}: is not a SentencePiece model ({problem})") from None
        p = self._pieces
        found = (p.pad_id(), p.unk_id(), p.bos_id(), p.eos_id())
        if found != (PAD, UNK, BOS, EOS):
            raise CorpusError(
                f"{where}: has pad, unk, bos and eos at {found}; "
                f"expected {(PAD, UNK, BOS, EOS)}, as Headrace trains them"
            )

    @classmethod
    def train(cls, sentences: Iterable[str], size: int) -> Vocabulary:
        """Train a unigram vocabulary of at most `size` pieces. A small text may give fewer.

        The same sentences in the same order give the same model, byte for byte.
        """
        text = [sentence for sentence in sentences if sentence.strip()]
        # Take every n-th sentence, not a random sample: the same text must give the same model.
        text = text[:: -(-len(text) // _MAX_SENTENCES) or 1]
        if not text:
            raise CorpusError("no text to train a vocabulary on; expected sentences")
        text = _without_rare_characters([_shortened(line) for line in text], size)
        for _ in range(3):
            try:
                return cls(train_model(text, {**_OPTIONS, "vocab_size": size}))
            except RuntimeError as problem:
                # The message says which size this text needs, or allows.
                limit = re.search(r"required_chars\. \d+ vs (\d+)|value <= (\d+)", str(problem))
                if limit is None:
                    raise CorpusError(
                        f"no vocabulary could be trained on {len(text):,} sentences ({problem})"
                    ) from None
                size = int(limit[1] or limit[2])
        raise CorpusError(f"no vocabulary of {size:,} pieces could be trained on this text")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a `.model` file."""
        require_regular_file(Path(path), CorpusError)
        try:
            model = Path(path).read_bytes()
        except OSError as problem:
            raise CorpusError(f"{path}: cannot be read ({problem.strerror})") from problem
        return cls(model, where=str(path))

    def save(self, path: Path) -> None:
        """Write a `.model` file that SentencePiece's own tools can read."""
        Path(path).write_bytes(self.model)

    def __len__(self) -> int:
        return int(self._pieces.vocab_size())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.model == other.model

    def __hash__(self) -> int:
        return hash(self.model)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self):,} pieces)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (self.model,)

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """The ids of each sentence, without `bos` and `eos`."""
        # SentencePiece 0.2.2 was measured to be slower with threads of its own.
        ids: list[list[int]] = self._pieces.encode(list(sentences), out_type=int, num_threads=1)
        return ids

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence up to its first `eos`; `bos` and `pad` give no text."""
        cut = []
        for sequence in ids:
            whole = [int(token) for token in sequence]
            cut.append(whole[: whole.index(EOS)] if EOS in whole else whole)
        try:
            texts: list[str] = self._pieces.decode(cut) if cut else []
        except UnicodeDecodeError as problem:
            raise CorpusError(f"the vocabulary has pieces that are not text ({problem})") from None
        return texts


def _shortened(line: str) -> str:
    """The line without what would keep SentencePiece busy for minutes."""
    if len(line) <= _MAX_REPETITIVE_CHARACTERS:
        return line
    line = line[:_MAX_CHARACTERS]
    content = line.encode(errors="replace")
    is_repetitive = len(zlib.compress(content, 1)) * 4 < len(content)
    return line[:_MAX_REPETITIVE_CHARACTERS] if is_repetitive else line


def _without_rare_characters(text: list[str], size: int) -> list[str]:
    """Replace characters that get no piece by spaces.

    All characters get one if together they need no more than three quarters of the vocabulary;
    otherwise only the most frequent do. SentencePiece's own option for this, `character_coverage`,
    does not go below 98 %.
    """
    counts = Counter[str]()
    for sentence in text:
        counts.update(sentence)
    room = (size - _RESERVED) * 3 // 4
    if len(counts) <= room:
        return text
    rare, covered = {}, 0
    ordered = sorted(counts.items(), key=lambda counted: (-counted[1], counted[0]))
    for rank, (character, count) in enumerate(ordered):
        if rank >= room or covered >= _COVERAGE * counts.total():
            rare[ord(character)] = " "
        covered += count
    return [sentence.translate(rare) for sentence in text]
