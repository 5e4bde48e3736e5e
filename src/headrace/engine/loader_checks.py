"""What an engine notices about a loader and a model before or after a pass, and says once."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from headrace.data import UsedIterators, explain_no_batch
from headrace.engine.build.step_builder import StepBuilder
from headrace.engine.loop.loop import Pass
from headrace.source_lines import users_line

log = logging.getLogger("headrace")


class LoaderChecks:
    """The loaders and warnings of one engine."""

    def __init__(self) -> None:
        self._iterators = UsedIterators()
        self._warned: set[str] = set()

    def note(self, loader: Iterable[Any]) -> None:
        """Call this after a pass that had batches."""
        self._iterators.note(loader)

    def warn_of_eval_mode(self, builder: StepBuilder) -> None:
        """Warn once if the model is in eval mode: the engine does not call `model.train()`."""
        if "eval" not in self._warned and builder.is_in_eval_mode():
            self._warned.add("eval")
            log.warning(
                "the model is in eval mode in the training loop at %s, so dropout is off and batch "
                "norm uses its running means: call model.train() first, unless you want this",
                users_line(),
            )

    def require_batches(self, run: Pass, loader: Iterable[Any], max_steps: int | None) -> None:
        """Raise if a pass had no batch because an earlier pass has used up the iterator. Warn once
        if the loader is empty, unless the pass has continued an epoch at its end."""
        if run.has_trained or max_steps == 0:
            return
        self._iterators.require_batches(loader)
        if run.progress.batches == 0 and "no batch" not in self._warned:
            self._warned.add("no batch")
            why = explain_no_batch(loader)
            log.warning(
                "the loader passed at %s had no batch%s: there is no loss, and mean_loss is NaN",
                users_line(),
                f" ({why})" if why else "",
            )
