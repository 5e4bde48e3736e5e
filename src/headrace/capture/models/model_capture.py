"""How a model's forward and backward are captured.

Both are captured over fresh aliases of the parameters: what the loop keeps of earlier autograd
graphs has no part in them.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.capture.guards.kernel_settings import KernelSettings
from headrace.capture.models.captured_model import (
    BackwardKey,
    CallKind,
    CapturedBackward,
    CapturedModel,
)
from headrace.capture.models.eager import running_inside
from headrace.capture.models.model_state import ModelState
from headrace.capture.models.outputs import Outputs, addresses, require_plain
from headrace.capture.state.memory import StateBeforeCapture
from headrace.capture.state.state import StepState
from headrace.capture.watching.host_constants import HostConstants
from headrace.capture.watching.host_draws import HostDraws
from headrace.data import rebuild_batch
from headrace.errors import CaptureError


@dataclass(frozen=True, slots=True)
class ModelCapture:
    """One capture. `reads` are tensors that the model reads besides its own, `host_draws` what it
    draws on the host, `host_constants` what it copies from there, `pools` those of the forward and
    of the backward."""

    step: StepState
    state: ModelState
    kind: CallKind
    reads: list[torch.Tensor]
    host_draws: HostDraws | None
    host_constants: HostConstants | None
    pools: tuple[object, object]

    def run(self, call: Any, leaves: list[Any]) -> CapturedModel:
        """Capture a call, which it does not run. Raises `CaptureError` if that cannot be done."""
        host_state = torch.get_rng_state()
        try:
            with StateBeforeCapture(self.step) as before:
                if self.host_draws is not None:
                    self.host_draws.begin()  # so that the capture decides as the watched run did
                graph = self._capture(call, leaves)
                before.require_in_place()
        finally:
            torch.set_rng_state(host_state)
            torch.clear_autocast_cache()
        graph.gradients.note_references()
        return graph

    def require_memory(self) -> None:
        """Raise if the graphs would not fit. They need what the forward keeps, as much again while
        the backward runs, and the gradients."""
        self.step.device.release_unused()
        free = self.step.device.memory().free
        needed = 2 * self.kind.kept_bytes + self.state.gradients.missing_bytes()
        if needed > free:
            raise CaptureError(
                f"a graph would need about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            )

    def _capture(self, call: Any, leaves: list[Any]) -> CapturedModel:
        device, guards = self.step.device, self.state.guards
        own = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        versions = [one._version for one in own]
        args, kwargs = rebuild_batch(call, own)
        torch.clear_autocast_cache()  # a cast that is cached now would be a stale weight
        function: Any = self.step.function
        constants = self.host_constants or HostConstants(device)
        with guards.aliases() as aliases, running_inside(), constants.on_device():
            forward, result = device.capture(lambda: function(*args, **kwargs), self.pools[0])
        if any(one._version != version for one, version in zip(own, versions, strict=True)):
            raise CaptureError("it writes to its arguments, of which a graph gets copies")
        given: dict[int, Callable[[Sequence[Any]], Any]] = {
            id(one): operator.itemgetter(at) for at, one in enumerate(own)
        }
        for real, alias in zip(guards.parameters, aliases, strict=True):
            given[id(alias)] = functools.partial(_same, real)
        given |= {id(one): functools.partial(_same, one) for one in guards.buffers}
        require_plain(result)
        outputs = Outputs(result, given, addresses([*own, *guards.tensors]))
        del result
        places = [at for at, leaf in enumerate(leaves) if device.holds(leaf)]
        return CapturedModel(
            self.kind,
            forward,
            self._capture_backwards(own, aliases, outputs.with_history()),
            _differentiated(own),
            self.state.gradients,
            [own[at].detach() for at in places],
            places,
            outputs,
            self.host_draws,
            # Other memory may be given to a parameter while a call waits for its backward.
            [*own, *(one.detach() for one in guards.tensors), *self.reads, *constants.values],
        )

    def _capture_backwards(
        self, own: list[torch.Tensor], aliases: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> dict[BackwardKey, CapturedBackward]:
        """The loop's backward usually runs after its autocast block, and this call inside of it.
        What outputs have a gradient may differ from backward to backward, too."""
        numbers = tuple(number for number, one in enumerate(outputs) if one.requires_grad)
        if not numbers:
            return {}
        sources = {id(one) for one in (*own, *aliases) if one.requires_grad}
        uses = _require_own_leaves([outputs[number] for number in numbers], sources)
        self.kind.note_sums(max(uses.values(), default=0) > 1)
        present = KernelSettings(self.step.device)
        keys = self.kind.distinct_backwards()
        keys = keys or [BackwardKey(numbers, present.without_autocast())]
        found = {}
        for key in keys:
            with present.set(key.settings):
                found[key] = self._capture_backward(
                    own, aliases, {n: outputs[n] for n in key.outputs}, retains=key is not keys[-1]
                )
        return found

    def _capture_backward(
        self,
        own: list[torch.Tensor],
        aliases: list[torch.Tensor],
        roots: dict[int, torch.Tensor],
        *,
        retains: bool,
    ) -> CapturedBackward:
        gradients, strides = self.state.gradients, self.kind.strides
        wanted = [at for at, one in enumerate(aliases) if one.requires_grad]
        sources = [*(aliases[at] for at in wanted), *(own[at] for at in _differentiated(own))]
        into = [_gradient_like(one, strides.get(number)) for number, one in roots.items()]
        # The first graph's own gradients are the buffers. Later graphs copy theirs into them. What
        # they add is memory outside of the pool: in it, replays of earlier graphs may use it.
        takes = not gradients.buffers()
        if not takes:
            gradients.make_buffers(wanted)

        def work() -> tuple[tuple[int, ...], list[torch.Tensor | None]]:
            found: list[torch.Tensor | None] = list(
                torch.autograd.grad(
                    list(roots.values()), sources, into, retain_graph=retains, allow_unused=True
                )
            )
            ours, others = found[: len(wanted)], found[len(wanted) :]
            by_number = {n: one for n, one in zip(wanted, ours, strict=True) if one is not None}
            found.clear()
            ours.clear()
            if takes:
                gradients.take(by_number, besides=[*into, *others])
            else:
                gradients.write(by_number)
            return tuple(by_number), others

        graph, (found_for, others) = self.step.device.capture(work, self.pools[1])
        return CapturedBackward(graph, into, found_for, others)


def _differentiated(own: list[torch.Tensor]) -> list[int]:
    return [at for at, one in enumerate(own) if one.requires_grad]


def _same(tensor: torch.Tensor, leaves: Sequence[Any]) -> torch.Tensor:
    return tensor


def _gradient_like(output: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Memory for an output's gradient, laid out as those that were seen."""
    dense = torch.empty_like(output, device="meta").contiguous().stride()
    if strides is not None and sorted(strides) == sorted(dense):
        return torch.zeros_like(output).as_strided(output.size(), strides).detach()
    return torch.zeros(output.shape, dtype=output.dtype, device=output.device)


def _require_own_leaves(outputs: list[torch.Tensor], own: set[int]) -> Counter[Any]:
    """Raise if gradients would flow to a tensor that is neither a parameter nor an argument.
    Returns how many gradients each node of these adds up."""
    todo: list[Any] = [one.grad_fn for one in outputs]
    seen: set[Any] = set()
    uses: Counter[Any] = Counter()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            raise CaptureError(
                f"it uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is "
                "none of its parameters: register it as one"
            )
        following = [one for one, _ in node.next_functions if one is not None]
        uses.update(one for one in following if getattr(one, "variable", None) is not None)
        todo += following
    return uses
