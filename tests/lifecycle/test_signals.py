"""Being asked to stop: by signals sent to this very process, which Python handles at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.lifecycle import StopRequests


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Each test begins with Python's own handlers, and ends with those it found."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop(number: signal.Signals) -> None:
    with StopRequests() as stop:
        assert stop.requested is None
        send(number)
        assert stop.requested == number.name
    assert stop.requested == number.name


def test_handlers_are_put_back() -> None:
    def own(*_: Any) -> None: ...

    signal.signal(signal.SIGTERM, own)
    with StopRequests():
        assert signal.getsignal(signal.SIGTERM) is not own
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is own
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_are_put_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), StopRequests():
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_second_ctrl_c_interrupts() -> None:
    with StopRequests() as stop:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert stop.requested == "SIGINT"


def test_sigterm_may_come_any_number_of_times() -> None:
    with StopRequests() as stop:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGINT)  # the first Ctrl-C
        assert stop.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_blocks_nest() -> None:
    with StopRequests() as outer:
        with StopRequests() as inner:
            send(signal.SIGINT)
        send(signal.SIGTERM)
    assert (outer.requested, inner.requested) == ("SIGTERM", "SIGINT")


def test_in_another_thread_it_does_nothing() -> None:
    seen: list[object] = []

    def work() -> None:
        with StopRequests() as stop:
            seen.extend([signal.getsignal(signal.SIGINT), stop.requested])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler, None]


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequests() as stop:
        send(signal.SIGINT)
        assert stop.requested is None
        send(signal.SIGTERM)
        assert stop.requested == "SIGTERM"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_can_be_terminated() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with StopRequests() as stop:
        worker = context.Process(target=_wait_for_good, args=(theirs,), daemon=True)
        worker.start()
        assert ours.recv() == "up"
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == -signal.SIGTERM
        assert stop.requested is None


def _wait_for_good(pipe: Any) -> None:
    pipe.send("up")
    pipe.recv()
