"""The sentences of the built-in corpus: noun phrases, clauses, and statements of many kinds."""

from __future__ import annotations

import calendar
import datetime
import random
from dataclasses import dataclass

from headrace.translation.corpus.toy import lexicon as lx
from headrace.translation.corpus.toy.lexicon import (
    Noun,
    Subject,
    Verb,
    article,
    chinese_number,
    counted,
    english_number,
)

Sentence = tuple[str, str]  # Chinese and English, without the final mark (but for the Chinese ？)

# --- who and what: noun phrases -------------------------------------------------------------------


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
        zh, en = rng.choice(lx.COLOURS)
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


# --- clauses: somebody does something; when, where, whether, or not -------------------------------

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
    suited = [place for place in lx.PLACES if place[2] in verb.places]
    if not suited or rng.random() > share:
        return "", ""
    zh, en, _ = rng.choice(suited)
    return f"在{zh}", f" {en}"


def told(rng: random.Random) -> Sentence:
    """Past, future and habit: 他昨天买了三本书 / He bought three books yesterday."""
    who, verb = subject(rng), rng.choice(lx.VERBS)
    when_zh, when_en, tense = rng.choice(lx.TIMES)
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
    modal, base, third, negative = rng.choice(lx.MODALS)
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
    past = [time for time in lx.TIMES if time[2] == "past"]
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
        future = [time for time in lx.TIMES if time[2] == "future"]
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


# --- statements: where things are, dates, times, prices, comparisons, weather ---------------------

_FOR_SALE = tuple(noun for noun in lx.NOUNS if noun.price[1])
_YEARS = range(1990, 2031)
_WEEKDAYS_ZH = "一二三四五六天"


def _family(who: Subject) -> bool:
    return who.zh.endswith(tuple(lx.FAMILY))


def going(rng: random.Random) -> Sentence:
    who = subject(rng)
    zh, en = rng.choice(lx.GOALS)
    far = zh in dict(lx.CITIES)
    ride_zh = ride_en = ""
    if rng.random() < 0.6:
        suited = [ride for ride in lx.RIDES if (ride[2] == "far") == far]
        ride_zh, ride_en, _ = rng.choice(suited)
        ride_en = f" {ride_en}"
    when_zh, when_en, tense = rng.choice([t for t in lx.TIMES if not (far and t[2] == "habit")])
    asked = who.person != "i" and rng.random() < 0.25
    if tense == "past":
        if asked:
            says, action = f"{who.zh}{when_zh}{ride_zh}去了{zh}吗？", f"did {who.en} go"
        elif rng.random() < 0.25:
            says, action = f"{who.zh}{when_zh}没{ride_zh}去{zh}", f"{who.en} did not go"
        else:
            says, action = f"{who.zh}{when_zh}{ride_zh}去了{zh}", f"{who.en} went"
    elif tense == "future":
        if asked:
            says, action = f"{who.zh}{when_zh}会{ride_zh}去{zh}吗？", f"will {who.en} go"
        else:
            says, action = f"{who.zh}{when_zh}会{ride_zh}去{zh}", f"{who.en} will go"
    elif asked:
        says, action = f"{who.zh}{when_zh}{ride_zh}去{zh}吗？", f"{do(who.person)} {who.en} go"
    else:
        goes = "goes" if who.person == "he" else "go"
        says, action = f"{who.zh}{when_zh}{ride_zh}去{zh}", f"{who.en} {goes}"
    return says, f"{action} {en}{ride_en} {when_en}"


def there_is(rng: random.Random) -> Sentence:
    """桌子上有三本书 / There are three books on the table."""
    zh, en, suited = rng.choice(lx.SPOTS)
    kinds = frozenset(suited.split())
    noun = any_noun(rng, kinds)
    draw = rng.random()
    if draw < 0.15:
        return f"{zh}没有{noun.zh}", f"there are no {noun.many} {en}"
    if draw < 0.3:
        return f"{zh}有几{noun.measure}{noun.zh}？", f"how many {noun.many} are there {en}"
    some = portion(rng, kinds, 6) if draw < 0.45 else None
    thing = some or quantity(rng, noun, 12)
    verb = "are" if thing.plural else "is"
    if rng.random() < 0.2:
        return f"{zh}有{thing.zh}吗？", f"{verb} there {thing.en} {en}"
    return f"{zh}有{thing.zh}", f"there {verb} {thing.en} {en}"


