"""The report of a race: lines, calls, counts, the comment that accepts it, and the page."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from headrace.errors import DeviceError, RaceError
from headrace.fake import FakeCuda, FakeDevice, fake_cuda, ordered
from headrace.races import race_page, race_report


def produce(stream: torch.cuda.Stream) -> torch.Tensor:
    with torch.cuda.stream(stream):
        return torch.ones(3, 4, device="cuda")  # FIRST


def looped(steps: int) -> FakeCuda:
    with fake_cuda(check=False) as device:
        side = torch.cuda.Stream()  # MADE
        for _ in range(steps):
            ones = produce(side)  # CALL
            ones.add(1), ones.mul(2)  # SECOND
            torch.cuda.synchronize()
    return device


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def test_a_report_says_what_to_do() -> None:
    device = looped(steps=5)
    (finding,) = device.findings()  # add and mul race with the same line, at the same line
    assert (finding.times, len(device.races)) == (10, 1)
    assert [line.site.line for line in finding.first][:2] == [line_of("FIRST"), line_of("CALL")]
    assert finding.first[0].function == "produce"
    assert finding.second[0].text == "ones.add(1), ones.mul(2)  # SECOND"
    text = race_report([finding])
    for expected in (
        r"^1 race found\n",
        rf"a \(3, 4\) float32 tensor in device memory, allocated at .*:{line_of('FIRST')}\n",
        rf"first:   aten::ones writes it on stream 'side' \(made at .*:{line_of('MADE')}\)\n",
        rf"missing: torch.cuda.current_stream\(\)\.wait_stream\(side\) .*:{line_of('SECOND')}\n",
        r"seen 10 times",
    ):
        assert re.search(expected, text), (expected, text)


@dataclass
class Pipe:
    batch: torch.Tensor
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)


def test_generated_code_is_not_named_but_the_line_that_calls_it() -> None:
    with fake_cuda(check=False) as device:
        one = Pipe(torch.ones(1, device="cuda"))  # PIPE
        with torch.cuda.stream(one.stream):
            other = Pipe(torch.ones(1, device="cuda"), one.stream)  # COPY
        _ = one == other  # COMPARED
    (made_at,) = device.made_at.values()
    assert made_at.line == line_of("PIPE")
    (finding,) = device.findings()
    read = finding.second[0]
    assert read.site.line == line_of("COMPARED")
    assert read.text.startswith("_ = one == other")
    assert "current_stream().wait_stream(one.stream) before" in finding.race.missing


def test_generated_code_is_named_if_nothing_else_calls_it() -> None:
    """As in `python -c`, or in a thread that runs such code."""
    with fake_cuda(check=False) as device:
        side = torch.cuda.Stream()
        scope: dict[str, Callable[[torch.Tensor, torch.cuda.Stream], None]] = {}
        exec("def use(x, copies):\n    return x.add(1)\n", scope)
        thread = threading.Thread(target=scope["use"], args=(produce(side), side))
        thread.start()
        thread.join()
    (finding,) = device.findings()
    assert [str(line.site) for line in finding.second] == ["<string>:2"]
    assert "wait_stream(copies) before <string>:2" in finding.race.missing


def test_threads_without_an_order_need_one_before_a_wait_can_help() -> None:
    with fake_cuda(check=False) as device:
        side, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        copied, go_on = threading.Event(), threading.Event()

        def save() -> None:
            with torch.cuda.stream(side):
                x.clone()
            copied.set()
            go_on.wait()

        thread = threading.Thread(target=save)
        thread.start()
        while not copied._flag:  # type: ignore[attr-defined]  # is_set() would order the threads
            continue
        x.add_(1)
        go_on.set()
        thread.join()
    (race,) = device.races
    first, *_ = race.missing.split(
        ", and then torch.cuda.current_stream().wait_stream(side) before"
    )
    assert first == "a lock, queue or join between the threads that launch the two"
    assert "launch the two,\n        and then torch.cuda" in race_report(device.findings())


def test_two_streams_of_one_variable_are_told_apart() -> None:
    with fake_cuda(check=False) as device:
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        for _ in range(2):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                x.add_(1)
    (race,) = device.races
    assert race.missing.startswith("side.wait_stream(<stream 'side'>) before")


def test_a_race_keeps_no_tensor_alive() -> None:
    """The report looks into the variables of the running functions."""
    with fake_cuda(check=False) as device:
        side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
        first, kept = x * 2, x * 3
        with torch.cuda.stream(side):
            x + 1  # a race
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first + kept
        del first
        new = x * 4  # may get the memory of `first`
        variables = locals()
        with torch.cuda.stream(side):
            new - 1  # another race: a dict that the program has is left as it is
        assert variables["kept"] is kept
    kinds = [race.kind for race in device.races]
    assert kinds == ["write-read", "reuse", "write-read"]
    assert device.races[1].missing.startswith("first.record_stream(side) before")


def test_a_wait_belongs_into_what_the_second_line_calls() -> None:
    def run(*, waits: bool) -> list[str]:
        with fake_cuda(check=False) as device:
            side, model = torch.cuda.Stream(), torch.nn.Linear(4, 4).cuda()

            def unpack(host: torch.Tensor) -> torch.Tensor:
                with torch.cuda.stream(side):
                    back = host.to("cuda", non_blocking=True)  # UNPACKED
                    back.record_stream(torch.cuda.default_stream())
                    if waits:
                        torch.cuda.default_stream().wait_stream(side)
                return back

            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.cpu().pin_memory(), unpack):
                loss = model(torch.ones(2, 4, device="cuda")).sum()
            loss.backward()
        return [race.missing for race in device.races]

    (missing,) = run(waits=False)
    place = rf"after .*test_findings.py:{line_of('UNPACKED')}"
    assert re.fullmatch(rf"torch\.cuda\.default_stream\(\)\.wait_stream\(side\) {place}", missing)
    assert run(waits=True) == []


def test_a_stream_is_current_at_the_line_that_is_told_to_use_it() -> None:
    with fake_cuda(check=False) as device:
        callers, side = torch.cuda.Stream(), torch.cuda.Stream()
        weight = torch.ones(4, device="cuda", requires_grad=True)
        scaled = (weight * torch.full((4,), 2.0, device="cuda")).sum()
        with torch.cuda.stream(side), torch.no_grad():
            weight.grad = torch.ones(4, device="cuda")
        with torch.cuda.stream(callers):
            scaled.backward()
    (race, *_) = device.races
    assert race.second.where == "default"
    assert race.missing.startswith("torch.cuda.default_stream().wait_stream(side) before")


def test_the_tensor_of_a_missing_record_has_its_own_name() -> None:
    def freed(make: Callable[[torch.Tensor, torch.cuda.Stream], None]) -> str:
        with fake_cuda(check=False) as device:
            side, x = torch.cuda.Stream(), torch.ones(64, device="cuda")
            make(x, side)
            x * 2
        (race,) = device.races
        return race.missing.partition(".record_stream(")[0]

    def use(x: torch.Tensor, side: torch.cuda.Stream) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x + 1

    def assigned(x: torch.Tensor, side: torch.cuda.Stream) -> None:
        doubled = x.mul(2).view(8, 8)
        use(doubled, side)

    def one_of_two(x: torch.Tensor, side: torch.cuda.Stream) -> None:
        doubled, other = x.mul(2) if x.is_cuda else x, x.untyped_storage()
        use(doubled, side), other.nbytes()

    def inside(x: torch.Tensor, side: torch.cuda.Stream) -> None:
        total = use(x.mul(2), side).device  # `total` is not what was freed
        assert total.type == "cuda"

    def in_a_list(x: torch.Tensor, side: torch.cuda.Stream) -> None:
        parts = [x.mul(2) for _ in range(1)]
        use(parts[0], side)

    names = [freed(make) for make in (assigned, one_of_two, inside, in_a_list)]
    assert names == ["doubled", "doubled", "tensor", "tensor"]


def test_a_stream_that_no_variable_names() -> None:
    with fake_cuda(check=False) as device:
        graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x + 1
            y * 2
            torch.cuda.current_stream().wait_stream(side)
        del side

        def on_new_streams() -> None:
            for stream in [torch.cuda.Stream() for _ in range(2)]:
                with torch.cuda.stream(stream):
                    x.add_(1)

        torch.cuda.synchronize()
        on_new_streams()
        x.mul_(2)
    captured, _, last = device.races
    assert captured.missing.startswith("torch.cuda.current_stream().wait_stream(side) before")
    assert last.missing.startswith("torch.cuda.current_stream().wait_stream(<stream 'stream")


def test_a_race_error_is_that_report() -> None:
    device = looped(steps=1)
    with pytest.raises(RaceError) as raised:
        device.check()
    assert str(raised.value) == race_report(device.findings())


def test_a_comment_accepts_a_race() -> None:
    with fake_cuda() as device:
        side = torch.cuda.Stream()
        ones = produce(side)
        ones.add(1)  # headrace: ordered-by the driver's callback
        ones = produce(side)
        ones.sum(
            0,
        ).mul(2)  # headrace: ordered-by the same
    assert device.races == device.findings() == []
    assert len(device.checker.accepted) == 2


def test_what_follows_an_accepted_race_is_ordered_too() -> None:
    with fake_cuda(check=False) as device:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        shared = torch.zeros(4, device="cuda")
        side.wait_stream(current)
        with torch.cuda.stream(side):
            shared.add_(1)
        shared.mul_(2)  # headrace: ordered-by the extension's event
        del shared
        torch.zeros(4, device="cuda")  # the memory is free on this stream: `side` is done with it
    assert device.races == []


def test_an_accepted_race_does_not_hide_a_later_one_of_its_line() -> None:
    def add_on(side: torch.cuda.Stream, tensor: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.add_(1)  # USED

    with fake_cuda(check=False) as device:
        side = torch.cuda.Stream()
        first, second = torch.zeros(2, 4, device="cuda"), torch.zeros(2, 4, device="cuda")
        add_on(side, first)
        first.mul_(2)  # headrace: ordered-by the extension's event
        add_on(side, second)
        del second
        torch.ones(2, 4, device="cuda")
    (race,) = device.races
    assert (race.kind, race.first.site.line) == ("reuse", line_of("USED"))


def test_a_stream_kept_from_an_earlier_block_keeps_the_line_that_made_it() -> None:
    with fake_cuda():
        kept = torch.cuda.Stream()  # KEPT
    with fake_cuda(check=False) as device:
        produce(kept).add(1)
    (finding,) = device.findings()
    assert finding.made_at["kept"].line == line_of("KEPT")


def test_ordered_tells_the_checker_of_an_order() -> None:
    with fake_cuda():
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        ones = produce(side)
        ordered(side, other)
        with torch.cuda.stream(other):
            ones.add_(1)
        back = torch.empty(3, 4).pin_memory()
        with torch.cuda.stream(other):
            back.copy_(ones, non_blocking=True)
        ordered(other)
        assert back.sum() == 24
        with pytest.raises(DeviceError, match="expected a stream of the fake device"):
            ordered(3)
    ordered(side, other)  # without a fake device it does nothing
    with FakeDevice() as device:
        first, second = device.stream("first"), device.stream("second")
        with device.use(first):
            x = torch.ones(2, device=device.torch_device)
        ordered(first, second)
        with device.use(second):
            x.add_(1)


def test_the_page_draws_the_missing_order(tmp_path: Path) -> None:
    with fake_cuda(check=False) as device:
        copies, compute = torch.cuda.Stream(), torch.cuda.Stream()
        x = torch.zeros(4, device="cuda")
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            x.add_(1)
        compute.wait_stream(copies)
        with torch.cuda.stream(copies):
            x.copy_(torch.ones(4).pin_memory(), non_blocking=True)
        with torch.cuda.stream(compute):
            text = "<b>"
            x.mul_(len(text))  # the copy after the wait is not waited for
    (finding,) = device.findings()
    lanes = finding.picture.lanes()
    assert lanes[:2] == ["copies", "compute"]
    shown = [(moment.lane, moment.name) for moment in finding.picture.moments]
    wait = shown.index(("compute", "wait_stream(copies)"))
    assert shown.index(("copies", "aten::add_")) < wait < shown.index(("copies", "copy h2d"))
    device.write_report(tmp_path / "races.html")
    page = (tmp_path / "races.html").read_text(encoding="utf-8")
    assert page == race_page(device.findings())
    assert page.count('class="arrow missing"') == 1
    assert page.count('class="arrow "') == 1
    assert "compute.wait_stream(copies) before" in page
    assert "x.mul_(len(text))" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_picture_has_the_access_that_raced_not_a_later_one_of_its_line() -> None:
    with fake_cuda(check=False) as device:
        copies = torch.cuda.Stream()
        pinned = [torch.zeros(2).pin_memory() for _ in range(2)]
        for step in range(3):  # the third step fills the first buffer again
            pinned[step % 2].fill_(step)
            with torch.cuda.stream(copies):
                pinned[step % 2].cuda(non_blocking=True)
    (finding,) = device.findings()
    here = [m for m in finding.picture.moments if m.name == "copy h2d"]
    assert [moment.number for moment in here].index(finding.picture.first) == 0
