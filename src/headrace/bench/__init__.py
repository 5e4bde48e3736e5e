"""`headrace bench` and `headrace tune`: the same workload under every plan, on this machine.

A workload is a function that returns model, optimizer, loss and loader. The result says how long a
step takes under each plan, whether the losses are the same, and which plan to use. Names are loaded
when they are used.

    from headrace.bench import find_work

    work = find_work("translation", {"batch": 64})          # or "your_module:make_work"
    model, optimizer, loss, loader = work.make(device, seed=0)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.bench.environment import environment_of
    from headrace.bench.peers import peers_of
    from headrace.bench.plan_list import entries_of, plans_here
    from headrace.bench.runner import Bench
    from headrace.bench.text import text_of
    from headrace.bench.tune.search import Stopped
    from headrace.bench.tune.settings import TuneSettings
    from headrace.bench.tune.tuning import Tuning
    from headrace.bench.verdict import verdict_of
    from headrace.bench.works.lookup import find_work

_HOMES = {
    "Bench": "runner",
    "Stopped": "tune.search",
    "TuneSettings": "tune.settings",
    "Tuning": "tune.tuning",
    "entries_of": "plan_list",
    "environment_of": "environment",
    "find_work": "works.lookup",
    "peers_of": "peers",
    "plans_here": "plan_list",
    "text_of": "text",
    "verdict_of": "verdict",
}

__all__ = [
    "Bench",
    "Stopped",
    "TuneSettings",
    "Tuning",
    "entries_of",
    "environment_of",
    "find_work",
    "peers_of",
    "plans_here",
    "text_of",
    "verdict_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
