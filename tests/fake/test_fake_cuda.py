"""`fake_cuda()`: what PyTorch says and does inside the block. After it, all is as before."""

from __future__ import annotations

import importlib
import io
import math
import multiprocessing
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import Stream as StreamBefore
from torch.cuda import current_stream as current_before
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from headrace.errors import DeviceError, NotEmulatedError, RaceError
from headrace.fake import FakeCuda, fake_cuda
from support.graphs.captures import line


class Keeper:
    """Holds names of `torch.cuda` where no module has them."""

    stream_class = torch.cuda.Stream
    inside = (torch.cuda.Event, torch.cuda.CUDAGraph, torch.cuda.synchronize)

    @staticmethod
    def default(current: Callable[[], Any] = torch.cuda.current_stream) -> Any:
        return current()


class Derived(torch.cuda.Stream):
    """Derived before the block."""


def on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device == torch.device("cuda", 0) and tensor.is_cuda and not tensor.is_cpu


# --- the block ------------------------------------------------------------------------------------


def test_the_device_is_there_inside_the_block_only() -> None:
    def seen() -> tuple[object, ...]:
        return (
            torch.cuda.is_available(),
            torch.cuda.device_count(),
            torch.accelerator.is_available(),
            torch.Stream.__module__,
            torch.Generator.__module__,
            hasattr(torch._C, "__getattr__"),
            torch.cuda.default_generators,
            torch.get_default_device(),
            StreamBefore is torch.cuda.Stream,
        )

    def fail() -> None:
        with fake_cuda():
            assert seen()[:3] == (True, 1, True)
            assert StreamBefore is torch.cuda.Stream
            torch.set_default_device("cuda")
            raise ZeroDivisionError

    before = seen()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen() == before
    if torch.version.cuda is None:
        with pytest.raises(AssertionError, match="not compiled with CUDA"):
            torch.zeros(1).cuda()


def test_a_block_in_a_block_is_an_error(fake_cuda: FakeCuda) -> None:
    from headrace.fake import fake_cuda as again

    with pytest.raises(DeviceError, match="one block at a time"), again():
        pass
    assert torch.cuda.is_available()


def test_races_are_raised_at_the_end() -> None:
    def race() -> None:
        with fake_cuda():
            x = torch.ones(4, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                x.add_(1)

    with pytest.raises(RaceError, match="1 race found"):
        race()


def test_an_object_used_after_its_block_says_so() -> None:
    with fake_cuda():
        stream = torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="after its fake_cuda"):
        stream.synchronize()


def test_a_stream_kept_for_the_next_block_is_a_stream_there() -> None:
    with fake_cuda():
        kept = torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Event()
        kept[2].record()
    with fake_cuda(check=False) as device:
        stream, default, event = kept
        assert default == torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            x = torch.ones(2, device="cuda")
        event.wait()  # of the other block: not recorded here
        x.add_(1)
    assert [race.first.where for race in device.races] == ["kept"]


# --- names from before the block ------------------------------------------------------------------


def test_names_held_anywhere_lead_to_the_fake(fake_cuda: FakeCuda) -> None:
    event, graph, synchronize = Keeper.inside
    streams = [StreamBefore(), Keeper.stream_class(), torch.cuda.Stream()]
    assert len(set(streams)) == 3
    for stream in streams:
        assert isinstance(stream, StreamBefore)
        assert isinstance(stream, Keeper.stream_class)
        assert isinstance(stream, torch.Stream)
        with torch.cuda.stream(stream):
            assert current_before() == Keeper.default() == stream
    assert current_before() == torch.cuda.default_stream()
    event().record()
    assert graph().replay
    synchronize()


