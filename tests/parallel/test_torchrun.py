"""Joining ranks by the environment variables that torchrun sets."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from headrace.errors import DeviceNotFoundError, RanksError
from headrace.parallel import SINGLE, Ranks, torchrun


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with torchrun.join_ranks() as ranks:
        assert ranks is SINGLE
    assert torchrun.rank_device("auto") == "auto"


def test_each_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "available_devices", lambda: ["cuda:0", "cpu"])
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert torchrun.rank_device("auto") == "cuda:1"  # does not exist: open_device will refuse it
    assert torchrun.rank_device("cuda") == "cuda:1"
    assert torchrun.rank_device("cpu") == "cpu"
    with pytest.raises(DeviceNotFoundError, match="each rank uses a device of its own"):
        torchrun.rank_device("cuda:0")


def test_ranks_that_cannot_connect_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(RanksError, match="rank 1 of 2 could not connect to the others"),
        torchrun.join_ranks(),
    ):
        raise AssertionError("must not be reached")


@pytest.mark.parametrize(
    ("problem", "lost"),
    [
        (RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer [127.0.0.1]"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("connection closed"), False),
    ],
)
def test_errors_that_mean_another_rank_is_gone(problem: Exception, lost: bool) -> None:
    assert torchrun._is_lost_rank(problem) is lost


class Watch:
    """What is known of the other ranks."""

    def __init__(self, killed: str = "", ended: tuple[int, ...] = ()) -> None:
        self.ended = list(ended)
        self._killed = killed

    def killed(self, timeout_s: float) -> str:
        return self._killed


@pytest.mark.parametrize(
    ("watch", "said"),
    [
        (Watch("rank 1 was killed"), ""),  # the watch has said it
        (Watch(ended=(1, 2)), "error: rank 0: ended: rank 1, 2; see its own error, or "),
        (Watch(), "error: rank 0: another rank has ended or does not answer; see its own error"),
        (None, "error: rank 0: another rank has ended or does not answer; see its own error"),
    ],
)
def test_a_rank_that_lost_another_exits_with_1_and_says_how_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], watch: Any, said: str
) -> None:
    monkeypatch.setattr(torchrun, "exit_with_children", sys.exit)
    ranks = Ranks()
    ranks.resume_with("headrace train --resume runs/train/exp")
    with pytest.raises(SystemExit) as ended:
        torchrun._exit_failed(ranks, watch, RuntimeError("Connection closed by peer"))
    assert ended.value.code == 1
    found = capsys.readouterr().err
    assert found.startswith(said)
    assert found == "" or found.endswith("; resume with: headrace train --resume runs/train/exp\n")


def test_a_rank_ends_with_the_exit_code_of_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchrun, "exit_with_children", sys.exit)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    typed_wrong = RanksError("no such plan")
    typed_wrong.exit_code = 2
    for problem, code in ((typed_wrong, 2), (RanksError("failed"), 1), (KeyboardInterrupt(), 130)):
        with pytest.raises(SystemExit) as ended:
            torchrun._exit_failed(Ranks(), None, problem)
        assert ended.value.code == code
    assert capsys.readouterr().err == "error: rank 0: no such plan\nerror: rank 0: failed\n"
