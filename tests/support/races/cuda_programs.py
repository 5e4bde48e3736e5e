"""Stream bugs with their twins, written against `torch.cuda`, as its users write them.

`cuda_programs.txt` has them in the form of `race_table`: a line that begins with `-` is in the bug
only, one with `+` in the twin only. FIRST and SECOND mark the lines of the race.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import heapq
import io
import linecache
import queue
import threading
import weakref
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from support.paths import TESTS
from support.races.race_table import Case

_TEXT = TESTS / "support" / "races" / "cuda_programs.txt"


class Program(Case):
    def run_on_cuda(self, *, bug: bool) -> str:
        """Run it on `cuda`. Returns the name of its file in reports."""
        file = f"{self.name} ({'bug' if bug else 'twin'})"
        run_text(self.text(bug=bug), file)
        return file


def run_text(text: str, file: str) -> None:
    """Run a program's text on `cuda`. Reports find its lines under the name `file`."""
    torch.manual_seed(0)
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names = _names()
    try:
        exec(compile(text, file, "exec"), names)
        torch.cuda.synchronize()
    finally:
        names.clear()


def _names() -> dict[str, Any]:
    found = (asyncio, contextlib, copy, functools, gc, heapq, io, queue, threading, weakref, torch)
    found += (OrderedDict, deque, ThreadPoolExecutor, as_completed, ThreadPool, checkpoint)
    found += (flex_attention,)
    names = {one.__name__: one for one in found}
    return {**names, "np": np, "nn": torch.nn, "F": torch.nn.functional}


def _programs() -> list[Program]:
    parts = ("\n" + _TEXT.read_text(encoding="utf-8")).split("\n== ")[1:]
    return [Program(name, code) for name, _, code in (part.partition("\n") for part in parts)]


PROGRAMS = _programs()