def test_names_imported_inside_are_the_real_ones_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_inside.py").write_text(
        "import torch\n"
        "from torch import Generator, Stream as AnyStream\n"
        "from torch.cuda import Event, current_stream as now\n"
        "from torch._C import _accelerator_setDeviceIndex as set_index\n"
        "from torch._C import _accelerator_hooks_set_current_device as set_current\n",
        encoding="utf-8",
    )
    with fake_cuda():
        inside = importlib.import_module("imported_inside")
        inside.set_index(0)
        assert isinstance(inside.now(), inside.AnyStream)
    del sys.modules["imported_inside"]
    assert inside.Generator is torch.Generator
    assert inside.AnyStream is torch.Stream
    assert inside.Event is torch.cuda.Event
    assert inside.now is torch.cuda.current_stream
    assert inside.set_index is torch._C._accelerator_setDeviceIndex
    assert inside.set_current is torch._C._accelerator_hooks_set_current_device


def test_a_class_derived_before_the_block_is_an_error(fake_cuda: FakeCuda) -> None:
    with pytest.raises(DeviceError, match=r"Derived derives from torch.cuda.streams.Stream"):
        Derived()


# --- tensors --------------------------------------------------------------------------------------


def test_every_way_to_the_device(fake_cuda: FakeCuda) -> None:
    host = torch.arange(6.0)
    model = torch.nn.Linear(6, 2)
    made = {
        "cuda()": host.cuda(),
        "cuda(0)": host.cuda(0, non_blocking=True),
        "to str": host.to("cuda"),
        "to int": host.to(0),
        "to dtype": host.to("cuda", torch.float16),
        "to other": host.to(host.cuda()),
        "factory": torch.zeros(3, device="cuda"),
        "factory int": torch.randn(3, device=0),
        "tensor": torch.tensor([1, 2], device="cuda:0"),
        "like": torch.empty_like(host, device="cuda"),
        "new": host.cuda().new_zeros(2),
        "type": host.type("torch.cuda.HalfTensor"),
        "as_tensor": torch.as_tensor(host.numpy(), device="cuda"),
        "module": model.cuda().weight,
        "module to": torch.nn.Linear(2, 2).to("cuda").weight,
        "module keyword": torch.nn.Linear(2, 2).to(device="cuda", dtype=torch.float64).weight,
        "module int": torch.nn.Linear(2, 2).to(0).weight,
        "parallel": torch.nn.DataParallel(model)(host),
        "module device": torch.nn.Linear(2, 2, device="cuda").bias,
        "result": model(host.cuda()),
    }
    with torch.device("cuda"):
        made["context"] = torch.ones(2)
        assert not on_cuda(torch.ones(2, device="cpu"))
    torch.set_default_device("cuda")
    made["default"] = torch.arange(3)
    torch.set_default_device("cpu")
    assert [name for name, tensor in made.items() if not on_cuda(tensor)] == []
    assert torch.device(0) == torch.device("cuda", 0)
    assert made["type"].dtype == torch.float16
    assert made["type"].type() == "torch.cuda.HalfTensor"
    assert (made["cuda()"].get_device(), host.get_device()) == (0, -1)
    assert torch.equal(made["cuda()"].cpu(), host)
    assert not on_cuda(made["cuda()"].cpu())
    assert not on_cuda(torch.ones(2))
    with pytest.raises(RuntimeError, match="same device"):
        host + made["cuda()"]
    with pytest.raises(RuntimeError, match=r"invalid device ordinal \(cuda:1"):
        host.cuda(1)
    with pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
        made["cuda()"].numpy()


def test_classes_of_older_scripts_make_tensors(fake_cuda: FakeCuda) -> None:
    kind: Any = torch.cuda.FloatTensor
    sized, copied = kind(2, 3), kind([[1.5], [2.5]])
    assert (sized.shape, sized.dtype, copied.tolist()) == ((2, 3), torch.float32, [[1.5], [2.5]])
    assert [on_cuda(one) for one in (sized, copied, kind(), kind(copied))] == [True] * 4
    assert torch.ones(2).type(kind).is_cuda
    assert [isinstance(one, kind) for one in (sized, torch.ones(2), sized.long())] == [
        True,
        False,
        False,
    ]
    with pytest.raises(TypeError, match=r"expected torch.cuda.FloatTensor \(got torch.FloatTensor"):
        kind(torch.ones(2))
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    made = torch.zeros(2)
    torch.set_default_tensor_type(torch.FloatTensor)
    assert (on_cuda(made), made.dtype) == (True, torch.float64)
    assert (on_cuda(torch.zeros(2)), torch.zeros(2).dtype) == (False, torch.float32)


