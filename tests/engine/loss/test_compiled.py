"""`compile`: the settings of each compilation, what happens if one fails, and what is reported."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch._dynamo.exc import InternalTorchDynamoError
from torch._dynamo.utils import counters

import headrace as hr
from headrace.device import open_device
from headrace.device.cpu import CpuDevice
from headrace.engine import CompileReport
from headrace.engine.loss import compiler
from headrace.engine.loss.compiled import CompiledLoss
from headrace.fake import FakeDevice

Backend = Callable[[Any, Any], Any]
real_compile = torch.compile


class Compiling(CpuDevice):
    compiles = True


class CompilingFake(FakeDevice):
    compiles = True


class Inductor:
    """Stands in for inductor. Records for each compilation whether it had dynamic sizes and the
    tiling analysis. The graph runs as it was traced. `fails` says which compilations raise."""

    def __init__(self, fails: Callable[[bool, bool], bool] = lambda dynamic, analysed: False):
        self.fails = fails
        self.asked: list[tuple[bool, bool]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        sizes = [size for one in inputs if isinstance(one, torch.Tensor) for size in one.shape]
        dynamic = any(isinstance(one, torch.SymInt) for one in (*inputs, *sizes))
        analysed = inductor.triton.coalesce_tiling_analysis
        self.asked.append((dynamic, analysed))
        if self.fails(dynamic, analysed):
            raise AssertionError("get_pw_red_splits")
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    assert inductor.triton.coalesce_tiling_analysis  # as it was


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Backend], None]:
    """Compile with a stand-in for inductor."""

    def with_backend(backend: Backend) -> None:
        monkeypatch.setattr(torch, "compile", lambda f: real_compile(f, backend=backend))

    return with_backend


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).relu().mean()
    return found


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))


def rows(*counts: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(count, 4, generator=draw) for count in counts]


def engine_on(device: Any, plan: Any = "max", function: Any = loss) -> hr.Engine:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hr.Engine(model, optimizer, function, plan=plan, device=device)


class TestSettings:
    def test_only_the_first_shape_is_analysed(self, use: Any) -> None:
        use(backend := Inductor(lambda dynamic, analysed: dynamic and analysed))
        engine = engine_on(Compiling())
        result = engine.epoch(rows(3, 5, 3, 7, 9))
        assert backend.asked == [(False, True), (True, False)]
        assert result.compiled is not None
        assert result.compiled.compiled
        assert (result.compiled.why, result.compiled.compilations) == (None, 2)
        assert result.losses == engine_on("cpu", "pipeline").epoch(rows(3, 5, 3, 7, 9)).losses

    def test_what_fails_with_the_analysis_is_compiled_without_it(
        self, use: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        use(backend := Inductor(lambda dynamic, analysed: analysed))
        result = engine_on(Compiling()).epoch(rows(3, 3, 3))
        assert backend.asked == [(False, True), (False, False)]
        assert result.compiled is not None
        assert (result.compiled.compiled, result.compiled.compilations) == (True, 1)
        assert "not compiled" not in caplog.text
        assert result.losses == engine_on("cpu", "pipeline").epoch(rows(3, 3, 3)).losses

    def test_an_analysis_that_the_user_turned_off_stays_off(self, use: Any) -> None:
        use(backend := Inductor(lambda dynamic, analysed: True))
        with inductor.patch({"triton.coalesce_tiling_analysis": False}):
            engine_on(Compiling()).epoch(rows(3, 5))
            assert not inductor.triton.coalesce_tiling_analysis
        assert backend.asked == [(False, False)]  # a second attempt would be the same

    @pytest.mark.parametrize("chosen", [None, "1"])
    def test_reductions_are_mixed_only_if_the_variable_says_so(
        self, use: Any, monkeypatch: pytest.MonkeyPatch, chosen: str | None
    ) -> None:
        monkeypatch.delenv("TORCHINDUCTOR_MIX_ORDER_REDUCTION", raising=False)
        if chosen is not None:
            monkeypatch.setenv("TORCHINDUCTOR_MIX_ORDER_REDUCTION", chosen)
        mixed = []

        def backend(graph: Any, inputs: Any) -> Any:
            mixed.append(inductor.triton.mix_order_reduction)
            return graph.forward

        use(backend)
        with inductor.patch({"triton.mix_order_reduction": True}):
            engine_on(Compiling()).epoch(rows(3))
        assert mixed == [chosen is not None]

    def test_a_pytorch_without_the_setting_compiles_as_usual(
        self, use: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiler, "_TILING", "of_another_version")
        use(backend := Inductor())
        result = engine_on(Compiling()).epoch(rows(3, 5))
        assert backend.asked == [(False, True), (True, True)]
        assert result.compiled is not None
        assert result.compiled.compiled

    def test_a_second_compilation_in_a_capture_has_no_analysis(self, use: Any) -> None:
        use(backend := Inductor(lambda dynamic, analysed: dynamic and analysed))
        compiled, model = CompiledLoss(loss, Compiling()), model_of()
        first, second = rows(3, 5)
        compiled(model, first)
        compiled.mode = "compiled"
        compiled(model, second)
        assert backend.asked[1:] == [(True, False)]


class TestFailure:
    def test_is_reported_with_its_reason_and_changes_no_loss(
        self, use: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        use(backend := Inductor(lambda dynamic, analysed: True))
        engine = engine_on(Compiling())
        result = engine.epoch(rows(3, 3, 3))
        assert len(backend.asked) == 2
        assert result.compiled == engine.compiled
        assert result.compiled is not None
        assert not result.compiled.compiled
        assert result.compiled.why is not None
        assert "get_pw_red_splits" in result.compiled.why
        assert f"the step is not compiled and runs as it is: {result.compiled.why}" in caplog.text
        assert json.loads(result.to_json())["compiled"]["why"] == result.compiled.why
        assert result.losses == engine_on("cpu", "pipeline").epoch(rows(3, 3, 3)).losses

    def test_an_error_in_user_code_is_raised(self, use: Any) -> None:
        use(Inductor())

        def wrong(model: Any, batch: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            engine_on(Compiling(), function=wrong).epoch(rows(3))

    def test_a_step_that_the_compiler_skips_is_not_called_compiled(
        self, use: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A graph break inside `try` in a loop: PyTorch runs the whole function uncompiled."""
        use(backend := Inductor())
        printed: list[str] = []

        @torch._dynamo.disable
        def note() -> None:
            printed.append("x")

        def skipped(model: Any, batch: torch.Tensor) -> torch.Tensor:
            for _ in range(1):
                try:
                    note()
                    found: torch.Tensor = (batch @ model[0].weight).mean()
                finally:
                    note()
            return found

        engine = engine_on(Compiling(), function=skipped)
        result = engine.epoch(rows(3, 3))
        assert backend.asked == []
        assert result.compiled is not None
        assert not result.compiled.compiled
        assert "TORCH_LOGS=graph_breaks" in str(result.compiled.why)
        assert "TORCH_LOGS=graph_breaks" in caplog.text
        assert len(printed) == 4

    @pytest.mark.parametrize("kind", ["function", "object", "module"])
    def test_code_compiled_by_an_earlier_engine_counts(self, use: Any, kind: str) -> None:
        class CallableLoss:
            def __call__(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
                return loss(model, batch)

        class Module(torch.nn.Module):
            def forward(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
                return loss(model, batch)

        use(backend := Inductor())
        function = {"function": loss, "object": CallableLoss(), "module": Module()}[kind]
        model = model_of()
        device = Compiling()
        first, second = CompiledLoss(function, device), CompiledLoss(function, device)
        for one in (first, second):
            one(model, rows(3)[0])
            assert one.report().compiled
        assert len(backend.asked) == first.report().compilations == 1
        assert second.report() == CompileReport(compiled=True)


def test_the_compiler_is_loaded_while_something_else_runs() -> None:
    """In a process of its own: here it is loaded."""
    program = """if True:
        import os, sys, threading
        from headrace.engine import compiler_loading
        assert "torch._inductor.compile_fx" not in sys.modules
        with compiler_loading():
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith("compiled")
        assert "torch._inductor.compile_fx" in sys.modules
        assert "headrace-compiler" not in [thread.name for thread in threading.enumerate()]
        sys.modules["torch._inductor"] = None  # cannot be imported
        del sys.modules["torch._inductor.compile_fx"]
        with compiler_loading():
            pass
    """
    environment = {**os.environ, "TORCH_WARM_POOL": "0"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


class TestReport:
    def test_before_the_first_batch_nothing_is_known(self, use: Any) -> None:
        use(Inductor())
        assert engine_on(Compiling()).compiled == CompileReport(compiled=False)

    def test_a_plan_that_does_not_compile_has_no_report(self) -> None:
        engine = engine_on("cpu", "graph")
        assert engine.compiled is None
        assert engine.epoch(rows(3)).compiled is None

    def test_a_device_that_compiles_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = engine_on(open_device("cpu"))
        why = "Headrace does not compile for cpu"
        assert engine.compiled == CompileReport(compiled=False, why=why)
        assert f"plan max: the step is not compiled and runs as it is: {why}" in caplog.text
        assert engine.epoch(rows(3)).compiled == engine.compiled
        assert engine.evaluate(rows(3)).compiled == engine.compiled

    def test_a_users_own_step_is_not_compiled(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = hr.Engine.from_step(lambda batch: None, device="cpu", plan="max")
        assert engine.compiled is not None
        assert engine.compiled.why == "it is your own step (Engine.from_step)"
        assert "the step is not compiled" in caplog.text

    def test_how_long_it_took_is_in_the_log(
        self, use: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, logger="headrace")
        use(Inductor())
        engine = engine_on(Compiling())
        engine.epoch(rows(3, 3))
        assert engine.compiled is not None
        assert engine.compiled.seconds > 0
        assert "compiled the step in" in caplog.text

    def test_code_with_sdpa_kernel_is_cacheable(self, use: Any) -> None:
        from torch._functorch._aot_autograd.autograd_cache import check_cacheable
        from torch.nn.attention import SDPBackend, sdpa_kernel

        graphs = []

        def attending(model: Any, batch: torch.Tensor) -> torch.Tensor:
            x = model(batch)[None, None]
            with sdpa_kernel([SDPBackend.MATH]):
                found: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(x, x, x)
            return found.mean()

        def backend(graph: Any, inputs: Any) -> Any:
            check_cacheable(graph)  # raises if it is not
            graphs.append(graph)
            return graph.forward

        use(backend)
        result = engine_on(Compiling(), function=attending).epoch(rows(3, 3))
        assert result.compiled is not None
        assert (result.compiled.why, len(graphs)) == (None, 1)

    def test_code_from_the_compilers_cache(
        self, use: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Only if forward and backward were in it. Inductor counts both."""
        caplog.set_level(logging.INFO, logger="headrace")
        stand_in, said = Inductor(), "compiled nothing: took the step from the compiler's cache in"
        for counts, expected in (
            ({"fxgraph_cache_hit": 1, "fxgraph_cache_miss": 1}, 0),
            ({"fxgraph_cache_hit": 1, "fxgraph_cache_bypass": 1}, 0),
            ({"fxgraph_cache_hit": 2}, 1),
        ):
            assert said not in caplog.text
            torch.compiler.reset()

            def counting(graph: Any, inputs: Any, counts: dict[str, int] = counts) -> Any:
                counters["inductor"].update(counts)
                return stand_in(graph, inputs)

            use(counting)
            result = engine_on(Compiling()).epoch(rows(3, 3))
            assert result.compiled is not None
            assert (result.compiled.compilations, result.compiled.from_cache) == (1, expected)
        assert said in caplog.text

    def test_a_captured_step_that_is_not_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is replayed, and the report says that it is not compiled."""

        def broken(*_: Any) -> Any:
            raise InternalTorchDynamoError("broken on purpose")

        monkeypatch.setattr(torch, "compile", lambda f: broken)
        with CompilingFake() as device:
            model = torch.nn.Linear(4, 4).to(device.torch_device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = hr.Engine(model, optimizer, loss, plan="max", device=device)
            result = engine.epoch(rows(*[3] * 6))
        assert result.statistics.replays > 0
        assert result.compiled is not None
        assert result.compiled.why == "InternalTorchDynamoError: broken on purpose"
