"""Random steps of one's own: captured, they equal the plain loop bit for bit; or they are not
captured, with the right line.

In CI a few steps, always the same; `HEADRACE_FUZZ=10000` tries as many, drawn anew.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, given, note, settings

from headrace.testing import FakeDevice
from support.random_steps import REFUSED, Recipe, recipes, train

ASKED = int(os.environ.get("HEADRACE_FUZZ", "0"))
BATCHES = 15


@settings(
    max_examples=ASKED or 12,
    derandomize=not ASKED,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a step takes too long to be made smaller in CI
)
@given(recipes())
def test_a_random_step_is_equal_or_refused(recipe: Recipe) -> None:
    with FakeDevice() as device:
        plain, _ = train(device, recipe, captured=False, count=BATCHES)
    with FakeDevice() as device:
        found, report = train(device, recipe, captured=True, count=BATCHES)
    assert report is not None
    note(f"{report}")
    assert found == plain
    # Each kind of call must be seen a few times, in a step that nobody changes in between.
    steady = not recipe.between and recipe.schedule != "outside" and _keys(recipe) <= 2
    if recipe.refused is not None:
        assert report.replays == 0
        assert not steady or REFUSED[recipe.refused] in str(report.why)
    elif report.why is not None:
        # A number that changes every few batches: SGD reads its rate on the device only if fused.
        assert recipe.schedule == "outside"
        assert "SGD's lr needs fused=True" in report.why
    elif steady:
        assert report.replays > 0


def _keys(recipe: Recipe) -> int:
    """How many kinds of calls there are; each is watched before it is captured."""
    values = 2 if recipe.arguments == "host values" else 1
    return recipe.every * len(set(recipe.sizes)) * values
