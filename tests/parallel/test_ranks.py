"""The order in which a process group and what uses it are taken down."""

from __future__ import annotations

import gc
import logging

import pytest
import torch.distributed as dist

from headrace.device import Device
from headrace.engine.build import checks
from headrace.parallel import close_before_group, ranks


class Graphs:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def close(self) -> None:
        self.log.append(self.name)


def test_graphs_are_closed_before_the_group_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def destroy(group: object = None) -> None:
        log.append(f"destroyed {group}")

    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    monkeypatch.setattr(ranks.atexit, "register", lambda act: log.append("at exit"))
    one, gone = Graphs(log, "one"), Graphs(log, "gone")
    close_before_group(one)
    close_before_group(gone)
    del gone
    gc.collect()
    dist.destroy_process_group("group")
    assert log == ["at exit", "one", "destroyed group"]
    dist.destroy_process_group("again")
    assert log[3:] == ["destroyed again"]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_warned_of(
    fake_device: Device,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:False")
    with caplog.at_level(logging.WARNING, "headrace"):
        checks.warn_of_expandable_segments(fake_device)
        assert not caplog.records
        monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
        for _ in range(2):
            checks.warn_of_expandable_segments(fake_device)
    (said,) = caplog.records
    assert said.getMessage().startswith(
        f"{name} has expandable_segments:True, and the plan captures"
    )
