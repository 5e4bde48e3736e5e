"""Somebody's training script, run unchanged and sped up.

In: a script or module with its arguments. Out: what the script does under `python`, sooner: each
model that is called in training and each optimizer that steps runs as graphs (`capture/`), and
batches are copied to the device ahead of their use. What became of each part is told on the way
and at the end. Its names are loaded on first use: this package is imported before PyTorch is.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.run.program import run_sped_up as run_sped_up
    from headrace.run.settings import KINDS as KINDS
    from headrace.run.settings import RunSettings as RunSettings
    from headrace.run.text import table_of as table_of

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
