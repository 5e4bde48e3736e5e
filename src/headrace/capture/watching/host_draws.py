"""Random numbers that a forward draws on the host, to decide something by them.

LayerDrop draws a number for each layer, also where no layer is ever left out, as most models of
transformers are configured. A graph cannot draw on the host. So a replay is preceded by the same
draws and the same arithmetic on them; if what the forward read of them is what it read before its
capture, the graph is right, and the generator goes on as in the plain loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

_READ = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A number that was drawn, or computed from such numbers, by the number of its operation."""

    number: int


@dataclass(frozen=True, slots=True)
class _HostOperation:
    func: Any
    args: Any
    kwargs: Any
    #: What the forward read; None for other operations.
    read: Any = None


class HostDraws:
    """The draws of one run from PyTorch's CPU generator, and what was computed from them."""

    def __init__(self) -> None:
        self._before = torch.get_rng_state()
        self._operations: list[_HostOperation] = []
        # By memory and type: a number, and the operation that made it.
        self._numbers: dict[tuple[int, torch.dtype], tuple[torch.Tensor, _Drawn]] = {}
        self._is_complete = True
        #: Whether the run has ended, and drew nothing else from the generator.
        self.are_all = False

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operation of the run if it draws on the host, or uses what was drawn."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not draws and not self._numbers:
            return
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        drawn = [one for one in given if one in self]
        if not drawn and not (draws and isinstance(result, torch.Tensor) and result.is_cpu):
            return
        is_read = func is _READ
        if len(drawn) < len(given) or not (is_read or _is_number(func, result, kwargs)):
            self._is_complete = False
            return
        args, kwargs = tree_map(self._refer, (args, kwargs or {}))
        if not is_read:
            number = _Drawn(len(self._operations))
            self._numbers.setdefault(_memory(result), (result, number))
        self._operations.append(_HostOperation(func, args, kwargs, result if is_read else None))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is one of the numbers."""
        return bool(self._numbers) and tensor.is_cpu and _memory(tensor) in self._numbers

    def _refer(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._numbers[_memory(value)][1]
        return value

    def end(self) -> None:
        """The run has just ended."""
        self._numbers.clear()
        if not self._operations or not self._is_complete:
            return
        after = torch.get_rng_state()
        torch.set_rng_state(self._before)
        self.are_all = self.repeat() and torch.equal(torch.get_rng_state(), after)
        torch.set_rng_state(after)

    def begin(self) -> None:
        """Set the generator to where it was when the run began."""
        torch.set_rng_state(self._before)

    def repeat(self) -> bool:
        """Draw again. If what is read differs from what the run read, put the generator back, and
        return False."""
        before = torch.get_rng_state()
        results: list[Any] = []

        def value(part: Any) -> Any:
            return results[part.number] if isinstance(part, _Drawn) else part

        for one in self._operations:
            args, kwargs = tree_map(value, (one.args, one.kwargs))
            results.append(one.func(*args, **kwargs))
            if one.read is not None and results[-1] != one.read:
                torch.set_rng_state(before)
                return False
        return True


def _is_number(func: Any, result: Any, kwargs: Any) -> bool:
    """Whether an operation changes nothing, and returns one number on the host."""
    return (
        not func._schema.is_mutable
        and isinstance(result, torch.Tensor)
        and result.is_cpu
        and result.numel() == 1
        and (kwargs or {}).get("generator") is None
    )


def _memory(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    has_memory = torch._C._has_storage(tensor)
    return tensor.untyped_storage()._cdata if has_memory else 0, tensor.dtype
