"""`headrace bench` and `headrace tune`: the same workload under every plan, on this machine.

A workload is a function that returns model, optimizer, loss and loader. The result says how long a
step takes under each plan, whether the losses are the same, and which plan to use. Names are loaded
when they are used.

    from headrace.bench import find_work

    work = find_work("translation", {"batch": 64})          # or "your_module:make_work"
    training = work.make(device, seed=0)        # training.model, training.loader …
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.bench.environment import environment_of as environment_of
    from headrace.bench.known import EarlierResults as EarlierResults
    from headrace.bench.peers import peers_of as peers_of
    from headrace.bench.plan_list import entries_of as entries_of
    from headrace.bench.plan_list import plans_here as plans_here
    from headrace.bench.runner import Bench as Bench
    from headrace.bench.text import text_of as text_of
    from headrace.bench.trainable import DeviceLost as DeviceLost
    from headrace.bench.tune.settings import TuneSettings as TuneSettings
    from headrace.bench.tune.trial import Stopped as Stopped
    from headrace.bench.tune.tuning import Tuning as Tuning
    from headrace.bench.verdict import verdict_of as verdict_of
    from headrace.bench.works.lookup import find_work as find_work

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
