"""The state that is being carried from batch to batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from headrace.capture import parts_of, signature, storages
from headrace.checkpoint import StoredTensor
from headrace.data import flatten_batch, rebuild_batch
from headrace.device import Device
from headrace.engine.loss.carry import Carry
from headrace.errors import CaptureError, StepError

# Carried state of this many different shapes keeps its memory for graphs.
_MAX_SHAPES = 64


class CarriedState:
    """The state that is being carried.

    A function that is called with it returns the state for the next call. Until `keep`, the state
    is the old one: a batch that fails leaves it as it was.
    """

    def __init__(self, carry: Carry, device: Device) -> None:
        self._carry, self._device = carry, device
        #: Whether the state keeps its memory from batch to batch, as graphs require.
        self.in_place = False
        self._state: Any = None  # None: the next batch begins with the initial state
        self._initial: Any = None
        # A state that was loaded or set, until the next batch; the nesting of one that was set.
        self._restored: list[torch.Tensor] | None = None
        self._nesting: Any = None
        self._was_set = False
        self._memory: dict[Hashable, Any] = {}

    @property
    def state(self) -> Any:
        """The state that the next batch gets; None if that is the initial one. A state that was
        loaded has no nesting before the next batch: it is a tuple of tensors until then."""
        if self._state is not None or self._restored is None:
            return self._state
        if self._nesting is None:
            return tuple(self._restored)
        return rebuild_batch(self._nesting, self._restored)

    def begin_epoch(self, *, from_start: bool) -> None:
        """Call when a pass begins. With `at_epoch_end="reset"`, one that begins at its epoch's
        first batch (`from_start`) gets the initial state, unless the user has just set another."""
        if from_start and self._carry.at_epoch_end == "reset" and not self._was_set:
            self.reset()
        self._was_set = False

    def reset(self) -> None:
        """Begin with the initial state again."""
        self._state = self._restored = self._nesting = None

    def fresh(self) -> CarriedState:
        """Another state of the same kind, at its beginning: for evaluation."""
        return CarriedState(self._carry, self._device)

    def keep_in_place(self, in_place: bool) -> None:
        """Whether the state keeps its memory from batch to batch from now on."""
        self.in_place = in_place

    # --- one batch --------------------------------------------------------------------------------

    def before(self, batch: Any) -> Any:
        """The state to call a function with. Call it on the stream that runs the batch."""
        if self._state is None:
            self._set_initial(self._checked(self._carry.initial_for(batch), "the initial state"))
            restored = self._restored is not None
            self.keep(self._from_restored() if restored else _copy(self._initial))
        return self._state

    def call(
        self, function: Callable[..., Any], name: str, batch: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Call `function(*args, carried, **kwargs)`. Returns what it returned for this batch, and
        the state for the next one. `name` is the function's in messages."""
        returned = function(*args, self.before(batch), **kwargs)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise StepError(
                f"{name} returned a {type(returned).__name__}: expected a tuple of two, the loss "
                "and the carried state, because there is a `carry`"
            )
        result, carried = returned
        return result, self.after(batch, self._checked(carried, f"what {name} returned to carry"))

    def after(self, batch: Any, carried: Any) -> Any:
        """The state for the next batch: detached, and initial where a sequence has ended."""
        leaves = [leaf.detach() for leaf in flatten_batch(carried)]
        ends = self._carry.ends_in(batch)
        if ends is not None:
            initial = flatten_batch(self._initial)
            if len(initial) != len(leaves):
                raise StepError(
                    f"carry: the state has {len(leaves)} tensors and the initial one "
                    f"{len(initial)}: expected as many, since ended sequences begin with it"
                )
            leaves = [
                self._where(ends, one, other) for one, other in zip(initial, leaves, strict=True)
            ]
        return rebuild_batch(carried, leaves)

    def keep(self, carried: Any) -> None:
        """The batch has been trained on: its carried state is the present one."""
        self._state = self.write(carried) if self.in_place else carried

    def write(self, carried: Any, *, capturing: bool = False) -> Any:
        """Copy a state into memory that stays, one for each shape, and return it there."""
        key = signature(carried, self._device)
        memory = self._memory.get(key)
        if memory is None:
            if capturing:
                raise CaptureError(
                    "the carried state has another shape than after the batches before: carry "
                    "tensors of one shape"
                )
            leaves = [torch.empty_like(leaf) for leaf in flatten_batch(carried)]
            memory = self._memory[key] = rebuild_batch(carried, leaves)
            if len(self._memory) > _MAX_SHAPES:
                self._memory.pop(next(iter(self._memory)))
        targets, sources = flatten_batch(memory), flatten_batch(carried)
        own = storages(targets)
        # A state may be part of the one before, as in a list that is shifted: one copy at a time
        # would overwrite what the next one reads.
        sources = [one.clone() if storages([one]) & own else one for one in sources]
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
        return memory

    def hold(self, memory: Any) -> None:
        """A replay has written the state into `memory`, which `write` returned at capture."""
        self._state = memory

    # --- what graphs and checkpoints need ---------------------------------------------------------

    def key(self) -> Hashable:
        """What a graph depends on: the memory that it reads the state from."""
        return tuple(leaf.data_ptr() for leaf in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the present state, and of the initial one if sequences may end."""
        found = flatten_batch(self._state) if self._state is not None else []
        if self._carry.ends is not None and self._initial is not None:
            found += flatten_batch(self._initial)
        return found

    def leaves(self) -> list[torch.Tensor] | None:
        """The state's tensors, to be stored; None: the initial state."""
        return self._restored if self._state is None else flatten_batch(self._state)

    def load(self, leaves: Iterable[torch.Tensor | StoredTensor] | None) -> None:
        """Take the state from stored tensors. They get their nesting with the next batch."""
        self.reset()
        if leaves is not None:
            whole = [one.whole() if isinstance(one, StoredTensor) else one for one in leaves]
            self._restored = [one.to(self._device.torch_device, copy=True) for one in whole]

    def set(self, state: Any) -> None:
        """Take a state from the user; None: the initial one."""
        if state is None:
            self.reset()
            return
        checked = self._checked(state, "the state set")
        self.load([leaf.detach() for leaf in flatten_batch(checked)])
        self._nesting, self._was_set = checked, True

    def _set_initial(self, initial: Any) -> None:
        """Keep a copy of the initial state, in the same memory as that of the last epoch."""
        initial = rebuild_batch(initial, [leaf.detach() for leaf in flatten_batch(initial)])
        before = None if self._initial is None else signature(self._initial, self._device)
        if before is not None and signature(initial, self._device) == before:
            with torch.no_grad():
                torch._foreach_copy_(flatten_batch(self._initial), flatten_batch(initial))
        else:
            self._initial = _copy(initial)

    def _from_restored(self) -> Any:
        restored, initial = self._restored or [], flatten_batch(self._initial)
        if len(restored) != len(initial):
            raise StepError(
                f"carry: the stored state has {len(restored)} tensors and the initial one "
                f"{len(initial)}: expected the carry that the state was stored with"
            )
        self._restored = None
        return rebuild_batch(self._initial, restored)

    def _checked(self, tree: Any, what: str) -> Any:
        """Return a state, or raise if it does not consist of tensors on the device."""
        parts = list(parts_of(tree))
        found = [part for part in parts if isinstance(part, torch.Tensor)]
        odd = [part for part in parts if not isinstance(part, torch.Tensor | None)]
        if odd:
            raise StepError(
                f"carry: {what} holds the {type(odd[0]).__name__} {str(odd[0])[:60]}: expected "
                "tensors only, since a checkpoint and a graph keep nothing else"
            )
        if not found:
            raise StepError(
                f"carry: {what} is a {type(tree).__name__} without tensors: expected tensors, in "
                "any nesting of tuples, lists and dicts"
            )
        for leaf in found:
            if not self._device.holds(leaf):
                raise StepError(
                    f"carry: {what} has a tensor on {leaf.device}: expected it on {self._device}"
                )
        return tree

    def _where(self, ends: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """`one` for samples whose sequence has ended, `other` for the rest."""
        dim = self._carry.sample_dim
        fits = -other.dim() <= dim < other.dim() and other.shape[dim] == len(ends)
        if not fits or one.shape != other.shape:
            raise StepError(
                f"carry: a carried tensor has shape {tuple(other.shape)}, its initial one "
                f"{tuple(one.shape)}, and {len(ends)} samples say whether they end: expected the "
                f"same shapes, with {len(ends)} in dimension {dim} (set Carry(sample_dim=…))"
            )
        shape = [1] * other.dim()
        shape[dim] = len(ends)
        return torch.where(ends.bool().view(shape), one, other)


def _copy(tree: Any) -> Any:
    return rebuild_batch(tree, [leaf.detach().clone() for leaf in flatten_batch(tree)])