def test_meta_tensors_are_nowhere(fake_cuda: FakeCuda) -> None:
    tensor = torch.ones(3, device="cuda")
    assert (tensor.to("meta").device.type, tensor.to("meta").shape) == ("meta", (3,))
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    assert on_cuda(model.to_empty(device="cuda")(tensor))
    with pytest.raises(NotImplementedError, match="no data"):
        tensor.to("meta").cuda()


def test_forward_and_reverse_differentiation_mix(fake_cuda: FakeCuda) -> None:
    """PyTorch plans with meta tensors, and with zeros that have no memory."""
    tensor = torch.ones(3, device="cuda")
    found = torch.func.hessian(lambda x: (x * x).sum())(tensor)
    assert torch.equal(found, 2 * torch.eye(3, device="cuda"))


def test_save_and_load(fake_cuda: FakeCuda) -> None:
    def load(**options: Any) -> torch.Tensor:
        file.seek(0)
        loaded: torch.Tensor = torch.load(file, **options)["x"]
        return loaded

    file = io.BytesIO()
    x = torch.arange(4.0).cuda()
    before = len(fake_cuda.hidden_waits)
    torch.save({"x": x, "part": x[1:]}, file)
    assert len(fake_cuda.hidden_waits) == before + 1  # for their storage
    assert on_cuda(load())  # it was saved on cuda:0
    assert not on_cuda(load(map_location="cpu"))
    for place in ("cuda", "cuda:0", torch.device("cuda"), {"cuda:0": "cuda:0"}):
        assert on_cuda(load(map_location=place))
    assert load(map_location=lambda storage, _: storage.cuda()).tolist() == [0, 1, 2, 3]


def test_pinned_memory_and_loader_workers(fake_cuda: FakeCuda) -> None:
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    for workers in (0, 1):
        loader = DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batches = [batch for pair in loader for batch in pair]
        assert all(batch.is_pinned() for batch in batches)
        assert sum(batch.cuda(non_blocking=True).sum() for batch in batches).item() == 56


def _use_device(answers: Any) -> None:
    try:
        torch.ones(1).cuda()
    except RuntimeError as problem:
        answers.put(f"{problem}; {torch.ones(1).tolist()}")


def test_a_forked_process_cannot_use_the_device(fake_cuda: FakeCuda) -> None:
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_use_device, args=(answers,))
    child.start()
    child.join()
    answer = answers.get()
    assert answer.startswith("Cannot re-initialize CUDA in forked subprocess")
    assert answer.endswith("[1.0]")  # the host's tensors work there
    assert on_cuda(torch.ones(1).cuda())


# --- streams and events ---------------------------------------------------------------------------


def test_streams(fake_cuda: FakeCuda) -> None:
    side = torch.cuda.Stream(priority=-1)
    other = torch.Stream("cuda")
    assert (side.device, side.priority, side.query()) == (torch.device("cuda", 0), -1, True)
    assert torch.cuda.Stream(stream_id=side.stream_id, device_index=0, device_type=1) == side
    with side, torch.cuda.device(0), torch.accelerator.device_index(0):
        assert torch.cuda.current_stream() == side == torch.accelerator.current_stream()
    with torch.cuda.stream(None):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.set_stream(side)
    threads: list[object] = []
    thread = threading.Thread(target=lambda: threads.append(torch.cuda.current_stream()))
    thread.start()
    thread.join()
    assert threads == [torch.cuda.default_stream()]  # each thread has a current stream of its own
    torch.accelerator.set_stream(other)
    assert torch.cuda.current_stream() == other
    torch.cuda.set_stream(torch.cuda.default_stream())
    x = torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    x.record_stream(side)
    done = side.record_event()
    torch.cuda.current_stream().wait_event(done)
    x.add_(1)
    assert fake_cuda.races == []
    assert repr(side) == "<fake torch.cuda.Stream 'side'>"


