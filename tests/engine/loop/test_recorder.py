"""Values reach the loop in order, each once. An open group's last batch waits for the update."""

from __future__ import annotations

from typing import Any

import torch

from headrace.data import Cursor, Fetched
from headrace.device import Device
from headrace.engine.loop.recorder import HoldingRecorder, Recorder
from headrace.engine.stages import Launched
from headrace.engine.streams.lanes import Lanes
from headrace.engine.values.arrived import DeferredValues, values_of_state
from headrace.engine.values.deferred import DeferredScalars
from headrace.engine.values.weighted_sum import EMPTY_SUM
from headrace.plan import Plan


def launched(device: Device, index: int, *, updated: bool = True, **more: Any) -> Launched:
    values = {"loss": torch.tensor(float(index), device=device.torch_device), **more}
    fetched = Fetched(index, None, 0, 1, Cursor(index + 1))
    return Launched(fetched, values, weighted=False, updated=updated)


def recorder(device: Device, kind: type[Recorder] = Recorder, **options: Any) -> Any:
    lanes = Lanes(device, Plan.preset("pipeline"), split=False)
    return kind(DeferredScalars(device, 2), lanes, **{"loss": EMPTY_SUM, **options})


def test_what_was_not_handed_out_is_part_of_the_state(device: Device) -> None:
    one = recorder(device)
    for index in range(3):
        one.push(launched(device, index))
        one.send()
    one.drain()
    assert [entry.step for entry in one.unseen()] == [0, 1, 2]
    assert one.unseen() == []  # each is returned once
    stored = values_of_state(one.state(), device)
    assert [(entry.step, entry.values) for entry in stored] == [
        (0, {"loss": 0.0}),
        (1, {"loss": 1.0}),
        (2, {"loss": 2.0}),
    ]
    assert [entry.step for entry in one.hand_out()] == [0, 1, 2]
    assert (one.hand_out(), one.state(), one.loss().mean) == ((), [], 1.0)
    one.close()


def test_restored_values_come_first(device: Device) -> None:
    one = recorder(device, restored=(DeferredValues(4, {"loss": 4.0}),))
    one.push(launched(device, 5))
    one.drain()
    assert [entry.step for entry in one.hand_out()] == [4, 5]
    one.close()


def test_an_open_groups_last_batch_waits_for_the_update(device: Device) -> None:
    one = recorder(device, HoldingRecorder)
    result = torch.zeros(
        (), device=device.torch_device
    )  # like the result of a graph: each replay overwrites it
    for index in range(3):
        result.fill_(float(index))
        one.push(launched(device, index, updated=False, loss=result, skipped=0))
        one.send()
    one.drain()
    assert [entry.values["loss"] for entry in one.hand_out()] == [0.0, 1.0]
    assert one.has_outstanding()
    stored = values_of_state(one.state(), device)
    assert [(entry.step, entry.values) for entry in stored] == [(2, {"loss": 2.0, "skipped": 0.0})]
    one.amend({"skipped": torch.ones((), device=device.torch_device)})
    one.drain()
    (last,) = one.hand_out()
    assert (last.step, last.values) == (2, {"loss": 2.0, "skipped": 1.0})
    one.close()


def test_a_held_value_survives_a_resume(device: Device) -> None:
    held = DeferredValues(2, {"loss": 2.0, "skipped": 0.0})
    one = recorder(device, HoldingRecorder, held=held)
    one.amend({"skipped": torch.ones((), device=device.torch_device)})
    one.drain()
    assert [(entry.step, entry.values) for entry in one.hand_out()] == [
        (2, {"loss": 2.0, "skipped": 1.0})
    ]
    one.close()
