"""The words of the built-in corpus, Chinese beside English, with what the grammar must know of
them: measure words, plurals, verb forms, what goes with what; and numbers in words."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Noun:
    """A thing that is counted. `kinds` says which verbs, adjectives and places suit it."""

    zh: str
    measure: str
    one: str
    many: str
    kinds: frozenset[str]
    price: tuple[int, int]  # yuan, from and to; (0, 0): not for sale


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb with an object: its forms, the kinds of objects it takes, and places to do it in."""

    zh: str
    base: str
    third: str
    past: str
    ing: str
    takes: frozenset[str]
    places: frozenset[str]


@dataclass(frozen=True, slots=True)
class Subject:
    """Who does it. `person` is how English verbs agree: i, you, he or they."""

    zh: str
    en: str
    person: str
    object_en: str = ""


@dataclass(frozen=True, slots=True)
class Adjective:
    """A quality: English with its comparative and superlative, and what it can be said of."""

    zh: str
    en: str
    more: str
    most: str
    kinds: frozenset[str]


def _plural(one: str) -> str:
    irregular = {"fish": "fish", "sheep": "sheep", "knife": "knives", "scarf": "scarves"}
    irregular |= {"photo": "photos", "child": "children", "shelf": "shelves"}
    if one in irregular:
        return irregular[one]
    if one.endswith("y") and one[-2] not in "aeiou":
        return f"{one[:-1]}ies"
    return f"{one}es" if one.endswith(("s", "x", "ch", "sh", "tomato", "potato")) else f"{one}s"


def _nouns() -> tuple[Noun, ...]:
    found = []
    for line in _NOUNS.strip().splitlines():
        zh, measure, one, kinds, price = (part.strip() for part in line.split("|"))
        low, high = (int(number) for number in price.split("-"))
        tags = frozenset((*kinds.split(), *(("sold",) if high else ())))
        found.append(Noun(zh, measure, one, _plural(one), tags, (low, high)))
    return tuple(found)


