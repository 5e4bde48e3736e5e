"""How plans are scored, in points out of 100. Gain and memory are measured; the rest is opinion,
and all of it is in the two tables here."""

from __future__ import annotations

from dataclasses import dataclass

#: The most points that each criterion can bring.
WEIGHTS = {
    "gain": 30,
    "effort": 25,
    "complexity": 15,
    "maintainability": 15,
    "memory": 10,
    "risk": 5,
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """Marks from 0 (bad) to 10 (good) for what cannot be measured, and the reason for them."""

    effort: int
    complexity: int
    maintainability: int
    risk: int
    why: str


#: One judgement for each preset; a plan of one's own has that of the preset it resembles.
JUDGEMENTS: dict[str, Judgement] = {
    "baseline": Judgement(10, 10, 10, 10, "the loop that everybody knows: nothing to do"),
    "interval": Judgement(9, 9, 9, 9, "one word; losses come in tens"),
    "event": Judgement(9, 9, 9, 9, "one word; events order a copy stream, losses come in tens"),
    "streams4": Judgement(9, 6, 6, 6, "one word; four streams and their edges are hard to follow"),
    "pipeline": Judgement(9, 8, 9, 9, "one word; losses come late, the loop never stops for them"),
    "graph": Judgement(
        9, 7, 8, 8, "one word; a step may not read values back, and few batch shapes are best"
    ),
    "max": Judgement(
        8, 5, 7, 6, "one word and a minute of compiling at first; other kernels, last bits differ"
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
