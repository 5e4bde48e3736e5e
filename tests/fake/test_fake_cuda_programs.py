"""Programs in the style of those that others wrote for a GPU: silent if right, found if wrong.

Each takes `bug`, the name of one line to leave out. The expected race is named by the source text
of its two lines.
"""

from __future__ import annotations

import itertools
import linecache
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headrace.fake import fake_cuda
from headrace.races import race_report
from support.paths import TESTS


def loader(workers: int = 0) -> DataLoader[Any]:
    pixels = torch.randint(0, 255, (12, 3, 2, 2), dtype=torch.uint8)
    data = TensorDataset(pixels, torch.randint(0, 4, (12,)))
    return DataLoader(data, batch_size=3, pin_memory=True, num_workers=workers)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)).cuda()


class ApexPrefetcher:
    """As in apex's ImageNet example."""

    def __init__(self, batches: Any, bug: str | None) -> None:
        self.loader = iter(batches)
        self.stream = torch.cuda.Stream()
        self.bug = bug
        self.mean = torch.tensor([124.0, 116.0, 104.0]).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self) -> None:
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float()
            self.next_input = self.next_input.sub_(self.mean)

    def next(self) -> tuple[Any, Any]:
        if self.bug != "wait":
            torch.cuda.current_stream().wait_stream(self.stream)
        pixels, target = self.next_input, self.next_target
        if pixels is not None and self.bug != "record":
            pixels.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return pixels, target