# Chinese | measure word | English | kinds | price in yuan
_NOUNS = """
书     | 本 | book       | read small borrow good       | 20-90
词典   | 本 | dictionary | read small borrow good       | 30-150
杂志   | 本 | magazine   | read small borrow good       | 10-40
小说   | 本 | novel      | read small borrow good write | 20-80
报纸   | 份 | newspaper  | read small borrow            | 1-5
票     | 张 | ticket     | small lose                   | 10-300
地图   | 张 | map        | small lose borrow draw       | 5-40
照片   | 张 | photo      | small lose take good         | 0-0
桌子   | 张 | table      | big furniture repair colour  | 200-900
床     | 张 | bed        | big furniture repair         | 500-900
椅子   | 把 | chair      | big furniture repair colour  | 50-400
雨伞   | 把 | umbrella   | small lose borrow colour     | 20-90
钥匙   | 把 | key        | small lose                   | 0-0
刀     | 把 | knife      | small wash borrow            | 10-90
衬衫   | 件 | shirt      | wear wash colour small good  | 80-400
毛衣   | 件 | sweater    | wear wash colour small good  | 100-500
大衣   | 件 | coat       | wear wash colour good        | 300-900
裙子   | 条 | skirt      | wear wash colour small good  | 80-500
围巾   | 条 | scarf      | top wash colour small lose  | 30-200
领带   | 条 | tie        | top colour small lose       | 50-300
毛巾   | 条 | towel      | wash colour small            | 10-50
帽子   | 顶 | hat        | top wash colour small lose  | 20-150
鱼     | 条 | fish       | eat animal                   | 15-80
狗     | 只 | dog        | animal pet look wash         | 0-0
猫     | 只 | cat        | animal pet look              | 0-0
鸟     | 只 | bird       | animal look draw             | 0-0
羊     | 只 | sheep      | animal look draw             | 0-0
马     | 匹 | horse      | animal look draw             | 0-0
牛     | 头 | cow        | animal look draw             | 0-0
猪     | 头 | pig        | animal look                  | 0-0
汽车   | 辆 | car        | vehicle repair wash colour   | 0-0
自行车 | 辆 | bicycle    | vehicle repair wash colour borrow | 300-900
公共汽车 | 辆 | bus      | vehicle repair wash colour   | 0-0
出租车 | 辆 | taxi       | vehicle repair wash          | 0-0
苹果   | 个 | apple      | eat fruit wash small         | 2-9
橙子   | 个 | orange     | eat fruit small              | 2-9
梨     | 个 | pear       | eat fruit wash small         | 2-9
桃子   | 个 | peach      | eat fruit wash small         | 2-9
西瓜   | 个 | watermelon | eat fruit                    | 10-40
鸡蛋   | 个 | egg        | eat small                    | 1-3
土豆   | 个 | potato     | eat wash small               | 1-5
西红柿 | 个 | tomato     | eat wash small               | 1-5
包子   | 个 | steamed bun | eat small                   | 1-6
三明治 | 个 | sandwich   | eat small                    | 8-30
香蕉   | 根 | banana     | eat fruit small              | 1-5
杯子   | 个 | cup        | wash small colour dish       | 10-60
盘子   | 个 | plate      | wash small colour dish       | 10-60
书包   | 个 | schoolbag  | small lose colour wash       | 60-300
钱包   | 个 | wallet     | small lose colour            | 50-300
盒子   | 个 | box        | small colour                 | 5-40
手机   | 部 | mobile phone | device small lose repair borrow good | 600-990
相机   | 台 | camera     | device small lose repair borrow good | 700-990
电脑   | 台 | computer   | device repair borrow good    | 0-0
电视   | 台 | television | device big repair good       | 0-0
手表   | 块 | watch      | top small lose repair good  | 200-900
电影   | 部 | film       | watch good                   | 0-0
信     | 封 | letter     | write small mail             | 0-0
邮件   | 封 | email      | write mail                   | 0-0
故事   | 个 | story      | write tell good              | 0-0
歌     | 首 | song       | sing write good              | 0-0
诗     | 首 | poem       | write good                   | 0-0
花     | 朵 | flower     | small draw look              | 3-20
树     | 棵 | tree       | big draw look                | 0-0
铅笔   | 支 | pencil     | small lose borrow            | 1-9
钢笔   | 支 | pen        | small lose borrow            | 10-200
礼物   | 件 | present    | small give good              | 0-0
"""
NOUNS = _nouns()


@functools.cache
def nouns_of(kinds: frozenset[str]) -> tuple[Noun, ...]:
    """The nouns of any of these kinds."""
    return tuple(noun for noun in NOUNS if noun.kinds & kinds)


# Measured by the vessel: (Chinese vessel, one, many, Chinese stuff, English stuff, kind, price).
PORTIONS = (
    ("杯", "cup", "cups", "茶", "tea", "drink", (5, 40)),
    ("杯", "cup", "cups", "咖啡", "coffee", "drink", (15, 45)),
    ("杯", "glass", "glasses", "水", "water", "drink", (1, 5)),
    ("杯", "glass", "glasses", "牛奶", "milk", "drink", (5, 15)),
    ("杯", "glass", "glasses", "果汁", "juice", "drink", (10, 30)),
    ("瓶", "bottle", "bottles", "啤酒", "beer", "drink", (5, 25)),
    ("瓶", "bottle", "bottles", "牛奶", "milk", "drink", (5, 20)),
    ("瓶", "bottle", "bottles", "水", "water", "drink", (2, 8)),
    ("碗", "bowl", "bowls", "米饭", "rice", "eat", (2, 8)),
    ("碗", "bowl", "bowls", "面条", "noodles", "eat", (10, 40)),
    ("碗", "bowl", "bowls", "汤", "soup", "eat", (8, 35)),
    ("块", "piece", "pieces", "蛋糕", "cake", "eat", (10, 45)),
    ("片", "slice", "slices", "面包", "bread", "eat", (1, 5)),
    ("双", "pair", "pairs", "鞋", "shoes", "wear", (100, 600)),
    ("双", "pair", "pairs", "袜子", "socks", "wear", (5, 40)),
    ("双", "pair", "pairs", "筷子", "chopsticks", "dish", (3, 40)),
    ("张", "sheet", "sheets", "纸", "paper", "paper", (1, 3)),
    ("公斤", "kilogram", "kilograms", "肉", "meat", "food", (40, 120)),
    ("公斤", "kilogram", "kilograms", "糖", "sugar", "food", (8, 30)),
)


