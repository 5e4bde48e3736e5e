"""A step that did not fit on the device: what holds the memory, and what to change."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headrace.device import Device
from headrace.engine.step import StepParts
from headrace.errors import OutOfMemoryError
from headrace.plan import Plan


def explained(
    problem: BaseException,
    *,
    device: Device,
    plan: Plan,
    parts: StepParts | None,
    batch: str | None,
    largest: str | None,
    graph_bytes: int,
) -> OutOfMemoryError:
    """The error that says so. `batch` is the one that did not fit, `largest` one that did."""
    memory = device.memory()
    held = _held(parts, graph_bytes)
    rest = memory.allocated - sum(held.values())
    if rest > 0:
        held["activations, batches and others"] = rest
    shares = ", ".join(f"{what} {_mb(nbytes)}" for what, nbytes in held.items() if nbytes)
    lines = [
        f"{device} has no memory left for batch {batch}"
        if batch is not None
        else f"{device} has no memory left for the next batch",
        f"the largest that fitted was {largest}" if largest else "none fitted before",
        f"allocated {_mb(memory.allocated)} of {_mb(memory.total)} ({shares}), kept for reuse "
        f"{_mb(memory.reserved - memory.allocated)}, free {_mb(memory.free)}",
        f"to change: {'; '.join(_remedies(memory.reserved - memory.allocated, plan, parts))}",
        f"PyTorch says: {str(problem).strip().splitlines()[0] if str(problem).strip() else '-'}",
    ]
    return OutOfMemoryError(". ".join(lines))


def _held(parts: StepParts | None, graph_bytes: int) -> dict[str, int]:
    """Bytes by what holds them, as far as it is the engine's own."""
    held = {"graphs": graph_bytes}
    if parts is None:
        return held
    parameters = parts.group.parameters()
    states = [
        value
        for state in parts.optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "weights": _nbytes([*parts.model.parameters(), *parts.model.buffers()]),
        "gradients": _nbytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer": _nbytes(states),
        "averages": 0 if parts.update.ema is None else _nbytes(parts.update.ema.averages),
        **held,
    }


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _remedies(kept: int, plan: Plan, parts: StepParts | None) -> list[str]:
    found = ["smaller batches, with accumulate for the same update"]
    if parts is not None and plan.graphs == "off":
        found.append("on_oom='halve', which trains on such a batch in two halves")
    if plan.precision in (None, "fp32", "tf32"):
        found.append("precision='bf16'")
    if plan.prefetch_depth > 1 or plan.run_ahead_bytes is None:
        found.append("a plan with a smaller prefetch_depth, or with run_ahead_bytes")
    if plan.cache_batches:
        found.append(f"cache_batches below {plan.cache_batches}")
    if plan.graphs != "off":
        found.append("graph_shapes, or graphs: off")
    if kept > 512 << 20:
        found.append("PYTORCH_ALLOC_CONF=expandable_segments:True, as much is kept in pieces")
    return found


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
