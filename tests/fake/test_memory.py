"""The fake device's memory: what lies on it, what may be mixed, and where the host waits unseen."""

from __future__ import annotations

import copy
import ctypes
import io

import numpy as np
import pytest
import safetensors.torch
import torch

from headrace.errors import DeviceError, DeviceMismatchError
from headrace.fake import FakeDevice
from headrace.races.layout import Layout
from support.races.race_cases import split


class TestMemory:
    def test_what_lies_on_the_device(self) -> None:
        with FakeDevice() as device:
            here, host = torch.ones(3, device=device.torch_device), torch.ones(3)
            for tensor in (here, here + 1, here[1:], here.t(), host.to(device.torch_device)):
                assert device.holds(tensor)
                assert tensor.device == device.torch_device
            for tensor in (host, host + 1, here.cpu(), here.to("cpu"), torch.zeros(2)):
                assert not device.holds(tensor)
                assert tensor.device == torch.device("cpu")
            assert device.holds(torch.arange(3, device=here.device))
            assert device.holds(torch.tensor([1, 2], device=device.torch_device))
            assert device.holds(host.to(here))
            assert here.to(device.torch_device) is here

    def test_a_model_moves_there_and_back(self) -> None:
        with FakeDevice() as device:
            model = torch.nn.Linear(3, 2).to(device.torch_device)
            assert all(device.holds(parameter) for parameter in model.parameters())
            twin = copy.deepcopy(model)
            assert all(device.holds(parameter) for parameter in twin.parameters())
            assert device.holds(copy.deepcopy(torch.ones(2, device=device.torch_device)))
            model.cpu()
            assert not any(device.holds(parameter) for parameter in model.parameters())

    def test_mixing_host_and_device_fails_as_on_a_gpu(self) -> None:
        with FakeDevice() as device:
            here = torch.ones(3, device=device.torch_device)
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                here + torch.ones(3)
            assert device.holds(here * torch.tensor(2.0))  # a 0-dim host tensor is a number
            assert device.holds(here[torch.tensor([0, 2])])  # and indices may lie on the host
            with pytest.raises(TypeError, match="can't convert fake:1 device type tensor to numpy"):
                here.numpy()
            with pytest.raises(RuntimeError, match="cannot pin a tensor on fake:1"):
                here.pin_memory()

    def test_safetensors_reads_pinned_memory(self) -> None:
        for waits in (False, True):
            with FakeDevice(check=False) as device:
                here, pinned = torch.arange(4.0, device=device.torch_device), torch.zeros(2, 4)
                pinned = pinned.pin_memory()
                pinned[0].copy_(here, non_blocking=True)
                safetensors.torch.save({"row": pinned[1]})  # another row
                assert device.races == []
                if waits:
                    device.synchronize("test")
                saved = safetensors.torch.save({"row": pinned[0]})
                assert safetensors.torch.load(saved)["row"].tolist() == [0, 1, 2, 3]
            assert len(device.races) == (0 if waits else 1)
        numbers = (ctypes.c_int * 3)(1, 2, 3)
        assert np.ctypeslib.as_array(numbers).tolist() == [1, 2, 3]

    def test_pinned_memory(self) -> None:
        with FakeDevice() as device:
            pinned = torch.ones(4).pin_memory()
            assert pinned.is_pinned()
            assert pinned.pin_memory() is pinned
            assert not torch.ones(4).is_pinned()
            assert torch.empty(4, pin_memory=True).is_pinned()
            assert device.is_pinned(pinned[1:])

    def test_memory_is_counted_and_freed(self) -> None:
        with FakeDevice() as device:
            before = device.memory().allocated
            kept = torch.ones(1000, device=device.torch_device)
            assert device.memory().allocated == before + 4000
            view = kept[10:]
            del kept
            assert device.memory().allocated == before + 4000
            del view
            assert device.memory().allocated == before
            assert device.memory().peak_allocated >= before + 4000

    def test_record_stream_of_a_host_tensor(self) -> None:
        with FakeDevice() as device, pytest.raises(DeviceError, match="is not on fake:1"):
            device.record_stream(torch.ones(1), device.stream("side"))

    def test_a_named_device_is_where_it_lies(self) -> None:
        with FakeDevice() as device:
            here, host = torch.ones(4, device=device.torch_device), torch.ones(4)
            for tensor in (
                torch.zeros_like(here, device="cpu"),
                torch.full_like(here, 2, device=torch.device("cpu")),
                here.new_zeros(3, device="cpu"),
                here.new_tensor([1.0], device="cpu"),
            ):
                assert not device.holds(tensor)
            for tensor in (
                torch.zeros_like(host, device=device.torch_device),
                host.new_ones(3, device=device.torch_device),
                torch.rand_like(here),
                here.new_full((2,), 1.0),
            ):
                assert device.holds(tensor)
            assert device.hidden_waits == []
            assert device.holds(here.new_tensor([1.0, 2.0]))
            assert torch.empty_like(here, device="cpu", pin_memory=True).is_pinned()
            with pytest.raises(RuntimeError, match="cannot pin a tensor on fake:1"):
                torch.empty(3, device=device.torch_device, pin_memory=True)

    def test_an_index_on_the_device_into_host_memory(self) -> None:
        with FakeDevice() as device:
            index = torch.tensor([1, 2], device=device.torch_device)
            with pytest.raises(RuntimeError, match="indices should be either on cpu or on the"):
                torch.ones(5)[index]
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same"):
                torch.ones(5, device=device.torch_device)[index] = torch.ones(2)

    def test_lengths_may_lie_on_the_host(self) -> None:
        rnn = torch.nn.utils.rnn
        with FakeDevice() as device:
            model = torch.nn.LSTM(4, 5, batch_first=True).to(device.torch_device)
            batch = torch.ones(3, 6, 4, device=device.torch_device)
            packed = rnn.pack_padded_sequence(batch, torch.tensor([6, 4, 2]), batch_first=True)
            assert not device.holds(packed.batch_sizes)
            result, lengths = rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
            assert not device.holds(lengths)
            assert lengths.tolist() == [6, 4, 2]
            result.sum().backward()
            scores = torch.ones(5, 2, 4, device=device.torch_device, requires_grad=True)
            targets = torch.ones(2, 2, dtype=torch.int64, device=device.torch_device)
            waits = len(device.hidden_waits)
            torch.nn.functional.ctc_loss(
                scores.log_softmax(2),
                targets,
                torch.tensor([5, 5]),
                target_lengths=torch.tensor([2, 2]),
            ).backward()
            assert scores.grad is not None
            assert len(device.hidden_waits) == waits + 1

    def test_copies_in_one_call(self) -> None:
        with FakeDevice() as device:
            slots = [torch.zeros(3, device=device.torch_device) for _ in range(2)]
            torch._foreach_copy_(slots, [torch.ones(3), torch.ones(3)])
            assert len(device.hidden_waits) == 2
            torch._foreach_copy_([torch.ones(3)], slots[:1])
            assert len(device.hidden_waits) == 3
            assert slots[1].tolist() == [1.0] * 3

    def test_a_view_made_in_place_is_no_write(self) -> None:
        with FakeDevice() as device:
            value, (side,) = torch.ones(8, device=device.torch_device), split(device, "side")
            with device.use(side):
                kept = value * 2
            before = len(device.timeline().spans)
            value.unsqueeze_(0).squeeze_(0).unsqueeze_(0).t_().transpose_(0, 1).detach_()
            assert len(device.timeline().spans) == before
            device.current_stream().wait_stream(side)
            assert device.holds(value)
            assert kept is not None

    def test_a_pinned_number_may_be_changed_after_the_launch(self) -> None:
        with FakeDevice() as device:
            number = torch.zeros(()).pin_memory()
            kept = torch.ones(4, device=device.torch_device) * number
            number.fill_(2)
            assert device.holds(kept)

    def test_the_shape_of_pinned_memory_is_no_read(self) -> None:
        with FakeDevice() as device:
            host = torch.empty(4, pin_memory=True)
            host.copy_(torch.ones(4, device=device.torch_device), non_blocking=True)
            assert torch.empty_like(host).shape == (4,)

    def test_sparse_tensors_and_vmap(self) -> None:
        with FakeDevice() as device:
            model = torch.nn.Embedding(10, 4, sparse=True).to(device.torch_device)
            for kind in (torch.optim.SGD, torch.optim.SparseAdam):
                optimizer = kind(model.parameters(), lr=0.1)
                model(torch.arange(5, device=device.torch_device)).sum().backward()
                assert model.weight.grad is not None
                assert model.weight.grad.device == device.torch_device
                optimizer.step()
                optimizer.zero_grad()
            square = torch.eye(3, device=device.torch_device)
            assert device.holds(square.to_sparse() @ square)
            torch.vmap(lambda row: row.sum())(square)
            torch.func.grad(lambda value: (value * value).sum())(square)

    def test_a_copy_keeps_its_gradient(self) -> None:
        with FakeDevice() as device:
            value = torch.ones(3, device=device.torch_device, requires_grad=True)
            value.sum().backward()
            twins = copy.deepcopy([value, value])
            assert twins[0] is twins[1]
            assert twins[0].grad is not None
            assert twins[0].grad is not value.grad
            assert device.holds(twins[0].grad)

    def test_a_result_grows_where_it_is(self) -> None:
        with FakeDevice() as device:
            ones = torch.ones(1000, device=device.torch_device)
            result = torch.empty(0, device=device.torch_device)
            before = device.memory().allocated
            torch.add(ones, 1, out=result)
            assert device.memory().allocated == before + 4000
            del result
            assert device.memory().allocated == before

    def test_freed_memory_is_forgotten_once_it_is_ordered(self) -> None:
        with FakeDevice() as device:
            side = device.stream("side")
            for step in range(50):
                value = torch.zeros(256 * (step + 1), device=device.torch_device)
                side.wait_stream(device.current_stream())
                with device.use(side):
                    value.sum()
                del value
                device.current_stream().wait_stream(side)
        assert sum(map(len, device.checker._freed.values())) <= 1

    def test_many_rows_are_read_one_by_one(self) -> None:
        with FakeDevice() as device:
            table = torch.zeros(3000, 8, device=device.torch_device)
            looked_at = 0
            for row in range(3000):
                table[row].sum()
            record = device.checker.storage_of(table)
            assert record is not None
            for row in range(3000):
                looked_at += len(record.entries.near(Layout.of(table[row])))
        assert looked_at < 5 * 3000  # each row has neighbors, not the whole table

    def test_two_fake_devices_of_one_number_are_two(self) -> None:
        with FakeDevice() as device:
            event = FakeDevice().event()
            event.record()
            with pytest.raises(DeviceMismatchError, match="fake:1, another device of that number"):
                device.current_stream().wait_event(event)

    def test_two_fake_devices_are_two(self) -> None:
        with FakeDevice() as one, FakeDevice(index=2) as two:
            assert one.torch_device != two.torch_device
            tensor = torch.ones(1, device=two.torch_device)
            assert two.holds(tensor)
            assert not one.holds(tensor)

    def test_a_copy_between_two_fake_devices(self) -> None:
        with FakeDevice() as one, FakeDevice(index=2) as two:
            first = torch.ones(4, device=one.torch_device)
            second = first.to(two.torch_device)
            third = second.to(one.torch_device)
            second.copy_(first)
            first.copy_(second, non_blocking=True)
            assert [one.holds(tensor) for tensor in (first, second, third)] == [True, False, True]
            assert [two.holds(tensor) for tensor in (first, second, third)] == [False, True, False]
            assert one.hidden_waits == two.hidden_waits == []
            assert (first.device, second.device) == (one.torch_device, two.torch_device)

    @pytest.mark.parametrize("arguments", [{"index": 0}, {"host_order": "loose"}])
    def test_arguments_are_checked(self, arguments: dict[str, object]) -> None:
        with pytest.raises(DeviceError, match="expected"):
            FakeDevice(**arguments)  # type: ignore[arg-type]


