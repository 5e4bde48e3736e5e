"""What a loader's errors mean. (What else `source.py` does is tested by `test_prefetcher.py`.)"""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from headrace.data import loader_error


def test_a_worker_that_died_while_it_handed_over_a_batch() -> None:
    here, there = Pipe()
    there.close()
    with pytest.raises(EOFError) as caught:
        here.recv()
    problem = loader_error(caught.value)
    assert problem is not None
    assert str(problem).startswith("a loader process exited unexpectedly")


def test_an_error_of_the_datasets_own_connection() -> None:
    assert loader_error(ConnectionResetError("reset by the server")) is None
