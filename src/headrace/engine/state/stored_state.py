"""An engine's state: values and tensors with which it continues as if never interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from headrace.checkpoint import PerRank
from headrace.engine.graphs.ladder import Ladder
from headrace.engine.state.own_share import own_value
from headrace.engine.state.placement import for_this_optimizer, sharded_like
from headrace.engine.state.position import Position
from headrace.engine.step.parts import StepParts
from headrace.engine.update.group import Phase
from headrace.engine.update.schedules import Schedule
from headrace.errors import StepError
from headrace.parallel import local_shard, unwrap

FORMAT = 1
# What PyTorch and Python raise for a state of another model, or for something else altogether.
_MISMATCH_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError)


def state_of(
    parts: StepParts,
    schedule: Schedule | None,
    graphs: Ladder | None,
    position: Position,
    skipped_updates: int,
) -> dict[str, Any]:
    """The state between two batches. `skipped_updates` counts updates skipped because they were not
    finite. Tensors are the live ones: copy them before training continues."""
    ema, scaler = parts.update.ema, parts.update.scaler

    def per_rank(value: Any) -> Any:
        return PerRank(own=value) if parts.ranks.several else value

    scales = None
    if scaler is not None:
        with parts.device.ledger.waiting("scaler_state"):  # PyTorch reads the scale back
            scales = scaler.state_dict()
    return {
        "format": FORMAT,
        "epoch": position.epoch,
        "batch": position.batch,
        "own_batch": per_rank(position.own_batch),
        "share_ended": per_rank(position.share_ended),
        "loader": per_rank(position.loader),
        "deferred": position.deferred,
        "epoch_loss": position.epoch_loss,
        "skipped_updates": skipped_updates,
        "random_at_start": per_rank(position.random_at_start),
        "generators": per_rank(position.generators),
        "drawn_ahead": per_rank(position.drawn_ahead),
        "drawn_last": per_rank(position.drawn_last),
        "graphs": None if graphs is None else graphs.state_dict(),
        "ledger": parts.device.ledger.state_dict(),
        "model": dict(unwrap(parts.model).state_dict()),
        "optimizer": parts.optimizer.state_dict(),
        "scheduler": None if schedule is None else schedule.state_dict(),
        "scaler": scales,
        "ema": None if ema is None else ema.state(),
        "step": _step_state(parts),
        "random": per_rank(position.random),
        "carry": per_rank(None if parts.carry is None else parts.carry.leaves()),
    }


def _step_state(parts: StepParts) -> dict[str, Any]:
    """The accumulation group's state, with the gradients outside the optimizer and the guard's
    state. After an error, what the guard found in the failed group is not stored."""
    group, clipping, guard = parts.group, parts.update.clipping, parts.update.guard
    failed = group.phase is not Phase.CLEAN
    return {
        **group.state_dict(),
        "outside": {} if clipping is None else clipping.gradients_outside(),
        "guard": None if guard is None else guard.state_dict(with_group=not failed),
    }


def _restore_step(state: dict[str, Any], parts: StepParts) -> None:
    clipping, guard = parts.update.clipping, parts.update.guard
    if guard is not None:
        guard.load_state_dict(state["guard"])
    parts.group.load_state_dict(state)
    if clipping is not None:
        clipping.set_gradients_outside(state["outside"])


def checked(state: object) -> dict[str, Any]:
    """A stored state of this format. Raises `StepError` for anything else."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if not isinstance(state, dict) or found != FORMAT or isinstance(found, bool):
        raise StepError(f"this is not an engine's state of format {FORMAT}: found {found!r}")
    if not isinstance(state.get("step"), dict):
        raise StepError("this is not an engine's state: it has no 'step'")
    return state


def restore(
    state: dict[str, Any], parts: StepParts, schedule: Schedule | None, graphs: Ladder | None
) -> None:
    """Load `state` into a step's parts, except for the random generators. If this raises, some
    parts may be loaded and others not: do not use the engine then."""
    with mismatch_as_step_error():
        _restore(state, parts, schedule, graphs)


@contextmanager
def mismatch_as_step_error() -> Iterator[None]:
    """Inside the block, errors that the state of another engine causes become a `StepError`."""
    try:
        yield
    except _MISMATCH_ERRORS as problem:
        what = " ".join(str(problem).split())[:200] or type(problem).__name__
        raise StepError(f"the stored state does not fit this engine: {what}") from problem


def _restore(
    state: dict[str, Any], parts: StepParts, schedule: Schedule | None, graphs: Ladder | None
) -> None:
    group, scaler, ema = parts.group, parts.update.scaler, parts.update.ema
    for name, part in (("scheduler", schedule), ("scaler", scaler), ("ema", ema)):
        if (state[name] is None) != (part is None):
            has, had = ("none" if part is None else "one"), ("one" if part is None else "none")
            raise StepError(
                f"{name}: this engine has {has}, the stored state has {had}: expected both to have "
                "one, or neither"
            )
    in_group = state["step"]["in_group"]
    if in_group >= group.size:
        raise StepError(
            f"the stored state is {in_group} batches into a group: accumulate = {group.size}, "
            f"expected the value it was stored with, which is above {in_group}"
        )
    divided_by = state["step"]["divided_by"]
    if in_group and divided_by != group.divided_by:
        raise StepError(
            f"the stored state is {in_group} batches into a group accumulated by "
            f"{_accumulated_by(divided_by)}, and this engine accumulates by "
            f"{_accumulated_by(group.divided_by)}: expected "
            "the same accumulate and accumulate_by, or a state taken right after an update"
        )
    model = unwrap(parts.model)
    own = model.state_dict()
    model.load_state_dict(
        {name: sharded_like(value, own.get(name)) for name, value in state["model"].items()}
    )
    parts.optimizer.load_state_dict(for_this_optimizer(state["optimizer"], parts.optimizer))
    if schedule is not None:
        schedule.load_state_dict(state["scheduler"])
    if scaler is not None:
        scaler.load_state_dict(state["scaler"])
        if scaler._scale is None:  # PyTorch makes it with the first batch: there may be none
            scaler._lazy_init_scale_growth_tracker(parts.device.torch_device)
    if ema is not None:
        for average, weight, stored in zip(ema.averages, ema.weights, state["ema"], strict=True):
            average.copy_(local_shard(sharded_like(stored, weight)))
    _restore_step(state["step"], parts)
    if parts.carry is not None:
        parts.carry.load(own_value(state["carry"], parts.ranks, None))
        if parts.carry.leaves() is None and state["batch"] > 0:
            parts.device.warn_once(
                "carry",
                "the stored state has no carried state for this rank, because the number of "
                "ranks has changed: the next batch begins with the initial one",
            )
    if graphs is not None:
        graphs.load_state_dict(state["graphs"])
    if state["ledger"] is not None:
        parts.device.ledger.load_state_dict(state["ledger"])
    for name in ("epoch", "batch"):
        if type(state[name]) is not int or state[name] < 0:
            raise ValueError(f"{name} = {state[name]!r}: expected a whole number, 0 or more")
    missing = {"skipped_updates", *(field.name for field in fields(Position))} - state.keys()
    if missing:
        raise KeyError(f"it has no {', '.join(sorted(missing))}")


def _accumulated_by(divided_by: int | None) -> str:
    return "weight" if divided_by is None else f"count ({divided_by} batches)"
