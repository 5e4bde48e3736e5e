"""Clauses of somebody doing something: when, where, whether, or not."""

from __future__ import annotations

import random

from headrace.translation.corpus.toy import circumstances as cs
from headrace.translation.corpus.toy import lexicon as lx
from headrace.translation.corpus.toy.lexicon import Verb
from headrace.translation.corpus.toy.phrases import (
    Phrase,
    any_noun,
    definite,
    portion,
    quantity,
    subject,
)

Sentence = tuple[str, str]  # Chinese and English, without the final mark (but for the Chinese ？)

_MOST = {"买": 20, "穿": 1, "戴": 1, "准备": 10, "画": 10, "修": 3, "讲": 3, "借": 5}
_HABITS = frozenset("买吃喝看写唱讲画洗")
_DEFINITE_ONLY = frozenset(("找", "修"))


def be(person: str) -> str:
    return {"i": "am", "he": "is"}.get(person, "are")


def do(person: str) -> str:
    return "does" if person == "he" else "do"


def _object(rng: random.Random, verb: Verb, *, named: bool = False) -> Phrase:
    most = _MOST.get(verb.zh, 4)
    if verb.zh == "喝":
        named = False
    if not named and verb.zh not in _DEFINITE_ONLY and rng.random() < 0.75:
        some = portion(rng, verb.takes, most)
        if some is not None and (verb.zh == "喝" or rng.random() < 0.4):
            return some
        return quantity(rng, any_noun(rng, verb.takes), most)
    if verb.zh == "喝":
        owner, whose = rng.choice(lx.OWNERS)
        _, _, _, zh, en, _, _ = rng.choice([p for p in lx.PORTIONS if p[5] == "drink"])
        return Phrase(f"{owner}的{zh}", f"{whose} {en}")
    return definite(rng, any_noun(rng, verb.takes))


def _place(rng: random.Random, verb: Verb, share: float) -> tuple[str, str]:
    suited = [place for place in cs.PLACES if place[2] in verb.places]
    if not suited or rng.random() > share:
        return "", ""
    zh, en, _ = rng.choice(suited)
    return f"在{zh}", f" {en}"


def told(rng: random.Random) -> Sentence:
    """Past, future and habit: 他昨天买了三本书 / He bought three books yesterday."""
    who, verb = subject(rng), rng.choice(lx.VERBS)
    when_zh, when_en, tense = rng.choice(cs.TIMES)
    if tense == "habit":
        verb = rng.choice([v for v in lx.VERBS if v.zh in _HABITS])
    negated = tense != "habit" and rng.random() < 0.25
    thing = _object(rng, verb, named=negated)
    place_zh, place_en = _place(rng, verb, 0.4)
    if tense == "past":
        if negated:
            action_zh, action_en = f"没{place_zh}{verb.zh}", f"did not {verb.base}"
        else:
            action_zh, action_en = f"{place_zh}{verb.zh}了", verb.past
    elif tense == "future":
        if negated:
            action_zh, action_en = f"不会{place_zh}{verb.zh}", f"will not {verb.base}"
        elif rng.random() < 0.5:
            action_zh, action_en = f"会{place_zh}{verb.zh}", f"will {verb.base}"
        else:
            action_zh = f"要{place_zh}{verb.zh}"
            action_en = f"{be(who.person)} going to {verb.base}"
    else:
        action_zh = f"{place_zh}{verb.zh}"
        action_en = verb.third if who.person == "he" else verb.base
    if rng.random() < 0.3:
        return (
            f"{when_zh}{who.zh}{action_zh}{thing.zh}",
            f"{when_en} {who.en} {action_en} {thing.en}{place_en}",
        )
    return (
        f"{who.zh}{when_zh}{action_zh}{thing.zh}",
        f"{who.en} {action_en} {thing.en}{place_en} {when_en}",
    )