def date(rng: random.Random) -> Sentence:
    """年月日 one way, month, day and year the other; the weekdays are those of the calendar."""
    year, month = rng.choice(_YEARS), rng.randint(1, 12)
    day = datetime.date(year, month, rng.randint(1, calendar.monthrange(year, month)[1]))
    short_zh, short_en = f"{month}月{day.day}日", f"{lx.MONTHS[month - 1]} {day.day}"
    full_zh, full_en = f"{year}年{short_zh}", f"{short_en}, {year}"
    kind = rng.randrange(6)
    if kind == 0:
        return f"今天是{full_zh}", f"today is {full_en}"
    if kind == 1:
        week_zh, week_en = _WEEKDAYS_ZH[day.weekday()], lx.WEEKDAYS[day.weekday()]
        return f"{full_zh}是星期{week_zh}", f"{full_en} is a {week_en}"
    if kind == 2:
        who = subject(rng)
        born = "were" if who.person in ("you", "they") else "was"
        return f"{who.zh}出生于{full_zh}", f"{who.en} {born} born on {full_en}"
    if kind == 3:
        zh, en = rng.choice(lx.RELATIVES)
        owner, whose = rng.choice(lx.OWNERS)
        of = "" if zh in lx.FAMILY else "的"
        return f"{owner}{of}{zh}的生日是{short_zh}", f"{whose} {en}'s birthday is {short_en}"
    event_zh, event_en, _ = rng.choice(lx.EVENTS[:5])
    if kind == 4:
        return f"{event_zh}{short_zh}开始", f"{event_en} starts on {short_en}"
    return f"{event_zh}是在{full_zh}吗？", f"is {event_en} on {full_en}"


def _time(rng: random.Random) -> Phrase:
    """下午三点一刻: a quarter past three in the afternoon."""
    part_zh, part_en, hours = rng.choice(lx.DAY_PARTS)
    hour = rng.choice(hours)
    minute = rng.choice((0, 0, 15, 30, 30, 45, 5, 10, 20, 25, 35, 40, 50, 55))
    zh, here = f"{part_zh}{counted(hour)}点", english_number(hour)
    following = english_number(hour % 12 + 1)
    if minute == 0:
        return Phrase(zh, f"{here} o'clock {part_en}")
    if minute == 15:
        return Phrase(f"{zh}一刻", f"a quarter past {here} {part_en}")
    if minute == 30:
        return Phrase(f"{zh}半", f"half past {here} {part_en}")
    if minute == 45:
        return Phrase(f"{zh}三刻", f"a quarter to {following} {part_en}")
    zh = f"{zh}{'零' if minute < 10 else ''}{chinese_number(minute)}分"
    if minute < 30:
        return Phrase(zh, f"{english_number(minute)} past {here} {part_en}")
    return Phrase(zh, f"{english_number(60 - minute)} to {following} {part_en}")


def clock(rng: random.Random) -> Sentence:
    time = _time(rng)
    kind = rng.randrange(4)
    if kind == 0:
        return f"现在是{time.zh}", f"it is {time.en} now"
    if kind == 1:
        zh, en, verb = rng.choice(lx.EVENTS)
        starts = "开始" if verb == "starts" else "出发"
        if rng.random() < 0.3:
            return f"{zh}{time.zh}{starts}吗？", f"does {en} {verb[:-1]} at {time.en}"
        return f"{zh}{time.zh}{starts}", f"{en} {verb} at {time.en}"
    who = subject(rng)
    zh, *forms = rng.choice(lx.ROUTINES)
    says = forms[1] if who.person == "he" else forms[0]
    if kind == 2:
        return f"{who.zh}每天{time.zh}{zh}", f"{who.en} {says} at {time.en} every day"
    return f"{who.zh}明天{time.zh}要{zh}", f"{who.en} will {forms[0]} at {time.en} tomorrow"


