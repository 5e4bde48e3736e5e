"""Calls of `torch.distributed`, and the end of backward."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headrace.device import open_device
from headrace.diagnosis.collectives import watching_collectives, watching_ends_of_backward
from headrace.diagnosis.segment_calls import watching_edges
from headrace.diagnosis.segments import COMMUNICATION, HostEdges
from headrace.diagnosis.torch_calls import TorchCalls
from support.processes.process_groups import fake_process_group, gloo_process_group


def test_the_outermost_collectives_and_waits_are_told() -> None:
    told: list[str] = []
    all_reduce, wait = dist.all_reduce, dist.Work.wait
    with (
        gloo_process_group(),
        watching_collectives(lambda: told.append("begins"), lambda: told.append("ends")),
    ):
        dist.all_reduce(torch.ones(2))
        assert told == ["begins", "ends"]
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        work.wait()
        assert told == ["begins", "ends"] * 3
    assert (dist.all_reduce, dist.Work.wait) == (all_reduce, wait)


def test_the_end_of_backward_is_told_and_nothing_stays_on_the_loss() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    told: list[bool] = []
    with watching_ends_of_backward(lambda: told.append(weight.grad is not None)):
        loss = weight.sum()
        loss.backward(retain_graph=True)
    loss.backward()
    assert told == [True]


def test_it_is_told_before_ddp_waits_for_what_is_reduced() -> None:
    told = threading.Event()
    was_told: list[bool] = []

    def reducing(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A reduction that lasts until backward is said to have ended."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def reduce() -> None:
            was_told.append(told.wait(timeout=10))
            future.set_result(bucket.buffer())

        threading.Thread(target=reduce).start()
        return future

    with gloo_process_group(), watching_ends_of_backward(told.set):
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(None, lambda state, bucket: reducing(bucket))
        model(torch.ones(2, 4)).sum().backward()
    assert was_told == [True]


def reduced(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_communication_is_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    with fake_process_group(2):
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(None, lambda state, bucket: reduced(bucket))
        edges, calls = HostEdges(open_device("cpu")), TorchCalls()
        with watching_edges(edges), calls.noted(edges.edge):
            model(torch.ones(2, 4)).sum().backward()
            dist.barrier()
    assert [key for _, key in edges.edges] == [
        ("forward", 0),
        ("after forward", 0),
        ("backward", 0),
        (COMMUNICATION, 0),
        ("after backward", 0),
        (COMMUNICATION, 1),
        ("after communication", 0),
    ]
    assert set(edges.communication_ns()) == {(COMMUNICATION, 0), (COMMUNICATION, 1)}
