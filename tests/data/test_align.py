"""The same number of batches on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.data.align import Aligned
from headrace.device import open_device
from headrace.errors import StepError
from headrace.parallel import SINGLE


def aligned(batches: Iterator[torch.Tensor]) -> Aligned:
    return Aligned(batches, SINGLE, open_device("cpu").ledger)


def test_a_loader_without_length_may_yield_one_tensor_again() -> None:
    batch = torch.ones(2)
    loader = aligned(batch for _ in range(3))
    found = [(one is batch, loader.alignment.ends_epoch) for one in loader]
    assert found == [(True, False), (True, False), (True, True)]


def test_a_loader_without_length_that_writes_to_a_batch_before_it_is_used_is_refused() -> None:
    batch = torch.ones(2)
    with pytest.raises(StepError, match="the loader wrote to batch 0"):
        list(aligned(batch.fill_(number) for number in range(3)))
