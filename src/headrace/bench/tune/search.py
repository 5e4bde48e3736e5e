"""The search: stage by stage, the best candidate so far runs in turns with its variations.

What is clearly behind after a turn is dropped. The others run until one is ahead by more than
chance, or `repeats` times. The simplest of those within noise wins the stage. The search ends when
a whole round of stages finds nothing better.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from headrace.bench.tune.candidates import Candidate, Space
from headrace.bench.tune.noise import MIN_NOISE, deviation_of, noise_of
from headrace.bench.tune.trial import (
    Measurement,
    NothingRuns,
    Outcome,
    SearchProgress,
    Stopped,
    Trial,
)

#: After each of the first turns, by how much a candidate may trail the leader.
MARGINS = (0.15, 0.07)
_UNDECIDED = 0.03  # what a gain must exceed if the time is up in the middle of a stage
_FIRST_RUNS = 3  # of the first plan, to estimate the noise
_MAX_ROUNDS = 3


class Search:
    """Searches `space` for the fastest candidate.

    `measure(candidate, steps)` runs a candidate; `release(candidate)` is called when it will not
    run again soon. A run has `steps` steps, or as many as take the first plan `min_ms`. `budget_s`
    limits the total time of the measurements, None means no limit; a run that has begun is
    finished.
    """

    def __init__(
        self,
        space: Space,
        measure: Callable[[Candidate, int], Measurement],
        *,
        steps: int = 20,
        repeats: int = 5,
        min_ms: float = 500.0,
        budget_s: float | None = None,
        release: Callable[[Candidate], object] = lambda candidate: None,
        on_progress: Callable[[SearchProgress], object] = lambda progress: None,
    ) -> None:
        self._space = space
        self._measure = measure
        self._release = release
        self._on_progress = on_progress
        self._steps = steps
        self._repeats = repeats
        self._min_ms = min_ms
        self._budget_s = math.inf if budget_s is None else budget_s
        self._trials: dict[str, Trial] = {}
        self._spent_s = 0.0
        self._done = 0
        self._best: Trial | None = None

    def run(self) -> Outcome:
        first = self._trial(self._space.first())
        self._run(first, "first", self._steps)
        if first.ms_per_step is None:
            raise NothingRuns(first.why)
        self._best = best = first
        self._steps = max(self._steps, math.ceil(self._min_ms / first.ms_per_step))
        ended_by = None
        try:
            for _ in range(_FIRST_RUNS):
                self._run(first, "first", self._steps)
            for stage in self._stages():
                around = map(self._trial, self._space.around(stage, self._best.candidate))
                # What lost an earlier stage is not tried again.
                new = [trial for trial in around if not trial.ms and trial.status is None]
                if new:
                    self._best = self._contest(stage, [self._best, *new])
            best = self._best
            if best is not first:
                self._best = self._contest("last comparison", [first, best])
        except Stopped as stopped:
            ended_by = str(stopped)
        return self._outcome(first, ended_by)

    def _stages(self) -> Iterable[str]:
        """The stages, again and again, until a whole round has changed nothing."""
        stages = self._space.stages()
        unchanged = 0
        for turn in range(_MAX_ROUNDS * len(stages)):
            before = self._best
            yield stages[turn % len(stages)]
            unchanged = unchanged + 1 if self._best is before else 0
            if unchanged >= len(stages):
                return

    def _contest(self, stage: str, racing: Sequence[Trial]) -> Trial:
        """Run these in turns and return the best. Only runs made at about the same time are
        compared, so the best so far takes part again. Passes on `Stopped`, after the best of
        those that have run was chosen."""
        runs: dict[int, list[float]] = {trial.number: [] for trial in racing}
        left = list(racing)
        try:
            for turn in range(self._repeats):
                for trial in left:
                    known = len(trial.ms)
                    self._run(trial, stage, self._steps)
                    runs[trial.number] += trial.ms[known:]
                left = self._without_slow([t for t in left if t.can_run], runs, turn)
                if len(left) < 2 or (turn >= 2 and self._are_tied(left, runs)):
                    break
        except Stopped:
            ran = [trial for trial in left if trial.can_run and runs[trial.number]]
            if len(ran) > 1:
                self._best = self._decide(ran, runs, repeats=1, least=_UNDECIDED)
            raise
        return self._decide(left or [self._fallback()], runs, self._repeats)

    def _without_slow(
        self, left: list[Trial], runs: dict[int, list[float]], turn: int
    ) -> list[Trial]:
        """Drop what is behind the leader: clearly at first, then by more than noise."""
        if not left:
            return []
        leader = min(left, key=lambda trial: statistics.median(runs[trial.number]))
        best = statistics.median(runs[leader.number])
        if turn < len(MARGINS):
            # Two runs of the same candidate differ by more than this in one case out of twenty.
            margin = max(MARGINS[turn], 2 * math.sqrt(2) * deviation_of(self._series()))
        else:
            margin = noise_of(runs.values(), turn + 1)
        kept = []
        for trial in left:
            behind = statistics.median(runs[trial.number]) / best - 1
            if behind > margin:
                trial.end("slower", f"{behind:.1%} behind {leader.candidate.name}")
                self._release(trial.candidate)
            else:
                kept.append(trial)
        return kept

    def _are_tied(self, left: list[Trial], runs: dict[int, list[float]]) -> bool:
        """Whether all are so close that more repeats would only cost time."""
        medians = [statistics.median(runs[trial.number]) for trial in left]
        return max(medians) / min(medians) - 1 <= MIN_NOISE

    def _decide(
        self,
        racing: Sequence[Trial],
        runs: dict[int, list[float]],
        repeats: int,
        least: float = MIN_NOISE,
    ) -> Trial:
        """The simplest of those that are as fast as the fastest, within the noise of so many
        runs, which is at `least` that."""
        medians = {t.number: statistics.median(runs.get(t.number) or t.ms) for t in racing}
        limit = min(medians.values()) * (1 + max(least, noise_of(self._series(), repeats)))
        fast = [trial for trial in racing if medians[trial.number] <= limit]
        chosen = min(fast, key=lambda trial: (trial.candidate.complexity, trial.number))
        for trial in racing:
            if trial is not chosen:
                same = trial in fast
                why = f"the same as {chosen.candidate.name} within noise" if same else "slower"
                trial.end("same as winner" if same else "slower", why)
                self._release(trial.candidate)
        chosen.reopen()  # a first plan that had lost may win the last comparison
        return chosen

    def _series(self) -> list[list[float]]:
        return [trial.ms for trial in self._trials.values()]

    def _trial(self, candidate: Candidate) -> Trial:
        return self._trials.setdefault(candidate.key, Trial(len(self._trials), candidate))

    def _run(self, trial: Trial, stage: str, steps: int) -> None:
        if self._best is not None and self._spent_s >= self._budget_s:
            raise Stopped("time limit")
        left_s = self._budget_s - self._spent_s
        self._on_progress(
            SearchProgress(
                stage,
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
        trial.add(found)
        if not trial.can_run:
            self._release(trial.candidate)

    def _fallback(self) -> Trial:
        """The best of the others, when the best so far has failed."""
        running = [trial for trial in self._trials.values() if trial.can_run and trial.ms]
        if not running:
            raise NothingRuns(next(t.why for t in self._trials.values() if not t.can_run))
        return min(running, key=lambda trial: statistics.median(trial.ms))

    def _outcome(self, first: Trial, ended_by: str | None) -> Outcome:
        winner = self._best
        assert winner is not None
        if not winner.can_run:
            winner = self._fallback()
        measured = tuple(t for t in self._trials.values() if t.ms or t.status is not None)
        winner.end("winner", "")
        noise = noise_of(self._series(), len(winner.ms))
        for trial in measured:
            if trial.status is None:
                trial.end("slower", "the search ended before it was decided")
            elif trial.status == "same as winner":  # of its stage
                behind = statistics.median(trial.ms) / statistics.median(winner.ms) - 1
                if behind > noise:
                    trial.end("slower", f"{behind:.1%} behind {winner.candidate.name}")
        return Outcome(measured, winner, first, noise, ended_by)
