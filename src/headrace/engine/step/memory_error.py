"""The error for a step that does not fit on the device: what holds the memory, what to change."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headrace.device import Device
from headrace.engine.step.parts import StepParts
from headrace.errors import OutOfMemoryError
from headrace.plan import Plan


def out_of_memory_error(
    problem: BaseException,
    *,
    device: Device,
    plan: Plan,
    parts: StepParts | None,
    batch: str | None,
    largest: str | None,
    graph_bytes: int,
) -> OutOfMemoryError:
    """The error to raise for PyTorch's `problem`. `batch` is the batch that did not fit, `largest`
    the size of the largest that did, both in words."""
    memory = device.memory()
    held = _bytes_held(parts, graph_bytes)
    rest = memory.allocated - sum(held.values())
    if rest > 0:
        held["activations, batches and others"] = rest
    shares = ", ".join(f"{what} {_mb(nbytes)}" for what, nbytes in held.items() if nbytes)
    lines = [
        f"{device} has no memory left for batch {batch}"
        if batch is not None
        else f"{device} has no memory left for the next batch",
        f"the largest batch that fitted had {largest}" if largest else "no batch fitted before",
        f"allocated {_mb(memory.allocated)} of {_mb(memory.total)} ({shares}), kept for reuse "
        f"{_mb(memory.reserved - memory.allocated)}, free {_mb(memory.free)}",
        f"try {'; or '.join(_remedies(memory.reserved - memory.allocated, plan, parts))}",
        f"PyTorch says: {str(problem).strip().splitlines()[0] if str(problem).strip() else '-'}",
    ]
    return OutOfMemoryError(". ".join(lines))


def _bytes_held(parts: StepParts | None, graph_bytes: int) -> dict[str, int]:
    """The bytes of what the engine itself holds, by name."""
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


def _remedies(cached_bytes: int, plan: Plan, parts: StepParts | None) -> list[str]:
    found = ["smaller batches, with accumulate for the same update"]
    if parts is not None and plan.graphs == "off":
        found.append("on_oom='halve', which trains on a batch that does not fit in two halves")
    if plan.precision in (None, "fp32", "tf32"):
        found.append("precision='bf16'")
    if plan.prefetch_depth > 1 or plan.run_ahead_bytes is None:
        found.append("a plan with a smaller prefetch_depth, or with run_ahead_bytes")
    if plan.cache_batches:
        found.append(f"cache_batches below {plan.cache_batches}")
    if plan.graphs != "off":
        found.append("a plan with a smaller graph_shapes, or with graphs: off")
    if cached_bytes > 512 << 20:
        found.append(
            "PYTORCH_ALLOC_CONF=expandable_segments:True, since the memory kept for reuse may be "
            "fragmented"
        )
    return found


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
