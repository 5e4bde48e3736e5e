"""The two languages of a corpus, and the names that files have for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import CorpusError

# ISO 639-1, then what else stands for the language in files: ISO 639-2 and -3, its English name.
_LANGUAGES = """
ar ara arabic; bg bul bulgarian; bn ben bengali; ca cat catalan; cs ces cze czech; da dan danish
de deu ger german; el ell gre greek; en eng english; eo epo esperanto; es spa spanish
et est estonian; eu eus baq basque; fa fas per pes persian; fi fin finnish; fr fra fre french
ga gle irish; he heb hebrew; hi hin hindi; hr hrv croatian; hu hun hungarian
id ind indonesian; is isl ice icelandic; it ita italian; ja jpn japanese; jp; ko kor korean; kr
la lat latin; lt lit lithuanian; lv lav latvian; mr mar marathi; ms msa may malay; nb nob
nl nld dut dutch; no nor norwegian; pl pol polish; pt por portuguese; ro ron rum romanian
ru rus russian; sk slk slo slovak; sl slv slovenian; sr srp serbian; sv swe swedish
sw swa swahili; ta tam tamil; te tel telugu; th tha thai; tl tgl tagalog; tr tur turkish
uk ukr ukrainian; ur urd urdu; vi vie vietnamese; zh ch cn zho chi cmn chinese; yue cantonese
"""
_CODES = {
    name: words[0]
    for words in (line.split() for line in re.split("[;\n]", _LANGUAGES))
    for name in words
} | {"jp": "ja", "kr": "ko"}
# The characters by which a column of text shows its language. Only scripts of few languages.
_CYRILLIC, _ARABIC, _DEVANAGARI = "\u0400-\u04ff", "\u0600-\u06ff", "\u0900-\u097f"
_SCRIPTS = {
    **dict.fromkeys(("zh", "yue", "ja"), "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"),
    **dict.fromkeys(("bg", "ru", "uk"), _CYRILLIC),
    **dict.fromkeys(("ar", "fa", "ur"), _ARABIC),
    **dict.fromkeys(("hi", "mr"), _DEVANAGARI),
    "ko": "\uac00-\ud7af",
    "el": "\u0370-\u03ff",
    "he": "\u0590-\u05ff",
    "th": "\u0e00-\u0e7f",
}
_ROLES = {
    **dict.fromkeys(("src", "source"), "src"),
    **dict.fromkeys(("trg", "tgt", "target"), "trg"),
}


@dataclass(frozen=True, slots=True)
class Sides:
    """The two languages, as `--src` and `--trg` name them.

    Files may use other names: `zh`, `zh-CN`, `zh_Hans`, `zho` and `cmn` are all Chinese.
    """

    src: str
    trg: str

    def __post_init__(self) -> None:
        for name, side in (("src", self.src), ("trg", self.trg)):
            if not side or not side.isascii() or re.search(r"[\s/\\.]", side):
                raise CorpusError(f"{name} = {side!r}: expected a language's name, such as 'en'")
        if _exact(self.src) == _exact(self.trg):
            raise CorpusError(
                f"src = {self.src!r} and trg = {self.trg!r}: expected two different languages"
            )

    def side_of(self, name: str) -> str | None:
        """'src' or 'trg' if `name` is that language, else None."""
        src, trg = language_code(self.src), language_code(self.trg)
        if src != trg:
            return {src: "src", trg: "trg"}.get(language_code(name))
        # Two variants of one language, such as pt-BR and pt-PT: the region decides.
        return {_exact(self.src): "src", _exact(self.trg): "trg"}.get(_exact(name))

    def find_in(self, names: Sequence[str]) -> tuple[int, int] | None:
        """Which of these names, such as a table's header, are src and trg; None if not both are.

        A name that is exactly `--src` or `--trg` wins over another variant of the language.
        Without languages, `source` and `target` will do. Of a name such as `English sentence` the
        first word counts.
        """
        found: dict[str, int] = {}
        first = [_first_word(name) for name in names]
        for wanted, side in ((self.src, "src"), (self.trg, "trg")):
            exact = [at for at, name in enumerate(names) if _exact(name) == _exact(wanted)]
            alike = [at for at, name in enumerate(first) if self.side_of(name) == side]
            roles = [at for at, name in enumerate(first) if _role(name) == side]
            for at in (*exact, *alike, *roles):
                found.setdefault(side, at)
        if len(found) < 2 or found["src"] == found["trg"]:
            return None
        return found["src"], found["trg"]

    def are_swapped(self, pairs: Sequence[tuple[str, str]]) -> bool:
        """Whether the scripts show that each first text is in trg's language, the second in src's.

        False if the scripts show nothing, as with two European languages.
        """
        scripts = [_SCRIPTS.get(language_code(side), "") for side in (self.src, self.trg)]
        if not pairs or scripts[0] == scripts[1]:
            return False

        def share(column: int, script: str) -> float:
            return sum(bool(re.search(f"[{script}]", pair[column])) for pair in pairs) / len(pairs)

        return all(
            share(1 - column, script) > 0.9 and share(column, script) < 0.1
            for column, script in enumerate(scripts)
            if script
        )

    def __str__(self) -> str:
        return f"{self.src!r} and {self.trg!r}"


def _role(name: str) -> str | None:
    return _ROLES.get(re.split("[-_]", name.lower())[0])


def _first_word(name: str) -> str:
    """The first word of a heading of up to three; anything longer, such as a sentence, as it is."""
    words = name.split(maxsplit=3)
    return words[0] if 0 < len(words) <= 3 else name


def language_code(name: str) -> str:
    """The language without its region or script: 'zh' for 'zh-CN', 'zh_Hans', 'zho' and 'cmn'."""
    base = re.split("[-_]", name.strip().lower())[0]
    return _CODES.get(base, base)


def is_language(name: str) -> bool:
    """Whether `name` is the code of a language in the table."""
    return language_code(name) in _CODES


def _exact(name: str) -> tuple[str, ...]:
    base, *rest = re.split("[-_]", name.strip().lower())
    return _CODES.get(base, base), *rest
