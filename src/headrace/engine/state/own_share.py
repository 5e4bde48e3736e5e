"""A rank's own share of a state that several ranks have stored."""

from __future__ import annotations

import hashlib
from typing import Any

from headrace.checkpoint import PerRank
from headrace.parallel import Ranks


def for_rank(state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """A state in which each `PerRank` value is replaced by this rank's own. If the number of ranks
    has changed, loaders have other shares of the data, and what is stored about them is dropped."""
    own = {name: _own_random(state[name], ranks) for name in ("random", "random_at_start")}
    unknown: dict[str, Any] = {"own_batch": None, "share_ended": False, "loader": None}
    unknown |= {"generators": None, "drawn_ahead": [], "drawn_last": None}
    for name, value in unknown.items():
        own[name] = own_value(state[name], ranks, value)
    return {**state, **own}


def own_value(stored: Any, ranks: Ranks, unknown: Any) -> Any:
    if not isinstance(stored, PerRank):
        return stored if ranks.size == 1 else unknown
    if not stored.all:  # this state was never written to a checkpoint
        return stored.own
    return stored.all[ranks.rank] if len(stored.all) == ranks.size else unknown


def _own_random(stored: Any, ranks: Ranks) -> dict[str, Any] | None:
    """The random state for this rank: its stored one or, if the number of ranks has changed, a seed
    derived from the stored state and the rank."""
    if isinstance(stored, PerRank):
        states = list(stored.all)
        if not states:  # this state was never written to a checkpoint
            return stored.own  # type: ignore[no-any-return]
    else:
        states = [stored]
    if len(states) == ranks.size or states[0] is None:
        own: dict[str, Any] | None = states[min(ranks.rank, len(states) - 1)]
        return own
    if "seed" in states[0]:
        host = str(states[0]["seed"]).encode()
    else:
        host = states[0]["host"].numpy().tobytes()
    text = host + f"rank {ranks.rank} of {ranks.size}".encode()
    return {"seed": int.from_bytes(hashlib.sha256(text).digest()[:4], "little")}