def price(rng: random.Random) -> Sentence:
    kind = rng.randrange(4)
    yuan = rng.choice(("块钱", "元"))
    if kind == 0:
        noun = rng.choice(_FOR_SALE)
        zh, en = f"这{noun.measure}{noun.zh}", f"this {noun.one}"
        if rng.random() < 0.5:
            zh, en = f"那{zh[1:]}", f"that{en[4:]}"
        if rng.random() < 0.15:
            return f"{zh}多少钱？", f"how much is {en}"
        amount = rng.randint(*noun.price)
        return f"{zh}{counted(amount)}{yuan}", f"{en} costs {english_number(amount)} yuan"
    if kind == 1:
        measure, one, _, zh, en, _, (low, high) = rng.choice(lx.PORTIONS)
        amount = rng.randint(low, high)
        return (
            f"一{measure}{zh}{counted(amount)}{yuan}",
            f"{article(one)} of {en} costs {english_number(amount)} yuan",
        )
    noun = rng.choice(_FOR_SALE)
    number = rng.randint(2, 10)
    total = min(999, number * rng.randint(*noun.price))
    things = f"{counted(number)}{noun.measure}{noun.zh}", f"{english_number(number)} {noun.many}"
    cost_zh, cost_en = f"{counted(total)}{yuan}", f"{english_number(total)} yuan"
    if kind == 2:
        return f"{things[0]}一共{cost_zh}", f"{things[1]} cost {cost_en} altogether"
    who = subject(rng)
    return f"{who.zh}花了{cost_zh}买{things[0]}", f"{who.en} spent {cost_en} on {things[1]}"


def quality(rng: random.Random) -> Sentence:
    word = rng.choice(lx.ADJECTIVES)
    thing = definite(rng, any_noun(rng, word.kinds))
    verb = "are" if thing.plural else "is"
    kind = rng.randrange(5)
    if kind == 0:
        return f"{thing.zh}太{word.zh}了", f"{thing.en} {verb} too {word.en}"
    if kind == 1:
        return f"{thing.zh}不{word.zh}", f"{thing.en} {verb} not {word.en}"
    if kind == 2:
        return f"{thing.zh}{word.zh}吗？", f"{verb} {thing.en} {word.en}"
    return f"{thing.zh}很{word.zh}", f"{thing.en} {verb} very {word.en}"


def comparison(rng: random.Random) -> Sentence:
    """这本书比那本书贵 / This book is more expensive than that book."""
    word = rng.choice(lx.ADJECTIVES)
    noun = any_noun(rng, word.kinds)
    this = Phrase(f"这{noun.measure}{noun.zh}", f"this {noun.one}")
    that = Phrase(f"那{noun.measure}{noun.zh}", f"that {noun.one}")
    if rng.random() < 0.5:
        this, that = that, this
    if rng.random() < 0.4:
        (a, whose_a), (b, whose_b) = rng.sample(lx.OWNERS, 2)
        this = Phrase(f"{a}的{noun.zh}", f"{whose_a} {noun.one}")
        that = Phrase(f"{b}的{noun.zh}", f"{whose_b} {noun.one}")
    kind = rng.randrange(6)
    if kind == 0:
        return f"{this.zh}没有{that.zh}{word.zh}", f"{this.en} is not as {word.en} as {that.en}"
    if kind == 1:
        return f"{this.zh}和{that.zh}一样{word.zh}", f"{this.en} is as {word.en} as {that.en}"
    if kind == 2:
        return f"{this.zh}比{that.zh}{word.zh}得多", f"{this.en} is much {word.more} than {that.en}"
    if kind == 3:
        return f"{this.zh}比{that.zh}{word.zh}吗？", f"is {this.en} {word.more} than {that.en}"
    if kind == 4:
        return f"{this.zh}是最{word.zh}的", f"{this.en} is the {word.most} one"
    return f"{this.zh}比{that.zh}{word.zh}", f"{this.en} is {word.more} than {that.en}"


def people_compared(rng: random.Random) -> Sentence:
    one, other = subject(rng), subject(rng)
    while other.zh == one.zh:
        other = subject(rng)
    # Nobody is younger than a younger brother: family is compared in other ways.
    zh, en, more = rng.choice(lx.HUMAN[1:] if _family(one) or _family(other) else lx.HUMAN)
    is_ = be(one.person)
    kind = rng.randrange(5)
    if kind == 0:
        return f"{one.zh}没有{other.zh}{zh}", f"{one.en} {is_} not as {en} as {other.object_en}"
    if kind == 1:
        return f"{one.zh}和{other.zh}一样{zh}", f"{one.en} {is_} as {en} as {other.object_en}"
    if kind == 2 and one.person != "i":
        return f"{one.zh}比{other.zh}{zh}吗？", f"{is_} {one.en} {more} than {other.object_en}"
    if kind == 3:
        return f"{one.zh}很{zh}", f"{one.en} {is_} very {en}"
    return f"{one.zh}比{other.zh}{zh}", f"{one.en} {is_} {more} than {other.object_en}"


