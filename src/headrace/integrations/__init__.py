"""`hr.speed_up` inside other training frameworks: a file for each, which is imported on first use.

    hr.transformers.speed_up(trainer)                        # the Hugging Face Trainer
    lightning.Trainer(callbacks=[hr.lightning.SpeedUp()])    # Lightning

In: a framework's trainer. Out: the same losses, weights, logged values and checkpoints, with the
model and the optimizer as graphs, and without the framework's own waits for the device. Accelerate
needs nothing from here: `hr.speed_up` takes what it prepares. Importing this package imports no
framework.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from headrace.extras import require

#: The modules, and the packages that each needs.
_MODULES = {"lightning": ("lightning",), "transformers": ("transformers", "accelerate")}


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require(f"headrace.{name}", *_MODULES[name])
    return importlib.import_module(f"{__name__}.{name}")
