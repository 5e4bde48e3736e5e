"""The trainer: takes a run from its settings to its scores, and resumes it after interruptions.

    result = Trainer.create(TrainSettings(preset="tiny", epochs=5)).run()
    print(result.scores, result.folder.path)

A run depends only on its settings, which include the seed. It may be killed at any moment:
`Trainer.resume(folder).run()` continues with the batch after the last checkpoint.

`Trainer.run` prepares the corpus, chooses what the settings leave open (`choices.py`) and builds
the run (`build.py`). `built_run.py` opens observers and the checkpoint writer, restores the last
checkpoint, trains (`training_loop.py`) and scores the best weights (`ending.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from headrace.atomic_files import replace_file
from headrace.checkpoint import agreed_checkpoint
from headrace.device import Ledger, open_device
from headrace.engine import compiler_loading
from headrace.errors import CheckpointError, CorpusError, PlanError, RunError, TranslationError
from headrace.lifecycle import RunFolder, shared_folder
from headrace.parallel import SINGLE, Ranks, rank_device
from headrace.progress import ProgressLine
from headrace.report import try_report
from headrace.schema import refuse_unknown
from headrace.translation.announcements import announce
from headrace.translation.build import RunParts, build_run, check_settings, may_compile
from headrace.translation.built_run import BuiltRun
from headrace.translation.choices import choose
from headrace.translation.corpus.prepare import check_data
from headrace.translation.observers import EpochGauges, new_progress
from headrace.translation.result import TrainResult, stored_result
from headrace.translation.run_checkpoints import Checkpoints
from headrace.translation.run_corpus import prepare_run
from headrace.translation.settings import CHANGED_BY_RESUME, PLAN_FILE, TrainSettings, is_plan_file
from headrace.translation.start_up import StartUp
from headrace.translation.training_loop import TIME_LIMIT

log = logging.getLogger("headrace")


class Trainer:
    """One training run in its folder. Make it with `create` or `resume`."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: RunFolder,
        *,
        cache: Path | None = None,
        quiet: bool = False,
        ranks: Ranks = SINGLE,
        is_changed: bool = False,
        is_new: bool = False,
    ) -> None:
        self.settings, self.folder = settings, folder
        self._cache, self._quiet, self._ranks = cache, quiet, ranks
        self._is_changed = is_changed  # `config.yaml` has other settings
        self._is_new = is_new  # `create` made the folder, and nothing was built yet

    @classmethod
    def create(
        cls,
        settings: TrainSettings,
        *,
        project: Path = Path("runs/train"),
        name: str | None = None,
        cache: Path | None = None,
        quiet: bool = False,
        ranks: Ranks = SINGLE,
    ) -> Trainer:
        """Start a new run: check settings and data, then make its folder with `config.yaml`.

        With several `ranks`, rank 0 makes the folder for all.
        """
        check_settings(settings)
        check_data(settings)
        folder = _new_folder(settings, ranks, project, name)
        settings = TrainSettings.read(folder.config)
        return cls(settings, folder, cache=cache, quiet=quiet, ranks=ranks, is_new=True)

    @classmethod
    def resume(
        cls,
        run: Path,
        *,
        changes: Mapping[str, Any] | None = None,
        cache: Path | None = None,
        quiet: bool = False,
        ranks: Ranks = SINGLE,
    ) -> Trainer:
        """Open the run in this folder. `run` then continues from its last checkpoint, or starts
        over if it has none.

        `changes` are new values for settings in `CHANGED_BY_RESUME`, such as more `epochs` for a
        finished run. `run` stores them in `config.yaml`.
        """
        folder = RunFolder.open(run)
        settings = TrainSettings.read(folder.config)
        refuse_unknown(changes or {}, list(CHANGED_BY_RESUME), "changes", TranslationError)
        settings = TrainSettings.from_dict(settings.to_dict() | dict(changes or {}))
        return cls(
            settings, folder, cache=cache, quiet=quiet, ranks=ranks, is_changed=bool(changes)
        )

    def run(self) -> TrainResult:
        """Train to the end, until a signal asks to stop, or until the time limit or the patience
        is over. Does nothing if the run is finished. If the corpus cannot be used, or the settings
        do not fit it, a new run is removed."""
        folder, ranks = self.folder, self._ranks
        limit_s = self.settings.time_limit
        ends_at_s = time.monotonic() + limit_s if limit_s else None
        stored = stored_result(folder)
        if stored is not None and not self._is_changed and stored.ended_early != TIME_LIMIT:
            log.warning(
                "%s: this run is finished; for more epochs: headrace train --resume %s --epochs N",
                folder.path,
                folder.path,
            )
            return stored
        gauges = EpochGauges()
        with (
            folder.locked() if ranks.is_first else nullcontext(),
            self._removed_if_refused(),
            new_progress(self.settings, ranks, self._quiet, gauges, ends_at_s) as progress,
        ):
            # No StopRequests yet: nothing is worth saving, and Ctrl-C ends the run at once.
            path = agreed_checkpoint(folder.state, ranks, Ledger())
            checkpoints: list[Checkpoints] = []  # made below; the engine asks if a step fails
            parts, start_up = self._build(
                progress,
                loads_weights=path is None,  # they may be gone when the run is resumed
                on_error=lambda error: checkpoints[0].rescue(error),
            )
            run = BuiltRun(parts, folder, progress, gauges, start_up, ends_at_s, stored)
            result = run.run(path, checkpoints.append, self._keep_changes)
        if ranks.is_first and result is not stored:
            try_report(folder.path)
        return result

    def _build(
        self,
        progress: ProgressLine,
        *,
        loads_weights: bool,
        on_error: Callable[[BaseException], object],
    ) -> tuple[RunParts, StartUp]:
        """Prepare the corpus, choose what the settings leave open, and build the run. What was
        chosen is in `config.yaml` as well, so that the run keeps it wherever it is resumed."""
        begun_s = time.monotonic()
        device = open_device(rank_device(self.settings.device))
        with compiler_loading() if may_compile(self.settings, device) else nullcontext():
            data = prepare_run(self.settings, self.folder, self._ranks, self._cache, progress)
        prepared_s = time.monotonic()
        chosen = choose(self.settings, data, self._ranks, device, has_trained=not loads_weights)
        if chosen.settings != self.settings:
            self.settings = chosen.settings
            self._write_config(self.settings)
        parts = build_run(
            self.settings, data, self._ranks, loads_weights=loads_weights, on_error=on_error
        )
        self._is_new = False
        announce(parts, chosen, self.folder, progress)
        return parts, StartUp(prepared_s - begun_s, time.monotonic() - prepared_s)

    def _keep_changes(self) -> None:
        """Store new settings, once the checkpoint has shown that they can be used."""
        if self._is_changed:
            self._write_config(self.settings)

    @contextmanager
    def _removed_if_refused(self) -> Iterator[None]:
        """Remove a new run's folder if the corpus, the weights or the settings are wrong: the
        corrected command may then have its name. Most such errors are found before there is a
        folder, but not those that need the prepared corpus."""
        try:
            yield
        except (TranslationError, CorpusError, PlanError, CheckpointError):
            # Another process may have resumed the run meanwhile.
            if self._is_new and self._ranks.is_first:
                self.folder.remove_if_untrained()
            raise

    def _write_config(self, settings: TrainSettings) -> None:
        if self._ranks.is_first:
            plan = PLAN_FILE if is_plan_file(settings.plan) else settings.plan
            self.folder.write_config(settings.to_dict() | {"plan": plan})


def _new_folder(
    settings: TrainSettings, ranks: Ranks, project: Path, name: str | None
) -> RunFolder:
    """Make the folder of a new run on rank 0, for all ranks.

    A plan file is copied into it, so that the run does not depend on the original. Paths become
    absolute: the run can be resumed from any folder.
    """
    path = Path()
    if ranks.is_first:
        folder = RunFolder.create(project, name)
        settings = settings.replace(
            data=tuple(str(Path(path).absolute()) for path in settings.data),
            weights=settings.weights and str(Path(settings.weights).absolute()),
        )
        if is_plan_file(settings.plan):
            replace_file(folder.path / PLAN_FILE, Path(settings.plan).read_bytes(), RunError)
            settings = settings.replace(plan=PLAN_FILE)
        folder.write_config(settings.to_dict())
        path = folder.path
    return shared_folder(Path(ranks.broadcast(str(path), Ledger())))
