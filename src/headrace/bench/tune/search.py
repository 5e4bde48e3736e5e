"""The search: successive halving, stage by stage.

A stage starts with the best candidate so far and its variations. All run for a few steps. The
search drops those that are clearly behind; at most half of the others go on to runs of twice the
length, and then of four times. It repeats what is then close, in turns, until one is ahead by more
than chance or `repeats` is reached. The simplest of those within noise wins the stage. The search
ends when a whole round of stages finds nothing better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.bench.tune.candidates import Candidate, Space
from headrace.bench.tune.trials import (
    MIN_NOISE,
    Measurement,
    Trial,
    deviation_of,
    noise_of,
    simplest,
)
from headrace.records import Status

#: After each rung, by how much a candidate may trail the leader; more on a noisy machine.
MARGINS = (0.15, 0.07, 0.03)
_FIRST_RUNS = 3  # of the first plan, to estimate the noise
_MIN_KEPT = (4, 3)  # how many may always go on from the first and second rung
_MAX_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far the search is, for a progress line. `done` counts runs; `left_s` is what remains of
    the time limit, None without one."""

    stage: str
    candidate: Candidate
    steps: int
    done: int
    left_s: float | None
    best: Trial | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a search ended. `noise` is the share by which two candidates may differ by chance,
    `ended_by` what ended the search early: "time limit", or a signal's name."""

    trials: tuple[Trial, ...]
    winner: Trial
    first: Trial
    noise: float
    ended_by: str | None


class NothingRuns(Exception):  # noqa: N818 - turned into an error that names the workload
    """Not even the first plan runs. The message is its error."""


class Stopped(Exception):  # noqa: N818 - not an error: `measure` raises it to end the search
    """The user, or the time limit, ended the search. The message says which."""


