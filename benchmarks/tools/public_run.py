"""One run of a public program in this process, watched from outside, for `public_loops.py`.

The program's files stay as they are, up to the one line that is added. What it would download is
made up: torchvision's data sets, and the files that its recipe writes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import os
import pty
import random
import runpy
import shlex
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.torchvision_ops import define_missing

define_missing()  # before torchvision is imported
import torchvision

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from public_programs import Program

import headrace as hr

#: How large the made-up data sets are, on a GPU and elsewhere.
_IMAGES = {True: 20_000, False: 400}
#: How often `headrace run` looks at a part before it is captured.
_AFTER = {"cuda": 10, "fake": 4, "cpu": 10}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Ended(SystemExit):
    """Raised inside a program when it has trained for long enough."""


@dataclass(frozen=True)
class Wanted:
    """What a run is for. `way` is `plain`, `line` or `run`. `steps` ends it after so many steps and
    notes the weights after each; None: it is timed, for `seconds` after `warm_up` steps.
    `capturable`: its optimizers compute from the start as they do in a graph."""

    way: str
    device: str
    steps: int | None = None
    capturable: bool = False
    seconds: float = 1.0
    warm_up: int = 30
    check: int = 0


@dataclass
class Recorder:
    """Counts steps, times them, and keeps what the weights were after each."""

    wanted: Wanted
    by_backward: bool
    models: list[torch.nn.Module] = field(default_factory=list)
    handle: Any = None
    #: What `headrace run` has told, and its result.
    told: list[str] = field(default_factory=list)
    run: dict[str, Any] | None = None
    marks: int = 0
    digests: list[torch.Tensor] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    began: float | None = None
    block: tuple[float, int] = (0.0, 0)

    def speed_up(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What the added line calls."""

        def call(*parts: Any, **options: Any) -> Any:
            self.models = [one for one in parts if isinstance(one, torch.nn.Module)]
            if self.wanted.way == "line":
                self.handle = original(*parts, plan="graph", **options)
            optimizers = [one for one in parts if isinstance(one, torch.optim.Optimizer)]
            if self.wanted.capturable:
                make_capturable(optimizers, plain=self.wanted.way == "plain")
            if not self.by_backward:
                self._count(optimizers[0])
            return self.handle

        return call

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        step = optimizer.step.__func__  # type: ignore[attr-defined]

        def counted(own: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            found = step(own, *args, **kwargs)
            self.mark()
            return found

        counted.__wrapped__ = step  # type: ignore[attr-defined]
        optimizer.step = counted.__get__(optimizer)  # type: ignore[method-assign]

    def mark(self) -> None:
        """A step has ended."""
        self.marks += 1
        if self.wanted.steps is not None:
            ends = self.marks >= self.wanted.steps
            if self.models:
                self.digests.append(digest(self.models))
            elif ends:
                self.digests.append(everything())
            if ends:
                raise Ended
        elif self.marks >= self.wanted.warm_up:
            self._time()

    def _time(self) -> None:
        now = time.perf_counter()
        at, marks = self.block
        enough = self.marks - marks >= 5 and now - at > self.wanted.seconds / 8
        if self.began is None or enough:
            torch.cuda.synchronize()
            now = time.perf_counter()
            if self.began is None:
                self.began = now
            else:
                self.times.append((now - at) / (self.marks - marks) * 1e3)
            self.block = now, self.marks
            if now - self.began > self.wanted.seconds and len(self.times) >= 3:
                raise Ended

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = {"marks": self.marks, "ms": self.times}
        if self.wanted.steps is not None:
            found["digests"] = [one.tolist() for one in self.digests]
        if self.wanted.way == "run":
            found |= {"told": self.told, "run": self.run}
        if self.handle is not None:
            found["report"] = parts(self.handle.report())
        if torch.cuda.is_available() and self.wanted.device == "cuda":
            found["peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
        return found


def make_capturable(optimizers: list[torch.optim.Optimizer], *, plain: bool) -> None:
    """Let optimizers compute as in a graph, with the learning rate on the device: also where a
    scheduler has put a number there since, if nothing else does it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "capturable" in group and not group.get("fused"):
                group["capturable"] = True
        rates_to_device(optimizer)
        if plain:
            optimizer.register_step_pre_hook(rates_to_device)


def rates_to_device(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("capturable") and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)


def parts(report: Any) -> list[dict[str, Any]]:
    """What `speed_up` says of each part."""
    return [
        {
            "name": one.name,
            "replays": one.replays,
            "captures": one.captures,
            "eager": one.eager,
            "why": one.why,
            "rounding": one.rounding,
        }
        for one in report.parts
    ]


def digest(models: list[torch.nn.Module]) -> torch.Tensor:
    """A number for each tensor of the models, which another bit changes. The host waits for none:
    that would hide what runs in the wrong order."""
    tensors = [one for model in models for one in (*model.parameters(), *model.buffers())]
    numbers = [_number(one) for one in tensors if one.numel()]
    return torch.stack([one.to(numbers[0].device, non_blocking=True) for one in numbers])


def everything() -> torch.Tensor:
    """The same for all parameters that are alive, in the order of the numbers."""
    alive = [one for one in gc.get_objects() if isinstance(one, torch.nn.Parameter)]
    by_address = {one.data_ptr(): one for one in alive if one.numel()}
    return torch.stack([_number(one).cpu() for one in by_address.values()]).sort().values


def _number(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    if flat.dtype != torch.bool:
        flat = flat.view(_INTEGERS[flat.element_size()])
    flat = flat.long()
    return (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum()


# --- what a program finds instead of downloads ------------------------------------------------


def _mnist(images: int) -> Callable[[Any], Any]:
    def load(self: Any) -> Any:
        draw = torch.Generator().manual_seed(0)
        count = images if self.train else images // 5
        pixels = torch.randint(0, 255, (count, 28, 28), generator=draw, dtype=torch.uint8)
        return pixels, torch.randint(0, 10, (count,), generator=draw)

    return load


def _cifar(images: int, classes: int) -> Callable[..., None]:
    def init(self: Any, root: Any, train: bool = True, transform: Any = None,
             target_transform: Any = None, download: bool = False) -> None:  # fmt: skip
        torchvision.datasets.VisionDataset.__init__(
            self, ".", transform=transform, target_transform=target_transform
        )
        draw = np.random.default_rng(0)
        count = images if train else images // 5
        self.train = train
        self.data = draw.integers(0, 255, (count, 32, 32, 3), np.uint8)
        self.targets = draw.integers(0, classes, count).tolist()
        self.classes = [str(one) for one in range(classes)]

    return init


@contextmanager
def made_up_data(large: bool) -> Iterator[None]:
    """torchvision's data sets hold random pixels."""
    sets, images = torchvision.datasets, _IMAGES[large]
    with (
        mock.patch.object(sets.MNIST, "_check_exists", return_value=True),
        mock.patch.object(sets.MNIST, "_load_data", _mnist(images)),
        mock.patch.object(sets.CIFAR10, "__init__", _cifar(images, 10)),
        mock.patch.object(sets.CIFAR100, "__init__", _cifar(images, 100)),
    ):
        yield


# --- the run ----------------------------------------------------------------------------------


def prepare(program: Program, checkouts: Path, folder: Path, small: bool) -> None:
    """A copy of the program's files, with data, and made smaller where asked."""
    import shutil

    shutil.copytree(checkouts / program.checkout, folder)
    script = folder / program.script
    if small and program.smaller:
        text = script.read_text()
        for one, other in program.smaller:
            if one not in text:
                raise SystemExit(f"{program.name}: {one!r} is not in {program.script}")
            text = text.replace(one, other)
        script.write_text(text)
    if program.parts and program.after:
        file = folder / (program.file or program.script)
        file.write_text(program.with_line(file.read_text()))
    if program.data is not None:
        program.data(folder / program.folder)


def run(program: Program, folder: Path, wanted: Wanted) -> dict[str, Any]:
    """Run the program in its prepared folder until it has trained for long enough."""
    os.chdir(folder / program.folder)
    large = wanted.device == "cuda"
    recorder = Recorder(wanted, program.by_backward or not program.after)
    found: dict[str, Any] = {"way": wanted.way, "capturable": wanted.capturable}
    begun = time.monotonic()
    _terminal()
    try:
        with made_up_data(large), _device(wanted):
            _seed(wanted)
            _run(program, wanted, recorder, large)
            found |= recorder.found()
    except Exception as problem:
        traceback.print_exc()
        found["failed"] = f"{type(problem).__name__}: {str(problem)[:400]}"
    found["seconds"] = round(time.monotonic() - begun, 1)
    return found


def _run(program: Program, wanted: Wanted, recorder: Recorder, large: bool) -> None:
    arguments = shlex.split(program.arguments) + ([] if large else shlex.split(program.small))
    name = str(Path.cwd() / Path(program.script).name)
    sys.argv = [name, *arguments]
    benchmarks = Path(__file__).resolve().parents[1]
    ours = (*map(str, benchmarks.glob("*/")), str(benchmarks.parent / "tests"))
    sys.path[:] = [str(Path.cwd()), *(one for one in sys.path if one not in ours)]
    if program.file:
        sys.path.insert(0, str(Path.cwd().parents[len(Path(program.folder).parts) - 1]))
    original = hr.speed_up
    with mock.patch.object(hr, "speed_up", recorder.speed_up(original), create=True):
        try:
            if recorder.by_backward:
                _counted_backwards(recorder)
            if wanted.way == "run":
                _run_sped_up(name, arguments, wanted, recorder)
            else:
                runpy.run_path(name, run_name="__main__")
        except Ended:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"exit code {end.code}") from end


def _run_sped_up(name: str, arguments: list[str], wanted: Wanted,
                 recorder: Recorder) -> None:  # fmt: skip
    """As `headrace run` does."""
    from headrace.run import RunSettings, run_sped_up

    def ended(result: Any) -> None:
        recorder.run = None if result is None else dataclasses.asdict(result)

    settings = RunSettings(check=wanted.check, after=_AFTER[wanted.device], plan="graph")
    code = run_sped_up(
        name,
        arguments,
        as_module=False,
        settings=settings,
        tell=recorder.told.append,
        ended=ended,
        fake=wanted.device == "fake",
        is_own_process=False,
    )
    if code and recorder.marks < (wanted.steps or 1):
        raise RuntimeError(f"exit code {code}")


def _counted_backwards(recorder: Recorder) -> None:
    original = torch.Tensor.backward

    inside: list[Any] = []  # the fake device comes here twice

    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        inside.append(self)
        try:
            original(self, *args, **kwargs)
        finally:
            inside.pop()
        if not inside:
            recorder.mark()

    torch.Tensor.backward = backward  # type: ignore[method-assign]


def _terminal() -> None:
    """A terminal of the usual size, which some programs ask for its width."""
    _, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.dup2(terminal, 0)


@contextmanager
def _device(wanted: Wanted) -> Iterator[None]:
    if wanted.device == "fake" and wanted.way != "run":
        from headrace.fake import fake_cuda

        with fake_cuda(check=False, keep_timeline=False):
            yield
    else:
        yield


def _seed(wanted: Wanted) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if wanted.steps is not None and wanted.device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