def test_events(fake_cuda: FakeCuda) -> None:
    never = torch.cuda.Event()
    assert never.query()  # as in CUDA, an event that was never recorded has passed
    never.synchronize()
    never.wait()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    torch.cuda._sleep(3_000_000)
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) == 3
    with pytest.raises(ValueError, match="enable_timing"):
        never.elapsed_time(end)
    torch.Event("cuda").record(torch.cuda.current_stream())


def test_an_event_that_was_never_recorded_orders_nothing() -> None:
    with fake_cuda(check=False) as device:
        side, forgotten = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(side):
            x = torch.ones(3, device="cuda")
        forgotten.wait()
        x + 1
    assert [race.kind for race in device.races] == ["write-read"]


# --- graphs ---------------------------------------------------------------------------------------


def test_a_captured_step_replays(fake_cuda: FakeCuda) -> None:
    static, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        result = static * 2
    assert not torch.cuda.is_current_stream_capturing()
    static.copy_(torch.arange(4.0))
    graph.replay()
    assert result.tolist() == [0, 2, 4, 6]
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=graph.pool()):
        result = static + 1
    second.replay()
    assert result.tolist() == [1, 2, 3, 4]
    graph.reset()
    with pytest.raises(RuntimeError, match="preceding successful capture"):
        graph.replay()
    with pytest.raises(NotEmulatedError, match=r"CUDAGraph\.debug_dump"):
        second.debug_dump("file")


def _replay_then_capture(first: Callable[[], object], waits: bool) -> None:
    """Capture `first` and replay it; then capture something else with the calls that PyTorch's own
    `torch.cuda.graph` makes, which is what waits."""
    graph, second, stream = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        first()
    graph.replay()
    if waits:
        torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        second.capture_begin()
        torch.ones(4, device="cuda")
        second.capture_end()
    graph.replay()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("draws", [False, True])
def test_a_capture_resets_the_random_state_of_a_replay_under_way(draws: bool, waits: bool) -> None:
    expected = pytest.raises(RaceError, match="on the random state that captured graphs read")
    with expected if draws and not waits else nullcontext(), fake_cuda():
        values = torch.zeros(4, device="cuda")
        _replay_then_capture(lambda: values.uniform_() if draws else values.add_(1), waits)


def test_a_graph_draws_from_the_generators_that_it_knows(fake_cuda: FakeCuda) -> None:
    generator, graph = torch.Generator("cuda").manual_seed(3), torch.cuda.CUDAGraph()
    expected = torch.rand(2, 4, generator=torch.Generator().manual_seed(3))
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        drawn = torch.rand(4, device="cuda", generator=generator)
    for row in expected:  # the capture has drawn nothing
        graph.replay()
        assert torch.equal(drawn.cpu(), row)
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="generator"), capture:
        torch.rand(4, device="cuda", generator=generator)


def test_an_external_event_is_refused_in_a_capture(fake_cuda: FakeCuda) -> None:
    event = torch.cuda.Event(external=True)
    event.record()
    event.synchronize()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(NotEmulatedError, match="external=True"), capture:
        event.record()


def test_a_capture_fails_where_cudas_does(fake_cuda: FakeCuda) -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="when stream is capturing"), capture:
        x.sum().item()


def test_make_graphed_callables(fake_cuda: FakeCuda) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    eager = torch.nn.Sequential(*model).cuda()
    x = torch.randn(5, 3, device="cuda")
    expected = eager(x).sum()
    expected.backward()
    gradient = [parameter.grad.clone() for parameter in eager.parameters()]  # type: ignore[union-attr]
    eager.zero_grad()
    graphed = torch.cuda.make_graphed_callables(eager, (torch.randn(5, 3, device="cuda"),))
    loss = graphed(x).sum()
    loss.backward()
    assert torch.equal(loss, expected)
    for parameter, before in zip(eager.parameters(), gradient, strict=True):
        assert torch.equal(parameter.grad, before)  # type: ignore[arg-type]
    assert fake_cuda.races == []


