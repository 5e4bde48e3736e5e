"""The states of the host's generators, and going back to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.data import host_rng_states, set_host_rng_states

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
    def test_numpys_stored_normal_number_is_part_of_them(self) -> None:
        """NumPy makes normal numbers in pairs: drawing the second leaves the generator's words as
        they were."""
        numpy.random.seed(1)
        host_rng_states()
        numpy.random.randn()
        with_stored = host_rng_states()
        second = numpy.random.randn()
        without = host_rng_states()
        third = numpy.random.randn()
        set_host_rng_states(with_stored)
        assert numpy.random.randn() == second
        set_host_rng_states(without)
        assert numpy.random.randn() == third
        set_host_rng_states(with_stored)
        assert host_rng_states()["numpy"][3] == 1  # with the same words as `without`

    @given(draws=st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
    def test_go_back(self, draws: list[str]) -> None:
        """From any state between draws of all kinds, the same numbers follow again."""
        states, drawn = [host_rng_states()], []
        for name in draws:
            drawn.append(DRAWS[name]())
            states.append(host_rng_states())
        for at, state in enumerate(states):
            set_host_rng_states(state)
            assert [DRAWS[name]() for name in draws[at:]] == drawn[at:]
