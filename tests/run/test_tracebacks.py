"""Tracebacks in a run, as a script prints them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headrace.run
from headrace.run.tracebacks import users_tracebacks

OURS = str(Path(headrace.run.__file__).with_name("ours.py"))


def fail() -> None:
    raise ValueError("a bad batch")


def called_by_us(function: Callable[[], None]) -> ValueError:
    """The error of a function that code of ours has called."""
    names: dict[str, Any] = {}
    exec(compile("def call(function): function()", OURS, "exec"), names)
    try:
        names["call"](function)
    except ValueError as problem:
        return problem
    raise AssertionError("must not be reached")


def test_frames_of_ours_are_left_out_of_what_is_printed() -> None:
    problem = called_by_us(fail)
    with users_tracebacks():
        inside = "".join(traceback.format_exception(problem))
        lines = traceback.extract_tb(problem.__traceback__)
    assert OURS not in inside
    assert "in fail" in inside
    assert [line.name for line in lines] == ["called_by_us", "fail"]
    assert OURS in "".join(traceback.format_exception(problem))


def test_an_error_of_our_own_keeps_its_frames() -> None:
    """Without a line of the script's there is nothing else to show."""
    problem = called_by_us(fail)
    assert problem.__traceback__ is not None
    ours = problem.__traceback__.tb_next
    assert ours is not None
    ours.tb_next = None
    with users_tracebacks():
        assert OURS in "".join(traceback.format_tb(ours))
