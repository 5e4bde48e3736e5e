"""Several ranks: what each waits for, which one the others wait for, and why.

A step takes equally long on all ranks, since each waits for the slowest. So the slowest is the one
that waits least for others. It is compared with the rest: in what its GPU does, and in the host's
time by line.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from headrace.records import DiagnosisResult, HostLine, LineRecord, RankFigures, TimeParts

#: Ranks wait equally long for each other if they differ by less than this share of a step.
_EQUAL = 0.02
#: How long rank 0 waits for another's result, and for further ones if one did not come.
_PATIENCE, _SHORT = timedelta(seconds=60), timedelta(seconds=1)


def figures_of(
    rank: int | None,
    result: DiagnosisResult,
    waits_ms: float | None = None,
    lines: tuple[HostLine, ...] = (),
) -> RankFigures:
    """What is told of a rank. `waits_ms` is how long it waited for others, if the parts of its step
    do not say."""
    parts = result.parts
    return RankFigures(
        rank=rank,
        host=platform.node(),
        step_ms=result.step_ms,
        computing_ms=parts.computing if parts is not None else None,
        waits_ms=waits_ms if parts is None else parts.other_ranks,
        lines=lines,
    )


# --- all ranks together ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a script exchange their results: the store of its process group, which
    outlives the group."""

    store: Any
    rank: int
    size: int

    @classmethod
    def now(cls) -> Meeting | None:
        """None if the script has no process group of several ranks."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        store = dist.distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(), dist.get_world_size())

    def gathered(self, result: DiagnosisResult) -> DiagnosisResult:
        """The results of all ranks as one, on rank 0; on the others, their own, which they send."""
        if self.rank != 0:
            self.store.set(_key(self.rank), json.dumps(replace(result, timeline=None).to_dict()))
            return result
        found, missing = [result], list[int]()
        for other in range(1, self.size):
            try:
                self.store.wait([_key(other)], _SHORT if missing else _PATIENCE)
                text = self.store.get(_key(other))
            except RuntimeError:  # its time is over, or the connection is lost
                missing.append(other)
                continue
            found.append(DiagnosisResult.from_dict(json.loads(text)))
        merged = of_ranks(found) if len(found) > 1 else result
        told = tuple(f"no diagnosis came from rank {rank}" for rank in missing)
        return replace(merged, missing=(*merged.missing, *told))


def _key(rank: int) -> str:
    return f"headrace/diagnosis/{rank}"


def of_ranks(results: Sequence[DiagnosisResult]) -> DiagnosisResult:
    """The result of the rank for which the others wait, with the figures of all. Each of `results`
    has its own figures."""
    pairs = [(one, one.ranks[0]) for one in results]
    shown, slowest = min(pairs, key=lambda pair: (_waits(pair[1]), -(pair[1].computing_ms or 0.0)))
    longest = max((figures for _, figures in pairs), key=_waits)
    all_figures = tuple(figures for _, figures in pairs)
    if _waits(longest) - _waits(slowest) > _EQUAL * (slowest.step_ms or 0.0):
        first = (
            f"Of {len(pairs)} ranks, {slowest.name} waits least for the others, "
            f"{_waits(slowest):.1f} ms a step ({longest.name}: {_waits(longest):.1f} ms): they "
            f"wait for it. This is its diagnosis."
        )
        others = [one for one, figures in pairs if figures is not slowest]
        verdict: tuple[str, ...] = (first, *why_slower(shown, others), *shown.verdict)
    else:
        first = (
            f"None of {len(pairs)} ranks waits much longer for the others than the rest does. This "
            f"is {slowest.name}."
        )
        verdict = (first, *shown.verdict)
    return replace(shown, verdict=verdict, ranks=all_figures)


def _waits(figures: RankFigures) -> float:
    return figures.waits_ms or 0.0


def why_slower(slowest: DiagnosisResult, others: Sequence[DiagnosisResult]) -> Iterator[str]:
    """In which part of a step, and at which line, the slowest rank spends more than the others."""
    step_ms = slowest.step_ms or 0.0
    more = {
        name: _more(getattr(slowest.parts, name), [getattr(one.parts, name) for one in others])
        for name in TimeParts.__slots__
        if name != "other_ranks" and slowest.parts and all(one.parts for one in others)
    }
    worst = max(more, key=lambda name: more[name], default=None)
    if worst is not None and more[worst] > _EQUAL * step_ms:
        yield f"Of its step, {more[worst]:.1f} ms more than on the others are {_words(worst)}."
    lines = {
        _place(one.line): _more(
            one.ms, [_ms_at(_place(one.line), other.ranks[0]) for other in others]
        )
        for one in slowest.ranks[0].lines
    }
    line = max(lines, key=lambda place: lines[place], default=None)
    if line is not None and lines[line] > _EQUAL * step_ms:
        text = next(one.line.text for one in slowest.ranks[0].lines if _place(one.line) == line)
        yield f"Its host spends {lines[line]:.1f} ms more than the others at {line}: {text}"


def _more(own: float, others: Sequence[float]) -> float:
    return own - statistics.median(others) if others else 0.0


def _ms_at(place: str, figures: RankFigures) -> float:
    return sum(one.ms for one in figures.lines if _place(one.line) == place)


def _place(line: LineRecord) -> str:
    return f"{line.file}:{line.line}"


def _words(part: str) -> str:
    return part.replace("_", " ")
