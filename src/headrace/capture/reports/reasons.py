"""Why calls of a part run eagerly that has graphs, or will have some."""

from __future__ import annotations

FIRST_CALLS = "the first calls of a shape"
FIRST_STEPS = "the first steps"
NEW_GRADIENTS = "its gradients or settings are new"
NO_GRADIENT = "its outputs have had no gradient yet"
MISSED = "its backward had other gradients, or settings of PyTorch, than before"
CHECKED = "checked again"
BESIDE_CHECK = "a call that is checked waits for its backward"
BESIDE_EAGER = "a call that ran eagerly waits for its backward"
#: Those of calls that are on the way to a graph, or check one.
UNSETTLED = (
    FIRST_CALLS,
    FIRST_STEPS,
    NEW_GRADIENTS,
    NO_GRADIENT,
    CHECKED,
    BESIDE_CHECK,
    BESIDE_EAGER,
)
