"""The time that a thread waits for its loader."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headrace.diagnosis import data_waits
from headrace.diagnosis.data_waits import DataWaits


def test_only_the_training_thread_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(data_waits, "perf_counter_ns", lambda: next(ticks))
    loader = DataLoader(TensorDataset(torch.ones(3)))
    waits = DataWaits()
    waits.begin(threading.get_ident())
    with waits.watching():
        assert len(list(loader)) == 3
        assert waits.take() == 4  # and once to be told that there is no more
        other = threading.Thread(target=lambda: list(loader))
        other.start()
        other.join()
    assert waits.take() == 0
