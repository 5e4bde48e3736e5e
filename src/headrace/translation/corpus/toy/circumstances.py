"""Where, when, how and in which mood: the other words of the built-in corpus."""

from __future__ import annotations

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
