"""The feed: batches with the loader's position after each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.data import BlockingCopies, Cursor, Feed, Prefetcher
from headrace.data.loader_rng import LoaderRng
from headrace.device import Device


class Counting:
    """A loader with a state: how many batches it has yielded."""

    def __init__(self, count: int) -> None:
        self._count, self._given = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self._given, self._count):
            self._given = number + 1
            yield torch.full((2,), float(number))

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state["given"]


def feed_of(loader: Any, device: Device, depth: int = 2, **options: Any) -> Feed:
    loader_rng = options.pop("loader_rng", None)
    prefetcher = Prefetcher(loader, device, depth, loader_rng=loader_rng)
    return Feed(prefetcher, **{"first": 0, "start": Cursor(0), "limit": None} | options)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_cursor_belongs_to_its_batch_however_many_were_fetched(
    device: Device, depth: int
) -> None:
    feed = feed_of(Counting(5), device, depth)
    assert feed.begin() == Cursor(0, loader={"given": 0})
    fetched = list(feed)
    assert [one.number for one in fetched] == list(range(5))
    assert [one.cursor.own for one in fetched] == list(range(1, 6))
    assert [one.cursor.loader for one in fetched] == [{"given": n} for n in range(1, 6)]
    assert [float(one.batch[0]) for one in fetched] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert all((one.samples, one.nbytes) == (2, 8) for one in fetched)
    assert feed.end_state == {"given": 5}


def test_batches_are_numbered_from_where_the_pass_begins(device: Device) -> None:
    feed = feed_of(Counting(2), device, first=7, start=Cursor(6))
    feed.begin()
    assert [(one.number, one.cursor.own) for one in feed] == [(7, 7), (8, 8)]


def test_a_loader_stopped_at_the_limit_has_not_ended(device: Device) -> None:
    feed = feed_of(Counting(2), device, limit=2)
    feed.begin()
    assert len(list(feed)) == 2
    assert feed.end_state is None


def test_rng_states_before_batches_that_were_fetched_and_not_trained_on(device: Device) -> None:
    def drawing() -> Iterator[torch.Tensor]:
        for _ in range(6):
            yield torch.rand(2)

    loader = drawing()
    torch.manual_seed(0)
    feed = feed_of(loader, device, depth=2, loader_rng=LoaderRng(loader))
    start = feed.begin()
    first, second = next(feed), next(feed)
    # The second is being trained on, and two more were fetched, unless nothing is copied.
    ahead = 2 if device.asynchronous else 0
    states = feed.drawn_ahead(first.cursor)
    assert [len(feed.drawn_ahead(second.cursor)), len(states)] == [ahead, ahead + 1]
    assert feed.is_ahead_of(start)
    assert not feed.is_ahead_of(second.cursor)
    for fetched in (second, *(next(feed) for _ in range(ahead))):
        torch.set_rng_state(states.pop(0)["host"])
        assert torch.equal(fetched.batch.cpu(), torch.rand(2))
    feed.close()


def test_blocking_copies_are_waited_for_one_by_one(device: Device) -> None:
    feed = feed_of(Counting(3), device, depth=0)
    transfer = device.stream("transfer")
    feed.begin()
    before = device.ledger.statistics()["copy"].count
    assert len(list(BlockingCopies(feed, device, (transfer,)))) == 3
    assert device.ledger.statistics()["copy"].count - before == 3
