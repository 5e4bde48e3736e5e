"""Scores: sacrebleu's own figures, by the target's language."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

import pytest

from headrace.errors import TranslationError
from headrace.translation.score import score, tokenizer_of

sacrebleu = pytest.importorskip("sacrebleu")

GERMAN = ["Der Hund schläft.", "Die Katze sitzt auf der alten Matte.", "Es regnet heute sehr."]
CLOSE = ["Der Hund schläft.", "Die Katze sitzt auf der Matte.", "Heute regnet es."]
CHINESE = ["今天天气很好。", "我们去公园散步吧。"]


class TestScore:
    def test_scores_equal_sacrebleus(self) -> None:
        found = score(CLOSE, GERMAN, language="de")
        assert found.bleu == sacrebleu.corpus_bleu(CLOSE, [GERMAN]).score
        assert found.chrf == sacrebleu.corpus_chrf(CLOSE, [GERMAN]).score
        assert 0 < found.bleu < 100
        assert "tok:13a" in found.bleu_signature
        assert f"version:{sacrebleu.__version__}" in found.bleu_signature
        assert found.chrf_signature.startswith("nrefs:1|case:mixed")
        assert found.bleu_lower is None
        assert str(found).startswith(f"BLEU {found.bleu:.2f} (nrefs:1|")

    def test_the_same_text_is_perfect(self) -> None:
        found = score(GERMAN, GERMAN, language="de")
        assert found.bleu == pytest.approx(100)
        assert found.chrf == pytest.approx(100)

    def test_chinese_is_cut_into_characters(self) -> None:
        found = score(["今天天气好。", "我们去公园散步。"], CHINESE, language="zh")
        assert "tok:zh" in found.bleu_signature
        assert found.bleu > 50
        assert score(CHINESE, CHINESE, language="de").bleu_signature != found.bleu_signature

    def test_lower_case(self) -> None:
        found = score([text.lower() for text in GERMAN], GERMAN, language="de", lowercase=True)
        assert found.bleu < 100
        assert found.bleu_lower == pytest.approx(100)

    @pytest.mark.parametrize("language", ["de", "zh", "ja"])
    def test_empty_hypotheses(self, language: str) -> None:
        found = score(["", "", ""], GERMAN, language=language)
        assert (found.bleu, found.chrf) == (0, 0)
        assert score(["", *GERMAN[1:]], GERMAN, language=language).bleu > 0

    def test_it_is_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            score(CLOSE, GERMAN, language="de").bleu = 100  # type: ignore[misc]

    def test_without_sacrebleu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
        with pytest.raises(TranslationError, match=r"need sacrebleu: pip .*\[translate\]"):
            score(CLOSE, GERMAN, language="de")


class TestTokenizer:
    @pytest.mark.parametrize("language", ["zh", "zh-CN", "ZH_tw", "ch", " cn "])
    def test_chinese(self, language: str) -> None:
        assert tokenizer_of(language) == "zh"

    @pytest.mark.parametrize("language", ["de", "en-GB", "fr", "che"])
    def test_others(self, language: str) -> None:
        assert tokenizer_of(language) == "13a"

    @pytest.mark.parametrize(("language", "mecab"), [("ja", "ja-mecab"), ("ko-KR", "ko-mecab")])
    def test_mecab_where_there_is_one(
        self, monkeypatch: pytest.MonkeyPatch, language: str, mecab: str
    ) -> None:
        from headrace.translation import score as module

        monkeypatch.setattr(module, "find_spec", lambda name: None)
        assert tokenizer_of(language) == "char"
        here = importlib.util.find_spec("sacrebleu")
        monkeypatch.setattr(module, "find_spec", lambda name: here)
        assert tokenizer_of(language) == mecab
