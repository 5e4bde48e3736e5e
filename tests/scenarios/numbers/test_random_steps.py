"""Random steps of one's own: captured, they equal the plain loop bit for bit; or they are not
captured, with the right line.

In CI a few steps, always the same; `HEADRACE_FUZZ=10000` tries as many, drawn anew.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, given, note, settings

from headrace.fake import FakeDevice
from support.graphs.random_steps import REFUSED, Recipe, recipes, train

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
    reasons = _reasons(recipe)
    # Each kind of call must be seen a few times, in a step that nobody changes in between.
    steady = not recipe.between and recipe.schedule != "outside" and _keys(recipe) <= 2
    if recipe.refused is not None:
        assert report.replays == 0
        assert not steady or REFUSED[recipe.refused] in str(report.why)
    elif report.why is not None:
        assert any(reason in report.why for reason in reasons)
    elif steady and not reasons:
        assert report.replays > 0


def _reasons(recipe: Recipe) -> list[str]:
    """Why a step that could be captured may be refused: it differs from batch to batch."""
    reasons = []
    if recipe.schedule == "outside":
        reasons.append("SGD's lr needs fused=True")  # else it reads its rate on the host
        reasons += [".training changes from batch to batch"] if "eval" in recipe.between else []
        reasons += ["settings['weight'] changes from batch"] if "value" in recipe.between else []
    if recipe.losses == "grad" and recipe.zero_grad == "zeros at start":
        reasons.append("each call finds the gradients that it uses in other memory")
    return reasons


def _keys(recipe: Recipe) -> int:
    """How many kinds of calls there are; each is watched before it is captured."""
    values = 2 if recipe.arguments == "host values" else 1
    return recipe.every * len(set(recipe.sizes)) * values