class TestHiddenWaits:
    @pytest.mark.parametrize(
        "read",
        [
            lambda t: t.sum().item(),
            lambda t: float(t[0]),
            lambda t: bool(t[0] > 0),
            lambda t: t.tolist(),
            lambda t: t.cpu(),
            lambda t: str(t),
            lambda t: f"{t}",
            lambda t: f"{t[0]:.3f}",
            lambda t: t[t > 0],
            lambda t: t.nonzero(),
            lambda t: t.masked_select(t > 0),
            lambda t: t.unique(),
            lambda t: torch.equal(t, t + 1),
            lambda t: torch.ones(4).copy_(t),
            lambda t: t.copy_(torch.ones(4)),
            lambda t: t.copy_(torch.ones(4), non_blocking=True),  # pageable: not asynchronous
            lambda t: t.copy_(torch.ones(4).pin_memory()),
            lambda t: torch.tensor(1.0, device=t.device),
            lambda t: t[0].copy_(torch.tensor(1.0)),
            lambda t: t[torch.tensor([0, 2])],
            lambda t: torch.save(t, io.BytesIO()),
            lambda t: torch.tensor([t[0], t[1]]),
            lambda t: t.numpy(force=True),
            lambda t: f"{t[0]:.2f}",
        ],
    )
    def test_is_found_with_its_line(self, read: object) -> None:
        with FakeDevice() as device:
            tensor = torch.ones(4, device=device.torch_device)
            assert device.hidden_waits == []
            read(tensor)  # type: ignore[operator]
        (wait,) = {(wait.site.file, wait.site.line) for wait in device.hidden_waits}
        assert wait[0] == __file__

    @pytest.mark.parametrize(
        "work",
        [
            lambda t: (t * 2).sum(),
            lambda t: t.view(2, 2).t(),
            lambda t: t.copy_(torch.ones(4).pin_memory(), non_blocking=True),
            lambda t: torch.empty(4, pin_memory=True).copy_(t, non_blocking=True),
            lambda t: t[torch.zeros(2, dtype=torch.int64, device=t.device)],
            lambda t: torch.where(t > 0, t, -t),
            lambda t: t.shape[0] + len(t) + t.numel(),
            lambda t: t.to("cpu", non_blocking=True),
            lambda t: torch.zeros_like(torch.ones(4), device=t.device),
            lambda t: t.__setitem__(0, 1.0),
            lambda t: t.add_(torch.tensor(1.0)),
        ],
    )
    def test_ordinary_work_has_none(self, work: object) -> None:
        with FakeDevice() as device:
            work(torch.ones(4, device=device.torch_device))  # type: ignore[operator]
        assert device.hidden_waits == []

    def test_a_training_step_has_none(self) -> None:
        with FakeDevice() as device:
            model = torch.nn.Linear(4, 4, device=device.torch_device)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            device.hidden_waits.clear()
            for _ in range(2):
                batch = torch.ones(4, 4, pin_memory=True).to(device.torch_device, non_blocking=True)
                model(batch).pow(2).mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert device.hidden_waits == []