def _verbs() -> tuple[Verb, ...]:
    found = []
    for line in _VERBS.strip().splitlines():
        zh, forms, takes, places = (part.strip() for part in line.split("|"))
        base, third, past, ing = (form.strip() for form in forms.split(","))
        kinds = frozenset(takes.split()), frozenset(places.split())
        found.append(Verb(zh, base, third, past, ing, *kinds))
    return tuple(found)


# Chinese | base, third person, past, -ing | kinds of objects | kinds of places
_VERBS = """
买   | buy, buys, bought, buying             | sold                  | shop
借   | borrow, borrows, borrowed, borrowing  | borrow                | quiet
看   | read, reads, read, reading            | read                  | quiet home
看   | watch, watches, watched, watching     | watch                 | home
吃   | eat, eats, ate, eating                | eat                   | meal home
喝   | drink, drinks, drank, drinking        | drink                 | meal home quiet
写   | write, writes, wrote, writing         | write                 | quiet home
穿   | wear, wears, wore, wearing            | wear                  |
戴   | wear, wears, wore, wearing            | top                  |
洗   | wash, washes, washed, washing         | wash                  | home
修   | repair, repairs, repaired, repairing  | repair                | home
画   | draw, draws, drew, drawing            | draw                  | quiet out
找   | look for, looks for, looked for, looking for | lose pet       | home quiet out
唱   | sing, sings, sang, singing            | sing                  | home out
讲   | tell, tells, told, telling            | tell                  | home quiet
准备 | prepare, prepares, prepared, preparing | give                 | home
"""
VERBS = _verbs()

PRONOUNS = (
    Subject("我", "I", "i", "me"),
    Subject("你", "you", "you", "you"),
    Subject("他", "he", "he", "him"),
    Subject("她", "she", "he", "her"),
    Subject("我们", "we", "they", "us"),
    Subject("他们", "they", "they", "them"),
)
OWNERS = (("我", "my"), ("你", "your"), ("他", "his"), ("她", "her"), ("我们", "our"))
_NAMES = ("李明 Li Ming", "王芳 Wang Fang", "张伟 Zhang Wei", "刘洋 Liu Yang", "陈静 Chen Jing")
NAMES = tuple(Subject(zh, en, "he", en) for zh, en in (name.split(" ", 1) for name in _NAMES))
RELATIVES = (
    ("妈妈", "mother"),
    ("爸爸", "father"),
    ("哥哥", "older brother"),
    ("弟弟", "younger brother"),
    ("姐姐", "older sister"),
    ("妹妹", "younger sister"),
    ("朋友", "friend"),
    ("老师", "teacher"),
    ("同学", "classmate"),
    ("邻居", "neighbour"),
)
# Said without 的 after a pronoun: 我妈妈.
FAMILY = frozenset(zh for zh, _ in RELATIVES[:6])
PEOPLE = (
    ("学生", "student"),
    ("医生", "doctor"),
    ("司机", "driver"),
    ("孩子", "child"),
    ("工人", "worker"),
    ("记者", "reporter"),
)

_ADJECTIVES = """
贵   | expensive, more expensive, most expensive | read wear top device dish furniture
便宜 | cheap, cheaper, cheapest                  | read wear device dish furniture fruit top
好看 | nice, nicer, nicest                       | wear top dish furniture
重   | heavy, heavier, heaviest                  | device furniture
轻   | light, lighter, lightest                  | device
快   | fast, faster, fastest                     | vehicle
慢   | slow, slower, slowest                     | vehicle
长   | long, longer, longest                     | watch tell mail sing
短   | short, shorter, shortest                  | watch tell mail sing
有名 | famous, more famous, most famous          | watch sing
大   | big, bigger, biggest                      | fruit animal furniture
小   | small, smaller, smallest                  | fruit animal
甜   | sweet, sweeter, sweetest                  | fruit
新   | new, newer, newest                        | vehicle device read
旧   | old, older, oldest                        | vehicle device
"""


