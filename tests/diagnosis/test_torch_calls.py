"""When the thread that trains was in a module, in backward or in an optimizer."""

from __future__ import annotations

import _thread
import threading
import time
from itertools import pairwise
from typing import Any

import torch
from torch._dynamo.utils import counters

from headrace.diagnosis.torch_calls import TorchCalls


def model_and(optimizer: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    return model, optimizer(model.parameters(), lr=0.1)


def kinds_of(calls: Any) -> list[str]:
    assert all(call.start_ns <= call.end_ns for call in calls)
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(sorted(calls)))
    return [call.kind for call in sorted(calls)]


def test_only_the_outermost_calls_of_this_thread() -> None:
    model, optimizer = model_and(torch.optim.SGD)
    watch = TorchCalls()

    def step() -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).sum()
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()

    with watch.watching_optimizers():
        step()
        with watch.noted() as calls:
            step()
            other = threading.Thread(target=step)
            other.start()
            other.join()
        step()
    expected = ["optimizer", "forward", "backward", "backward", "optimizer"]
    assert kinds_of(calls) == expected


def test_a_closure_is_the_scripts_own_code() -> None:
    model, optimizer = model_and(torch.optim.SGD)
    watch, moments = TorchCalls(), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(3, 2)).sum()
        moments.append(len(calls))
        loss.backward()
        return loss

    with watch.watching_optimizers(), watch.noted() as calls:
        optimizer.step(closure)
    assert moments == [2]  # between the forward and the backward pass it was in no call
    assert kinds_of(calls) == ["optimizer", "forward", "backward", "optimizer"]


def test_a_block_may_begin_and_end_in_an_optimizers_hook() -> None:
    model, optimizer = model_and(torch.optim.SGD)
    watch = TorchCalls()
    found: list[Any] = []

    def at_the_end(*call: Any) -> None:
        if not found:
            found.append(watch.noted())
            found.append(found[0].__enter__())
        elif len(found) == 2:
            found.append(found[0].__exit__(None, None, None))

    with watch.watching_optimizers():
        optimizer.register_step_post_hook(at_the_end)
        for _ in range(3):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    # The optimizer's own hooks run first: its step had not ended for the watch.
    assert kinds_of(found[1]) == ["forward", "backward"]


def test_compiled_steps_are_noted_and_not_compiled_again() -> None:
    model, optimizer = model_and(torch.optim.SGD)
    compiled: Any = torch.compile(model, backend="eager")
    compiled_step: Any = torch.compile(optimizer.step, backend="eager")
    watch = TorchCalls()

    def step() -> None:
        compiled(torch.ones(3, 2)).sum().backward()
        compiled_step()

    torch.compiler.reset()
    with watch.watching_optimizers():
        step()
        step()
        before = counters["stats"]["unique_graphs"]
        with watch.noted() as calls:
            step()
    assert counters["stats"]["unique_graphs"] == before > 0
    assert kinds_of(calls) == ["forward", "backward", "optimizer"]


def test_what_is_compiled_meanwhile_has_no_breaks() -> None:
    model, _ = model_and(torch.optim.SGD)
    watch = TorchCalls()
    torch.compiler.reset()
    whole: Any = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    with watch.noted() as calls:
        whole(torch.ones(3, 2)).backward()
        whole(torch.ones(4, 2)).backward()
    assert kinds_of(calls) == ["backward", "backward"]


def test_optimizers_that_call_each_other_are_one_step() -> None:
    model, inner = model_and(torch.optim.SGD)

    class Outer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            moments.append(time.perf_counter_ns())
            inner.step()
            inner.step()
            moments.append(time.perf_counter_ns())

    outer, moments, watch = Outer(model.parameters(), {}), [], TorchCalls()
    with watch.watching_optimizers(), watch.noted() as calls:
        outer.step()
    (call,) = calls
    assert call.start_ns <= moments[0] <= moments[1] <= call.end_ns


def test_steps_of_other_threads_do_not_end_this_ones() -> None:
    (_, mine), (_, other) = model_and(torch.optim.SGD), model_and(torch.optim.SGD)
    watch = TorchCalls()

    def closure() -> float:
        thread = threading.Thread(target=other.step)
        thread.start()
        thread.join()
        return 0.0

    with watch.watching_optimizers(), watch.noted() as calls:
        mine.step(closure)
    assert kinds_of(calls) == ["optimizer"]


def test_a_block_in_a_thread_of_autograd_notes_the_main_thread() -> None:
    """Where an optimizer in backward steps. Threads that Python did not start look so."""
    model, _ = model_and(torch.optim.SGD)
    watch, entered, ended = TorchCalls(), threading.Event(), threading.Event()
    found: list[Any] = []

    def run() -> None:
        with watch.noted() as calls:
            found.append(calls)
            entered.set()
            ended.wait(10)

    _thread.start_new_thread(run, ())
    assert entered.wait(10)
    model(torch.ones(3, 2))
    ended.set()
    assert kinds_of(found[0]) == ["forward"]
