"""`Turns`: runs real steps with and without graphs, in turns, and says which is faster.

    graph   ..[turn 1]..........[turn 3]..........[turn 5]
    eager   ..........[turn 2]..........[turn 4]..........[turn 6]   then: what is faster

Every step trains on its own batch, so a comparison costs only what the slower way costs, and a host
wait at the beginning and at the end of each turn. The first steps of a turn are not timed: after a
change the allocator has to find its memory again.
"""

from __future__ import annotations

from headrace.device import Device

#: Steps of a turn, and how many of them come before the clock is started.
_TURN, _LEAD_IN = 8, 2
#: Turns of each way: at least, and at most, if their times overlap.
_MIN_ROUNDS, _MAX_ROUNDS = 3, 6
#: A graph must save at least this share of a step's time to be worth its memory.
_MIN_SAVING = 0.03
#: After this many turns that were no use, because some of their steps had no graph, it ends.
_MAX_BROKEN_TURNS = 40


class _Turn:
    """Steps that run one way: how many there were, and how long those took that count."""

    def __init__(self, device: Device, *, with_graphs: bool) -> None:
        self._device, self.with_graphs = device, with_graphs
        self.steps = self._took_ns = 0
        #: When the clock was started; None while it stands.
        self._since: int | None = None

    def begin_step(self) -> None:
        if self.steps >= _LEAD_IN and self._since is None:
            self._since = self._now()

    def end_step(self) -> bool:
        """Returns whether it was the last."""
        self.steps += 1
        return self.steps == _TURN

    @property
    def is_timing(self) -> bool:
        return self._since is not None

    def pause(self) -> None:
        """The time until the next step does not count."""
        if self._since is not None:
            self._took_ns += self._now() - self._since
            self._since = None

    @property
    def ms_per_step(self) -> float:
        return self._took_ns / 1e6 / (_TURN - _LEAD_IN)

    def _now(self) -> int:
        self._device.synchronize("auto")
        return self._device.ledger.now_ns()


class Turns:
    """Compares two ways of running a step. Call `begin` before and `end` after each step.

    `pays` is None while it runs; then it says whether graphs are faster, and `decision` says in
    words what was measured.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.pays: bool | None = None
        self.decision: str | None = None
        #: By way (True: with graphs), the milliseconds of a step in each turn.
        self._ms: dict[bool, list[float]] = {True: [], False: []}
        self._has_graphs = False
        self._turn = _Turn(device, with_graphs=True)
        self._steps = self._broken_turns = 0

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
            self._break_turn()
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

    def _break_turn(self) -> None:
        self._begin_turn(with_graphs=self._turn.with_graphs)
        self._broken_turns += 1
        if self._broken_turns == _MAX_BROKEN_TURNS:
            self._decide(
                False,
                f"after {self._steps} steps many still have no graph, since their shapes or values "
                "are new",
            )

    def _end_turn(self) -> None:
        turn = self._turn
        turn.pause()
        self._ms[turn.with_graphs].append(turn.ms_per_step)
        self._begin_turn(with_graphs=not turn.with_graphs)
        eager, graph = self._ms[False], self._ms[True]
        rounds = len(eager)
        if len(graph) != rounds or rounds < _MIN_ROUNDS:
            return
        are_apart = max(graph) < min(eager) or max(eager) < min(graph)
        if are_apart or rounds == _MAX_ROUNDS:
            # The fastest turns: whatever else the loop does now and then only makes one slower.
            fast, slow = min(graph), min(eager)
            self._decide(
                fast < slow * (1 - _MIN_SAVING),
                f"a step takes {fast:.2f} ms with graphs and {slow:.2f} ms without "
                f"({slow / fast:.2f} ×, measured in turns over {self._steps} steps)",
            )

    def _decide(self, pays: bool, measured: str) -> None:
        self.pays = pays
        self.decision = f"{measured}: {'' if pays else 'no '}graphs are used"