def _adjectives() -> tuple[Adjective, ...]:
    found = []
    for line in _ADJECTIVES.strip().splitlines():
        zh, forms, kinds = (part.strip() for part in line.split("|"))
        en, more, most = (form.strip() for form in forms.split(","))
        found.append(Adjective(zh, en, more, most, frozenset(kinds.split())))
    return tuple(found)


ADJECTIVES = _adjectives()

# --- where, when, how and in which mood -----------------------------------------------------------

# (Chinese after 在, English, kind)
PLACES = (
    ("学校", "at school", "quiet"),
    ("图书馆", "in the library", "quiet"),
    ("办公室", "in the office", "quiet"),
    ("教室", "in the classroom", "quiet"),
    ("家", "at home", "home"),
    ("商店", "in the shop", "shop"),
    ("市场", "at the market", "shop"),
    ("超市", "in the supermarket", "shop"),
    ("机场", "at the airport", "shop"),
    ("饭馆", "in the restaurant", "meal"),
    ("食堂", "in the canteen", "meal"),
    ("公园", "in the park", "out"),
    ("花园", "in the garden", "out"),
    ("河边", "by the river", "out"),
)
# Where things are: (Chinese, English, kinds of things that may be there).
SPOTS = (
    ("桌子上", "on the table", "read fruit dish device eat"),
    ("床上", "on the bed", "read wear top device"),
    ("椅子上", "on the chair", "wear top read pet"),
    ("床下", "under the bed", "pet lose"),
    ("书包里", "in the schoolbag", "read lose"),
    ("盒子里", "in the box", "lose wear top fruit"),
    ("冰箱里", "in the fridge", "eat drink"),
    ("房间里", "in the room", "furniture device pet"),
    ("教室里", "in the classroom", "furniture device"),
    ("厨房里", "in the kitchen", "eat dish drink"),
    ("门前", "in front of the door", "vehicle pet look"),
    ("公园里", "in the park", "look pet"),
    ("学校后面", "behind the school", "vehicle look"),
    ("车站旁边", "next to the station", "vehicle"),
)
CITIES = (
    ("北京", "Beijing"),
    ("上海", "Shanghai"),
    ("广州", "Guangzhou"),
    ("西安", "Xi'an"),
    ("成都", "Chengdu"),
    ("南京", "Nanjing"),
    ("杭州", "Hangzhou"),
    ("昆明", "Kunming"),
)
GOALS = (
    *((zh, f"to {en}") for zh, en in CITIES),
    ("学校", "to school"),
    ("图书馆", "to the library"),
    ("机场", "to the airport"),
    ("医院", "to the hospital"),
    ("公园", "to the park"),
    ("银行", "to the bank"),
    ("超市", "to the supermarket"),
    ("车站", "to the station"),
)
RIDES = (
    ("坐火车", "by train", "far"),
    ("坐飞机", "by plane", "far"),
    ("坐公共汽车", "by bus", "near"),
    ("坐出租车", "by taxi", "near"),
    ("骑自行车", "by bicycle", "near"),
    ("坐地铁", "by underground", "near"),
)