def apex(bug: str | None, workers: int = 0) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prefetcher = ApexPrefetcher(loader(workers), bug)
    pixels, target = prefetcher.next()
    while pixels is not None:
        loss = nn.functional.cross_entropy(model(pixels), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pixels, target = prefetcher.next()


def timm(bug: str | None) -> None:
    """As in timm's PrefetchLoader. Released without `record`, before it was found."""

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        stream = torch.cuda.Stream(device=torch.device("cuda"))
        first = True
        pixels = target = None
        for next_input, next_target in loader():
            with torch.cuda.stream(stream):
                next_input = next_input.to(device="cuda", non_blocking=True)
                next_target = next_target.to(device="cuda", non_blocking=True)
                next_input = next_input.to(torch.float32).sub_(120.0)
            if not first:
                yield pixels, target  # type: ignore[misc]
            first = False
            torch.cuda.current_stream().wait_stream(stream)
            pixels, target = next_input, next_target
            if bug != "record":
                pixels.record_stream(torch.cuda.current_stream())
                target.record_stream(torch.cuda.current_stream())
        yield pixels, target  # type: ignore[misc]

    model = classifier()
    with torch.no_grad():
        for pixels, target in batches():
            (model(pixels).argmax(1) == target).sum()


def whole_graph(bug: str | None) -> None:
    """As in PyTorch's notes on CUDA graphs: one training step, captured."""
    model, loss_function = classifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    static_input = torch.randn(3, 3, 2, 2, device="cuda")
    static_target = torch.zeros(3, dtype=torch.long, device="cuda")
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            loss_function(model(static_input), static_target).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(s)
    g = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(g):
        static_loss = loss_function(model(static_input), static_target)
        static_loss.backward()
        optimizer.step()
    copies = torch.cuda.Stream()
    losses = []
    for pixels, target in loader():
        if bug != "overwrite":
            copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            static_input.copy_(pixels, non_blocking=True)
            static_target.copy_(target, non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)
        g.replay()
        losses.append(static_loss.clone())
    assert torch.stack(losses).isfinite().all()


def mixed_precision(bug: str | None) -> None:
    """As in PyTorch's AMP recipe, with the loss copied to the host behind the device's back."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    side, shown = torch.cuda.Stream(), torch.zeros(()).pin_memory()
    copied = torch.cuda.Event()
    for pixels, target in loader():
        pixels, target = pixels.cuda(non_blocking=True), target.cuda(non_blocking=True)
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(pixels.float()), target)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        scaler.step(optimizer)
        scaler.update()
        value = loss.detach().float()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            shown.copy_(value, non_blocking=True)
            value.record_stream(side)
            copied.record()
        if bug != "synchronize":
            copied.synchronize()
        assert shown.item() >= 0


def double_buffer(bug: str | None) -> None:
    """Two pinned buffers that are filled in turn."""
    copies = torch.cuda.Stream()
    pinned = [torch.empty(4).pin_memory() for _ in range(2)]
    done = [torch.cuda.Event() for _ in range(2)]
    for step, slot in zip(range(5), itertools.cycle(range(2)), strict=False):
        if bug != "refill":
            done[slot].synchronize()
        pinned[slot].fill_(step)
        with torch.cuda.stream(copies):
            x = pinned[slot].to("cuda", non_blocking=True)
            done[slot].record(copies)
        torch.cuda.current_stream().wait_event(done[slot])
        x.record_stream(torch.cuda.current_stream())
        x.mul_(2)


PROGRAMS: list[tuple[Callable[[str | None], None], str, str, str, str]] = [
    # program, bug, parts of the two lines, and of the missing call
    (apex, "wait", "next_input.sub_(", "model(pixels)", ".wait_stream(prefetcher.stream)"),
    (apex, "record", "loss.backward()", "self.next_input.cuda(", "self.next_input.record_stream("),
    (timm, "record", "== target", "next_input.to(device=", "next_target.record_stream("),
    (whole_graph, "overwrite", "g.replay()", "static_input.copy_(", "copies.wait_stream("),
    (mixed_precision, "synchronize", "shown.copy_(", "shown.item()", "done = side.record_event()"),
    (double_buffer, "refill", "pinned[slot].to(", ".fill_(step)", "done = copies.record_event()"),
]


@pytest.mark.parametrize("program", dict.fromkeys(program for program, *_ in PROGRAMS))
def test_a_right_program_is_silent(program: Callable[[str | None], None]) -> None:
    with fake_cuda():
        program(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("program", dict.fromkeys(program for program, *_ in PROGRAMS))
def test_a_right_program_runs_on_a_gpu(program: Callable[[str | None], None]) -> None:
    program(None)
    torch.cuda.synchronize()


def test_a_loader_with_workers_is_silent() -> None:
    with fake_cuda():
        apex(None, workers=2)


@pytest.mark.parametrize(("program", "bug", "first", "second", "missing"), PROGRAMS)
def test_a_planted_bug_is_found(
    program: Callable[[str | None], None], bug: str, first: str, second: str, missing: str
) -> None:
    with fake_cuda(check=False) as device:
        program(bug)
    found = [
        (finding.first[0].text, finding.second[0].text, finding.race.missing)
        for finding in device.findings()
    ]
    assert any(first in one and second in two and missing in call for one, two, call in found), (
        "\n".join(map(str, device.findings()))
    )


def test_the_first_example_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/race-checking.md: its two files give its output, and its correction removes the race."""
    text = (TESTS.parent / "docs/race-checking.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    expected = re.search(r"<!-- output: .*?pytest.*?\n(.*?)```", text, re.DOTALL)
    corrected = re.search(r"```python\n( {8}batch = self.next_batch\n.*?)```", text, re.DOTALL)
    assert expected is not None
    assert corrected is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def found() -> str:
        monkeypatch.delitem(sys.modules, "prefetcher", raising=False)
        with fake_cuda(check=False) as device:
            runpy.run_path("test_prefetcher.py")["test_prefetching"](device)
        return race_report(device.findings())

    def lines(report: str) -> list[str]:  # without those of this file, which the columns follow
        return [" ".join(one.split()) for one in report.splitlines() if __file__ not in one]

    assert lines(found()) == lines(expected[1])
    wrong = (tmp_path / "prefetcher.py").read_text(encoding="utf-8")
    right = wrong.replace("        batch = self.next_batch\n", corrected[1])
    (tmp_path / "prefetcher.py").write_text(right, encoding="utf-8")
    linecache.clearcache()
    assert found() == "0 races found"
    del sys.modules["prefetcher"]
