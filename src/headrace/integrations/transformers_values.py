"""What the Trainer logs, without a wait for the device."""

from __future__ import annotations

import functools
import inspect
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from headrace.device import Device
from headrace.integrations.late_values import LateValues, Number
from headrace.replacing import replaced

log = logging.getLogger("headrace")

_TESTS = (torch.isnan, torch.isinf, torch.Tensor.isnan, torch.Tensor.isinf)


class FilteredLoss(torch.Tensor):
    """A loss that is neither NaN nor infinite, whatever the device finds: the Trainer's question
    is answered without asking it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TESTS:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def as_filtered(loss: Any, trainer: Any) -> Any:
    """What the Trainer adds to its sum for a step's loss: the mean of those before it, if the loss
    is NaN or infinite. The device decides."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_cpu:
        return loss
    steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
    kept = torch.where(torch.isfinite(loss), loss, trainer._tr_loss / steps)
    return kept.as_subclass(FilteredLoss)


@dataclass(frozen=True, slots=True)
class _Moment:
    """The step at which values were logged."""

    step: int
    epoch: float | None
    steps: int
    learning_rate: float
    start_time: float


class LateLogs:
    """Logs the Trainer's loss, gradient norm and token counts once they have arrived on the host.

    The Trainer's `log` then runs with the step and the epoch of these values in `trainer.state`.
    Everything is logged before an evaluation, a checkpoint and the end of an epoch.
    """

    def __init__(self, trainer: Any, device: Device) -> None:
        self._trainer, self._device = trainer, device
        self._values = LateValues(device)
        self._tokens: torch.Tensor | int = 0
        self._warned = False
        self._log = trainer.log
        self._track = trainer._track_num_input_tokens
        self._finish_step = trainer._maybe_log_save_evaluate
        self._of_step = inspect.signature(self._finish_step)
        self._run_epoch = trainer._run_epoch
        self._installed = ExitStack()
        for name, method in (
            ("log", self._log_in_order),
            ("_track_num_input_tokens", self._track_tokens),
            ("_maybe_log_save_evaluate", self._log_save_evaluate),
            ("_run_epoch", self._epoch),
        ):
            self._installed.enter_context(replaced(trainer, name, method))

    def deliver(self) -> None:
        """Log what has arrived. Never waits."""
        self._values.deliver()

    def drain(self) -> None:
        """Log everything, and bring the number of tokens up to date."""
        self._push_tokens()
        self._values.drain()

    def close(self) -> None:
        """Give the trainer its own methods back. Values that were not logged are lost."""
        self._installed.close()
        self._values.close()

    # --- in place of the Trainer's methods --------------------------------------------------------

    def _epoch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._run_epoch(*args, **kwargs)
        finally:
            self.drain()

    def _log_in_order(self, *args: Any, **kwargs: Any) -> Any:
        self.drain()
        return self._log(*args, **kwargs)

    def _log_save_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        trainer, control = self._trainer, self._trainer.control
        self.deliver()
        if control.should_log and trainer.state.global_step > trainer._globalstep_last_logged:
            self._push_log(self._of_step.bind(*args, **kwargs).arguments)
            control.should_log = False
        if control.should_evaluate or control.should_save:
            self.drain()
        return self._finish_step(*args, **kwargs)

    def _track_tokens(self, inputs: Any) -> None:
        counted = self._count_tokens(inputs)
        if counted is None:
            self._push_tokens()
            self._values.drain()
            self._track(inputs)
        elif isinstance(counted, int) or isinstance(self._tokens, torch.Tensor):
            self._tokens += counted
        else:
            self._tokens = counted + self._tokens

    def _count_tokens(self, inputs: Any) -> torch.Tensor | int | None:
        """How many tokens a batch has. None: the Trainer counts itself."""
        trainer, kind = self._trainer, self._trainer.args.include_num_input_tokens_seen
        if kind == "no":
            return 0
        ids = inputs.get(getattr(trainer.model, "main_input_name", "input_ids"))
        if kind == "all" and isinstance(ids, torch.Tensor):
            return ids.numel()
        mask = inputs.get("attention_mask")
        if kind == "non_padding" and ids is not None and self._device.holds(mask):
            assert isinstance(mask, torch.Tensor)
            return mask.sum()
        return None

    # --- values under way -------------------------------------------------------------------------

    def _push_log(self, given: dict[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        rate = given.get("learning_rate")
        moment = _Moment(
            state.global_step,
            state.epoch,
            state.global_step - trainer._globalstep_last_logged,
            trainer._get_learning_rate() if rate is None else rate,
            given["start_time"],
        )
        values = {"loss": given["tr_loss"], "tokens": self._take_tokens()}
        if given["grad_norm"] is not None:
            values["grad_norm"] = given["grad_norm"]
        self._values.push(values, functools.partial(self._log_late, moment))
        given["tr_loss"].sub_(given["tr_loss"])
        trainer._globalstep_last_logged = state.global_step

    def _push_tokens(self) -> None:
        if isinstance(self._tokens, torch.Tensor) or self._tokens:
            self._values.push({"tokens": self._take_tokens()}, self._add_tokens)

    def _take_tokens(self) -> torch.Tensor | int:
        tokens, self._tokens = self._tokens, 0
        return tokens

    def _add_tokens(self, values: dict[str, Number]) -> None:
        self._trainer.state.num_input_tokens_seen += int(values["tokens"])

    def _log_late(self, moment: _Moment, values: dict[str, Number]) -> None:
        """What the Trainer does at a step that logs, with values of an earlier step."""
        trainer, state, control = self._trainer, self._trainer.state, self._trainer.control
        self._add_tokens(values)
        logs = {"loss": values["loss"] / moment.steps}
        if "grad_norm" in values:
            logs["grad_norm"] = values["grad_norm"]
        logs["learning_rate"] = moment.learning_rate
        trainer._total_loss_scalar += values["loss"]
        trainer.store_flos()
        now, flags = (state.global_step, state.epoch), dict(vars(control))
        state.global_step, state.epoch = moment.step, moment.epoch
        try:
            self._log(logs, moment.start_time)
        finally:
            state.global_step, state.epoch = now
        control = trainer.control
        control.should_log = flags["should_log"]
        if vars(control) != flags and moment.step < state.global_step and not self._warned:
            self._warned = True
            log.warning(
                "transformers.speed_up: a callback's on_log has changed trainer.control at the "
                "values of step %d, and step %d is done already: close() the speed-up's handle if "
                "that must not be late",
                *(moment.step, state.global_step),
            )
