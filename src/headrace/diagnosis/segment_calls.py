"""The calls that begin a segment of a step: host waits, copies between host and device, graphs,
collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from headrace.device import cuda_namespace
from headrace.diagnosis.collectives import watching_collectives, watching_ends_of_backward
from headrace.diagnosis.rank_waits import this_rank
from headrace.diagnosis.segments import (
    COMMUNICATION,
    GRAPH,
    PAGEABLE_COPY,
    PINNED_COPY,
    TO_HOST,
    Edges,
)
from headrace.diagnosis.waits import watch_moments
from headrace.replacing import replaced

#: The driver takes a copy of so much memory that is not pinned, and the host goes on.
_STAGED_BYTES = 65_536


#: The device to which each method copies, if it is always the same.
_TARGETS = {"to": None, "cuda": "cuda", "cpu": "cpu", "copy_": None}


@contextmanager
def watching_edges(edges: Edges) -> Iterator[None]:
    """Tell `edges` of host waits, of copies between
    host and device, of graphs, and of communication inside the block."""
    cuda: Any = cuda_namespace()
    with ExitStack() as stack:
        stack.enter_context(watch_moments(edges.pause, edges.resume, edges.waited))
        for name in _TARGETS:
            call = _around_copy(getattr(torch.Tensor, name), name, edges)
            stack.enter_context(replaced(torch.Tensor, name, call))
        replay = cuda.CUDAGraph.replay
        stack.enter_context(replaced(cuda.CUDAGraph, "replay", _around_replay(replay, edges)))
        if this_rank()[1] > 1:
            stack.enter_context(_watching_communication(edges))
        yield


@contextmanager
def _watching_communication(edges: Edges) -> Iterator[None]:
    def begins() -> None:
        edges.edge(COMMUNICATION)

    def ends() -> None:
        edges.edge("after communication")

    with (
        watching_collectives(begins, ends),
        watching_ends_of_backward(lambda: edges.edge(COMMUNICATION, from_autograd=True)),
    ):
        yield


def _around_copy(original: Callable[..., Any], name: str, edges: Edges) -> Callable[..., Any]:
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        kind = _copy_kind(name, self, args, kwargs)
        if kind is None:
            return original(self, *args, **kwargs)
        edges.edge(kind)
        try:
            return original(self, *args, **kwargs)
        finally:
            edges.edge("after copy")

    return call


def _copy_kind(
    name: str, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """How the segment is called in which a tensor is copied; None if it stays where it is."""
    if name == "copy_":
        source, targets = args[0] if args else kwargs.get("other"), (tensor,)
    else:
        source, targets = tensor, (_TARGETS[name], *args[:1], *kwargs.values())
    if not isinstance(source, torch.Tensor):
        return None
    to_host = next((one for one in map(_is_host, targets) if one is not None), source.is_cpu)
    if to_host == source.is_cpu:
        return None
    if to_host:
        return TO_HOST
    is_ahead = source.nbytes <= _STAGED_BYTES or source.is_pinned()
    return PINNED_COPY if is_ahead else PAGEABLE_COPY


def _is_host(target: object) -> bool | None:
    """Whether an argument names the host or is a tensor there; None if it names no device."""
    if isinstance(target, torch.Tensor):
        return target.is_cpu
    if isinstance(target, torch.device):
        return target.type == "cpu"
    if isinstance(target, str):
        return target.startswith("cpu")
    is_number = isinstance(target, int) and not isinstance(target, bool)
    return False if is_number else None


def _around_replay(replay: Callable[..., Any], edges: Edges) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        edges.edge(GRAPH)
        try:
            return replay(self, *args, **kwargs)
        finally:
            edges.edge("after graph")

    return call