# --- inside PyTorch's calls -----------------------------------------------------------------------


class Devices(TorchDispatchMode):
    """Notes where each operation's tensors are, and makes one of its own beside each result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, bool, bool]] = set()
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {(str(one.device), one.is_cuda, one.is_cpu) for one in (*args, result)}
        self.made.append(torch.zeros(result.shape, device=result.device))
        self.made.append(torch.ones(result.shape).to(result.device))
        return result


def test_a_mode_of_the_users_sees_where_tensors_are(fake_cuda: FakeCuda) -> None:
    x, host = torch.ones(2, 2, device="cuda"), torch.ones(2, 2)
    with Devices() as mode:
        y = (x @ x).relu()
    assert mode.seen == {("cuda:0", True, False)}
    assert [one.tolist() for one in mode.made] == [[[n, n]] * 2 for n in (0.0, 1.0, 0.0, 1.0)]
    assert all(map(on_cuda, (y, *mode.made)))
    with Devices() as mode:
        host + host
    assert mode.seen == {("cpu", False, True)}


def test_a_jagged_tensor_moves_as_a_whole(fake_cuda: FakeCuda) -> None:
    rows = [torch.ones(2), torch.ones(3)]
    host = torch.nested.nested_tensor(rows, layout=torch.jagged)
    there = host.cuda()
    assert all(map(on_cuda, (there, there.values(), there.offsets())))
    assert (there * 2).to_padded_tensor(0.0).tolist() == [[2.0, 2.0, 0.0], [2.0, 2.0, 2.0]]
    back = there.cpu()
    assert [one.device.type for one in (back, back.values(), back.offsets())] == ["cpu"] * 3


def test_a_plan_ahead_is_made_for_the_cpu(fake_cuda: FakeCuda) -> None:
    """C++ would end the process at the first operation of one on cuda."""
    with FakeTensorMode() as mode:
        shapes = torch.empty(2, device="cuda"), mode.from_tensor(torch.ones(2, device="cuda"))
        assert (shapes[0] + shapes[1]).shape == (2,)


def test_host_waits_that_pytorch_reports(fake_cuda: FakeCuda) -> None:
    x, pageable = torch.ones(2, device="cuda"), torch.ones(2)
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    x.copy_(pageable, non_blocking=True)  # waits, but does not look as if it did
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation") as caught:
        x.sum().item()
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line() - 1)]
    torch.cuda.set_sync_debug_mode(2)
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        x.cpu()
    torch.cuda.set_sync_debug_mode("default")
    assert x.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="expected one of `default`, `warn`, `error`"):
        torch.cuda.set_sync_debug_mode("loud")


# --- random numbers, autocast, figures ------------------------------------------------------------


def test_random_numbers(fake_cuda: FakeCuda) -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("cuda", 0)
    drawn = torch.rand(3, device="cuda", generator=generator)
    again = torch.rand(3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(5))
    assert torch.equal(drawn, again)
    for device, wrong in (("cuda", torch.Generator()), ("cpu", generator)):
        with pytest.raises(RuntimeError, match=f"Expected a '{device}' device type for generator"):
            torch.rand(3, device=device, generator=wrong)
    for save, restore in (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    ):
        state = save()
        drawn = torch.rand(3, device="cuda")
        restore(state)  # type: ignore[arg-type]
        assert torch.equal(torch.rand(3, device="cuda"), drawn)
    torch.cuda.manual_seed_all(7)
    drawn = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(7)
    with torch.random.fork_rng():
        assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert torch.cuda.initial_seed() == 7


def test_the_host_draws_apart_from_the_device(fake_cuda: FakeCuda) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3).tolist(), torch.rand(3).tolist()
    torch.manual_seed(3)  # seeds both
    before = torch.get_rng_state()
    x = torch.rand(3, device="cuda")
    torch.nn.functional.dropout(torch.ones(50, device="cuda"))
    torch.randn_like(x).bernoulli_().exponential_()
    torch.randperm(9, device="cuda")
    assert torch.equal(torch.get_rng_state(), before)
    assert x.tolist() == expected[0]  # as for the CPU, with the same seed
    state = torch.cuda.get_rng_state()
    assert (torch.rand(3).tolist(), torch.rand(3).tolist()) == expected
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_the_default_generator_itself(fake_cuda: FakeCuda) -> None:
    (generator,) = torch.cuda.default_generators
    torch.cuda.manual_seed(4)
    drawn = [torch.rand(3, device="cuda") for _ in range(2)]
    generator.manual_seed(4)
    again = torch.rand(3, device="cuda", generator=generator), torch.rand(3, device="cuda")
    assert all(map(torch.equal, drawn, again))
    other = generator.clone_state()
    expected = torch.rand(3, device="cuda")
    generator.graphsafe_set_state(other)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    with pytest.raises(NotEmulatedError, match=r"Generator.get_offset\(\)"):
        generator.get_offset()


def test_autocast_and_scaler(fake_cuda: FakeCuda) -> None:
    model = torch.nn.Linear(4, 4).cuda()
    x = torch.ones(2, 4, device="cuda")
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled("cuda")
        assert model(x).dtype == torch.float16
        with torch.autocast("cuda", enabled=False):
            assert model(x).dtype == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        torch.set_autocast_enabled("cuda", False)
        assert model(x).dtype == torch.float32
        torch.set_autocast_enabled("cuda", True)
        assert model(x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")
    assert model(x).dtype == torch.float32

    class Doubled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    assert scaler.is_enabled()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = Doubled.apply(model(x)).mean()
    assert loss.dtype == torch.float32
    before = model.weight.detach().clone()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)
    assert fake_cuda.races == []


def test_figures_and_tools(fake_cuda: FakeCuda) -> None:
    x = torch.zeros(1024, device="cuda")
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 4096
    del x
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 4096)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert torch.cuda.mem_get_info() == (16 << 30, 16 << 30)
    assert torch.accelerator.memory_allocated() == 0
    if hasattr(torch.accelerator, "get_memory_info"):  # from PyTorch 2.10 on
        assert torch.accelerator.get_memory_info() == (16 << 30, 16 << 30)
    torch.cuda.empty_cache()
    assert "CUDA" in torch.cuda.memory_summary()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    assert torch.cuda.is_bf16_supported()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("here")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
    with torch.backends.cudnn.flags(enabled=True):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    with torch.profiler.profile(
        activities=list(torch.profiler.ProfilerActivity.__members__.values())
    ):
        torch.ones(2, device="cuda").sum()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 50, device="cuda")
    assert torch.compile(len) is len
    torch.cuda.synchronize(torch.device("cuda"))


def test_settings_of_a_pytorch_that_is_built_for_cuda_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting, driver_call = [1].copy, [2].copy  # builtins, as PyTorch's are
    monkeypatch.setattr(torch._C, "_cuda_get_cudnn_benchmark_limit", setting, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_newDriverCall", driver_call, raising=False)
    with fake_cuda():
        assert vars(torch._C)["_cuda_get_cudnn_benchmark_limit"]() == [1]
        with pytest.raises(NotEmulatedError, match="_cuda_newDriverCall"):
            vars(torch._C)["_cuda_newDriverCall"]()
    assert vars(torch._C)["_cuda_newDriverCall"] is driver_call


@pytest.fixture
def custom_ops() -> Iterator[Any]:
    """Operators whose implementation for CUDA is Python code."""
    library = torch.library.Library("headrace_tests", "FRAGMENT")
    library.define("doubled(Tensor x, bool joins) -> Tensor")
    library.define("host_sum(Tensor x) -> Tensor")
    library.impl("doubled", doubled, "CUDA")
    library.impl("host_sum", lambda x: x.new_full((), x.sum().item()), "CUDA")
    yield torch.ops.headrace_tests
    library._destroy()


def doubled(x: torch.Tensor, joins: bool) -> torch.Tensor:
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = torch.full_like(x, 2, device="cuda") * x
    if joins:
        current.wait_stream(side)
    return result


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="PyTorch 2.10")
def test_the_python_code_of_a_custom_operator_is_watched(custom_ops: Any) -> None:
    with fake_cuda() as device:
        x = torch.ones(4, device="cuda")
        assert custom_ops.doubled(x, True).sum().item() == 8
        device.hidden_waits.clear()
        assert custom_ops.host_sum(x).is_cuda
        assert [wait.operation for wait in device.hidden_waits] == ["aten::_local_scalar_dense"]
    with fake_cuda(check=False) as device:
        custom_ops.doubled(torch.ones(4, device="cuda"), False) + 1
    (race,) = device.races
    assert (race.first.where, race.first.operation) == ("side", "aten::mul")


def test_memory_that_is_pinned_later_is_watched() -> None:
    with fake_cuda(check=False) as device:
        host, values = torch.zeros(4), torch.ones(4, device="cuda")
        assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), 16, 1) == 0
        host.copy_(values, non_blocking=True)
        assert host.is_pinned()
        host.tolist()
    (race,) = device.races
    assert (race.first.operation, race.second.operation) == ("copy d2h", "tolist")
    assert device.hidden_waits == []


def test_memory_that_is_unpinned_is_ordinary_again(fake_cuda: FakeCuda) -> None:
    host, values = torch.zeros(4), torch.ones(4, device="cuda")
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), 16, 1)
    host.copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.cuda.cudart().cudaHostUnregister(host.data_ptr()) == 0
    assert not host.is_pinned()
    host.copy_(values, non_blocking=True)  # makes the host wait: the memory is pageable
    assert host.tolist() == [1, 1, 1, 1]
    assert len(fake_cuda.hidden_waits) == 1


def test_a_pool_of_memory_is_a_pool_for_captures(fake_cuda: FakeCuda) -> None:
    pool, graph = torch.cuda.MemPool(), torch.cuda.CUDAGraph()
    with torch.cuda.use_mem_pool(pool):
        static = torch.ones(2, device="cuda")
    with torch.cuda.graph(graph, pool=pool.id):
        result = static + 1
    graph.replay()
    assert result.tolist() == [2, 2]
    assert graph.pool() == pool.id
    with pytest.raises(NotEmulatedError, match="allocator"):
        torch.cuda.MemPool(allocator=object())  # type: ignore[arg-type]


def test_a_storage_and_a_stream_by_its_handle(fake_cuda: FakeCuda) -> None:
    storage = torch.UntypedStorage(32, device="cuda")
    tensor = torch.empty(0, device="cuda").set_(storage, 0, (8,))  # type: ignore[call-overload]
    assert (storage.device, tensor.is_cuda) == (torch.device("cuda", 0), True)
    assert torch.UntypedStorage(8).device == torch.device("cpu")
    side = torch.cuda.Stream()
    same = torch.cuda.ExternalStream(side.cuda_stream)
    assert same == side == torch.cuda.get_stream_from_external(side.cuda_stream)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.fill_(1)
    with torch.cuda.stream(same):
        assert tensor.sum().item() == 8


def test_the_runtime_and_the_versions(fake_cuda: FakeCuda) -> None:
    runtime, memory = torch.cuda.cudart(), torch.zeros(4)
    assert not memory.is_pinned()
    result = runtime.cudaHostRegister(memory.data_ptr(), 16, 0)
    torch.cuda.check_error(result)
    assert (result, int(result)) == (runtime.cudaError.success, 0)
    assert memory.is_pinned()
    assert runtime.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
    with pytest.raises(torch.cuda.CudaError, match=r"unknown error \(700\)"):
        torch.cuda.check_error(700)
    assert torch.cuda.nccl.version() >= (2, 10)
    assert int(torch.version.cuda.split(".")[0]) > 10


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_counts_as_one_kernel(fake_cuda: FakeCuda) -> None:
    def attend(attention: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inputs = [torch.randn(1, 1, 16, 16, device="cuda", requires_grad=True) for _ in range(3)]
        attention(*inputs).square().sum().backward()
        return [one.grad.cpu() for one in inputs if one.grad is not None]

    bias = torch.arange(16.0, device="cuda")
    shift = partial(flex_attention, score_mod=lambda score, b, h, i, j: score + bias[j])
    mask = bias.expand(1, 1, 16, 16).clone()
    expected = attend(partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask))
    launches = Counter(span.name for span in fake_cuda.timeline().spans)
    found = attend(torch.compile(shift))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    launches = Counter(span.name for span in fake_cuda.timeline().spans) - launches
    assert (launches["flex_attention"], launches["flex_attention_backward"]) == (1, 1)


def test_the_host_chooses_the_branch_of_a_condition(fake_cuda: FakeCuda) -> None:
    x = torch.ones(4, device="cuda")
    before = len(fake_cuda.hidden_waits)
    y = torch.cond(x.sum() > 2, lambda x: x * 2, lambda x: x + 5, (x,))
    assert [wait.operation for wait in fake_cuda.hidden_waits[before:]] == ["cond"]
    assert (y.is_cuda, y.tolist()) == (True, [2, 2, 2, 2])


def test_a_host_operand_is_an_error_that_says_how_to_move_it(fake_cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match=r"cuda:0 and cpu: .* \(move it with \.cuda\(\)"):
        torch.ones(2, device="cuda") + torch.ones(2)


# --- what has no emulation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: torch.cuda.cudart().cudaMemcpy(), r"torch\.cuda\.cudart\(\)\.cudaMemcpy"),
        (lambda: torch.cuda.memory._snapshot(), r"torch\.cuda\.memory\._snapshot"),
        (lambda: torch.cuda.memory._record_memory_history(), r"_record_memory_history"),
        (lambda: torch.cuda.MemPool().snapshot(), r"MemPool\.snapshot"),
        (lambda: torch.cuda.ExternalStream(1), r"torch\.cuda\.streams\.ExternalStream"),
        (lambda: torch.cuda.utilization(), r"torch\.cuda\.utilization"),
        (lambda: torch.cuda.nccl.all_reduce([]), r"torch\.cuda\.nccl\.all_reduce"),
        (lambda: torch.cuda.jiterator._create_jit_fn(""), r"jiterator"),
        (lambda: torch.export.export(torch.nn.ReLU(), ()), r"torch\.export\.export"),
        (lambda: torch._C._cuda_getCurrentRawStream(0), r"torch\._C\._cuda_getCurrentRawStream"),
        (lambda: torch.cuda.Event(interprocess=True), r"interprocess"),
        (lambda: torch.zeros(1, device="cuda").__cuda_array_interface__, r"CuPy"),
        (
            lambda: torch.zeros(1, device="cuda").untyped_storage()._share_cuda_(),
            r"another process",
        ),
        (lambda: torch.distributed.init_process_group("nccl"), r"NCCL.*use backend='gloo'"),
    ],
)
def test_what_cannot_be_emulated_says_so(
    call: Callable[[], object], named: str, fake_cuda: FakeCuda
) -> None:
    with pytest.raises(NotEmulatedError, match=named):
        call()
    assert not hasattr(torch._C, "_cuda_anything")


def test_a_call_of_the_driver_in_a_cuda_build_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_someCall", math.nextafter, raising=False)
    with fake_cuda(), pytest.raises(NotEmulatedError, match=r"torch\._C\._cuda_someCall"):
        torch._C._cuda_someCall(0)
    assert torch._C._cuda_someCall is math.nextafter


def test_functional_optimizers_can_be_compiled() -> None:
    """As importing torch.distributed.optim does, once in a process."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    with fake_cuda():
        assert "cpu" in torch.jit.script(optimizer._get_capturable_supported_devices)()