def age(rng: random.Random) -> Sentence:
    one, other = subject(rng), subject(rng)
    if rng.random() < 0.4:
        child = one.zh.endswith(("弟弟", "妹妹", "孩子"))
        years = rng.randint(3, 15) if child else rng.randint(25, 80)
        zh, en = chinese_number(years), english_number(years)
        return f"{one.zh}今年{zh}岁", f"{one.en} {be(one.person)} {en} years old this year"
    while other.zh == one.zh or _family(one) or _family(other):
        one, other = subject(rng), subject(rng)
    years = rng.randint(1, 12)
    zh, en = rng.choice((("大", "older"), ("小", "younger")))
    span = f"{english_number(years)} year{'s' if years > 1 else ''}"
    return (
        f"{one.zh}比{other.zh}{zh}{counted(years)}岁",
        f"{one.en} {be(one.person)} {span} {en} than {other.object_en}",
    )


def weather(rng: random.Random) -> Sentence:
    (city_zh, city_en), (other_zh, other_en) = rng.sample(lx.CITIES, 2)
    zh, en, more = rng.choice(lx.WEATHER)
    when_zh, when_en, was = rng.choice(
        (("今天", "today", "is"), ("昨天", "yesterday", "was"), ("明天", "tomorrow", "will be"))
    )
    kind = rng.randrange(5)
    if kind == 0:
        return f"{city_zh}{when_zh}很{zh}", f"it {was} very {en} in {city_en} {when_en}"
    if kind == 1:
        return f"{city_zh}{when_zh}不{zh}", f"it {lx.NOT[was]} {en} in {city_en} {when_en}"
    if kind == 2:
        falls_zh, falls_en = rng.choice((("下雨", "rain"), ("下雪", "snow")))
        return f"{city_zh}明天会{falls_zh}吗？", f"will it {falls_en} in {city_en} tomorrow"
    return (
        f"{city_zh}{when_zh}比{other_zh}{zh}",
        f"{city_en} {was} {more} than {other_en} {when_en}",
    )


def duration(rng: random.Random) -> Sentence:
    who = subject(rng)
    number = rng.randint(1, 12)
    many = "s" if number > 1 else ""
    unit_zh, unit_en = rng.choice((("年", "year"), ("个月", "month"), ("个星期", "week")))
    span_zh = f"{counted(number)}{unit_zh}"
    span_en = f"{english_number(number)} {unit_en}{many}"
    if rng.random() < 0.5:
        zh, en = rng.choice(lx.CITIES)
        return f"{who.zh}在{zh}住了{span_zh}", f"{who.en} lived in {en} for {span_en}"
    zh, en = rng.choice(lx.LANGUAGES)
    if rng.random() < 0.3:
        (zh, en), (zh2, en2) = rng.sample(lx.LANGUAGES, 2)
        return f"{who.zh}会说{zh}和{zh2}", f"{who.en} can speak {en} and {en2}"
    return f"{who.zh}学了{span_zh}{zh}", f"{who.en} studied {en} for {span_en}"


def request(rng: random.Random) -> Sentence:
    other = rng.choice((*lx.PRONOUNS[:1], *lx.PRONOUNS[2:], *lx.NAMES, subject(rng)))
    if other.zh == "你":
        other = lx.PRONOUNS[0]
    kinds = frozenset(("small", "read", "eat", "drink", "dish", "paper"))
    some = portion(rng, kinds, 6) if rng.random() < 0.35 else None
    thing = some or quantity(rng, any_noun(rng, frozenset(("small",))), 12)
    return f"请给{other.zh}{thing.zh}", f"please give {other.object_en} {thing.en}"


def identity(rng: random.Random) -> Sentence:
    draw = rng.random()
    if draw < 0.3:
        who = rng.choice((*lx.PRONOUNS[:4], *lx.NAMES))
        zh, en = rng.choice(lx.PEOPLE)
        if rng.random() < 0.3:
            return f"{who.zh}不是{zh}", f"{who.en} {be(who.person)} not {article(en)}"
        return f"{who.zh}是{zh}", f"{who.en} {be(who.person)} {article(en)}"
    noun = rng.choice(lx.NOUNS)
    owner, whose = rng.choice((*lx.OWNERS, *((n.zh, f"{n.en}'s") for n in lx.NAMES)))
    this_zh, this_en = rng.choice((("这", "this"), ("那", "that")))
    if draw < 0.5:
        return f"{this_zh}是{owner}的{noun.zh}吗？", f"is {this_en} {whose} {noun.one}"
    if draw < 0.65:
        return f"{this_zh}不是{owner}的{noun.zh}", f"{this_en} is not {whose} {noun.one}"
    return f"{this_zh}是{owner}的{noun.zh}", f"{this_en} is {whose} {noun.one}"
