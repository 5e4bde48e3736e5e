"""The doctor's conclusions, from made-up machines; its measurements, on the fake and on CUDA."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.device import open_device
from headrace.fake import Costs, FakeDevice
from headrace.machine import diagnose, doctor
from headrace.machine.device_speed import DeviceSpeed, measure_speed
from headrace.machine.machine_report import DeviceFacts, MachineFinding

CPU = DeviceFacts("cpu", "CPU", 1 << 34, 1 << 33, None)
GOOD = DeviceSpeed(50.0, 50.0, 8.0, 0.97, 6.0)
GPU = DeviceFacts("cuda:0", "A GPU", 1 << 36, 1 << 35, GOOD)


@pytest.fixture
def built_for(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(doctor, "_built_for", lambda: request.param)


@pytest.mark.parametrize("built_for", ["the CPU only"], indirect=True)
@pytest.mark.usefixtures("built_for")
def test_a_driver_without_a_cuda_build_is_a_problem() -> None:
    (finding,) = doctor._accelerator_findings((CPU,), "580.1")
    assert finding.level == "problem"
    assert "NVIDIA driver (580.1)" in finding.what
    assert "pip install" in finding.remedy


@pytest.mark.parametrize("built_for", ["CUDA 13.0"], indirect=True)
@pytest.mark.usefixtures("built_for")
def test_a_cuda_build_without_a_driver_is_a_problem() -> None:
    (finding,) = doctor._accelerator_findings((CPU,), None)
    assert finding.level == "problem"
    assert "no driver answers" in finding.what


@pytest.mark.parametrize("built_for", ["the CPU only"], indirect=True)
@pytest.mark.usefixtures("built_for")
def test_no_gpu_at_all_is_only_a_note() -> None:
    (finding,) = doctor._accelerator_findings((CPU,), None)
    assert finding.level == "note"


def test_a_healthy_gpu_has_no_findings_and_a_poor_one_has() -> None:
    assert doctor._accelerator_findings((GPU, CPU), "580.1") == []
    poor = dataclasses.replace(GPU, measured=dataclasses.replace(GOOD, overlap_share=0.1))
    (finding,) = doctor._accelerator_findings((poor, CPU), "580.1")
    assert "hardly overlap" in finding.what


def test_small_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(doctor, "_SHM", tmp_path)
    monkeypatch.setattr(doctor, "_ENOUGH_SHM_BYTES", 1 << 60)
    whats = [finding.what for finding in doctor._machine_findings((GPU, CPU))]
    assert any("shared memory is small" in what for what in whats)


def test_the_text_shows_what_was_measured() -> None:
    here = diagnose(measure=False)
    shown = dataclasses.replace(
        here, devices=(GPU, CPU), findings=(MachineFinding("problem", "something", "a command"),)
    )
    text = shown.text()
    assert "cuda:0: A GPU" in text
    assert "host to device 50.0 GB/s pinned, 8.0 pageable" in text
    assert "copies overlap compute: 97%" in text
    assert "problem: something\n  fix: a command" in text
    assert not shown.healthy
    assert dataclasses.replace(shown, findings=()).text().endswith("No problems found.")


def test_probing_an_ideal_device() -> None:
    # A product takes about as long as a copy: one of each is enough to see whether they overlap.
    costs = Costs(copy_us=0, copy_gb_per_s=10, kernel_us=0, by_name={"aten::mm": 27_000})
    with FakeDevice(costs=costs) as device:
        measured = measure_speed(device)
    assert measured.pinned_to_device_gb_per_s == pytest.approx(10, rel=0.01)
    assert measured.device_to_pinned_gb_per_s == pytest.approx(10, rel=0.01)
    assert measured.overlap_share == pytest.approx(1.0, abs=0.01)
    assert device.pinned.lent == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_probing_cuda() -> None:
    measured = measure_speed(open_device("cuda"))
    assert measured.pinned_to_device_gb_per_s > 1
    assert 0 <= measured.overlap_share <= 1
    assert measured.launch_us > 0
