"""`Turns`: runs real steps with and without graphs, in turns, and says which is faster.

    graph   ..[turn 1]..........[turn 3]..........[turn 5]
    eager   ..........[turn 2]..........[turn 4]..........[turn 6]   then: what is faster

Every step trains on its own batch, so a comparison costs only what the slower way costs, and a host
wait at the beginning and at the end of each turn. The first steps of a turn are not timed: after a
change the allocator has to find its memory again. Events on the device time the others, each from
the end of the step before it. A step that takes several times as long as most (a validation comes
before it, or a checkpoint) does not count.
"""

from __future__ import annotations

import statistics
from itertools import chain, pairwise

from headrace.device import Device, Event

#: Steps of a turn that are timed, and how many come before them.
_TIMED, _LEAD_IN = 6, 2
#: Turns of each way: at least, and at most, if their times overlap.
_MIN_ROUNDS, _MAX_ROUNDS = 3, 6
#: A graph must save at least this share of a step's time to be worth its memory.
_MIN_SAVING = 0.03
#: A step that takes so many times as long as the median is none of the loop's ordinary ones.
_OUTLIER = 3.0
#: It ends after so many steps of turns with graphs that had none, and as many more for each shape
#: that may get one: its first batches run eagerly.
_MAX_SKIPPED, _SKIPPED_BY_A_SHAPE = 40, 3


class _Turn:
    """Steps that run one way, and how long those took that are timed."""

    def __init__(self, device: Device, *, with_graphs: bool) -> None:
        self._device, self.with_graphs = device, with_graphs
        #: Marks at a step's beginning, and at the ends of the steps since then; a list for each
        #: time that the clock was started.
        self._marks: list[list[Event]] = []
        self._is_paused = True
        #: Steps before the clock is started.
        self._to_wait = _LEAD_IN
        self._timed = 0

    def begin_step(self) -> None:
        if self._is_paused and not self._to_wait:
            self._device.synchronize("auto")
            self._marks.append([])
            self._is_paused = False
            self._mark()

    def end_step(self) -> bool:
        """Returns whether it was the last."""
        if self._is_paused:
            self._to_wait -= 1
            return False
        self._mark()
        self._timed += 1
        return self._timed == _TIMED

    @property
    def is_timing(self) -> bool:
        return not self._is_paused

    def pause(self) -> None:
        """The time until the next step does not count, nor does a step that is under way."""
        self._is_paused = True

    def step_ms(self) -> list[float]:
        """How long each timed step took. Waits for the device."""
        self._device.synchronize("auto")
        return [begin.elapsed_ms(end) for marks in self._marks for begin, end in pairwise(marks)]

    def _mark(self) -> None:
        mark = self._device.event(timing=True)
        mark.record()
        self._marks[-1].append(mark)


class Turns:
    """Compares two ways of running a step. Call `begin` before and `end` after each step. `shapes`
    is how many graphs there are at most.

    `pays` is None while it runs; then it says whether graphs are faster, and `decision` says in
    words what was measured.
    """

    def __init__(self, device: Device, *, shapes: int = 0) -> None:
        self._device = device
        self._max_skipped = _MAX_SKIPPED + _SKIPPED_BY_A_SHAPE * shapes
        self.pays: bool | None = None
        self.decision: str | None = None
        #: By way (True: with graphs), the milliseconds of the steps of each turn.
        self._ms: dict[bool, list[list[float]]] = {True: [], False: []}
        self._has_graphs = False
        self._turn = _Turn(device, with_graphs=True)
        self._steps = self._skipped = 0

    def begin(self) -> bool:
        """Whether the next step may use graphs."""
        if self.pays is not None:
            return self.pays
        if not self._has_graphs:
            return True
        self._turn.begin_step()
        return self._turn.with_graphs

    def end(self, *, replayed: bool) -> bool:
        """A step was launched: as a graph (`replayed`) or eagerly. Returns whether this step has
        decided."""
        if self.pays is not None:
            return False
        self._steps += 1
        if not self._has_graphs:
            self._has_graphs = replayed
            return False
        if replayed != self._turn.with_graphs:
            self._skip()
        elif self._turn.end_step():
            self._end_turn()
        return self.pays is not None

    def pause(self) -> None:
        """The time until the next step does not count: the pass over the loader has ended."""
        self._turn.pause()

    def begin_pass(self) -> None:
        """A pass begins. If an error has ended the last one, its turn is no use."""
        if self._turn.is_timing:
            self._begin_turn(with_graphs=self._turn.with_graphs)

    def restore(self, *, pays: bool, decision: str | None) -> None:
        """Take the decision of an earlier run."""
        self.pays, self.decision = pays, decision

    def _begin_turn(self, *, with_graphs: bool) -> None:
        self._turn = _Turn(self._device, with_graphs=with_graphs)

    def _skip(self) -> None:
        self._turn.pause()
        self._skipped += 1
        if self._skipped == self._max_skipped:
            self._decide(
                False,
                f"after {self._steps} steps many still have no graph, since their shapes or values "
                "are new",
            )

    def _end_turn(self) -> None:
        turn = self._turn
        self._ms[turn.with_graphs].append(turn.step_ms())
        self._begin_turn(with_graphs=not turn.with_graphs)
        rounds = len(self._ms[False])
        if len(self._ms[True]) != rounds or rounds < _MIN_ROUNDS:
            return
        eager, graph = ([_typical(turn) for turn in self._ms[way]] for way in (False, True))
        slow, fast = (_typical([*chain(*self._ms[way])]) for way in (False, True))
        are_apart = max(graph) < min(eager) or max(eager) < min(graph)
        # Graphs that have saved nothing so far are not worth more steps.
        if are_apart or fast >= slow or rounds == _MAX_ROUNDS:
            self._decide(
                fast < slow * (1 - _MIN_SAVING),
                f"a step takes {fast:.2f} ms with graphs and {slow:.2f} ms without "
                f"({slow / fast:.2f} ×, measured in turns over {self._steps} steps)",
            )

    def _decide(self, pays: bool, measured: str) -> None:
        self.pays = pays
        self.decision = f"{measured}: {'' if pays else 'no '}graphs are used"


def _typical(step_ms: list[float]) -> float:
    """The mean of the ordinary steps."""
    most = _OUTLIER * statistics.median(step_ms)
    return statistics.fmean(one for one in step_ms if one <= most)
