"""Gradients that keep their memory from group to group, as graphs require."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


class KeptGradients:
    """The gradients of a group's `parameters`, and whether they keep their memory. If so, `reached`
    has the parameters (by `id`) that got a gradient in this group."""

    def __init__(self, parameters: Callable[[], list[torch.Tensor]]) -> None:
        self._parameters = parameters
        self.are_kept = False
        self.reached: set[int] = set()

    def keep(self) -> None:
        """Keep the gradients' memory from now on. The present group's batches allocate it."""
        self.are_kept = True
        self.reached.clear()

    def release(self, *, is_open: bool) -> None:
        """No longer keep the gradients' memory. Those of an open group stay for its update."""
        if self.are_kept:
            self.are_kept = False
            if not is_open:
                self.drop(but=set())

    def drop(self, *, but: set[int]) -> None:
        """Set gradients to None, but for the parameters (by `id`) in `but`. A kept gradient that
        no batch of the group has written is zero, and momentum would still move its parameter."""
        for parameter in self._parameters():
            if id(parameter) not in but:
                parameter.grad = None

    @contextmanager
    def noting_reached(self) -> Iterator[None]:
        """Inside the block, `reached` collects the parameters to which backward gives a gradient,
        if gradients keep their memory."""
        parameters = self._parameters() if self.are_kept else []
        handles = [
            p.register_post_accumulate_grad_hook(lambda p: self.reached.add(id(p)))
            for p in parameters
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note_reached(self, parameters: Iterable[int]) -> None:
        """A replay has given these parameters (by `id`) a gradient."""
        self.reached.update(parameters)

    def forget_reached(self) -> None:
        self.reached.clear()

    def assume_reached(self, *, is_open: bool) -> None:
        """After a restore: an open group has reached what has a gradient."""
        self.reached = self.existing() if is_open else set()

    def existing(self) -> set[int]:
        """The parameters (by `id`) that have a gradient."""
        return {id(p) for p in self._parameters() if p.grad is not None}
