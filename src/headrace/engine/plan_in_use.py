"""The plan that an engine runs under, and the memory that it occupies."""

from __future__ import annotations

import logging
from dataclasses import replace

from headrace.data import BatchCache
from headrace.engine.build.passes import PassOptions
from headrace.engine.build.step_builder import StepBuilder
from headrace.engine.loss.compiled import CompileReport
from headrace.engine.options import EngineOptions
from headrace.plan import PLAN_VARIABLE, Plan, effective_plan

log = logging.getLogger("headrace")


class PlanInUse:
    """`plan` is the one that passes run under; another one may wait for the next pass."""

    def __init__(self, options: EngineOptions, builder: StepBuilder, plan: Plan) -> None:
        self._options = options
        self._builder = builder
        self._warns = True
        self.plan = self._resolve(plan)
        self._next: Plan | None = None
        self.cache: BatchCache | None = None
        self._apply()

    def use_next(self, plan: Plan) -> None:
        """Run under `plan` from the next `change` on."""
        self._next = self._resolve(plan)

    def change(self) -> None:
        """Change to the plan that waits, if one does."""
        if self._next is not None:
            self.close()
            self.plan, self._next = self._next, None
            self._apply()

    def close(self) -> None:
        """Free the device memory of graphs and cached batches."""
        if self._builder.graphs is not None:
            self._builder.graphs.close()
        if self.cache is not None:
            self.cache = BatchCache(self.plan.cache_batches)

    def pass_options(self, loader_timeout: float) -> PassOptions:
        """The options of a pass under this plan."""
        return PassOptions(
            self._options.device,
            self.plan,
            self._builder.ranks,
            self.cache,
            self._options.deterministic,
            loader_timeout,
        )

    @property
    def compiled(self) -> CompileReport | None:
        """Whether the step runs as compiled code; None if the plan does not compile."""
        return self._builder.compiled if self.plan.compile else None

    def _apply(self) -> None:
        """Set up what the plan asks for. Warn about what is not possible here."""
        plan = self.plan
        self.cache = BatchCache(plan.cache_batches) if plan.cache_batches else None
        self._builder.apply_plan(plan)
        report = self.compiled
        if report is not None and report.why is not None:
            self._options.device.warn_once(
                f"compile: {report.why}",
                "plan %s: the step is not compiled and runs as it is: %s",
                plan.name,
                report.why,
            )

    def _resolve(self, plan: Plan) -> Plan:
        """The plan to run: `plan` with the engine's precision, if it has one, or the plan that
        `HEADRACE_PLAN` names."""
        precision = self._options.precision
        if precision is not None and precision != plan.precision:
            plan = replace(plan, precision=precision)  # type: ignore[arg-type]
        used = effective_plan(plan)
        if used != plan and self._warns:
            self._warns = False
            log.warning(
                "%s is set: this engine runs under plan %s instead of %s",
                PLAN_VARIABLE,
                used.name,
                plan.name,
            )
        return used
