"""The fake device beyond the seeded bugs: what a report says, what counts as device memory,
hidden waits, backward, threads, and the pytest fixture."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import DeviceError, RaceError
from headrace.testing import FakeDevice
from headrace.testing.layout import Layout


def unordered_copy(device: FakeDevice) -> torch.Tensor:
    slot = device.empty((4, 4), torch.float32)
    transfer = device.stream("transfer")
    transfer.wait_stream(device.current_stream())
    with device.use(transfer):
        device.copy(slot, torch.ones(4, 4).pin_memory())
    return slot


class TestReports:
    def test_the_report_says_everything(self) -> None:
        with FakeDevice(check=False) as device:
            unordered_copy(device) + 1
        (race,) = device.races
        assert race.kind == "write-read"
        assert (race.first.where, race.second.where) == ("transfer", "default")
        assert (race.first.operation, race.second.operation) == ("copy h2d", "aten::add")
        text = str(race)
        assert "a (4, 4) float32 tensor in device memory, allocated at" in text
        assert f"copy h2d writes it on stream 'transfer' at {__file__}:" in text
        assert f"event.record(transfer) after {__file__}:" in race.missing
        assert f"default.wait_event(event) before {__file__}:" in race.missing

    def test_all_races_are_collected_and_raised_together(self) -> None:
        with FakeDevice(check=False) as device:
            unordered_copy(device) + 1
            unordered_copy(device) * 2
        with pytest.raises(RaceError, match=r"^2 races found") as raised:
            device.check()
        assert isinstance(raised.value, AssertionError)

    def test_the_block_raises_them(self) -> None:
        with pytest.raises(RaceError, match=r"^1 race found"), FakeDevice() as device:
            unordered_copy(device) + 1

    def test_a_loop_reports_its_race_once(self) -> None:
        with FakeDevice(check=False) as device:
            for _ in range(5):
                unordered_copy(device) + 1
        assert len(device.races) == 1

    def test_an_error_in_the_block_is_not_hidden_by_a_race(self) -> None:
        def broken(device: FakeDevice) -> None:
            unordered_copy(device) + 1
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"), FakeDevice() as device:
            broken(device)
        assert len(device.races) == 1

    def test_a_backward_op_names_both_its_lines(self) -> None:
        with FakeDevice(check=False) as device:
            forward, side = device.stream("forward"), device.stream("side")
            weight = torch.ones(4, device=device.torch_device, requires_grad=True)
            batch = torch.ones(4, device=device.torch_device)
            forward.wait_stream(device.current_stream())
            side.wait_stream(device.current_stream())
            with device.use(forward):
                loss = (weight * batch).sum()
            forward_line = sys._getframe().f_lineno - 1
            with device.use(device.stream("backward")):
                loss.backward()
            backward_line = sys._getframe().f_lineno - 1
            with device.use(side):
                batch.zero_()
        reads = [race.first for race in device.races if race.first.forward_site is not None]
        assert reads
        for read in reads:
            assert read.where == "forward"  # whatever stream backward() was called under
            assert read.site.line == backward_line
            assert read.forward_site is not None
            assert read.forward_site.line == forward_line
            assert f"backward of the operation at {__file__}:{forward_line}" in str(read)

    def test_reused_memory_names_the_last_use_and_the_new_allocation(self) -> None:
        with FakeDevice(check=False) as device:
            value, side = torch.ones(100, device=device.torch_device), device.stream("side")
            side.wait_stream(device.current_stream())
            with device.use(side):
                kept = value * 2
            last_use = sys._getframe().f_lineno - 1
            del value
            fresh = device.empty((100,), torch.float32)
            allocation = sys._getframe().f_lineno - 1
            fresh.zero_()
        (race,) = device.races
        assert race.kind == "reuse"
        assert (race.first.site.line, race.second.site.line) == (last_use, allocation)
        assert "device.record_stream(tensor, side)" in race.missing
        assert kept is not None

    def test_memory_of_the_other_pool_is_not_handed_out(self) -> None:
        with FakeDevice() as device:
            value, side = torch.ones(1 << 20, device=device.torch_device), device.stream("side")
            side.wait_stream(device.current_stream())
            with device.use(side):
                kept = value * 2
            del value
            assert torch.ones(100, device=device.torch_device) is not kept


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

    def test_two_fake_devices_are_two(self) -> None:
        with FakeDevice() as one, FakeDevice(index=2) as two:
            assert one.torch_device != two.torch_device
            tensor = torch.ones(1, device=two.torch_device)
            assert two.holds(tensor)
            assert not one.holds(tensor)

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
            lambda t: t.to("cpu", non_blocking=True),
            lambda t: str(t),
            lambda t: f"{t}",
            lambda t: f"{t[0]:.3f}",
            lambda t: t[t > 0],
            lambda t: t.nonzero(),
            lambda t: t.masked_select(t > 0),
            lambda t: t.unique(),
            lambda t: torch.equal(t, t),
            lambda t: torch.ones(4).copy_(t),
            lambda t: t.copy_(torch.ones(4)),
            lambda t: t.copy_(torch.ones(4), non_blocking=True),  # pageable: not asynchronous
            lambda t: t.copy_(torch.ones(4).pin_memory()),
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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_arithmetic_is_the_cpus_own(amp: bool, fused: bool) -> None:
    """A real loop (AdamW, autocast, clipping, dropout): no report, and the very same weights."""

    def train(device: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        for _ in range(4):
            batch = torch.randn(5, 8).to(device)
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = model(batch).float().square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    expected = train(torch.device("cpu"))
    with FakeDevice() as device:
        found = train(device.torch_device)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("stream", ["default", "side"])
def test_a_transformer_trains_without_a_report(stream: str) -> None:
    with FakeDevice() as device:
        model = torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True).to(device.torch_device)
        batch = torch.randn(2, 5, 16).to(device.torch_device)
        optimizer = torch.optim.Adam(model.parameters())
        side = device.current_stream() if stream == "default" else device.stream(stream)
        side.wait_stream(device.current_stream())
        with device.use(side):
            for _ in range(2):
                model(batch, batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


class TestThreads:
    def test_a_thread_is_followed(self) -> None:
        with FakeDevice(check=False) as device:
            slot = unordered_copy(device)
            thread = threading.Thread(target=lambda: slot + 1)
            thread.start()
            thread.join()
        assert len(device.races) == 1

    def test_a_pool_hands_over(self) -> None:
        with FakeDevice() as device, ThreadPoolExecutor(1) as pool:
            staging = torch.zeros(8).pin_memory()
            slot = device.empty((8,), torch.float32)
            pool.submit(staging.fill_, 1.0).result()
            device.copy(slot, staging)

    def test_total_host_order_asks_for_no_hand_over(self) -> None:
        def run(device: FakeDevice) -> None:
            staging, slot = torch.zeros(8).pin_memory(), device.empty((8,), torch.float32)
            thread = threading.Thread(target=staging.fill_, args=(1.0,))
            thread.start()
            while thread.is_alive():
                continue
            device.copy(slot, staging)
            thread.join()

        with FakeDevice(host_order="total") as device:
            run(device)
        with FakeDevice(check=False) as device:
            run(device)
        assert [race.kind for race in device.races] == ["write-read"]
        assert "a lock, queue or join" in device.races[0].missing

    def test_everything_is_put_back(self) -> None:
        before = (threading.Lock, threading.RLock, threading.Thread.start, threading.Thread.join)
        with FakeDevice():
            assert threading.Lock is not before[0]
        assert before == (
            threading.Lock,
            threading.RLock,
            threading.Thread.start,
            threading.Thread.join,
        )


class TestFixture:
    SOURCE = """
        import torch

        def test_ordered(fake_device):
            slot = fake_device.empty((4,), torch.float32)
            fake_device.copy(slot, torch.ones(4).pin_memory())
            slot + 1

        def test_unordered(fake_device):
            slot = fake_device.empty((4,), torch.float32)
            side = fake_device.stream("side")
            side.wait_stream(fake_device.current_stream())
            with fake_device.use(side):
                fake_device.copy(slot, torch.ones(4).pin_memory())
            slot + 1
    """

    def test_one_line_in_a_users_test(self, tmp_path: Path) -> None:
        (tmp_path / "test_mine.py").write_text(textwrap.dedent(self.SOURCE))
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["headrace.pytest_plugin"]\n')
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "2 passed, 1 error" in run.stdout, run.stdout
        assert "race (write-read)" in run.stdout
        assert "side.wait_event" not in run.stdout
        assert "fake_device.copy(slot" not in "".join(run.stdout.splitlines()[:3])


def covered(tensor: torch.Tensor) -> set[int]:
    """The bytes a tensor covers, one by one: slow and plainly right."""
    offsets = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    size = tensor.element_size()
    return {
        byte for offset in offsets.tolist() for byte in range(offset * size, (offset + 1) * size)
    }


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    view = draw(st.sampled_from([BASE, BASE[0], BASE.flatten()]))
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, view.dim() - 1)) if view.dim() else None
        if dim is None:
            break
        start = draw(st.integers(0, view.shape[dim]))
        step = draw(st.integers(1, 3))
        index = [slice(None)] * view.dim()
        index[dim] = slice(start, draw(st.integers(start, view.shape[dim])), step)
        view = view[tuple(index)]
        if draw(st.booleans()):
            view = view.transpose(0, -1)
    return view


BASE = torch.zeros(4, 6, 5, dtype=torch.int16)


@settings(max_examples=300)
@given(views(), views())
def test_layouts_overlap_exactly_when_they_share_a_byte(
    one: torch.Tensor, two: torch.Tensor
) -> None:
    first, second = Layout.of(one), Layout.of(two)
    assert first.overlaps(second) == bool(covered(one) & covered(two))
    if first.covers(second):
        assert covered(two) <= covered(one)
    assert {byte for low, high in first.runs for byte in range(low, high)} == covered(one)
