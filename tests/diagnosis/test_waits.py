"""Every form of wait is found with its line, however it is reached; on the fake device or a GPU."""

from __future__ import annotations

import linecache
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.device import Device, open_device
from headrace.diagnosis import waits as waits_module
from headrace.diagnosis.waits import Wait, wait_at, watch_waits
from headrace.fake import fake_cuda
from support.diagnosis.wait_forms import FORMS, Case, Inputs, silent_functions, write_module


@contextmanager
def cuda_here() -> Iterator[Device]:
    if torch.cuda.is_available():
        yield open_device("cuda")
    else:
        with fake_cuda(check=False, keep_timeline=False) as device:
            yield device


def test_every_form_is_found_with_its_line(tmp_path: Path) -> None:
    check_every_form(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_form_is_found_with_its_line_on_a_gpu(tmp_path: Path) -> None:
    check_every_form(tmp_path)


def check_every_form(tmp_path: Path) -> None:
    module, cases = write_module(tmp_path / "forms.py")
    assert len({form for form, _ in FORMS}) >= 30
    assert len(FORMS) >= 35
    wrong: list[str] = []
    with cuda_here() as device:
        inputs = Inputs()
        for case in cases:
            waits: list[Wait] = []
            with watch_waits(device, waits.append):
                getattr(module, case.function)(inputs)
            wrong += problems(case, waits, module.__file__ or "")
    assert not wrong, "\n".join(wrong)


def problems(case: Case, waits: list[Wait], file: str) -> list[str]:
    if not waits:
        return [f"{case}: not found"]
    found = []
    for wait in waits:
        if wait.line is None:
            found.append(f"{case}: no line")
        elif (wait.line.file, wait.line.line) != (file, case.line):
            found.append(f"{case}: line {wait.line.line}, expected {case.line}")
    if case.form not in {wait.form.name for wait in waits}:
        found.append(f"{case}: {waits[0].form.name} ({waits[0].operation}), expected {case.form}")
    return found


def test_code_that_does_not_wait_is_not_named(tmp_path: Path) -> None:
    with cuda_here() as device:
        inputs = Inputs()
        for code, function in silent_functions(tmp_path / "silent.py"):
            waits: list[Wait] = []
            call: Any = function
            with watch_waits(device, waits.append):
                call(inputs)
            assert not waits, (code, waits)


def test_everything_is_as_before_after_the_block() -> None:
    with cuda_here() as device:
        owners = [(torch._C, "_cuda_synchronize"), (torch.cuda.Stream, "synchronize")]
        owners += [
            (torch.cuda.Event, "synchronize"),
            (torch.Tensor, "to"),
            (warnings, "simplefilter"),
        ]
        before = [(getattr(owner, name), name in vars(owner)) for owner, name in owners]
        with watch_waits(device, lambda wait: None):
            pass
        after = [(getattr(owner, name), name in vars(owner)) for owner, name in owners]
    assert before == after


def test_a_librarys_line_is_shown_with_the_users(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "library.py"
    package.parent.mkdir()
    package.write_text("def log(read):\n    return read()\n", encoding="utf-8")
    scope: dict[str, Any] = {}
    exec(compile(package.read_text(encoding="utf-8"), str(package), "exec"), scope)
    wait = scope["log"](lambda: None) or wait_in(scope["log"])
    assert wait.line is not None
    assert (wait.line.file, wait.line.line) == (str(package), 2)
    assert wait.called_from is not None
    assert wait.called_from.text == "return log(read)  # type: ignore"


def wait_in(log: Any) -> Wait:
    def read() -> Wait:
        frame = sys._getframe(1)
        return wait_at(frame)

    return log(read)  # type: ignore


def test_waits_of_the_engine_are_told_from_those_of_the_users_loss() -> None:
    waits: list[Wait] = []

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch).sum()
        found.item()
        return found

    with fake_cuda(check=False) as device:
        model = torch.nn.Linear(2, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = hr.Engine(model, optimizer, loss, plan="baseline")
        with watch_waits(device, waits.append):
            engine.epoch([torch.ones(3, 2)])
    lines = {(one.form.name, one.line.text) for one in waits if one.line is not None}
    assert lines == {
        ("headrace", "engine.epoch([torch.ones(3, 2)])"),
        ("item", "found.item()"),
    }


def test_generated_code_is_shown_with_the_line_that_runs_it() -> None:
    scope: dict[str, Any] = {"wait": lambda: wait_at(sys._getframe(1))}
    exec(compile("def generated():\n    return wait()\n", "<generated>", "exec"), scope)
    wait = scope["generated"]()
    assert wait.line is not None
    assert (wait.line.file, wait.line.line, wait.line.text) == ("<generated>", 2, "")
    assert wait.called_from.text == 'wait = scope["generated"]()'
    assert wait.form.name == "other"


def test_the_cells_of_a_notebook_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "<ipython-input-1-ab>"
    source = "def read():\n    return wait()\n"
    monkeypatch.setitem(linecache.cache, cell, (len(source), None, source.splitlines(True), cell))
    scope: dict[str, Any] = {"wait": lambda: wait_at(sys._getframe(1))}
    exec(compile(source, cell, "exec"), scope)
    wait = scope["read"]()
    assert (wait.line.text, wait.called_from) == ("return wait()", None)


@dataclass
class Losses:
    loss: torch.Tensor


def test_the_comparison_of_two_dataclasses_is_named() -> None:
    waits: list[Wait] = []
    with cuda_here() as device:
        inputs = Inputs()
        with watch_waits(device, waits.append):
            _ = Losses(inputs.loss) == Losses(inputs.loss + 0)
            made = torch.fx.symbolic_trace(lambda x: x.item())
            made(inputs.loss)
    compared, read = waits
    assert compared.form.name == "compare"
    for wait, code in ((compared, "_ = Losses("), (read, "made(inputs")):
        assert wait.called_from is not None
        assert wait.called_from.text.startswith(code)


def test_a_comprehension_is_a_part_of_its_function() -> None:
    found = [wait_at(sys._getframe()).line for _ in range(1)]
    found += [(lambda: wait_at(sys._getframe()).line)()]
    names = {line.function for line in found if line is not None}
    assert names == {"test_a_comprehension_is_a_part_of_its_function"}


#: Each line that waits says so.
MANY_LINES = """
def code(a):
    if (
        a.loss > 1e9  # branch
        or a.x.isnan()
        .any()  # finite check
    ):
        pass
    while (
        a.loss < 0  # branch
        and not a.n
    ):
        pass
    first = (
        a.loss  # branch
        and a.n
    )
    assert (
        a.n  # branch
    ), "a message"
    chosen = (
        1
        if (flag := a.n > 0)  # branch
        else 2
    )
    kept = [
        x
        for x in range(2)
        if x > 0
        and a.x.isfinite().all()  # finite check
    ]
    read = (
        a.loss
        .detach()
        .item()  # item
    )
    match a.n.shape:
        case () if (
            a.n > 5  # branch
        ):
            pass
"""


def test_code_over_many_lines_has_the_line_that_waits(tmp_path: Path) -> None:
    file = tmp_path / "many_lines.py"
    file.write_text(MANY_LINES, encoding="utf-8")
    scope: dict[str, Any] = {}
    exec(compile(MANY_LINES, str(file), "exec"), scope)
    waits: list[Wait] = []
    with cuda_here() as device:
        inputs = Inputs()
        with watch_waits(device, waits.append):
            scope["code"](inputs)
    found = [(wait.line.line, wait.form.name) for wait in waits if wait.line is not None]
    assert found == [
        (number, line.partition("# ")[2])
        for number, line in enumerate(MANY_LINES.splitlines(), 1)
        if "#" in line
    ]


def test_the_test_of_gradients_is_named() -> None:
    waits: list[Wait] = []
    with cuda_here() as device:
        inputs = Inputs()
        with torch.autograd.set_detect_anomaly(True), watch_waits(device, waits.append):
            (inputs.w * 2).sum().backward()
    assert {wait.form.name for wait in waits} == {"anomaly detection"}


def test_pytorchs_warning_is_caught_whatever_the_script_does_with_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    waits: list[Wait] = []
    before = list(warnings.filters)

    def synchronize() -> None:
        warnings.warn("called a synchronizing CUDA operation (at Copy.cpp)", stacklevel=1)

    with watch_waits(open_device("cpu"), waits.append):
        synchronize()
        warnings.filterwarnings("ignore", message="nothing of ours")
        warnings.simplefilter("ignore")
        synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            synchronize()
            warnings.warn("the script's own", stacklevel=1)
    assert [str(one.message) for one in caught] == ["the script's own"]
    assert [wait.line.function for wait in waits if wait.line] == ["synchronize"] * 3
    # What the script has set stays; what we have set is gone.
    assert [one for one in warnings.filters if one not in before] != []
    assert not any("synchronizing" in str(one[1]) for one in warnings.filters)
    warnings.filters[:] = before  # type: ignore[index]


def test_a_stream_that_pytorch_reports_too_is_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def synchronize(self) -> None:
            warnings.warn(
                "called a synchronizing CUDA operation (at CUDAFunctions.h)", stacklevel=1
            )

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    waits: list[Wait] = []
    with watch_waits(open_device("cpu"), waits.append):
        Stream().synchronize()
        Stream().synchronize()
    assert [wait.form.name for wait in waits] == ["stream synchronize"] * 2


def test_an_event_of_any_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    waits: list[Wait] = []
    before, event = torch.Event.synchronize, torch.Event()
    with watch_waits(open_device("cpu"), waits.append):
        event.synchronize()
    assert [wait.form.name for wait in waits] == ["event synchronize"]
    assert torch.Event.synchronize is before
    event.synchronize()
    assert len(waits) == 1


def test_what_thrust_waits_for_is_told() -> None:
    class Tensors:
        is_cuda = True

        def is_coalesced(self) -> bool:
            return not self.is_cuda

        def coalesce(self) -> Tensors:
            return self

        def unique(self, dim: int | None = None) -> Tensors:
            return self

    told: list[Wait] = []
    rows, sums = (
        waits_module._telling_of_thrust(Tensors, name, operation, told.append)
        for name, operation in (("unique", "aten::unique_dim"), ("coalesce", "aten::_coalesce"))
    )
    with rows, sums:
        Tensors().unique()
        Tensors().unique(dim=0)
        Tensors().coalesce()
        Tensors.is_cuda = False
        Tensors().coalesce()
    assert [wait.form.name for wait in told] == ["unique", "sparse"]


def is_tensor_or(value: object, kind: Any) -> bool:
    """`isinstance`, with stand-ins for tensors."""
    return kind is torch.Tensor or isinstance(value, kind)


def test_asynchronous_copies_from_pageable_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return  # in the table of forms
    told: list[Wait] = []
    moved = SimpleNamespace(is_cuda=True)

    class Source(torch.Tensor):
        is_cpu, pinned = True, False

        def is_pinned(self, device: Any = None) -> bool:
            return self.pinned

    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: moved, raising=False)
    monkeypatch.setattr(waits_module, "isinstance", is_tensor_or, raising=False)
    source = torch.ones(3).as_subclass(Source)
    with waits_module._telling_if_pageable("to", told.append):
        source.to("cuda", non_blocking=True)
        source.to("cuda")
        Source.pinned = True
        source.to("cuda", non_blocking=True)
    assert [wait.form.name for wait in told] == ["to"]


def test_each_copy_of_a_list_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module, "_pageable_copy", lambda *_: "copy from pageable memory")
    told: list[Wait] = []
    sources, targets = [torch.ones(2)] * 2, [torch.zeros(2), torch.zeros(2)]
    with waits_module._telling_if_any_pageable(told.append):
        torch._foreach_copy_(targets, sources)
        torch._foreach_copy_(targets, sources, non_blocking=True)
    assert [wait.form.name for wait in told] == ["pageable copy"] * 2
    assert all(target.tolist() == [1, 1] for target in targets)


