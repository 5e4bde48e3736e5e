"""What a tape records: positions in captured streams, and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.races.actors import Clock
from headrace.races.operators import tensors

if TYPE_CHECKING:
    from headrace.fake.streams import FakeStream
    from headrace.fake.tape import Tape


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in a captured stream, as an event records it."""

    tape: Tape
    stream: FakeStream
    count: int
    #: What the position is ordered after, within the capture.
    clock: Clock


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """An operator call that a replay repeats. Its new tensors, by their position in the result, are
    copied into those that the capture made. `trains` is whether gradients were on: some operators
    return more then (an LSTM also returns what its backward needs)."""

    func: Any
    args: Any
    kwargs: Any
    outputs: Sequence[tuple[int, torch.Tensor]] = ()
    trains: bool = False

    def run(self) -> None:
        torch._C._set_grad_enabled(self.trains)  # until `unobserved` ends
        result = self.func(*self.args, **self.kwargs)
        if self.outputs:
            found = tensors(result)
            for position, output in self.outputs:
                output.copy_(found[position])
