"""A running script, whose parts are captured as it comes to them."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch

from headrace.capture import is_sped_up, speed_up, watch_models, why_not
from headrace.device import Device, open_device
from headrace.errors import HeadraceError
from headrace.run.gain import ScriptGain
from headrace.run.loaders import ScriptLoaders
from headrace.run.optimizers import watch_optimizers
from headrace.run.parts import Kind, Part, ScriptParts
from headrace.run.scripting import scripting_own_forwards
from headrace.run.settings import RunSettings
from headrace.run.step_clock import StepClock
from headrace.source_lines import script_line

_ENGINE = "headrace.engine.engine"
#: Of so many optimizers that have gone, the last, the times of their steps are kept.
_MAX_CLOCKS_KEPT = 16


class SpeedUpSession:
    """Speeds up what runs in its block, on the device `given`, if there is a fake one. `tell` shows
    a line to the user."""

    def __init__(
        self, settings: RunSettings, tell: Callable[[str], object], given: Device | None = None
    ) -> None:
        self.settings, self._tell, self.given = settings, tell, given
        self._process = os.getpid()
        self._devices: dict[torch.device, Device | None] = {}
        self._known: WeakKeyDictionary[Any, Part | None] = WeakKeyDictionary()
        self.parts = ScriptParts()
        self._clocks: WeakKeyDictionary[Any, StepClock] = WeakKeyDictionary()
        self._clocks_kept: deque[StepClock] = deque(maxlen=_MAX_CLOCKS_KEPT)
        #: How many optimizer steps there were, on the CPU and on the device.
        self.cpu_steps = self.device_steps = 0
        self.gain = ScriptGain(settings, tell)
        self._is_adding = False
        #: Why nothing more is sped up, if so.
        self.off: str | None = None
        self._had_engine = _ENGINE in sys.modules
        self.loaders = ScriptLoaders(self._device_for, tell)
        self._stack = ExitStack()

    def begin(self) -> None:
        enter, guarded = self._stack.enter_context, self._guarded
        if torch.backends.cuda.is_built() or self.given is not None:
            enter(_own_log(self._on_log))
            enter(watch_models(guarded(self._on_model), guarded(self._look)))
            enter(watch_optimizers(guarded(self._on_optimizer), guarded(self._after_step)))
            enter(scripting_own_forwards())
            if "data" in self.settings.only:
                enter(self.loaders.watching())

    def leave(self) -> None:
        """Give PyTorch its own functions back. The script's parts stay as they are."""
        self._look()
        self._stack.close()

    @property
    def devices(self) -> list[Device]:
        """The accelerators that the script has trained on."""
        return [one for one in self._devices.values() if one is not None]

    @property
    def clocks(self) -> list[StepClock]:
        """The times of the optimizers' steps."""
        return [*self._clocks_kept, *self._clocks.values()]

    # --- what the script does ---------------------------------------------------------------------

    def _guarded(self, call: Callable[..., object]) -> Callable[..., None]:
        """`call`, in the script's first process, and without our errors: it must not fail for
        them."""

        def guarded(*arguments: Any) -> None:
            if self.off is not None or os.getpid() != self._process:
                return
            try:
                call(*arguments)
            except Exception as problem:
                self._stop(f"it has failed itself ({type(problem).__name__}: {problem})")

        return guarded

    def _stop(self, why: str) -> None:
        self.off = why
        self._tell(f"from here on the script runs as it is: {why}")

    def _on_model(self, model: torch.nn.Module) -> None:
        if model in self._known or "model" not in self.settings.only:
            return
        parameter = next(one for one in model.parameters() if one.requires_grad)
        device = self._device_for(parameter.device)
        if device is not None:  # else it may be moved later
            self._add("model", model, device, why_not(model))

    def _on_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._known or "optimizer" not in self.settings.only:
            return
        if (device := self._device_of(optimizer)) is not None:
            self._add("optimizer", optimizer, device, None)

    def _add(self, kind: Kind, one: Any, device: Device, why: str | None) -> None:
        if not self._had_engine and _ENGINE in sys.modules:
            self._stop("it uses headrace.Engine itself")
            return
        if is_sped_up(one):
            self._known[one] = None
            return
        if kind == "model":
            self.parts.free_dropped()
        part = self._known[one] = Part(kind, self._name(one), script_line(), why=why)
        if why is None:
            self._speed_up(part, one, device)
        self.parts.add(part)

    def _speed_up(self, part: Part, one: Any, device: Device) -> None:
        self._is_adding = True
        try:
            handle = speed_up(
                one,
                plan="graph",  # the parts of a script are compared together
                device=device,
                compile=self.settings.compile and part.kind == "model",
                after=self.settings.after,
                check=self.settings.check,
            )
        except HeadraceError as problem:
            part.left_alone(str(problem))
            return
        finally:
            self._is_adding = False
        part.sped_up(handle)
        self.gain.add(part, device)
        handle.when_replayed(self._guarded(self._after_step))

    def _name(self, one: object) -> str:
        kind = type(one).__name__
        same = sum(part.name.partition(" ")[0] == kind for part in self.parts.all)
        return f"{kind} {same + 1}" if same else kind

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        device = self._device_of(optimizer)
        if device is None:
            self.cpu_steps += 1
        elif not device.is_capturing():
            self.device_steps += 1
            self.loaders.training_begins()
            self._look()
            clock = self._clocks.get(optimizer)
            if clock is None:
                clock = self._clocks[optimizer] = StepClock(device, self.settings.after - 1)
                finalize(optimizer, self._keep, clock)
            clock.ended(self.parts.counts())
            self.gain.updated(optimizer)

    def _keep(self, clock: StepClock) -> None:
        """Its optimizer has gone."""
        if clock.is_timed:
            self._clocks_kept.append(clock)

    def _look(self) -> None:
        """Tell what has been captured, or cannot be, since the last look."""
        for news in self.parts.news():
            self._tell(news)

    def _on_log(self, text: str) -> None:
        """A warning of the package's. What says why a part cannot be captured is told once."""
        if self._is_adding:  # the part says it itself
            return
        self._look()
        whys = (piece.why for part in self.parts.all for _, piece in part.pieces())
        if not any(why is not None and text.endswith(why) for why in whys):
            self._tell(text)

    # --- devices ----------------------------------------------------------------------------------

    def _device_of(self, optimizer: torch.optim.Optimizer) -> Device | None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return self._device_for(parameter.device)
        return None

    def _device_for(self, where: torch.device) -> Device | None:
        """The device, if it captures graphs."""
        if where.type == "cpu":
            return None
        if where not in self._devices:
            device = open_device(where) if self.given is None else self.given
            self._devices[where] = device if device.captures else None
        return self._devices[where]


@contextmanager
def _own_log(tell: Callable[[str], object]) -> Iterator[None]:
    """In the block, warnings of the package go to `tell`, and not to where the script's log goes:
    that may be stdout, or a file of the script's."""
    log = logging.getLogger("headrace")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    handler, propagates = Handler(logging.WARNING), log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates
