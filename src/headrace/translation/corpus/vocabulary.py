"""Vocabularies: text to ids and back, with SentencePiece.

Nothing is unknown: what has no piece of its own is spelled in bytes. (U+2581, SentencePiece's own
sign for a space, is the one character that does not come back: it is read as a space.)
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import CorpusError

PAD, UNK, BOS, EOS = range(4)
# The four above, every byte, and some room for characters.
LEAST_SIZE = 300
_FIXED = 4 + 256
# Where there are more characters than have room, the rarest are spelled in bytes; SentencePiece
# advises this share for Chinese.
_COVERAGE = 0.9995
_MOST_SENTENCES = 1_000_000


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
        except (RuntimeError, ValueError) as problem:  # its message may not be text, either
            raise CorpusError(f"{where}: is not a SentencePiece model ({problem})") from None
        p = self._pieces
        found = (p.pad_id(), p.unk_id(), p.bos_id(), p.eos_id())
        if found != (PAD, UNK, BOS, EOS):
            raise CorpusError(
                f"{where}: has pad, unk, bos and eos at {found}; "
                f"expected {(PAD, UNK, BOS, EOS)}, as in the vocabularies made here"
            )

    @classmethod
    def train(cls, sentences: Iterable[str], size: int) -> Vocabulary:
        """A unigram vocabulary of at most `size` pieces; as many as a small text has to give.

        The same sentences in the same order give the same model, byte for byte.
        """
        if size < LEAST_SIZE:
            raise CorpusError(
                f"vocabulary_size = {size}: expected at least {LEAST_SIZE}, "
                f"since {_FIXED} go to bytes and marks"
            )
        text = [sentence for sentence in sentences if sentence.strip()]
        # Evenly over the text, and not at random: the same text is to give the same model.
        text = text[:: -(-len(text) // _MOST_SENTENCES) or 1]
        if not text:
            raise CorpusError("no text to make a vocabulary of; expected sentences")
        text = _common(text, size)
        for _ in range(3):
            try:
                return cls(_trained(text, size))
            except RuntimeError as problem:
                # It says how many it needs, or how many there are to have.
                limit = re.search(r"required_chars\. \d+ vs (\d+)|value <= (\d+)", str(problem))
                if limit is None:
                    raise CorpusError(
                        f"no vocabulary can be made of {len(text):,} sentences ({problem})"
                    ) from None
                size = int(limit[1] or limit[2])
        raise CorpusError(f"no vocabulary of {size:,} pieces can be made of this text")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read a `.model` file."""
        try:
            model = Path(path).read_bytes()
        except OSError as problem:
            raise CorpusError(f"{path}: cannot be read ({problem.strerror})") from problem
        return cls(model, where=str(path))

    def save(self, path: Path) -> None:
        """Write a `.model` file, as SentencePiece's own tools read it."""
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
        """Ids of each sentence, without `bos` and `eos`."""
        # One thread: SentencePiece's own threads are slower than none (measured, 0.2.2).
        ids: list[list[int]] = self._pieces.encode(list(sentences), out_type=int, num_threads=1)
        return ids

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence up to its first `eos`; `bos` and `pad` have no text."""
        cut = []
        for sequence in ids:
            whole = [int(token) for token in sequence]
            cut.append(whole[: whole.index(EOS)] if EOS in whole else whole)
        try:
            texts: list[str] = self._pieces.decode(cut) if cut else []
        except UnicodeDecodeError as problem:
            raise CorpusError(f"the vocabulary has pieces that are no text ({problem})") from None
        return texts


def _common(text: list[str], size: int) -> list[str]:
    """The text with spaces for characters that are to have no piece: all have one if they take up
    to three quarters of the room, and otherwise the common ones.

    SentencePiece's own `character_coverage` does the same, but not below 98 %.
    """
    counts = Counter[str]()
    for sentence in text:
        counts.update(sentence)
    room = (size - _FIXED) * 3 // 4
    if len(counts) <= room:
        return text
    rare, covered = {}, 0
    ordered = sorted(counts.items(), key=lambda counted: (-counted[1], counted[0]))
    for rank, (character, count) in enumerate(ordered):
        if rank >= room or covered >= _COVERAGE * counts.total():
            rare[ord(character)] = " "
        covered += count
    return [sentence.translate(rare) for sentence in text]


def _trained(text: list[str], size: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        model_type="unigram",
        vocab_size=size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",  # the corpus is normalised already, and to NFC
        max_sentence_length=1 << 20,
        num_threads=16,  # fixed: the sums, and so the model, depend on it
        pad_id=PAD,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        minloglevel=3,
    )
    return model.getvalue()
