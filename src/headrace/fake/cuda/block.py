"""`fake_cuda()`: the block inside which PyTorch has a CUDA device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from headrace.errors import DeviceError
from headrace.fake import patches
from headrace.fake.cuda import state
from headrace.fake.cuda.device import FakeCuda
from headrace.fake.cuda.namespace import replacements


@contextmanager
def fake_cuda(**options: Any) -> Iterator[FakeCuda]:
    """Give PyTorch a CUDA device inside the block, and check its streams for races.

        with fake_cuda() as device:              # raises RaceError at the end if there were races
            x = torch.randn(8).pin_memory().cuda(non_blocking=True)

    Everything is computed on the CPU. `options` are those of `FakeDevice`: `costs`, `check`,
    `host_order`, `memory_bytes`, `keep_timeline`. With `check=False` nothing is raised: look at
    `device.races`.

    Everything in PyTorch is as before when the block ends, also by an exception. Blocks cannot be
    nested, since `torch.cuda` is global.
    """
    if state.in_use():
        raise DeviceError(
            "fake_cuda() was entered inside fake_cuda(): expected one block at a time"
        )
    _handle_forks()
    device = FakeCuda(**options)
    replacer = patches.Replacer(everywhere=True)
    with ExitStack() as afterwards:
        afterwards.enter_context(_compiled_code_runs_eagerly())
        replacer.install(replacements())
        afterwards.callback(replacer.restore)
        state.begin(device)
        afterwards.callback(state.end, device)
        afterwards.enter_context(_default_device_restored())
        afterwards.enter_context(device)
        yield device


@contextmanager
def _default_device_restored() -> Iterator[None]:
    threads = torch._GLOBAL_DEVICE_CONTEXT

    def current() -> Any:
        return getattr(threads, "device_context", None)

    was_set, before = hasattr(threads, "device_context"), current()
    try:
        yield
    finally:
        if current() is not before:
            torch.set_default_device(None if before is None else before.device)
        if not was_set:  # PyTorch 2.9 asks a context that is None for its device
            vars(threads).pop("device_context", None)


@contextmanager
def _compiled_code_runs_eagerly() -> Iterator[None]:
    """Functions that were compiled before the block have no code for it. PyTorch loads its compiler
    at the first call in a mode: it must find the real `torch.cuda`, which it keeps."""
    importlib.import_module("torch._dynamo")
    with torch.compiler.set_stance("force_eager"):
        yield


# --- forks: a loader's workers --------------------------------------------------------------------


def _before_fork() -> None:
    for device in patches.devices:
        device.lock.acquire()


def _after_fork_in_parent() -> None:
    for device in patches.devices:
        device.lock.release()


def _after_fork_in_child() -> None:
    """A child computes on the host only, unwatched, and its `torch.cuda` refuses to work."""
    for device in patches.devices:
        device.lock.release()
        while device.watches_this_thread():
            device.exit_modes()
    patches.devices.clear()
    state.after_fork_in_child()


@cache
def _handle_forks() -> None:
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
