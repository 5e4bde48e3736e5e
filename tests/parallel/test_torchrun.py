"""What a process makes of the variables that torchrun sets."""

from __future__ import annotations

import pytest

from headrace.errors import DeviceNotFoundError, RanksError
from headrace.parallel import SINGLE, torchrun


def test_without_torchrun_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with torchrun.launched() as ranks:
        assert ranks is SINGLE
    assert torchrun.own_device("auto") == "auto"


def test_each_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "available_devices", lambda: ["cuda:0", "cpu"])
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert torchrun.own_device("auto") == "cuda:1"  # which open_device then refuses by name
    assert torchrun.own_device("cuda") == "cuda:1"
    assert torchrun.own_device("cpu") == "cpu"
    with pytest.raises(DeviceNotFoundError, match="each rank takes one of its own"):
        torchrun.own_device("cuda:0")


def test_ranks_that_do_not_meet_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(RanksError, match="rank 1 of 2 did not meet the others"),
        torchrun.launched(),
    ):
        raise AssertionError("is never reached")


@pytest.mark.parametrize(
    ("problem", "gone"),
    [
        (RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer [127.0.0.1]"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("connection closed"), False),
    ],
)
def test_an_error_that_is_another_ranks(problem: Exception, gone: bool) -> None:
    assert torchrun._is_gone(problem) is gone
