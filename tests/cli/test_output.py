"""Results on stdout, and words on stderr, whatever a script or a disk does to the two."""

from __future__ import annotations

import os
import sys

import pytest

from headrace.cli.output import OwnStderr, end_program, print_result
from headrace.errors import HeadraceError
from support.storage.full_disk import FullDisk


def test_a_result_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with pytest.raises(HeadraceError, match=r"written to stdout \(No space left on device\)"):
        print_result({}, "", as_json=True)


def test_a_script_may_redirect_stderr_but_not_ours(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    ours, before = OwnStderr(), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    ours.tell("still here ×")
    os.dup2(before, 2)
    os.close(before)
    os.close(nowhere)
    assert capfd.readouterr().err == "still here ×\n"


def test_a_script_does_not_fail_because_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    OwnStderr().tell("something")


def test_threads_that_are_left_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise KeyboardInterrupt  # stands for the end of the process

    monkeypatch.setattr("headrace.cli.output.os._exit", end)
    monkeypatch.setattr("headrace.cli.output.end_of_results", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        end_program(3, at_once=True, has_script_output=True)
    assert ended == [3]
