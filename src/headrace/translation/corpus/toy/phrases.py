"""Who and what: the noun phrases of the built-in grammar."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.translation.corpus.toy import circumstances as cs
from headrace.translation.corpus.toy import lexicon as lx
from headrace.translation.corpus.toy.lexicon import Noun, Subject
from headrace.translation.corpus.toy.numerals import article, counted, english_number


@dataclass(frozen=True, slots=True)
class Phrase:
    """The same words in both languages. `plural` is how an English verb agrees with them."""

    zh: str
    en: str
    plural: bool = False


def subject(rng: random.Random) -> Subject:
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(lx.PRONOUNS)
    if draw < 0.65:
        return rng.choice(lx.NAMES)
    if draw < 0.75:
        zh, en = rng.choice(lx.PEOPLE)
        this, dies = rng.choice((("这", "this"), ("那", "that")))
        return Subject(f"{this}个{zh}", f"{dies} {en}", "he", f"{dies} {en}")
    zh, en = rng.choice(lx.RELATIVES)
    owner, whose = rng.choice(lx.OWNERS)
    of = "" if zh in lx.FAMILY else "的"
    return Subject(f"{owner}{of}{zh}", f"{whose} {en}", "he", f"{whose} {en}")


def quantity(rng: random.Random, noun: Noun, most: int) -> Phrase:
    """三本书: three books. Few things are many, most are one or two."""
    number = 1 if most == 1 or rng.random() < 0.3 else rng.randint(2, most)
    zh_colour = en_colour = ""
    if "colour" in noun.kinds and rng.random() < 0.3:
        zh, en = rng.choice(cs.COLOURS)
        zh_colour, en_colour = f"{zh}的", f"{en} "
    draw = rng.random()
    if number > 1 and draw < 0.06:
        return Phrase(
            f"几{noun.measure}{zh_colour}{noun.zh}", f"a few {en_colour}{noun.many}", True
        )
    if number > 1 and draw < 0.12:
        return Phrase(f"很多{zh_colour}{noun.zh}", f"many {en_colour}{noun.many}", True)
    zh = f"{counted(number)}{noun.measure}{zh_colour}{noun.zh}"
    if number == 1:
        return Phrase(zh, article(f"{en_colour}{noun.one}"))
    return Phrase(zh, f"{english_number(number)} {en_colour}{noun.many}", True)


def portion(rng: random.Random, kinds: frozenset[str], most: int) -> Phrase | None:
    """两杯茶: two cups of tea."""
    suited = [p for p in lx.PORTIONS if p[5] in kinds or "sold" in kinds]
    if not suited:
        return None
    measure, one, many, zh, en, _, _ = rng.choice(suited)
    number = 1 if most == 1 or rng.random() < 0.4 else rng.randint(2, most)
    if number == 1:
        return Phrase(f"一{measure}{zh}", f"{article(one)} of {en}")
    return Phrase(
        f"{counted(number)}{measure}{zh}", f"{english_number(number)} {many} of {en}", True
    )


def definite(rng: random.Random, noun: Noun) -> Phrase:
    """这本书, 那三本书, 这些书, 我的书: this book, those three books, these books, my book."""
    draw = rng.random()
    near = rng.random() < 0.5
    that, one, many = ("这", "this", "these") if near else ("那", "that", "those")
    if draw < 0.45:
        return Phrase(f"{that}{noun.measure}{noun.zh}", f"{one} {noun.one}")
    if draw < 0.6:
        number = rng.randint(2, 9)
        zh = f"{that}{counted(number)}{noun.measure}{noun.zh}"
        return Phrase(zh, f"{many} {english_number(number)} {noun.many}", True)
    if draw < 0.7:
        return Phrase(f"{that}些{noun.zh}", f"{many} {noun.many}", True)
    owner, whose = rng.choice(lx.OWNERS)
    return Phrase(f"{owner}的{noun.zh}", f"{whose} {noun.one}")


def any_noun(rng: random.Random, kinds: frozenset[str]) -> Noun:
    return rng.choice(lx.nouns_of(kinds))
