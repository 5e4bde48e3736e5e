"""A search in a folder.

    result = Tuning.create(TuneSettings(work="resnet")).run()

The folder holds `plan.yaml` (the winner), `result.json` and `table.txt`.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headrace.atomic_files import replace_file
from headrace.bench.environment import environment_of
from headrace.bench.tune.candidates import Candidate, Space
from headrace.bench.tune.measurer import WorkMeasurer
from headrace.bench.tune.result import FinishedSearch
from headrace.bench.tune.search import Search
from headrace.bench.tune.settings import TuneSettings
from headrace.bench.tune.trial import Measurement, NothingRuns, SearchProgress, Stopped
from headrace.bench.works.lookup import find_work
from headrace.bench.works.work import Workload
from headrace.device import Device, open_device
from headrace.errors import TuneError
from headrace.lifecycle import RunFolder, StopRequests
from headrace.machine import usable_cores
from headrace.plan import refuse_plan_variable
from headrace.progress import StatusLine
from headrace.records import WorkRecord

log = logging.getLogger("headrace")


class Tuning:
    """One search. Make it with `create`, then call `run`."""

    def __init__(
        self,
        settings: TuneSettings,
        folder: RunFolder,
        *,
        device: Device | None = None,
        command: str = "",
        quiet: bool = False,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self._device = device if device is not None else open_device(settings.device)
        self._command = command
        self._quiet = quiet

    @classmethod
    def create(
        cls,
        settings: TuneSettings,
        *,
        project: Path = Path("runs/tune"),
        name: str | None = None,
        **options: Any,
    ) -> Tuning:
        """A new search. Wrong settings raise an error before the folder is created."""
        _require_parameters(find_work(settings.work, dict(settings.options)), settings)
        if options.get("device") is None:
            open_device(settings.device)
        return cls(settings, RunFolder.create(project, name, parts=()), **options)

    def run(self) -> FinishedSearch:
        """Search to the end, or until SIGINT or SIGTERM: then the result is what was measured so
        far. Raises `Stopped` if that is nothing."""
        refuse_plan_variable("tune")
        settings, device = self.settings, self._device
        options = dict(settings.options)
        work = find_work(settings.work, options, small=not device.asynchronous)
        space = self._space(work)
        environment = environment_of(device, self._command)
        with (
            StatusLine(self._quiet) as progress,
            StopRequests() as stop,
            self._measurer(work, space) as measurer,
        ):
            if work.options != find_work(settings.work, options).options:
                progress.message(f"no GPU: training a smaller {work.name}, {work.description}")
            try:
                outcome = Search(
                    space,
                    _unless_stopped(measurer.measure, stop),
                    steps=settings.steps,
                    repeats=settings.repeats,
                    budget_s=None if settings.minutes is None else settings.minutes * 60,
                    release=measurer.release,
                    on_progress=partial(_show, progress.status),
                ).run()
            except NothingRuns as problem:
                first = space.first().name
                raise TuneError(f"{work.name} does not run under {first}: {problem}") from None
        result = FinishedSearch(
            WorkRecord(work.name, work.description, _plain(work.options), work.unit),
            environment,
            settings.to_dict(),
            outcome,
        )
        self._store(result)
        return result

    def _space(self, work: Workload) -> Space:
        settings = self.settings
        return Space.on(
            self._device,
            usable_cores(),
            loads="workers" in work.loader_fields,
            presets=settings.plans,
            workers=settings.workers,
            precision=settings.precision,
            own_workers=_own_workers(work),
        )

    def _measurer(self, work: Workload, space: Space) -> WorkMeasurer:
        settings = self.settings
        return WorkMeasurer(
            work,
            self._device,
            space,
            warmup=settings.warmup,
            seed=settings.seed,
            compared_steps=settings.compare,
            tolerance=settings.tolerance,
        )

    @property
    def plan_file(self) -> Path:
        return self.folder.path / "plan.yaml"

    def _store(self, result: FinishedSearch) -> None:
        content = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
        replace_file(self.folder.path / "result.json", content.encode(), TuneError)
        replace_file(self.folder.path / "table.txt", (result.text() + "\n").encode(), TuneError)
        replace_file(self.plan_file, result.plan_yaml().encode(), TuneError)


def _require_parameters(work: Workload, settings: TuneSettings) -> None:
    """Raise an error if the search is to set workers and the workload has no such parameter."""
    if settings.workers and "workers" not in work.loader_fields:
        raise TuneError(f"workers: {work.name} has no such parameter: expected a parameter workers")


def _unless_stopped(
    measure: Callable[[Candidate, int], Measurement], stop: StopRequests
) -> Callable[[Candidate, int], Measurement]:
    def measured(candidate: Candidate, steps: int) -> Measurement:
        if stop.requested is not None:
            raise Stopped(stop.requested)
        found = measure(candidate, steps)
        # The signal may have killed the loader's workers: that is not the candidate's fault.
        if stop.requested is not None and found.ms_per_step is None:
            raise Stopped(stop.requested)
        return found

    return measured


def _own_workers(work: Workload) -> int | None:
    """How many workers a workload uses by itself, if it has such a parameter."""
    known = inspect.signature(work.build).parameters.get("workers")
    if known is None:
        return None
    value = work.options.get("workers", known.default)
    return value if type(value) is int else None


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """A workload's options as JSON can hold them: a user's default may be any object."""
    found: dict[str, Any] = json.loads(json.dumps(dict(options), default=str))
    return found


def _show(show: Callable[..., object], at: SearchProgress) -> None:
    best = at.best
    found = ""
    if best is not None and best.ms_per_step is not None:
        found = f", best {best.candidate.name} at {best.ms_per_step:.2f} ms"
    left = "" if at.left_s is None else f", at most {at.left_s:.0f} s left"
    show(
        f"{at.stage.replace('_', ' ')}: {at.candidate.name}, {at.steps} steps; "
        f"{at.done} runs{found}{left}",
        stage=at.stage,
    )
