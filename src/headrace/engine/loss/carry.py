"""State that is carried from batch to batch, such as the hidden state of a recurrent model.

    def loss(model, batch, carried):
        output, carried = model(batch.tokens, carried)
        return cross_entropy(output, batch.targets), carried

    engine = Engine(model, optimizer, loss, carry=model.initial_state(batch_size))

The engine detaches what the function returns, so that no backward reaches into an earlier batch,
and passes it to the next call. Under graphs it is copied into memory that stays, where the next
replay reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.errors import StepError


@dataclass(frozen=True, slots=True)
class Carry:
    """How state is carried from batch to batch.

    Args:
        initial: The state before the first batch: tensors on the device, nested like a batch. Or a
            function of an epoch's first batch that returns it, if the batch size is not known
            before. All batches of the epoch must have that size.
        at_epoch_end: "reset": each epoch begins with the initial state. "keep": an epoch continues
            with the state after the last one.
        ends: Says which sequences end with a batch: the name of an entry of the batch, or a
            function of the batch. It holds one truth value per sample. The state of the samples
            whose sequence has ended is the initial one again.
        sample_dim: The dimension of the carried tensors that counts samples. It is 1 for the state
            of `nn.LSTM`, `nn.GRU` and `nn.RNN`.
    """

    initial: Any
    at_epoch_end: Literal["reset", "keep"] = "reset"
    ends: str | Callable[[Any], torch.Tensor] | None = None
    sample_dim: int = 0

    @classmethod
    def of(cls, given: Any) -> Carry | None:
        """What a user gave as `carry`: None, a `Carry`, or the initial state alone."""
        carry = given if given is None or isinstance(given, Carry) else cls(given)
        if carry is not None and carry.at_epoch_end not in ("reset", "keep"):
            raise StepError(
                f"carry: at_epoch_end = {carry.at_epoch_end!r}: expected 'reset' or 'keep'"
            )
        return carry

    def initial_for(self, batch: Any) -> Any:
        return self.initial(batch) if callable(self.initial) else self.initial

    def ends_in(self, batch: Any) -> torch.Tensor | None:
        """Which samples of this batch are the last of their sequence; None if `ends` is not set."""
        if self.ends is None:
            return None
        if not isinstance(self.ends, str):
            found: Any = self.ends(batch)
        elif isinstance(batch, Mapping):
            found = batch.get(self.ends)
        else:
            found = getattr(batch, self.ends, None)
        if not isinstance(found, torch.Tensor) or found.dim() != 1:
            was = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
            name = repr(self.ends) if isinstance(self.ends, str) else "its function"
            raise StepError(
                f"carry: ends: {name} gave {was[:80]} for a batch: expected a tensor with one "
                "truth value per sample"
            )
        return found