class Search:
    """Searches `space` for the fastest candidate.

    `measure(candidate, steps)` runs a candidate; `release(candidate)` is called when it will not
    run again soon. The shortest runs have `steps` steps, or as many as take the first plan
    `min_ms`. `budget_s` limits the total time of the measurements, None means no limit; a run
    that has begun is finished.
    """

    def __init__(
        self,
        space: Space,
        measure: Callable[[Candidate, int], Measurement],
        *,
        steps: int = 20,
        repeats: int = 5,
        min_ms: float = 200.0,
        budget_s: float | None = None,
        release: Callable[[Candidate], object] = lambda candidate: None,
        on_progress: Callable[[SearchProgress], object] = lambda progress: None,
    ) -> None:
        self._space, self._measure, self._release = space, measure, release
        self._on_progress = on_progress
        self._steps, self._repeats, self._min_ms = steps, repeats, min_ms
        self._rungs: list[int] = []
        self._budget_s = math.inf if budget_s is None else budget_s
        self._trials: dict[str, Trial] = {}
        self._spent_s = 0.0
        self._done = 0
        self._stage = ""
        self._best: Trial | None = None
        self._same: list[Trial] = []  # equal to the best so far, within noise

    def run(self) -> Outcome:
        first = self._trial(self._space.first())
        self._stage = "first"
        self._run(first, self._steps)
        if first.ms_per_step is None:
            raise NothingRuns(first.why)
        self._best = first
        steps = max(self._steps, math.ceil(self._min_ms / first.ms_per_step))
        self._rungs = [steps * 2**rung for rung in range(len(MARGINS))]
        ended_by = None
        try:
            for _ in range(_FIRST_RUNS):
                self._run(first, steps)
            self._search()
            self._compare_at_the_end(first)
        except Stopped as stopped:
            ended_by = str(stopped)
            self._best = self._best_so_far()
            self._keep_first_unless_behind(first)
        return self._outcome(first, ended_by)

    def _search(self) -> None:
        """Go through the stages until a whole round changes nothing."""
        unchanged = 0
        stages = self._space.stages()
        for turn in range(_MAX_ROUNDS * len(stages)):
            self._stage = stages[turn % len(stages)]
            assert self._best is not None
            before = self._best
            self._best = self._contest(self._space.around(self._stage, before.candidate))
            unchanged = unchanged + 1 if self._best is before else 0
            if unchanged >= len(stages):
                return

    # --- one stage -------------------------------------------------------------------------------

    def _contest(self, candidates: Sequence[Candidate]) -> Trial:
        """Run one stage and return the best. The best so far takes part again, because only runs
        made at about the same time can be compared."""
        best = self._best
        assert best is not None
        trials = [self._trial(candidate) for candidate in candidates]
        # A candidate that lost an earlier stage is not tried again.
        racing = [best, *(t for t in trials if t is not best and not t.rungs and t.status is None)]
        if len(racing) == 1:
            return best
        for trial in racing:
            trial.mark()
        for rung, steps in enumerate(self._rungs):
            racing = self._drop_slow(self._run_all(racing, steps), rung, steps)
            if len(racing) == 1:
                return self._won(racing[0], [])
        return self._repeat_what_is_close(racing)

    def _won(self, winner: Trial, same: list[Trial]) -> Trial:
        self._same = [*self._same, *same] if winner is self._best else same
        for trial in same:
            self._end(trial, "kept", f"the same as {winner.candidate.name} within noise")
        return winner

    def _run_all(self, racing: Sequence[Trial], steps: int) -> list[Trial]:
        """Run each once; returns those that ran without an error."""
        for trial in racing:
            self._run(trial, steps)
        left = [trial for trial in racing if trial.can_run]
        return left or [self._fallback()]

    def _drop_slow(self, racing: list[Trial], rung: int, steps: int) -> list[Trial]:
        """Drop what is clearly behind; keep the faster half of the rest, but at least a few."""
        ranked = _ranked(racing, steps)
        leader, limit = ranked[0], len(ranked)
        # Two runs of the same candidate differ by more than this in one case out of twenty.
        margin = max(MARGINS[rung], 2 * math.sqrt(2) * self._deviation())
        if rung < len(_MIN_KEPT):
            limit = max(_MIN_KEPT[rung], math.ceil(len(ranked) / 2))
        left = []
        for place, trial in enumerate(ranked):
            behind = _behind(trial, leader, steps)
            if behind > margin:
                why = f"{behind:.0%} behind {leader.candidate.name} over {steps} steps"
                self._end(trial, "dropped", why)
            elif place >= limit:
                why = f"not among the {limit} fastest over {steps} steps ({behind:.1%} behind)"
                self._end(trial, "dropped", why)
            else:
                left.append(trial)
        return left

    def _deviation(self) -> float:
        """The relative standard deviation between runs."""
        return deviation_of(
            times for trial in self._trials.values() for times in trial.rungs.values()
        )

    def _repeat_what_is_close(self, racing: list[Trial]) -> Trial:
        steps = self._rungs[-1]
        while len(racing) > 1:
            fewest = min(len(trial.recent(steps)) for trial in racing)
            if fewest >= min(3, self._repeats):
                racing = self._within_noise(racing, steps)
            if fewest >= self._repeats or (fewest >= 3 and self._are_tied(racing, steps)):
                break
            if len(racing) > 1:
                racing = self._run_all(racing, steps)
        chosen = simplest(racing)
        return self._won(chosen, [trial for trial in racing if trial is not chosen])

    def _are_tied(self, racing: list[Trial], steps: int) -> bool:
        """Whether all are so close that more repeats would only cost time."""
        ranked = _ranked(racing, steps)
        return _behind(ranked[-1], ranked[0], steps) <= MIN_NOISE

    def _within_noise(self, racing: list[Trial], steps: int) -> list[Trial]:
        leader = _ranked(racing, steps)[0]
        noise = noise_of(trial.recent(steps) for trial in racing)
        left = []
        for trial in racing:
            behind = _behind(trial, leader, steps)
            if behind > noise:
                why = f"{behind:.1%} behind {leader.candidate.name}; noise {noise:.1%}"
                self._end(trial, "kept", why)
            else:
                left.append(trial)
        return left

    def _compare_at_the_end(self, first: Trial) -> None:
        """Run the winner and the first plan in turns to measure the gain. If it is within noise,
        the first plan wins."""
        best, steps = self._best, self._rungs[-1]
        assert best is not None
        self._stage = "last comparison"
        if best is first:
            return
        first.mark()
        best.mark()
        for _ in range(min(3, self._repeats)):
            self._run(first, steps)
            self._run(best, steps)
            if not (first.can_run and best.can_run):
                self._best = best if best.can_run else self._fallback()
                return
        noise = noise_of([first.recent(steps), best.recent(steps)])
        if _behind(first, best, steps) <= noise:
            self._best = self._won(first, [best])

    # --- single runs -----------------------------------------------------------------------------

    def _trial(self, candidate: Candidate) -> Trial:
        return self._trials.setdefault(candidate.key, Trial(len(self._trials), candidate))

    def _run(self, trial: Trial, steps: int) -> None:
        if self._best is not None and self._spent_s >= self._budget_s:
            raise Stopped("time limit")
        left_s = self._budget_s - self._spent_s
        self._on_progress(
            SearchProgress(
                self._stage,
                trial.candidate,
                steps,
                self._done,
                None if math.isinf(left_s) else max(0.0, left_s),
                self._best,
            )
        )
        found = self._measure(trial.candidate, steps)
        self._spent_s += found.took_s
        self._done += 1
        trial.add(steps, found)
        if not trial.can_run:
            self._release(trial.candidate)

    def _end(self, trial: Trial, status: Status, why: str) -> None:
        trial.end(status, why)
        self._release(trial.candidate)

    # --- the end ---------------------------------------------------------------------------------

    def _best_so_far(self) -> Trial:
        """The best when the time is up in the middle of a stage: compare by the longest runs that
        all candidates still in the race have."""
        racing = [trial for trial in self._trials.values() if trial.in_race and trial.longest]
        if not racing:
            return self._fallback()
        steps = min(trial.longest for trial in racing)
        fastest = min(trial.value(steps) for trial in racing)
        noise = max(MARGINS[-1], noise_of(trial.recent(steps) for trial in racing))
        return simplest([t for t in racing if t.value(steps) <= fastest * (1 + noise)])

    def _keep_first_unless_behind(self, first: Trial) -> None:
        """When the time is up, the two were not compared in turns. So the gain must exceed what a
        single run may be off by chance; otherwise the first plan wins."""
        best = self._best
        if best is first or best is None or not first.can_run:
            return
        assert best.ms_per_unit is not None
        assert first.ms_per_unit is not None
        runs = [times for trial in self._trials.values() for times in trial.rungs.values()]
        if first.ms_per_unit / best.ms_per_unit - 1 <= noise_of(runs, repeats=1):
            self._best = self._won(first, [best])

    def _fallback(self) -> Trial:
        """The best of the others, when the best so far has failed."""
        running = [trial for trial in self._trials.values() if trial.can_run and trial.rungs]
        if not running:
            raise NothingRuns(next(t.why for t in self._trials.values() if not t.can_run))
        return min(running, key=lambda trial: (-trial.longest, trial.ms_per_unit))

    def _outcome(self, first: Trial, ended_by: str | None) -> Outcome:
        winner = self._best
        assert winner is not None
        measured = [t for t in self._trials.values() if t.rungs or t.status is not None]
        every_length = [times for trial in measured for times in trial.rungs.values()]
        noise = noise_of(every_length, len(winner.rungs[winner.longest]))
        winner.end("winner", "")
        for trial in self._same:
            trial.end("same as winner", f"within noise ({noise:.1%}); the winner is simpler")
        for trial in measured:
            if trial.status is None:
                trial.end("kept", _why_kept(trial, winner, ended_by))
        return Outcome(tuple(measured), winner, first, noise, ended_by)


def _why_kept(trial: Trial, winner: Trial, ended_by: str | None) -> str:
    """Of a trial that was still in the race when the search ended."""
    if ended_by or trial.ms_per_unit is None or winner.ms_per_unit is None:
        return "the search ended before it was decided"
    return f"{trial.ms_per_unit / winner.ms_per_unit - 1:.1%} behind {winner.candidate.name}"


def _ranked(trials: Iterable[Trial], steps: int) -> list[Trial]:
    return sorted(trials, key=lambda trial: (trial.value(steps), trial.number))


def _behind(trial: Trial, leader: Trial, steps: int) -> float:
    return trial.value(steps) / leader.value(steps) - 1
