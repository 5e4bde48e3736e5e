"""Computes a batch's loss and metrics, without training."""

from __future__ import annotations

from headrace.data import Fetched
from headrace.engine.loss.forward import Forward, require_tensor
from headrace.engine.stages import Launched, Standing
from headrace.engine.streams.lanes import Lanes


class EvaluationStep:
    """Computes a batch's loss and metrics, without training. State is carried from the initial one
    on, apart from that of training."""

    def __init__(self, forward: Forward, lanes: Lanes) -> None:
        self._forward, self._lanes = forward, lanes
        self._carry = None if forward.carry is None else forward.carry.fresh()

    def __call__(self, fetched: Fetched) -> Launched:
        if fetched.number == 0:
            require_tensor(fetched.batch)
        with self._lanes.on(self._lanes.forward, "evaluate"):
            loss = self._forward.evaluate(fetched.batch, self._carry).unaliased()
        if fetched.zero_weight:
            loss = loss.zero_weight()
        elif self._carry is not None:
            self._carry.keep(loss.carried)
        return Launched(fetched, loss.values, loss.weighted, updated=False, outputs=loss.outputs)

    def finish(self) -> None:
        return None

    def recover(self, counted: Standing) -> bool:
        return True
