"""How the engine's step runs: the highest rung that carries it.

    whole step   forward, loss, backward, clipping and update as one graph
    parts        the model's forward and backward, and the optimizer's step
    children     those of the model's children that can be captured, where the whole model cannot
    eager        kernel by kernel

A step that cannot be captured as a whole is left to `speed_up`, which captures its parts and
divides the model where it must. With `graphs="auto"` the rung that was found is compared with the
eager step on real batches, in turns, and kept if it is faster. So are the parts of a compiled step
under `graphs="on"`, since they run as they were written: compiled code contains the model.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from headrace.capture import (
    GraphReport,
    SpeedUpHandle,
    Turns,
    own_forwards,
    rounding_when_captured,
    speed_up,
)
from headrace.data import Fetched
from headrace.engine.graphs.step_graphs import StepGraphs
from headrace.engine.loss.compiled import CompiledLoss, loss_mode
from headrace.engine.stages import Finished, Launched, Standing
from headrace.engine.step.eager import EagerStep
from headrace.engine.step.parts import StepParts
from headrace.plan import Plan

log = logging.getLogger("headrace")


class GraphedStep:
    """A step that runs as its ladder says. Zero-weight batches, which only keep the ranks in step,
    go to the `eager` step."""

    def __init__(self, eager: EagerStep, ladder: Ladder) -> None:
        self._eager, self._ladder = eager, ladder
        ladder.begin_pass()

    def __call__(self, fetched: Fetched) -> Launched:
        if fetched.zero_weight:
            return self._eager(fetched)
        lanes = self._eager.lanes
        with lanes.on(lanes.forward, "step"):
            return self._ladder.train(fetched, self._eager)

    def finish(self) -> Finished | None:
        lanes = self._eager.lanes
        with lanes.on(lanes.backward):
            self._ladder.end_pass()
        return self._eager.finish()

    def recover(self, counted: Standing) -> bool:
        return self._eager.recover(counted)


class Ladder:
    """The graphs of one training step under one plan. They stay from pass to pass."""

    def __init__(self, parts: StepParts, plan: Plan) -> None:
        self._parts, self._plan = parts, plan
        self._whole = StepGraphs(parts, plan)
        #: The step's parts as graphs, if the whole step cannot be captured.
        self._by_parts: SpeedUpHandle | None = None
        # Whether code that asks is told that it is captured, as in the run that this one continues.
        self._as_captured = False
        self._turns: Turns | None = None
        if plan.graphs == "auto":
            self._compare()

    def train(self, fetched: Fetched, eager: EagerStep) -> Launched:
        """Train on one batch, on the current stream."""
        uses_graphs = self._turns is None or self._turns.begin()
        if self._whole.why is None:
            train = self._whole.train if uses_graphs else self._whole.train_eagerly
            launched = train(fetched, eager)
            replayed = launched.replayed
        else:
            launched, replayed = self._train_by_parts(fetched, eager, uses_graphs)
        if self._turns is not None and self._turns.end(replayed=replayed):
            log.info("plan %s: %s", self._plan.name, self._turns.decision)
            self._apply(self._turns)
        return launched

    def begin_pass(self) -> None:
        if self._turns is not None:
            self._turns.begin_pass()

    def end_pass(self) -> None:
        """Call before a last partial group is updated."""
        if self._parts.group.is_open:
            self._whole.drop_unreached_gradients()
        if self._turns is not None:
            self._turns.pause()

    def report(self) -> GraphReport:
        found = self._whole.report()
        parts = None if self._by_parts is None else self._by_parts.report()
        decision = None if self._turns is None else self._turns.decision
        way = found.way if parts is None else parts.way
        return replace(found, way=way, parts=parts, decision=decision)

    def close(self) -> None:
        """Drop all graphs. What can be captured is captured again when it is due."""
        self._whole.close()
        self._close_parts()

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was decided, since a run that continues must not search again, and what later bits
        depend on."""
        turns = self._turns
        return {
            "decided_by": self._plan.graphs,
            "pays": None if turns is None else turns.pays,
            "decision": None if turns is None else turns.decision,
            "not_whole": self._whole.why,
            "parts_as_captured": (
                self._as_captured if self._by_parts is None else self._by_parts.answers_as_captured
            ),
            **self._whole.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the decision, and drop all graphs: the optimizer has another state by now."""
        self._close_parts()
        self._whole.load_state_dict(state)
        self._as_captured = state is not None and bool(state.get("parts_as_captured"))
        if state is None or state["pays"] is None:
            return
        if state.get("decided_by", "auto") != self._plan.graphs:
            return
        if self._whole.why is None and (why := state.get("not_whole")) is not None:
            self._whole.give_up(why)
        turns = self._compare()
        turns.restore(pays=state["pays"], decision=state["decision"])
        self._apply(turns)

    # --- below the whole step ---------------------------------------------------------------------

    def _train_by_parts(
        self, fetched: Fetched, eager: EagerStep, uses_graphs: bool
    ) -> tuple[Launched, bool]:
        # Ranks average gradients in hooks.
        if self._by_parts is None and uses_graphs and self._parts.parallelism == "plain":
            if self._compiled is not None:
                self._compare()
            self._by_parts = self._speed_up()
        if self._by_parts is None:
            return eager(fetched), False
        self._by_parts.use_graphs(uses_graphs)
        if self._turns is None or self._turns.pays is not None:
            return eager(fetched), False
        before = self._by_parts.counts()
        with self._as_compiled(not uses_graphs):
            launched = eager(fetched)
        parts = self._by_parts.parts()
        if self._compiled is not None and all(part.why is not None for part in parts):
            self._turns.restore(pays=False, decision="no part of the step can be captured")
            self._apply(self._turns)
            return launched, False
        return launched, self._by_parts.counts().is_replay_after(before)

    @property
    def _compiled(self) -> CompiledLoss | None:
        """The loss function, if it runs as compiled code."""
        loss = self._parts.forward.loss
        return loss if isinstance(loss, CompiledLoss) and loss.why_uncompiled is None else None

    def _as_compiled(self, compiled: bool) -> AbstractContextManager[object]:
        """In the block, a compiled loss function runs as compiled code, which must find the model
        as it was when it was compiled, or else as it was written."""
        if self._compiled is None:
            return nullcontext()
        return own_forwards(self._parts.model) if compiled else loss_mode(self._compiled, "plain")

    def _compare(self) -> Turns:
        """What compares steps, from now on."""
        if self._turns is None:
            self._turns = Turns(self._parts.device, shapes=self._plan.graph_shapes)
        return self._turns

    def _speed_up(self) -> SpeedUpHandle:
        parts, plan = self._parts, self._plan
        made = speed_up(
            *(parts.model, *((parts.optimizer,) if self._may_capture_update() else ())),
            plan="graph",
            device=parts.device,
            after=plan.graph_after,
            shapes=plan.graph_shapes,
            recheck=plan.recheck,
        )
        if self._as_captured:
            made.answer_as_captured()
        # An engine that is forgotten leaves its model as it was.
        weakref.finalize(self, made.close)
        return made

    def _may_capture_update(self) -> bool:
        """Whether the update may be captured: with the same bits, if nobody has asked for it."""
        return self._plan.graphs == "on" or rounding_when_captured(self._parts.optimizer) is None

    def _close_parts(self) -> None:
        if self._by_parts is not None:
            self._by_parts.close()
            self._by_parts = None

    def _apply(self, turns: Turns) -> None:
        """Drop all graphs if they do not pay. Parts that do are not compiled."""
        if turns.pays:
            if self._whole.why is not None and self._compiled is not None:
                self._compiled.give_up("its parts run as graphs, uncompiled, which is faster")
            return
        self._close_parts()
        if self._whole.why is None:
            self._whole.give_up(str(turns.decision))
