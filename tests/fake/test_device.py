"""The fake device beyond the seeded bugs: what a report says, whole training loops, threads, and
the pytest fixture."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, RLock
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.errors import RaceError
from headrace.fake import FakeDevice, host_threads, patches
from headrace.fake.device import replacements
from headrace.fake.patches import Replacement
from support.graphs.no_graphs import NoGraphs


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
        hr.speed_up(torch.nn.Linear(1, 1), device=NoGraphs()).close()  # leaves its watch behind
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

    def test_the_pinned_pool_hands_over(self) -> None:
        def fill(device: FakeDevice) -> None:
            buffer = device.pinned.take(100)
            buffer.view((4,), torch.float32).fill_(1)
            buffer.release()

        with FakeDevice() as device:
            threads = [threading.Thread(target=fill, args=(device,)) for _ in range(2)]
            for thread in threads:
                thread.start()
                while thread.is_alive():  # so that the buffer is free again; this orders nothing
                    continue
            for thread in threads:
                thread.join()

    def test_a_lock_hands_over_however_it_was_imported(self) -> None:
        with FakeDevice():
            for lock in (threading.Lock(), Lock(), RLock()):
                staging = torch.zeros(8).pin_memory()

                def fill(lock: Any = lock, staging: torch.Tensor = staging) -> None:
                    with lock:
                        staging.fill_(1.0)

                thread = threading.Thread(target=fill)
                thread.start()
                while thread.is_alive():
                    continue
                with lock:
                    assert staging.tolist() == [1.0] * 8
                thread.join()

    def test_a_queue_hands_over_however_it_was_imported(self) -> None:
        with FakeDevice():
            batches: SimpleQueue[torch.Tensor] = SimpleQueue()
            thread = threading.Thread(target=lambda: batches.put(torch.ones(8).pin_memory()))
            thread.start()
            assert batches.get().sum() == 8
            thread.join()

    def test_only_locks_of_the_named_modules_are_left_out(self) -> None:
        source = "import threading\ndef make(): return threading.Lock()"
        with FakeDevice():
            for name, traced in (("torch", False), ("torch.x", False), ("torch_helpers", True)):
                module: dict[str, Any] = {"__name__": name}
                exec(source, module)
                assert isinstance(module["make"](), host_threads._TracedLock) == traced

    def test_a_thread_from_before_the_block_comes_after_all_others(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int).result()  # starts the thread
            with FakeDevice() as device:
                value = torch.ones(8, device=device.torch_device)

                def work() -> None:
                    with device:
                        value.add_(1)

                pool.submit(work).result()

    def test_a_thread_at_every_step_leaves_clocks_short(self) -> None:
        with FakeDevice() as device:
            value = torch.ones(8, device=device.torch_device)
            for _ in range(20):
                thread = threading.Thread(target=value.add_, args=(1,))
                thread.start()
                thread.join()
                thread.join()  # again: the actor may belong to another thread by now
                value.add_(1)
        assert len(device.checker.hosts) == 2

    def test_everything_is_restore(self) -> None:
        def patched() -> list[object]:
            return [
                *(threading.Lock, threading.RLock, Lock, RLock, SimpleQueue),
                *(threading.Thread.start, threading.Thread.join),
                *(torch.autograd._engine_run_backward, torch.autograd.Function.__dict__["apply"]),
            ]

        before = patched()
        with FakeDevice():
            assert all(new is not old for new, old in zip(patched(), before, strict=True))
        assert patched() == before


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

        def test_cuda(fake_cuda):
            with torch.cuda.stream(torch.cuda.Stream()):
                ones = torch.ones(4, device="cuda")
            ones + 1
    """

    def test_one_line_in_a_users_test(self, tmp_path: Path) -> None:
        (tmp_path / "test_mine.py").write_text(textwrap.dedent(self.SOURCE))
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["headrace.fake.pytest_plugin"]\n')
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "2 failed, 1 passed" in run.stdout, run.stdout
        assert "race (write-read)" in run.stdout
        assert "side.wait_event" not in run.stdout
        assert "fake_device.copy(slot" not in "".join(run.stdout.splitlines()[:3])


class _Interrupting:
    """A test's timeout may strike at any moment; later tests must not find patches of patches."""

    name = 0

    def __setattr__(self, name: str, value: object) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_while_a_device_begins_leaves_nothing_patched() -> None:
    before = {(one.owner, one.name): vars(one.owner).get(one.name) for one in replacements()}
    table = replacements()
    table.insert(len(table) // 2, Replacement(_Interrupting(), "name", 1))
    with pytest.raises(KeyboardInterrupt):
        patches.install(FakeDevice(), table)
    assert all(vars(owner).get(name) is old for (owner, name), old in before.items())
    with FakeDevice() as device:
        assert threading.Lock is not before[threading, "Lock"]
        torch.ones(2, device=device.torch_device).sum()
    assert all(vars(owner).get(name) is old for (owner, name), old in before.items())
