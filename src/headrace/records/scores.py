"""How plans are scored, in points out of 100. Gain and memory are measured; the rest is opinion,
and all of it is in the two tables here."""

from __future__ import annotations

from dataclasses import dataclass

#: The maximum points of each criterion.
WEIGHTS = {
    "gain": 30,
    "effort": 25,
    "complexity": 15,
    "maintainability": 15,
    "memory": 10,
    "risk": 5,
}


@dataclass(frozen=True, slots=True)
class Judgment:
    """Marks from 0 (bad) to 10 (good) for what cannot be measured, and the reason for them."""

    effort: int
    complexity: int
    maintainability: int
    risk: int
    why: str


#: One judgment for each preset; another plan has that of the preset that it resembles.
JUDGMENTS: dict[str, Judgment] = {
    "baseline": Judgment(10, 10, 10, 10, "the loop that everybody knows: nothing to change"),
    "interval": Judgment(9, 9, 9, 9, "one argument; losses arrive ten at a time"),
    "event": Judgment(
        9, 9, 9, 9, "one argument; events order a copy stream, losses arrive ten at a time"
    ),
    "streams4": Judgment(
        9, 6, 6, 6, "one argument; four streams and their edges are hard to follow"
    ),
    "pipeline": Judgment(
        9, 8, 9, 9, "one argument; losses arrive late, and the loop never waits for them"
    ),
    "graph": Judgment(
        9, 7, 8, 8, "one argument; a step may not read values back, and few batch shapes work best"
    ),
    "max": Judgment(
        8, 5, 7, 6, "one argument and a minute of compiling; other kernels, so the last bits differ"
    ),
}


@dataclass(frozen=True, slots=True)
class Score:
    """A plan's points: the total, out of 100, and each criterion's, out of its weight."""

    total: float
    gain: float
    effort: float
    complexity: float
    maintainability: float
    memory: float
    risk: float
