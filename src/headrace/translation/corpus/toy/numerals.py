"""Numbers as Chinese and English say them, and English's `a` and `an`."""

from __future__ import annotations

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