def progressive(rng: random.Random) -> Sentence:
    who = subject(rng)
    verb = rng.choice([v for v in lx.VERBS if v.zh not in "穿戴借"])
    thing = _object(rng, verb)
    place_zh, place_en = _place(rng, verb, 0.5)
    doing = f"正{place_zh}" if place_zh else "正在"
    if who.person != "i" and rng.random() < 0.25:
        return (
            f"{who.zh}{doing}{verb.zh}{thing.zh}吗？",
            f"{be(who.person)} {who.en} {verb.ing} {thing.en}{place_en}",
        )
    return (
        f"{who.zh}{doing}{verb.zh}{thing.zh}",
        f"{who.en} {be(who.person)} {verb.ing} {thing.en}{place_en}",
    )


def modal(rng: random.Random) -> Sentence:
    """想, 可以, 应该, 必须, 需要: said, denied and asked."""
    who, verb = subject(rng), rng.choice(lx.VERBS)
    modal, base, third, negative = rng.choice(cs.MODALS)
    ordinary = base.endswith(" to")  # formed with `do`, unlike can, should and must
    draw = rng.random()
    negated = draw < 0.25 and bool(negative)
    asked = 0.25 <= draw < 0.45 and modal != "必须" and who.person != "i"
    thing = _object(rng, verb, named=negated)
    place_zh, place_en = _place(rng, verb, 0.35)
    rest_zh, rest_en = f"{place_zh}{verb.zh}{thing.zh}", f"{verb.base} {thing.en}{place_en}"
    if negated:
        if ordinary and who.person != "he":
            negative = negative.replace("does", "do")
        return f"{who.zh}不{modal}{rest_zh}", f"{who.en} {negative} {rest_en}"
    if asked:
        asks = f"{do(who.person)} {who.en} {base}" if ordinary else f"{base} {who.en}"
        return f"{who.zh}{modal}{rest_zh}吗？", f"{asks} {rest_en}"
    says = third if who.person == "he" else base
    return f"{who.zh}{modal}{rest_zh}", f"{who.en} {says} {rest_en}"


def asked(rng: random.Random) -> Sentence:
    """Questions about what was done, or will be: whether, who, where, when and why."""
    who, verb = subject(rng), rng.choice(lx.VERBS)
    if who.person == "i":
        who = lx.PRONOUNS[1]
    past = [time for time in cs.TIMES if time[2] == "past"]
    when_zh, when_en, _ = rng.choice(past)
    thing = _object(rng, verb, named=rng.random() < 0.6)
    place_zh, place_en = _place(rng, verb, 0.3)
    ask = rng.randrange(6)
    if ask == 0 or (ask == 3 and not verb.places):
        return (
            f"{who.zh}{when_zh}{place_zh}{verb.zh}了{thing.zh}吗？",
            f"did {who.en} {verb.base} {thing.en}{place_en} {when_en}",
        )
    if ask == 1:
        future = [time for time in cs.TIMES if time[2] == "future"]
        when_zh, when_en, _ = rng.choice(future)
        return (
            f"{who.zh}{when_zh}会{place_zh}{verb.zh}{thing.zh}吗？",
            f"will {who.en} {verb.base} {thing.en}{place_en} {when_en}",
        )
    if ask == 2:
        return (
            f"谁{when_zh}{place_zh}{verb.zh}了{thing.zh}？",
            f"who {verb.past} {thing.en}{place_en} {when_en}",
        )
    if ask == 3:
        return (
            f"{who.zh}{when_zh}在哪儿{verb.zh}了{thing.zh}？",
            f"where did {who.en} {verb.base} {thing.en} {when_en}",
        )
    if ask == 4:
        return (
            f"{who.zh}打算什么时候{place_zh}{verb.zh}{thing.zh}？",
            f"when {be(who.person)} {who.en} going to {verb.base} {thing.en}{place_en}",
        )
    thing = _object(rng, verb, named=True)
    return (
        f"{who.zh}{when_zh}为什么没{place_zh}{verb.zh}{thing.zh}？",
        f"why did {who.en} not {verb.base} {thing.en}{place_en} {when_en}",
    )
