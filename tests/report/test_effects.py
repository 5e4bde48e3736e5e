"""A stored search, and which fields of a plan made the difference."""

from __future__ import annotations

from typing import Any

from headrace.records import TuneResult
from headrace.report.effects import effects


class TestEffects:
    """What mattered in a search: nothing is said of fields that changed together."""

    def trial(self, number: int, plan: str, ms: float, **changed: Any) -> dict[str, Any]:
        graphs, depth = ("on", 2) if plan == "graph" else ("off", 0)
        return {
            "id": number,
            "plan": {"name": plan, "graphs": graphs, "prefetch_depth": depth} | changed,
            "loader": {
                "workers": changed.get("workers"),
                "prefetch_factor": changed.get("prefetch_factor"),
            },
            "changed": changed,
            "rungs": [{"steps": 20, "ms_per_step": [ms]}],
            "status": "kept",
        }

    def found(self, *trials: dict[str, Any]) -> dict[str, tuple[tuple[str, float], ...]]:
        result = TuneResult.from_dict(
            {"kind": "headrace tune", "version": 1, "trials": list(trials)}
        )
        return {effect.name: effect.best_ms for effect in effects(result)}

    def test_plans_are_one_choice_and_fields_are_compared_alone(self) -> None:
        found = self.found(
            self.trial(0, "baseline", 50.0),
            self.trial(1, "graph", 8.0),
            self.trial(2, "graph", 7.0, prefetch_depth=4),
            self.trial(3, "graph", 9.0, prefetch_depth=4, workers=2, prefetch_factor=2),
            self.trial(4, "graph", 9.5, prefetch_depth=4, workers=2, prefetch_factor=4),
        )
        assert found == {
            "plan": (("graph", 8.0), ("baseline", 50.0)),
            "prefetch_depth": (("4", 7.0), ("2", 8.0)),
            "workers": (("as given", 7.0), ("2", 9.0)),
            "prefetch_factor": (("2", 9.0), ("4", 9.5)),
        }

    def test_another_batch_size_is_not_the_same(self) -> None:
        """Graphs are compared at one batch size, though one trial was at another."""
        found = self.found(
            self.trial(0, "pipeline", 10.0, batch_size=None),
            self.trial(1, "pipeline", 9.0, batch_size=None, graphs="on"),
            self.trial(2, "pipeline", 4.0, batch_size=256),
        )
        assert found["graphs"] == (("on", 9.0), ("off", 10.0))

    def test_one_trial_shows_nothing(self) -> None:
        assert self.found(self.trial(0, "graph", 8.0)) == {}
