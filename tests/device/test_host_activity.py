"""Copies and random draws on the host, each with its line and what to do about it."""

from __future__ import annotations

import random

import numpy
import torch

from headrace.device import Obstacle, open_device
from headrace.device.host_activity import HostActivity
from headrace.source_lines import Site


def test_it_names_copies_from_host_memory_and_draws_on_the_host() -> None:
    found: list[Obstacle] = []
    host, result = torch.ones(3), torch.zeros(3)
    with HostActivity(open_device("cpu"), found):
        result.copy_(host)
        random.random()
        torch.rand(2)
        numpy.random.rand()
    copy, *draws = found
    assert copy.site is not None
    assert copy.site.file == __file__
    assert str(copy).startswith(f"host memory is copied to the device at {copy.site}: make ")
    first = test_it_names_copies_from_host_memory_and_draws_on_the_host.__code__.co_firstlineno
    assert [draw.site for draw in draws] == [Site(__file__, first + n) for n in (6, 5, 7)]
    assert [str(draw) for draw in draws] == [
        f"the step draws random numbers from {generator}: draw them on the device "
        "(torch.rand(…, device=…)), or in the loader"
        for generator in (
            f"torch's CPU generator, on the host at {draws[0].site}",
            f"the random module, on the host at {draws[1].site}",
            f"numpy.random, on the host at {draws[2].site}",
        )
    ]


def test_draws_by_functions_imported_by_name_are_found_without_their_line() -> None:
    before, found = (random.random, numpy.random.rand), []
    shuffle, rand = random.shuffle, numpy.random.rand
    with HostActivity(open_device("cpu"), found):
        shuffle([1, 2, 3])
        rand()
    assert [draw.site for draw in found] == [None, None]
    assert (random.random, numpy.random.rand) == before


def test_work_on_the_device_alone_is_no_obstacle() -> None:
    found: list[Obstacle] = []
    with HostActivity(open_device("cpu"), found):
        torch.ones(3).mul(2).sum()
        torch.zeros(0).copy_(torch.ones(0))  # nothing to copy
    assert found == []
