"""`prefetch`: every batch once and in order, on the device, whatever the loader does."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from headrace.data import BatchCache, Prefetcher, batch_leaves, prefetch, rebuild_batch
from headrace.device import Device
from headrace.errors import DeviceMismatchError, PlanError
from headrace.fake import Costs, FakeDevice
from support.training.batches import MovesItself, Pair, Sample, nested


def numbers(count: int, *shape: int) -> list[torch.Tensor]:
    return [torch.full(shape or (3,), float(n)) for n in range(count)]


def values(loader: Any) -> list[float]:
    return [float(batch.flatten()[0]) for batch in loader]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_batch_once_in_order(device: Device, depth: int, count: int) -> None:
    loader = prefetch(numbers(count), device, depth)
    assert len(loader) == count
    for _ in range(2):  # the second loop starts the loader anew
        assert values(loader) == [float(n) for n in range(count)]


def test_batches_are_on_the_device(device: Device) -> None:
    for batch in prefetch([{"x": torch.ones(2), "name": "n"}], device):
        assert device.holds(batch["x"])
        assert batch["name"] == "n"


def test_the_loader_begins_with_the_first_batch(device: Device) -> None:
    """Some libraries call `iter` only to see whether it works: that must fetch nothing."""
    begun: list[bool] = []

    class Loader(list[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            begun.append(True)
            return super().__iter__()

    arriving = iter(prefetch(Loader(numbers(3)), device))
    assert not begun
    assert values(arriving) == [0.0, 1.0, 2.0]
    assert begun == [True]
    closed = iter(prefetch(Loader(numbers(3)), device))
    closed.close()
    assert list(closed) == []
    assert begun == [True]


def test_a_generator_without_length(device: Device) -> None:
    loader = prefetch((batch for batch in numbers(4)), device)
    with pytest.raises(TypeError):
        len(loader)
    assert values(loader) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.unsanitized
def test_a_data_loader_with_a_last_partial_batch(device: Device, workers: int) -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(10.0)),
        batch_size=4,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for _ in range(2):
        found = [batch[0].cpu().tolist() for batch in prefetch(loader, device)]
        assert found == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]


def test_varying_shapes_and_types(device: Device) -> None:
    sources = [
        torch.arange(6).view(2, 3),
        torch.ones(5, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.tensor(3.5),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(3, 4)[:, ::2],
    ]
    for source, batch in zip(sources, prefetch(sources, device), strict=True):
        assert batch.dtype == source.dtype
        assert batch.shape == source.shape
        if device.asynchronous:
            assert batch.stride() == source.clone().stride()  # as after a plain .to()
        assert torch.equal(batch.cpu(), source)


@pytest.mark.parametrize("pinned", [False, True])
def test_many_small_tensors_are_copied_together(pinned: bool) -> None:
    with FakeDevice() as device:
        batch = [torch.full((2, 2), float(n)) for n in range(500)] + [torch.tensor([7])]
        if pinned:
            batch = [part.pin_memory() for part in batch]
        (arrived,) = prefetch([batch], device)
        copies = [span for span in device.timeline().spans if span.kind == "copy"]
        assert len(copies) == 2  # one for each dtype
        for source, there in zip(batch, arrived, strict=True):
            assert there.shape == source.shape
            assert torch.equal(there.cpu(), source)


def test_a_batch_may_be_kept(device: Device) -> None:
    kept = list(prefetch(numbers(6), device, depth=1))
    assert values(kept) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_loader_buffers_may_be_reused_by_the_loader(device: Device) -> None:
    def loader() -> Iterator[torch.Tensor]:
        buffer = torch.zeros(4)
        for n in range(5):
            buffer.fill_(n)
            yield buffer

    assert device.asynchronous is False or values(prefetch(loader(), device, 2)) == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
    ]


def test_objects_that_move_themselves(device: Device) -> None:
    (batch,) = prefetch([(MovesItself(), torch.ones(2))], device)
    assert batch[0].moved_to == device.torch_device
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    ((arrived,),) = prefetch([(packed,)], device)
    assert device.holds(arrived.data)
    assert arrived.batch_sizes.device == torch.device("cpu")
    if device.asynchronous:
        assert device.ledger.statistics()["object_copy"].count == 2


class Immovable:
    def to(self, device: torch.device) -> Immovable:
        raise BrokenError


class Picky(tuple[Any, ...]):
    """A batch whose class cannot be rebuilt."""

    def __new__(cls, parts: list[Any]) -> Picky:
        if any(part.device.index is not None for part in parts):
            raise BrokenError
        return super().__new__(cls, parts)


@pytest.mark.parametrize("batch", [(torch.ones(1000), Immovable()), Picky([torch.ones(1000)])])
def test_an_error_while_a_batch_is_sent_leaves_no_copy_running(batch: Any) -> None:
    """Its memory must not be reused while the copy into it runs."""
    with FakeDevice(costs=Costs(by_name={"copy h2d": 2000})) as device:
        with pytest.raises(BrokenError):
            next(iter(prefetch([batch], device)))
        torch.empty(1000, device=device.torch_device).fill_(2.0)


def test_named_tuples_and_dataclasses(device: Device) -> None:
    (pair,) = prefetch([Pair(torch.ones(1), torch.zeros(1))], device)
    assert isinstance(pair, Pair)
    assert device.holds(pair.trg)
    (sample,) = prefetch([Sample(torch.ones(1), ["a"])], device)
    assert sample.names == ["a"]
    assert device.holds(sample.ids)


def test_batches_on_the_device_already_are_not_copied(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    there = [torch.full((2,), float(n), device=device.torch_device) for n in range(3)]
    for source, batch in zip(there, prefetch(there, device), strict=True):
        assert batch is source
    warnings = [one for one in caplog.records if "already" in one.getMessage()]
    assert len(warnings) == (1 if device.asynchronous else 0)


def test_a_batch_of_another_device_is_refused() -> None:
    with FakeDevice() as device, pytest.raises(DeviceMismatchError, match="a tensor on meta"):
        list(prefetch([torch.ones(2, device="meta")], device))


@pytest.mark.parametrize("depth", [-1, 1.5, True, None])
def test_depth_is_checked(depth: Any) -> None:
    with pytest.raises(PlanError, match=r"depth = .*: expected a whole number"):
        prefetch([], "cpu", depth)


class BrokenError(Exception):
    pass


def breaking_after(count: int) -> Iterator[torch.Tensor]:
    yield from numbers(count)
    raise BrokenError(f"after {count}")


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("depth", [0, 2, 9])
@pytest.mark.unsanitized
def test_an_error_comes_after_the_batches_before_it(device: Device, count: int, depth: int) -> None:
    found: list[float] = []

    def run() -> None:
        for batch in prefetch(breaking_after(count), device, depth):
            found.append(float(batch[0]))

    with pytest.raises(BrokenError, match=f"after {count}"):
        run()
    assert found == [float(n) for n in range(count)]


def test_leaving_early_leaves_nothing_behind(device: Device) -> None:
    closed = []

    def loader() -> Iterator[torch.Tensor]:
        try:
            yield from numbers(10)
        finally:
            closed.append(True)

    threads = threading.active_count()
    for batch in prefetch(loader(), device):
        marker = weakref.ref(batch)
        break
    del batch
    gc.collect()
    assert closed == [True]
    assert marker() is None
    assert device.pinned.lent == 0
    assert threading.active_count() == threads


@pytest.mark.unsanitized
def test_an_exception_in_the_loop_leaves_nothing_behind(device: Device) -> None:
    def run() -> None:
        for _ in prefetch(numbers(10), device):
            raise BrokenError

    with pytest.raises(BrokenError):
        run()
    gc.collect()
    assert device.pinned.lent == 0


def test_memory_is_bounded_by_the_depth() -> None:
    with FakeDevice() as device:
        for batch in prefetch(numbers(100, 1000), device, depth=2):
            assert device.memory().allocated <= 4 * 4000  # one in use, two ahead, the one before
            device.work(10.0, reads=[batch])
        del batch
        assert device.memory().allocated == 0
        # The host runs far ahead of the device, but the number of queued copies is bounded.
        assert device.pinned.held_bytes <= 34 * 4096
        assert device.ledger.statistics()["copies_behind"].count > 0


@pytest.mark.parametrize(("depth", "count"), [(2, 10), (31, 100), (32, 100)])
def test_copies_overlap_compute(depth: int, count: int) -> None:
    costs = Costs(kernel_us=0, query_us=0, by_name={"copy h2d": 2000})
    with FakeDevice(costs=costs) as device:
        for _ in prefetch([batch.pin_memory() for batch in numbers(count)], device, depth):
            device.work(10.0)
        device.synchronize("end")
    assert device.timeline().length_ms == 2.0 + count * 10.0
    waits = device.ledger.statistics()
    assert waits.device_waits() - waits["copies_behind"].count == 1


def test_staging_memory_is_reused_as_soon_as_its_copy_is_done() -> None:
    with FakeDevice(costs=Costs(kernel_us=1, launch_us=1)) as device:
        for at, batch in enumerate(
            prefetch([torch.ones(512 << n % 8) for n in range(400)], device)
        ):
            device.work(0.001, reads=[batch])
            if at == 100:
                held = device.pinned.held_bytes
        assert device.pinned.held_bytes == held


def test_the_loader_is_in_the_ledger_as_data() -> None:
    with FakeDevice(costs=Costs(query_us=0)) as device:

        def slow() -> Iterator[torch.Tensor]:
            for batch in numbers(3):
                device.host_work(5.0, "load")
                yield batch

        list(prefetch(slow(), device))
    assert device.ledger.statistics()["data"].total_ms == 15.0
    assert device.ledger.statistics().device_waits() == 0


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_loader_may_write_each_batch_into_the_same_tensors(
    device: Device, buffers: int, on_device: bool
) -> None:
    target = device.torch_device if on_device else "cpu"

    def reusing() -> Iterator[torch.Tensor]:
        made = [torch.empty(3, device=target) for _ in range(buffers)]
        for number in range(6):
            yield made[number % buffers].fill_(number)

    assert values(prefetch(reusing(), device, depth=3)) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_loader_that_writes_on_the_device_waits_for_the_stream_that_reads() -> None:
    with FakeDevice() as device:
        reader, target = device.stream("reader"), device.torch_device

        def reusing() -> Iterator[torch.Tensor]:
            made = torch.empty(3, device=target)
            for number in range(4):
                yield made.fill_(number)

        found = []
        for batch in Prefetcher(reusing(), device, owner=reader):
            with device.use(reader):
                found.append(batch.sum())
        device.synchronize("test", reader)
        assert [float(one) for one in found] == [0.0, 3.0, 6.0, 9.0]


def test_objects_that_move_themselves_in_place_are_fetched_ahead() -> None:
    """As the batches of PyTorch Geometric: their `to` returns the object itself."""

    class Moving:
        def __init__(self, number: int) -> None:
            self.x = torch.full((3,), float(number))

        def to(self, device: torch.device, non_blocking: bool = False) -> Moving:
            self.x = self.x.to(device)
            return self

    fetched: list[int] = []

    def loader() -> Iterator[Moving]:
        for number in range(6):
            fetched.append(number)
            yield Moving(number)

    with FakeDevice() as device:
        batches = iter(prefetch(loader(), device, depth=2))
        assert (float(next(batches).x[0]), fetched) == (0.0, [0, 1, 2])


def test_a_loader_may_fill_the_same_container_with_each_batch(device: Device) -> None:
    def reusing() -> Iterator[dict[str, Any]]:
        batch: dict[str, Any] = {}
        for number in range(6):
            batch.update(number=number, x=torch.full((3,), float(number)))
            yield batch

    found = [(batch["number"], float(batch["x"][0])) for batch in prefetch(reusing(), device)]
    assert found == [(number, float(number)) for number in range(6)]


class TestCache:
    def test_a_list_of_batches_is_copied_once(self) -> None:
        with FakeDevice() as device:
            source, cache = numbers(4), BatchCache(3)
            loader = Prefetcher(source, device, cache=cache)
            for _ in range(3):
                assert values(loader) == [0.0, 1.0, 2.0, 3.0]
            copies = [s for s in device.timeline().spans if s.name == "copy h2d"]
            assert len(copies) == 4 + 1 + 1  # three stay, the fourth is copied each time
            assert (cache.hits, cache.misses) == (6, 6)

    def test_a_batch_that_has_changed_is_copied_again(self) -> None:
        with FakeDevice() as device:
            source, cache = numbers(2), BatchCache(4)
            loader = Prefetcher(source, device, cache=cache)
            assert values(loader) == [0.0, 1.0]
            source[0].fill_(9)
            assert values(loader) == [9.0, 1.0]

    def test_values_beside_one_tensor_are_those_of_each_batch(self) -> None:
        x = torch.ones(2)
        with FakeDevice() as device:
            loader = Prefetcher([(x, 1), (x, 2), {"a": x}], device, depth=0, cache=BatchCache(4))
            for _ in range(2):
                first, second, third = loader
                assert (first[1], second[1], list(third)) == (1, 2, ["a"])
                assert first[0] is second[0] is third["a"]

    def test_a_batch_that_a_step_writes_to_comes_twice_in_a_row(self) -> None:
        batch = torch.ones(2)
        with FakeDevice() as device:
            found = []
            for copy in Prefetcher([batch] * 4, device, cache=BatchCache(4)):
                found.append(copy.sum().item())
                copy.mul_(2)
        assert found == [2.0] * 4

    @pytest.mark.parametrize("passes", [1, 2])
    def test_two_passes_at_a_time_share_no_batch_that_is_still_ahead(self, passes: int) -> None:
        batches = numbers(4)
        with FakeDevice() as device:
            loader, found = Prefetcher(batches, device, cache=BatchCache(4)), []
            for _ in range(passes):
                for outer in loader:
                    found.append(float(outer[0]))
                    for inner in loader:
                        inner.mul_(2)
        assert found == [0.0, 1.0, 2.0, 3.0] * passes

    def test_a_data_loader_never_hits(self) -> None:
        with FakeDevice() as device:
            cache = BatchCache(4)
            data = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, shuffle=True)
            for _ in range(2):
                found = [b[0].cpu() for b in Prefetcher(data, device, cache=cache)]
                assert sorted(torch.cat(found).tolist()) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
            assert cache.hits == 0


class Counting:
    """A loader of numbers with a state: how many it has yielded."""

    def __init__(self, count: int = 8, breaks_after: int | None = None) -> None:
        self.count, self.at, self.breaks_after = count, 0, breaks_after

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([float(self.at - 1)])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        if self.breaks_after is not None and self.at >= self.breaks_after:
            raise BrokenError("the state is gone")
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stateless(list[torch.Tensor]):
    """A loader whose `state_dict` raises: it has the methods of a stateful loader, but no state."""

    asked = 0

    def state_dict(self) -> Any:
        self.asked += 1
        raise RuntimeError("not a stateful loader")

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("not a stateful loader")


class Flagging:
    """A loader that raises a flag with its last batch, as those prepared by Accelerate do."""

    end_of_dataloader = False
    is_active = False

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.is_active, self.end_of_dataloader = True, False
        for n in range(self.count):
            self.end_of_dataloader = n == self.count - 1
            yield torch.tensor([float(n)])
        self.is_active = False


class TestTheLoadersAttributes:
    def test_public_attributes_are_forwarded(self, device: Device) -> None:
        data = TensorDataset(torch.arange(10.0))
        loader = DataLoader(data, batch_size=4, shuffle=True)
        found = prefetch(loader, device)
        assert found.dataset is data
        assert found.sampler is loader.sampler
        assert found.batch_sampler is loader.batch_sampler
        assert (found.batch_size, found.num_workers, found.drop_last) == (4, 0, False)

    def test_methods_are_forwarded_too(self) -> None:
        class Shuffled(list[torch.Tensor]):
            epoch = 0

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

        loader = Shuffled(numbers(2))
        prefetch(loader, "cpu").set_epoch(3)
        assert loader.epoch == 3

    @pytest.mark.parametrize("name", ["set_epoch", "state_dict", "_index_sampler", "__array__"])
    def test_what_the_loader_lacks_is_missing(self, name: str) -> None:
        found = prefetch(DataLoader(TensorDataset(torch.ones(2))), "cpu")
        assert not hasattr(found, name)

    def test_an_error_names_both(self) -> None:
        with pytest.raises(
            AttributeError, match=r"nor its loader, a 'DataLoader', has .* 'epochs'"
        ):
            _ = prefetch(DataLoader(TensorDataset(torch.ones(2))), "cpu").epochs

    def test_the_prefetchers_own_attributes_come_first(self) -> None:
        class Deep(list[torch.Tensor]):
            depth = 99

        assert prefetch(Deep(numbers(2)), "cpu", 3).depth == 3

    @pytest.mark.parametrize("loader", [numbers(3), Counting(3)])
    def test_it_can_be_copied(self, loader: Any) -> None:
        assert values(copy.copy(prefetch(loader, "cpu"))) == [0.0, 1.0, 2.0]
        assert not hasattr(Prefetcher.__new__(Prefetcher), "dataset")  # one that `copy` is making


class TestTheLoadersState:
    @pytest.mark.parametrize("depth", [0, 2, 20])
    def test_it_belongs_to_the_batch_handed_out_last(self, device: Device, depth: int) -> None:
        found = prefetch(Counting(), device, depth)
        assert found.state_dict() == {"at": 0}  # type: ignore[attr-defined]
        for number, _ in enumerate(found):
            assert found.state_dict() == {"at": number + 1}  # type: ignore[attr-defined]
        assert found.state_dict() == {"at": 0}  # type: ignore[attr-defined]

    @pytest.mark.parametrize("depth", [0, 2, 20])
    def test_it_does_so_also_after_a_break(self, device: Device, depth: int) -> None:
        found: Any = prefetch(Counting(), device, depth)
        for number, _ in enumerate(found):
            if number == 3:
                break
        state = found.state_dict()
        other: Any = prefetch(Counting(), device, depth)
        other.load_state_dict(state)
        assert other.state_dict() == state == {"at": 4}
        assert values(other) == [4.0, 5.0, 6.0, 7.0]

    def test_a_prefetched_loader_inside_another(self, device: Device) -> None:
        found: Any = prefetch(prefetch(Counting(), device), device)
        for number, _ in enumerate(found):
            assert found.state_dict() == {"at": number + 1}
            if number == 4:
                break

    def test_a_loader_whose_state_dict_raises_is_stateless(
        self, device: Device, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "headrace")
        loader = Stateless(numbers(5))
        found: Any = prefetch(loader, device)
        for _ in range(2):
            assert values(found) == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert loader.asked == 2  # once in each pass
        said = [one for one in caplog.records if "Stateless.state_dict() raised" in one.message]
        assert [one.levelname for one in said] == ["INFO"]
        with pytest.raises(RuntimeError, match="not a stateful loader"):
            found.state_dict()  # raises as the loader's own does

    def test_one_that_has_worked_before_must_not_raise(self, device: Device) -> None:
        arriving = iter(prefetch(Counting(breaks_after=3), device))
        assert [float(next(arriving)) for _ in range(2)] == [0.0, 1.0]
        with pytest.raises(BrokenError, match="the state is gone"):
            next(arriving)

    def test_also_in_the_next_pass(self, device: Device) -> None:
        loader = Counting(3)
        assert values(prefetch(loader, device)) == [0.0, 1.0, 2.0]
        loader.breaks_after = 0
        with pytest.raises(BrokenError):
            list(prefetch(loader, device))


@pytest.mark.parametrize("depth", [0, 2, 20])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_the_end_flag_is_raised_with_the_last_batch_only(
    device: Device, depth: int, count: int
) -> None:
    """Accelerate's gradient accumulation reads the flag in the loop, behind the prefetching."""
    loader = Flagging(count)
    for _ in range(2):
        said = [
            (loader.end_of_dataloader, loader.is_active) for _ in prefetch(loader, device, depth)
        ]
        assert said == [(False, True)] * (count - 1) + [(True, True)]
        assert not loader.is_active


@settings(max_examples=40, deadline=None)
@given(st.lists(nested, max_size=5), st.integers(0, 4), st.booleans())
def test_any_batches_arrive_as_they_were(source: list[Any], depth: int, pin: bool) -> None:
    with FakeDevice() as device:
        arrived = list(prefetch(source, device, depth, pin=pin))
        back = [rebuild_batch(b, [leaf.cpu() for leaf in batch_leaves(b)]) for b in arrived]
    assert repr(back) == repr(source)
