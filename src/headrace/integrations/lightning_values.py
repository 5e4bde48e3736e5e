"""Values that a LightningModule logs in training, without a wait for the device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from headrace.device import Device
from headrace.integrations.late_values import LateValues, Number
from headrace.replacing import replaced

_TO_TENSOR = "_LightningModule__to_tensor"


class LoggedValues:
    """Values of `self.log` in training, which progress bars and loggers get once they are here.

    Lightning reads a value with `prog_bar=True` back in each batch, and those for loggers every
    `log_every_n_steps`. `callback_metrics` are tensors on the device, as they always are.
    """

    def __init__(self, trainer: Trainer, device: Device) -> None:
        self._trainer, self._connector = trainer, trainer._logger_connector
        self._shown, self._logged = LateValues(device), LateValues(device)
        #: What progress bars show: the last value of each name that has arrived.
        self._arrived: dict[str, Number] = {}
        self._last: dict[str, Any] = {}
        self._results = trainer.fit_loop.epoch_loop._results
        self._metrics_of_results = self._results.metrics
        self._log_metrics = self._connector.log_metrics
        self._installed = ExitStack()
        use = self._installed.enter_context
        use(replaced(self._results, "metrics", self._metrics))
        use(replaced(self._connector, "log_metrics", self._log))
        module = trainer.lightning_module
        if hasattr(module, _TO_TENSOR):
            use(replaced(module, _TO_TENSOR, _AsTensor(module)))

    def deliver(self) -> None:
        """Give the loggers what has arrived. Never waits."""
        self._logged.deliver()

    def drain(self) -> None:
        """Wait for all values. The progress bar then shows those of the last batch."""
        self._logged.drain()
        self._shown.drain()
        self._connector._progress_bar_metrics.update(self._arrived)

    def close(self) -> None:
        """Give Lightning its own methods back. Values that were not handed on are lost."""
        self._installed.close()
        self._logged.close()
        self._shown.close()

    def _metrics(self, on_step: bool) -> Any:
        """Lightning's metrics of a batch, but for progress bars those that have arrived."""
        if not on_step:
            self.drain()
            self._arrived.clear()
            self._last.clear()
            return self._metrics_of_results(on_step)
        shown = [one for _, one in self._results.valid_items() if one.meta.prog_bar]
        for one in shown:
            one.meta.prog_bar = False
        try:
            found = self._metrics_of_results(on_step)
        finally:
            for one in shown:
                one.meta.prog_bar = True
        names = self._push_new(shown)
        self._shown.deliver()
        if not self._arrived.keys() >= set(names):  # the first batch: nothing to show yet
            self._shown.drain()
        found["pbar"] = {name: self._arrived[name] for name in names}
        return found

    def _push_new(self, shown: list[Any]) -> list[str]:
        """Start the copies of values that were logged since the last call. Returns all names."""
        names, new = [], {}
        for one in shown:
            value = self._results._get_cache(one, True)
            if not isinstance(value, torch.Tensor):
                continue
            _, name = self._results._forked_name(one, True)
            names.append(name)
            if self._last.get(name) is not one._forward_cache:
                self._last[name] = one._forward_cache
                new[name] = value
        if new:
            self._shown.push(new, self._arrived.update)
        return names

    def _log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Lightning's `log_metrics`. A batch's values go to the loggers when they have arrived."""
        in_batch = step is None and self._connector._first_loop_iter is not None
        if not in_batch or not self._trainer.loggers or not metrics or "step" in metrics:
            self._logged.drain()
            self._log_metrics(metrics, step)
            return
        trainer, connector = self._trainer, self._connector
        connector._logged_metrics.update(metrics)
        at = trainer.fit_loop.epoch_loop._batches_that_stepped
        epoch = trainer.current_epoch

        def hand_on(values: dict[str, Number]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(metrics={"epoch": epoch} | values, step=at)
                logger.save()

        self._logged.push(metrics, hand_on)


class _AsTensor:
    """Makes a number that is logged a tensor on the device, without the copy that waits for it.
    Copies of the module get their class's own method."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._theirs: Any = getattr(module, _TO_TENSOR)

    def __call__(self, value: Any, name: str) -> Any:
        if type(value) in (int, float, bool):
            kind = torch.promote_types(torch.get_default_dtype(), torch.float32)
            value = torch.full((), value, dtype=kind, device=self._module.device)
        return self._theirs(value, name)

    def __reduce__(self) -> Any:
        return getattr, (self._module, _TO_TENSOR)
