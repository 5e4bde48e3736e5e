"""A search in a run folder, which can be interrupted and resumed.

    result = Tuning.create(TuneSettings(work="resnet")).run()

The folder holds `config.yaml` (the settings) and `journal.jsonl` (every measurement). A finished
search adds `plan.yaml` (the winner), `result.json` and `table.txt`.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.atomic_files import replace_file
from headrace.bench.environment import environment_of
from headrace.bench.tune import search
from headrace.bench.tune.candidates import Candidate, Space
from headrace.bench.tune.journal import Journal
from headrace.bench.tune.measurer import WorkMeasurer
from headrace.bench.tune.result import FinishedSearch
from headrace.bench.tune.settings import TuneSettings, memory_of
from headrace.bench.tune.trials import Measurement
from headrace.bench.works.lookup import find_work
from headrace.bench.works.work import Work
from headrace.device import Device, open_device
from headrace.errors import TuneError, usage_errors
from headrace.plan import refuse_plan_variable
from headrace.runs import RunFolder, StatusLine, StopRequests, usable_cores
from headrace.runs.records import Environment, WorkRecord
from headrace.schema import read_yaml

if TYPE_CHECKING:
    from headrace.bench.tune.trials import Trial

log = logging.getLogger("headrace")


class Stopped(Exception):  # noqa: N818 - not an error: the user asked for it
    """A signal ended the search. `signal` is its name."""

    def __init__(self, signal: str) -> None:
        super().__init__(signal)
        self.signal = signal


class Tuning:
    """One search. Start it with `create` or `resume`, then call `run`."""

    def __init__(
        self,
        settings: TuneSettings,
        folder: RunFolder,
        *,
        device: Device | None = None,
        command: str = "",
        quiet: bool = False,
    ) -> None:
        self.settings, self.folder = settings, folder
        self._device = device if device is not None else open_device(settings.device)
        self._command, self._quiet = command, quiet

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
        folder = RunFolder.create(project, name, parts=())
        folder.write_config(settings.to_dict())
        return cls(settings, folder, **options)

    @classmethod
    def resume(cls, run: Path, **options: Any) -> Tuning:
        """The search in a folder, to be continued."""
        folder = RunFolder.open(run)
        content = read_yaml(folder.config, TuneError)
        return cls(TuneSettings.from_dict(content, where=str(folder.config)), folder, **options)

    def run(self) -> FinishedSearch:
        """Search to the end. Raises `Stopped` after SIGINT or SIGTERM; no measurement is lost, and
        `resume` continues."""
        refuse_plan_variable("tune")
        settings, device = self.settings, self._device
        options = dict(settings.options)
        work = find_work(settings.work, options, small=not device.asynchronous)
        with usage_errors():  # a resumed search may have another work now
            _require_parameters(work, settings)
        space = self._space(work)
        environment = environment_of(device, self._command)
        with (
            self.folder.locked(),
            StatusLine(self._quiet) as progress,
            StopRequests() as stop,
            self._measurer(work, space) as measurer,
            Journal(
                self.folder.path / "journal.jsonl",
                _unless_stopped(measurer.measure, stop),
                _machine(work, environment),
            ) as journal,
        ):
            if work.options != find_work(settings.work, options).options:
                progress.message(f"no GPU: training a smaller {work.name}, {work.description}")
            if settings.memory_cap is not None and not device.asynchronous:
                progress.message(f"memory_cap is ignored: {device} does not count allocations")
            if journal.stored:
                progress.message(f"resuming after {journal.stored} measurements")
                if settings.minutes is not None:
                    progress.message(
                        f"the time limit of {settings.minutes:g} minutes, set in "
                        f"{self.folder.config}, includes the time before"
                    )
            try:
                outcome = search.Search(
                    space,
                    journal.measure,
                    steps=settings.steps,
                    repeats=settings.repeats,
                    budget_s=None if settings.minutes is None else settings.minutes * 60,
                    release=measurer.release,
                    on_progress=_ProgressView(progress.status, journal),
                ).run()
            except search.NothingRuns as problem:
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

    def _space(self, work: Work) -> Space:
        settings = self.settings
        return Space.on(
            self._device,
            usable_cores(),
            work.loader_fields,
            presets=settings.plans,
            workers=settings.workers,
            batch_sizes=settings.batch_sizes,
            precision=settings.precision,
            own_workers=_own_value(work, "workers"),
            own_batch_size=_own_value(work, "batch_size", "batch"),
        )

    def _measurer(self, work: Work, space: Space) -> WorkMeasurer:
        settings, cap = self.settings, self.settings.memory_cap
        return WorkMeasurer(
            work,
            self._device,
            space,
            warmup=settings.warmup,
            seed=settings.seed,
            compared_steps=settings.compare,
            tolerance=settings.tolerance,
            memory_cap=None if cap is None else memory_of(cap, self._device.memory().total),
        )

    @property
    def plan_file(self) -> Path:
        return self.folder.path / "plan.yaml"

    def _store(self, result: FinishedSearch) -> None:
        content = json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n"
        replace_file(self.folder.path / "result.json", content.encode(), TuneError)
        replace_file(self.folder.path / "table.txt", (result.text() + "\n").encode(), TuneError)
        replace_file(self.plan_file, result.plan_yaml().encode(), TuneError)


def _require_parameters(work: Work, settings: TuneSettings) -> None:
    """Raise an error if the search is to set loader parameters that the work does not have."""
    for setting, parameter in (("batch_sizes", "batch_size"), ("workers", "workers")):
        if getattr(settings, setting) and parameter not in work.loader_fields:
            raise TuneError(
                f"{setting}: {work.name} has no such parameter: expected a parameter {parameter}"
            )


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


def _own_value(work: Work, *names: str) -> int | None:
    """The value that a workload uses for the first of these parameters that it has."""
    parameters = inspect.signature(work.build).parameters
    for name in names:
        known = parameters.get(name)
        value = work.options.get(name, None if known is None else known.default)
        if known is not None and type(value) is int:
            return value
    return None


def _machine(work: Work, environment: Environment) -> dict[str, Any]:
    """What must be the same for two measurements to be comparable."""
    kept = ("device_name", "torch", "headrace", "cores")
    return {name: getattr(environment, name) for name in kept} | {
        "work": work.name,
        "options": _plain(work.options),
    }


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """A workload's options as JSON can hold them: a user's default may be any object."""
    found: dict[str, Any] = json.loads(json.dumps(dict(options), default=str))
    return found


class _ProgressView:
    """Shows how far the search is, and an estimate of the time left."""

    def __init__(
        self,
        show: Callable[..., object],
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show, self._journal, self._clock = show, journal, clock
        self._began_s = clock()
        self._replayed = 0

    def __call__(self, at: search.SearchProgress) -> None:
        if self._journal.is_replaying:
            self._replayed = at.done + 1
            return
        now_s = self._clock()
        done = at.done - self._replayed
        left = ""
        if done > 0 and at.left:
            left_s = (now_s - self._began_s) / done * at.left
            left_s = left_s if at.left_s is None else min(left_s, at.left_s)
            left = f", about {_duration(left_s)} left"
        self._show(
            f"{at.stage.replace('_', ' ')}: {at.candidate.name}, {at.steps} steps; "
            f"{at.done} runs{_best(at.best)}{left}",
            stage=at.stage,
        )


def _best(best: Trial | None) -> str:
    if best is None or best.ms_per_step is None:
        return ""
    return f", best {best.candidate.name} at {best.ms_per_step:.2f} ms"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
