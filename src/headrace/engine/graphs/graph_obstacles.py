"""Why the engine's step cannot be captured as a graph, as far as that is known before it runs."""

from __future__ import annotations

from headrace.capture import fused_or, state_obstacle
from headrace.engine.step.parts import StepParts


def capture_obstacle(parts: StepParts) -> str | None:
    """Why the engine's step cannot be captured and what to do; None if nothing prevents it."""
    obstacle = _distributed_obstacle(parts) or state_obstacle(parts.state)
    if obstacle is None and parts.update.guard is not None and not parts.update.scales_on_device:
        other = "use on_nonfinite='report' or 'stop'"
        return (
            f"with on_nonfinite and {type(parts.optimizer).__name__} the host reads back before "
            f"every update whether to leave it out: {fused_or(other, parts.optimizer)}"
        )
    return obstacle


def _distributed_obstacle(parts: StepParts) -> str | None:
    """PyTorch can capture DDP's steps, over NCCL and after a warm-up, but no FSDP2 step."""
    if parts.parallelism == "fsdp":
        return (
            "FSDP2 gathers and frees weights from the host during a step, which no graph can "
            "repeat: use DDP, or a plan with graphs = off"
        )
    if parts.parallelism == "ddp":
        if not parts.ranks.uses_nccl:
            return (
                "DDP's gradients are averaged by the hosts, not on the device: initialize the "
                "process group with the backend nccl"
            )
        if parts.group.size > 1:
            return (
                "with DDP and accumulation only a group's last batch averages gradients, so its "
                "batches differ: use accumulate = 1, or a plan with graphs = off"
            )
    return None
