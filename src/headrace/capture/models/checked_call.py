"""A model's call that is run eagerly beside its replay.

It runs over fresh aliases of the weights, on clones of its arguments and of the buffers, and with
the random numbers that the replay began with. Outputs and buffers are compared at once, gradients
when the backward is replayed, for the same gradients of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.capture.guards.module_guards import ModuleGuards
from headrace.capture.models.eager import running_inside
from headrace.capture.models.model_clones import ModelClones
from headrace.capture.models.outputs import Outputs
from headrace.capture.reports.differences import Differences
from headrace.capture.state.state import StepState
from headrace.data import rebuild_batch


class CheckedCall:
    """A model's call that is compared: the state before it, and then its eager twin, until the
    backward."""

    def __init__(
        self, differences: Differences, step: StepState, host_state: torch.Tensor | None
    ) -> None:
        self._differences, self._step = differences, step
        self._device, self._model = step.device, step.modules[0]
        device, model = self._device, self._model
        self._random = device.random_state()
        self._host_random = torch.get_rng_state() if host_state is None else host_state
        self._clones = ModelClones(model)
        self._lower = torch.is_autocast_enabled(device.torch_device.type)
        #: Of the eager call: outputs by number, leaves in place of parameters and arguments.
        self._outputs: list[torch.Tensor] = []
        self._aliases: list[torch.Tensor] = []
        self._arguments: list[torch.Tensor] = []

    @classmethod
    def begin(
        cls, differences: Differences, step: StepState, host_state: torch.Tensor | None
    ) -> CheckedCall | None:
        """A replay begins. None: it is not compared. `host_state` is the random state of the host
        before it, if it draws there."""
        return cls(differences, step, host_state) if differences.begins() else None

    def forward(
        self,
        outputs: Outputs,
        call: Any,
        leaves: list[Any],
        made: Sequence[torch.Tensor],
    ) -> None:
        """Run the call eagerly on clones of its `leaves`, over fresh aliases of the parameters, and
        compare with what the replay has `made`."""
        device = self._device
        random, host_random = device.random_state(), torch.get_rng_state()
        device.set_random_state(self._random)
        torch.set_rng_state(self._host_random)
        self._arguments = [one.detach().clone().requires_grad_(one.requires_grad) for one in leaves]
        try:
            args, kwargs = rebuild_batch(call, self._arguments)
            torch.clear_autocast_cache()
            function: Any = self._step.function
            with (
                self._clones.in_place(),
                ModuleGuards(self._model).aliases() as self._aliases,
                running_inside(),
            ):
                result = function(*args, **kwargs)
            torch.clear_autocast_cache()
            self._outputs = outputs.find(result)
            pairs = [
                (f"output {number}", one, other.detach())
                for number, (one, other) in enumerate(zip(made, self._outputs, strict=True))
            ]
            self._differences.compare(pairs, lower_precision=self._lower)
            self._differences.compare(
                [(f"buffer {name}", one, clone) for name, one, clone in self._clones.pairs()],
                lower_precision=self._lower,
            )
            state = ("the random state after the call", random, device.random_state())
            self._differences.compare([state])
        finally:
            device.set_random_state(random)
            torch.set_rng_state(host_random)

    def backward(
        self,
        replay: Callable[[], None],
        roots: dict[int, torch.Tensor],
        parameters: dict[str, int],
        found: Callable[[str], torch.Tensor | None],
        inputs: Sequence[int],
        found_for_inputs: Sequence[torch.Tensor | None],
    ) -> Callable[[], None]:
        """A function that replays the backward and compares its gradients. `roots` are the outputs'
        gradients by number, `parameters` the positions of the parameters that get one by name;
        `found` returns a parameter's after the replay. `inputs` are the arguments that get one."""
        outputs, self._outputs = self._outputs, []
        sources = [self._aliases[at] for at in parameters.values()]
        sources += [self._arguments[at] for at in inputs]
        given = [(outputs[number], one) for number, one in roots.items()]
        expected = torch.autograd.grad(
            [one for one, _ in given],
            sources,
            [gradient.clone() for _, gradient in given],
            allow_unused=True,
        )

        def replay_and_compare() -> None:
            replay()
            names = [*(f"gradient of {name}" for name in parameters)]
            names += [f"gradient of argument {at}" for at in inputs]
            gradients = [*map(found, parameters), *found_for_inputs]
            pairs = [
                (name, one, other)
                for name, one, other in zip(names, gradients, expected, strict=True)
                if one is not None and other is not None
            ]
            self._differences.compare(pairs, lower_precision=self._lower)

        return replay_and_compare
