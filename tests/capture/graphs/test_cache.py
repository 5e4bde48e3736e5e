"""Graphs by shape: signatures, use counts and the limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from headrace.capture.graphs.cache import GraphCache
from headrace.capture.state.signatures import signature
from headrace.device import Device, open_device
from headrace.errors import CaptureError
from headrace.fake import FakeDevice


@dataclasses.dataclass
class Pair:
    ids: torch.Tensor
    language: str


class Boxed:
    def to(self, device: Any) -> Boxed:
        return self


class Extra(dict[str, Any]):
    """A dict with attributes."""


def with_note(batch: Any, note: Any) -> Any:
    batch.note = note
    return batch


class Opaque:
    """Equal only to itself, whatever its attributes are."""


CPU = open_device("cpu")


def signature_of(batch: Any) -> Any:
    return signature(batch, CPU)


class TestSignature:
    def test_same_shape_same_signature_of(self) -> None:
        assert signature_of((torch.ones(2, 3), torch.ones(4))) == signature_of(
            (torch.zeros(2, 3), torch.zeros(4))
        )

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (torch.ones(2, 3), torch.ones(3, 2)),
            (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64)),
            (torch.ones(2, 3), torch.ones(3, 2).t()),
            ((torch.ones(2),), [torch.ones(2)]),
            ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
            ((torch.ones(2), 3), (torch.ones(2), 4)),
            ((torch.ones(2), True), (torch.ones(2), 1)),
            ((torch.ones(2), 0.0), (torch.ones(2), -0.0)),
            ((torch.ones(2), None), (torch.ones(2), "none")),
            (Pair(torch.ones(2), "en"), Pair(torch.ones(2), "zh")),
            (with_note(Pair(torch.ones(2), "en"), 1), with_note(Pair(torch.ones(2), "en"), 2)),
            (with_note(Extra(x=torch.ones(2)), 1), with_note(Extra(x=torch.ones(2)), 2)),
        ],
    )
    def test_different_batches_have_different_signatures(self, one: Any, other: Any) -> None:
        assert signature_of(one) != signature_of(other)
        assert signature_of(one) == signature_of(one)

    def test_nested(self) -> None:
        batch = {"src": [torch.ones(2), (torch.ones(3), "x")], "pair": Pair(torch.ones(1), "en")}
        assert hash(signature_of(batch)) == hash(signature_of(batch))

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            ((torch.ones(2), Boxed()), "a batch holds a Boxed, which moves itself"),
            ((torch.ones(2), {1, 2}), "a batch holds a set, which cannot be compared"),
            ((torch.ones(2), Opaque()), "a batch holds a Opaque, which cannot be compared"),
            (torch.ones(2, requires_grad=True), "requires a gradient"),
            (
                with_note(Extra(x=torch.ones(2)), torch.ones(2)),
                "a Extra with a tensor in its attribute 'note'",
            ),
        ],
    )
    def test_batches_that_no_graph_can_hold(self, batch: Any, message: str) -> None:
        with pytest.raises(CaptureError, match=message):
            signature_of(batch)


def doubled(batch: Any) -> torch.Tensor:
    return batch[0] * 2


def on(device: Device, *numbers: float) -> tuple[torch.Tensor]:
    return (torch.tensor(numbers).to(device.torch_device),)


def use(cache: GraphCache[torch.Tensor], batch: Any) -> str:
    """Use a batch as the engine does. Returns how it ran."""
    key = batch[0].shape
    captured, way = cache.find(key), "replay"
    if captured is None and cache.is_due(key):
        captured, way = cache.capture(key, batch, doubled), "capture"
    if captured is None:
        return "eager"
    result = captured.replay(list(batch)).clone()
    assert torch.equal(result, batch[0] * 2)
    return way


class TestCache:
    def test_a_shape_is_captured_after_two_uses(self, capturing: Device) -> None:
        cache: GraphCache[torch.Tensor] = GraphCache(capturing, max_graphs=4, capture_after=2)
        ways = [use(cache, on(capturing, float(number), 1.0)) for number in range(6)]
        assert ways == ["eager", "eager", "capture", "replay", "replay", "replay"]
        assert len(cache) == cache.captures == 1

    def test_each_shape_has_its_own_graph(self, capturing: Device) -> None:
        cache: GraphCache[torch.Tensor] = GraphCache(capturing, max_graphs=4, capture_after=1)
        for _ in range(4):
            for size in (3, 2, 1):
                use(cache, on(capturing, *map(float, range(size))))
        assert (len(cache), cache.captures, cache.evictions) == (3, 3, 0)

    def test_a_larger_shape_leaves_the_other_graphs_alone(self, capturing: Device) -> None:
        cache: GraphCache[torch.Tensor] = GraphCache(capturing, max_graphs=4, capture_after=1)
        batches = [on(capturing, *[1.0] * size) for size in (1, 10, 100)]
        for batch in batches:
            assert [use(cache, batch) for _ in range(3)] == ["eager", "capture", "replay"]
        assert [use(cache, batch) for batch in batches] == ["replay"] * 3
        assert (len(cache), cache.captures, cache.evictions) == (3, 3, 0)

    def test_a_larger_shape_replaces_the_others_if_memory_is_scarce(self) -> None:
        """Memory blocks of small shapes are of no use to a large one."""
        with FakeDevice(memory_bytes=10_000_000) as device:
            cache: GraphCache[torch.Tensor] = GraphCache(device, max_graphs=4, capture_after=1)
            small, large = on(device, *[1.0] * 10_000), on(device, *[1.0] * 11_000)
            assert [use(cache, small) for _ in range(3)] == ["eager", "capture", "replay"]
            others = torch.ones(2_424_000).to(device.torch_device)  # leaves 140 of 10,000 kB
            assert [use(cache, large) for _ in range(2)] == ["eager", "capture"]
            assert len(cache) == 1
            del others
            assert [use(cache, small) for _ in range(2)] == ["capture", "replay"]
            assert use(cache, large) == "replay"
            assert (len(cache), cache.captures, cache.evictions) == (2, 3, 0)
            cache.close()

    def test_the_least_used_graph_is_replaced(self, capturing: Device) -> None:
        cache: GraphCache[torch.Tensor] = GraphCache(capturing, max_graphs=2, capture_after=1)
        one, two, three = (on(capturing, *[1.0] * size) for size in (3, 2, 1))
        for batch in (one, one, one, one, two, two):
            use(cache, batch)
        assert [use(cache, three) for _ in range(4)] == ["eager", "eager", "capture", "replay"]
        assert cache.evictions == 1
        assert use(cache, one) == "replay"  # the one used most is still there
        assert use(cache, two) == "eager"  # until it is used more than another

    def test_shapes_that_take_turns_do_not_evict_each_other(self, capturing: Device) -> None:
        cache: GraphCache[torch.Tensor] = GraphCache(capturing, max_graphs=2, capture_after=1)
        sizes = [3, 2, 1]
        for _ in range(20):
            for size in sizes:
                use(cache, on(capturing, *[1.0] * size))
        assert cache.captures <= 4

    def test_memory_is_counted_and_freed(self, capturing: Device) -> None:
        cache: GraphCache[torch.Tensor] = GraphCache(capturing, max_graphs=2, capture_after=0)
        batch = (torch.ones(1 << 20).to(capturing.torch_device),)
        use(cache, batch)  # PyTorch allocates memory for itself at the first capture
        cache.close()
        before = capturing.memory().reserved
        use(cache, batch)
        assert cache.memory_bytes >= 4 << 20
        assert capturing.memory().reserved > before
        cache.close()
        assert (len(cache), cache.memory_bytes) == (0, 0)
        assert capturing.memory().reserved == before
        assert use(cache, batch) == "capture"  # the cache may be used again

    def test_endless_shapes_do_not_fill_the_memory(self) -> None:
        cache: GraphCache[torch.Tensor] = GraphCache(
            open_device("cpu"), max_graphs=2, capture_after=2
        )
        for number in range(20_000):
            cache.find(number)
        assert len(cache._uses) <= 4096