def test_each_copy_of_a_scatter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits_module, "_pageable_copy", lambda *_: "copy from pageable memory")
    monkeypatch.setattr(torch._C, "_scatter", lambda source, devices: [source] * 2, raising=False)
    told: list[Wait] = []
    scatter: Any = torch._C
    with waits_module._telling_if_scattered(told.append):
        assert len(scatter._scatter(torch.ones(2), [0, 1])) == 2
    assert [wait.operation for wait in told] == ["copy from pageable memory"] * 2


@pytest.mark.parametrize(
    ("source", "target", "operation"),
    [
        (("cpu", False), ("cuda", False), "copy from pageable memory"),
        (("cpu", True), ("cuda", False), None),
        (("cuda", False), ("cpu", False), "copy to pageable memory"),
        (("cuda", False), ("cpu", True), None),
        (("cpu", False), ("cpu", False), None),
    ],
)
def test_copies_block_from_and_to_pageable_memory(
    source: tuple[str, bool],
    target: tuple[str, bool],
    operation: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tensor(place: str, pinned: bool) -> Any:
        return SimpleNamespace(
            is_cpu=place == "cpu",
            is_cuda=place == "cuda",
            is_pinned=lambda: pinned,
            is_contiguous=lambda: True,
            dim=lambda: 1,
        )

    monkeypatch.setattr(waits_module, "isinstance", is_tensor_or, raising=False)
    assert waits_module._pageable_copy(tensor(*source), tensor(*target)) == operation