# (Chinese, English, tense)
TIMES = (
    ("昨天", "yesterday", "past"),
    ("前天", "the day before yesterday", "past"),
    ("昨天晚上", "last night", "past"),
    ("昨天下午", "yesterday afternoon", "past"),
    ("上个星期", "last week", "past"),
    ("上个月", "last month", "past"),
    ("上个星期天", "last Sunday", "past"),
    ("明天", "tomorrow", "future"),
    ("后天", "the day after tomorrow", "future"),
    ("明天早上", "tomorrow morning", "future"),
    ("明天晚上", "tomorrow evening", "future"),
    ("下个星期", "next week", "future"),
    ("下个月", "next month", "future"),
    ("下个星期六", "next Saturday", "future"),
    ("每天", "every day", "habit"),
    ("每天早上", "every morning", "habit"),
    ("每天晚上", "every evening", "habit"),
    ("每个星期", "every week", "habit"),
    ("每个星期天", "every Sunday", "habit"),
)
HUMAN = (
    ("年轻", "young", "younger"),
    ("高", "tall", "taller"),
    ("忙", "busy", "busier"),
    ("聪明", "clever", "cleverer"),
    ("高兴", "happy", "happier"),
    ("认真", "careful", "more careful"),
)
WEATHER = (
    ("冷", "cold", "colder"),
    ("热", "hot", "hotter"),
    ("暖和", "warm", "warmer"),
    ("凉快", "cool", "cooler"),
)
COLOURS = (
    ("红色", "red"),
    ("蓝色", "blue"),
    ("白色", "white"),
    ("黑色", "black"),
    ("绿色", "green"),
    ("黄色", "yellow"),
)
MODALS = (
    ("想", "want to", "wants to", "does not want to"),
    ("可以", "can", "can", "cannot"),
    ("应该", "should", "should", "should not"),
    ("必须", "must", "must", ""),
    ("需要", "need to", "needs to", "does not need to"),
)
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
EVENTS = (
    ("会议", "the meeting", "starts"),
    ("考试", "the exam", "starts"),
    ("比赛", "the match", "starts"),
    ("电影", "the film", "starts"),
    ("音乐会", "the concert", "starts"),
    ("火车", "the train", "leaves"),
    ("飞机", "the plane", "leaves"),
    ("公共汽车", "the bus", "leaves"),
)
# What is done at a time of day: Chinese, English, and English with he and she.
ROUTINES = (
    ("上课", "have class", "has class"),
    ("工作", "work", "works"),
    ("跑步", "run", "runs"),
    ("游泳", "swim", "swims"),
    ("学习", "study", "studies"),
    ("打篮球", "play basketball", "plays basketball"),
    ("踢足球", "play football", "plays football"),
    ("打电话", "make a phone call", "makes a phone call"),
)
NOT = {"is": "is not", "was": "was not", "will be": "will not be"}
LANGUAGES = (
    ("中文", "Chinese"),
    ("英语", "English"),
    ("法语", "French"),
    ("德语", "German"),
    ("日语", "Japanese"),
    ("俄语", "Russian"),
)
DAY_PARTS = (
    ("早上", "in the morning", range(6, 10)),
    ("上午", "in the morning", range(9, 12)),
    ("下午", "in the afternoon", range(1, 6)),
    ("晚上", "in the evening", range(6, 11)),
)

# --- numbers, and English's `a` and `an` ----------------------------------------------------------

_DIGITS = "零一二三四五六七八九"
_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def chinese_number(number: int) -> str:
    """1 to 999, as counted and read aloud (二 for 2; before a measure word it is 两)."""
    if number < 10:
        return _DIGITS[number]
    if number < 20:
        return "十" + (_DIGITS[number - 10] if number > 10 else "")
    if number < 100:
        tens, ones = divmod(number, 10)
        return _DIGITS[tens] + "十" + (_DIGITS[ones] if ones else "")
    hundreds, rest = divmod(number, 100)
    head = ("两" if hundreds == 2 else _DIGITS[hundreds]) + "百"
    if not rest:
        return head
    if rest < 10:
        return head + "零" + _DIGITS[rest]
    return head + ("一" if rest < 20 else "") + chinese_number(rest)


def counted(number: int) -> str:
    """A number before a measure word: 两, not 二."""
    return "两" if number == 2 else chinese_number(number)


def english_number(number: int) -> str:
    """1 to 999, in words."""
    if number < 20:
        return _WORDS[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_WORDS[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    head = f"{_WORDS[hundreds]} hundred"
    return f"{head} and {english_number(rest)}" if rest else head


def article(noun: str) -> str:
    """`a` or `an`, by the sound of these words (none here begins with a silent h or a "yoo")."""
    return f"an {noun}" if noun[0] in "aeiou" and not noun.startswith("uni") else f"a {noun}"
