"""Where the host's generators stand, and going back there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.data import host_states, set_host_states

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "python's normal": lambda: random.gauss(0, 1),
    "python's bits": lambda: random.getrandbits(1),
    "python's seed": lambda: random.seed(5),
    "numpy": numpy.random.rand,
    "numpy's normal": numpy.random.randn,
    "numpy's seed": lambda: numpy.random.seed(5),
    "nothing": lambda: None,
}


class TestHostStates:
    def test_a_normal_number_in_stock_is_part_of_them(self) -> None:
        """NumPy makes two at a time: the second is drawn without a trace in the generator."""
        numpy.random.seed(1)
        host_states()
        numpy.random.randn()
        with_stock = host_states()
        second = numpy.random.randn()
        without = host_states()
        third = numpy.random.randn()
        set_host_states(with_stock)
        assert numpy.random.randn() == second
        set_host_states(without)
        assert numpy.random.randn() == third
        set_host_states(with_stock)
        assert host_states()["numpy"][3] == 1  # the words are the same as without

    @given(draws=st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
    def test_go_back(self, draws: list[str]) -> None:
        """To any moment between draws of all kinds, some of which leave few traces."""
        states, drawn = [host_states()], []
        for name in draws:
            drawn.append(DRAWS[name]())
            states.append(host_states())
        for at, state in enumerate(states):
            set_host_states(state)
            assert [DRAWS[name]() for name in draws[at:]] == drawn[at:]
