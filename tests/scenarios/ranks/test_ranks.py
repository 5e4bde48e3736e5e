"""Several processes give what one gives with the same global batches: over gloo, on the CPU.

Losses and weights agree to rounding: gradients are summed in another order. Over the 22 batches
here losses of about 1 differ by up to 1e-6; the tests allow 1e-5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from headrace.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint
from headrace.device import open_device
from headrace.engine import Engine
from headrace.errors import CheckpointError, StepError
from headrace.parallel import SINGLE, Agreement, parallelism_of
from support.processes import ranks_jobs as jobs
from support.processes.forked import forkserver
from support.translation.corpora import write_corpus
from support.translation.id_pairs import random_pairs

CLOSE = 1e-5
Job = tuple[Callable[..., Any], tuple[Any, ...]]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("ddp", {"accumulate": 3, "clip_norm": 0.5, "ema_decay": 0.9}),
    ("ddp", {"plan": "baseline", "clip_norm": 0.5}),
    ("fsdp", {}),
    ("fsdp", {"accumulate": 3, "clip_norm": 0.5, "ema_decay": 0.9}),
]
OPTIONS: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.5, "ema_decay": 0.9}


def on_ranks(size: int, folder: Path, work: list[Job]) -> list[list[Any]]:
    """Run jobs on `size` ranks, each a process; the results by job, then by rank."""
    forkserver()  # so that the ranks need not load PyTorch
    torch.multiprocessing.start_processes(
        jobs.run, (size, str(folder), jobs.many, work), nprocs=size, start_method="forkserver"
    )
    by_rank = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def alone(job: Callable[..., Any], *args: Any) -> Any:
    return job(0, 1, *args)


def assert_close(found: Any, expected: Any) -> None:
    """The same nest of numbers, to rounding."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_close(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert found == pytest.approx(expected, abs=CLOSE)


CUT = [
    ("plain", 3, 4),
    ("no length", 3, 4),
    ("plain", 3, 6),
    ("start_at", 3, None),
    ("noisy", 0, None),
    ("noisy", 3, None),
    ("noisy", 7, None),
]
BY_COUNT = [("ddp", 99, False), ("fsdp", 99, False), ("ddp", 5, False), ("ddp", 99, True)]
RESUMED = [(kind, knows) for kind in ("plain", "stateful") for knows in (True, False)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """All that two ranks do here, in the same two processes: starting them is what takes long."""
    full, limited = tmp_path_factory.mktemp("full"), tmp_path_factory.mktemp("limited")
    write_corpus(limited)
    work: list[Job] = [(jobs.training, case) for case in CASES]
    work += [
        (jobs.uneven, (how, knows, accumulate))
        for how, knows, accumulate in (("ddp", True, 1), ("ddp", False, 3), ("fsdp", False, 3))
    ]
    work += [(jobs.uneven_resumed, case) for case in RESUMED]
    work += [(jobs.stopped_and_resumed, case) for case in CUT]
    work += [(jobs.inside_a_group, (how,)) for how in ("ddp", "fsdp")]
    work += [(jobs.some_have_no_batches, ()), (jobs.exchanged, ()), (jobs.graphs_refused, ())]
    work += [
        (jobs.left_by_break, ()),
        (jobs.deferred_waits, ()),
        (jobs.cannot_write, (str(full),)),
    ]
    work += [(jobs.time_limited, (str(limited),))]
    work += [(jobs.one_is_not_finite, (how,)) for how in ("ddp", "fsdp")]
    work += [(jobs.by_count, case) for case in BY_COUNT]
    packed = tmp_path_factory.mktemp("packed")
    random_pairs(packed, 40, 17, 10)
    work += [(jobs.packed, ("ddp", accumulate, str(packed))) for accumulate in (1, 3)]
    found = on_ranks(2, tmp_path_factory.mktemp("two"), work)
    by_job: dict[Any, Any] = {
        (job.__name__, str(args)): result for (job, args), result in zip(work, found, strict=True)
    }
    return by_job | {"full": full, "packed": packed}


def result_of(two: dict[Any, Any], job: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank got."""
    for (name, given), result in ((key, two[key]) for key in two if isinstance(key, tuple)):
        if name == job.__name__ and (not args or given == str(args)):
            return list(result)
    raise AssertionError(f"{job.__name__} was not run")


class TestLosses:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_two_ranks_train_as_one_process(
        self, two: dict[Any, Any], case: tuple[str, dict[str, Any]]
    ) -> None:
        """Shares are unequal, batches of one row leave a rank with nothing, losses are weighted."""
        expected = alone(jobs.training, "plain", case[1])
        for found in result_of(two, jobs.training, *case):
            assert_close(found, expected)
            assert found["weights"] == expected["weights"]  # sums of whole numbers are exact

    @pytest.mark.parametrize("accumulate", [1, 3])
    def test_packed_sentences(self, two: dict[Any, Any], accumulate: int) -> None:
        """Weighted by tokens, in groups, stopped within an epoch and resumed."""
        case = (accumulate, str(two["packed"]))
        expected = alone(jobs.packed, "plain", *case)
        assert 0 < expected["first"] < expected["batches"]
        assert len(set(expected["weights"])) > 1
        for found in result_of(two, jobs.packed, "ddp", *case):
            assert_close(found, expected)
            assert found["weights"] == expected["weights"]

    def test_both_ranks_report_the_same_to_the_bit(self, two: dict[Any, Any]) -> None:
        for case in CASES:
            one, other = result_of(two, jobs.training, *case)
            assert one == other

    def test_values_are_summed_once_for_ten_batches(self, two: dict[Any, Any]) -> None:
        batches = len(jobs.ROWS)
        for found in result_of(two, jobs.deferred_waits):
            assert found == {"weights": batches, "values": math.ceil(batches / 10)}

    @pytest.mark.parametrize("case", BY_COUNT, ids=str)
    def test_accumulated_by_count_as_by_hand(
        self, two: dict[Any, Any], case: tuple[str, int, bool]
    ) -> None:
        """A loop that is left averages its gradients afterwards, in another order than DDP."""
        for found in result_of(two, jobs.by_count, *case):
            assert found["close"]
            assert found["same"] or case[2]

    @pytest.mark.parametrize("how", ["ddp", "fsdp"])
    def test_what_one_rank_finds_not_finite_all_leave_out(
        self, two: dict[Any, Any], how: str
    ) -> None:
        expected = alone(jobs.one_is_not_finite, "plain")
        assert expected["non_finite"] == (1,)
        for found in result_of(two, jobs.one_is_not_finite, how):
            assert found["non_finite"] == [1]
            assert_close(found["model"], expected["model"])
            assert found["last"] == pytest.approx(expected["last"], abs=CLOSE)


class TestEnds:
    @pytest.mark.parametrize(
        ("how", "knows_length", "accumulate"),
        [("ddp", True, 1), ("ddp", False, 3), ("fsdp", False, 3)],
    )
    def test_a_rank_with_fewer_batches_goes_on_with_weight_0(
        self, two: dict[Any, Any], how: str, knows_length: bool, accumulate: int
    ) -> None:
        engine = jobs.new_engine("plain", accumulate=accumulate)
        batches = jobs.global_batches()
        union = batches[:5] + [jobs.share(batch, 0, 2) for batch in batches[5:]]
        result = engine.epoch(union)  # type: ignore[arg-type]
        evaluated = engine.evaluate(union).mean_loss  # type: ignore[arg-type]
        # The row of padding that stands for an empty share is a sample, too.
        padding = sum(rows == 1 for rows in jobs.ROWS[:5])
        expected = [*result.losses, evaluated, result.statistics.samples + padding]
        for found in result_of(two, jobs.uneven, how, knows_length, accumulate):
            assert_close(found[:-1], expected[:-1])
            assert found[-1] == expected[-1]

    @pytest.mark.parametrize("case", RESUMED, ids=str)
    def test_resumed_before_and_after_the_shorter_share_has_ended(
        self, two: dict[Any, Any], case: tuple[str, bool]
    ) -> None:
        for found in result_of(two, jobs.uneven_resumed, *case):
            assert found == {at: [True, True] for at in ("1", "3", "4", "7")}

    @pytest.mark.parametrize("case", CUT, ids=str)
    def test_resumed_in_any_loader(
        self, two: dict[Any, Any], case: tuple[str, int, int | None]
    ) -> None:
        """Also where the pass was to end there, which the loader was not, or says more than is
        left of it."""
        for found in result_of(two, jobs.stopped_and_resumed, *case):
            assert found == {"same": True, "updates": 0}

    def test_a_rank_without_any_batch_is_an_error_on_all(self, two: dict[Any, Any]) -> None:
        for message in result_of(two, jobs.some_have_no_batches):
            assert "a rank's loader has no batch in an epoch in which others have some" in message

    def test_ddp_left_inside_a_group_loses_nothing(self, two: dict[Any, Any]) -> None:
        engine = jobs.new_engine("plain", accumulate=3)
        steps = engine.steps(jobs.global_batches())
        next(steps)
        steps.close()
        assert engine.last_result is not None
        expected = {name: value.tolist() for name, value in engine.model.state_dict().items()}
        for found in result_of(two, jobs.inside_a_group, "ddp"):
            (message,) = found["messages"]
            assert "call it between two updates" in message
            assert found["updates"] == 1
            assert found["losses"] == pytest.approx(engine.last_result.losses, abs=CLOSE)
            assert_close(found["model"], expected)

    def test_fsdp_left_inside_a_group_says_what_is_lost(self, two: dict[Any, Any]) -> None:
        for found in result_of(two, jobs.inside_a_group, "fsdp"):
            assert "leave the loop after an update" in found["messages"][1]

    def test_a_loop_that_is_just_left_waits_for_nobody(self, two: dict[Any, Any]) -> None:
        for found in result_of(two, jobs.left_by_break):
            assert found == {"batches": 3}


class TestTalk:
    def test_all_ranks_learn_of_a_request_after_the_same_update(self, two: dict[Any, Any]) -> None:
        one, other = result_of(two, jobs.exchanged)
        # Wished by rank 1 at its 4th look, sent at that one, agreed two looks later.
        assert one["agreed"] == other["agreed"] == [0, 0, 0, 0, 0, 15, 0, 0, 0]
        assert one["settled"] == other["settled"] == [15, 1]

    def test_a_time_limit_ends_all_ranks_after_the_same_update(self, two: dict[Any, Any]) -> None:
        """The first rank's clock decides; all learn of it with the second exchange, at update 8.
        The run then trains on to the weights of one without a limit."""
        for found in result_of(two, jobs.time_limited):
            assert found == {
                "unlimited": [None, 26, True],
                "limited": ["time limit", 8, True],
                "resumed": [None, 26, True],
                "same weights": True,
            }

    def test_broadcast_and_all_gather(self, two: dict[Any, Any]) -> None:
        for found in result_of(two, jobs.exchanged):
            assert found["broadcast"] == ["of", 0]
            assert found["all_gather"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é" * 9}]
            assert found["waits"] == ["agreement", "ranks"]  # no wait outside the ledger

    def test_a_process_alone_knows_at_once(self) -> None:
        device = open_device("cpu")
        agreement = Agreement(SINGLE, device)
        assert agreement.poll(15, 0) == (15, 0)
        assert agreement.wait(0, 1) == (0, 1)
        assert SINGLE.all_gather("x", device.ledger) == ["x"]
        assert device.ledger.statistics().count == 0

    def test_graphs_are_refused_with_the_reason(self, two: dict[Any, Any]) -> None:
        for ddp, fsdp in result_of(two, jobs.graphs_refused):
            assert "averaged by the hosts" in ddp
            assert "FSDP2" in fsdp


def undisturbed(options: dict[str, Any]) -> dict[str, Any]:
    """The second epoch of a run that nothing stopped, in one process."""
    engine = jobs.new_engine("plain", **options)
    batches = jobs.global_batches()
    engine.epoch(batches)
    result = engine.epoch(batches)
    return {
        "losses": list(result.losses),
        "evaluated": engine.evaluate(batches).mean_loss,
        "model": {name: value.tolist() for name, value in engine.model.state_dict().items()},
    }


class TestCheckpoints:
    AT = 4  # batches of the second epoch that were trained on

    @pytest.mark.parametrize("how", ["ddp", "fsdp"])
    def test_killed_on_two_and_resumed_on_one_and_three(self, how: str, tmp_path: Path) -> None:
        folder = tmp_path / "state"
        folder.mkdir()
        (tmp_path / "two").mkdir()
        (tmp_path / "three").mkdir()
        with pytest.raises(torch.multiprocessing.ProcessExitedException):
            on_ranks(2, tmp_path / "two", [(jobs.killed, (how, OPTIONS, str(folder), self.AT))])
        (path,) = folder.iterdir()
        assert sorted(file.name for file in path.iterdir()) == [
            "state.json",
            "tensors-00000-of-00002.safetensors",
            "tensors-00001-of-00002.safetensors",
        ]
        expected = undisturbed(OPTIONS)
        expected["losses"] = expected["losses"][self.AT :]
        found = alone(jobs.resumed, "plain", OPTIONS, str(folder))
        found["losses"] = list(found["losses"])
        assert found.pop("path") == path.name
        assert_close(found, expected)
        # And on three, of the other kind: what was sharded is whole, and the other way round.
        other = "fsdp" if how == "ddp" else "ddp"
        work: list[Job] = [(jobs.resumed, (kind, OPTIONS, str(folder))) for kind in (how, other)]
        for by_rank in on_ranks(3, tmp_path / "three", work):
            for one in by_rank:
                assert one.pop("path") == path.name
                assert_close(one, expected)

    def test_a_rank_that_cannot_write_is_named_on_all(self, two: dict[Any, Any]) -> None:
        for message in result_of(two, jobs.cannot_write):
            assert "step 2 was not written" in message
            assert "rank 1: No space left on device" in message
            assert "still there: step-00000001" in message
        assert [path.name for path in two["full"].iterdir()] == ["step-00000001"]

    def test_a_changed_byte_in_any_file_is_refused(self, two: dict[Any, Any]) -> None:
        path = two["full"] / "step-00000001"
        for file in sorted(path.glob("*.safetensors")):
            good = file.read_bytes()
            file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
            assert latest_checkpoint(two["full"]) is None
            with pytest.raises(CheckpointError, match=file.name):
                load_checkpoint(path)
            file.write_bytes(good)
        assert latest_checkpoint(two["full"]) == path

    def test_a_file_name_that_climbs_out_is_refused(self, two: dict[Any, Any]) -> None:
        from headrace.checkpoint.content import checksum

        path = two["full"] / "step-00000001"
        content = json.loads((path / "state.json").read_text())
        content["content"]["files"][0]["name"] = "../../x.safetensors"
        content["sha256"] = checksum(content["content"])
        good = (path / "state.json").read_bytes()
        (path / "state.json").write_text(json.dumps(content))
        try:
            with pytest.raises(CheckpointError, match=r"files\[0\]\.name = .*: expected tensors-"):
                load_checkpoint(path)
        finally:
            (path / "state.json").write_bytes(good)


class TestOneProcess:
    def test_a_plain_model_needs_nobody(self) -> None:
        engine = jobs.new_engine("plain")
        assert (engine.ranks, parallelism_of(engine.model)) == (SINGLE, "plain")

    def test_one_process_writes_the_plain_layout(self, tmp_path: Path) -> None:
        engine: Engine = jobs.new_engine("plain")
        engine.epoch(jobs.global_batches())
        with CheckpointWriter(engine.device, tmp_path) as writer:
            writer.save({"engine": engine.state_dict(), "note": "kept"}, 1)
        names = sorted(path.name for path in (tmp_path / "step-00000001").iterdir())
        assert names == ["state.json", "tensors.safetensors"]

    def test_fp16_under_fsdp_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = jobs.new_engine("plain")
        monkeypatch.setattr(
            "headrace.engine.build.model_builder.parallelism_of", lambda model: "fsdp"
        )
        with pytest.raises(StepError, match="use bf16"):
            engine.use_plan(replace(engine.plan, precision="fp16"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestNccl:
    def test_one_rank_on_the_gpu(self, tmp_path: Path) -> None:
        """Wrapped or not, with a graph or not, the losses are the same; what cannot be captured
        says why."""
        cases = [(how, plan) for how in ("plain", "ddp", "fsdp") for plan in ("pipeline", "graph")]
        work: list[Job] = [(jobs.on_cuda, case) for case in cases]
        found = dict(zip(cases, on_ranks(1, tmp_path, work), strict=True))
        (expected,) = found["plain", "pipeline"]
        for (how, plan), (row,) in found.items():
            assert row["losses"] == pytest.approx(expected["losses"], abs=CLOSE)
            if plan == "graph":
                assert row["replays"] > 0 or row["why"]
            if (how, plan) == ("fsdp", "graph"):
                assert "FSDP2" in row["why"]

    def test_packed_sentences_on_one_rank(self, tmp_path: Path) -> None:
        """Wrapped with DDP, flex_attention is compiled and captured, too."""
        random_pairs(tmp_path, 40, 17, 10)
        cases = [(jobs.packed_on_cuda, (how, str(tmp_path))) for how in ("plain", "ddp")]
        (plain,), (ddp,) = on_ranks(1, tmp_path, list[Job](cases))
        assert (plain["uncompiled"], ddp["uncompiled"]) == (None, None)
        assert ddp["losses"] == pytest.approx(plain["losses"], rel=2e-3)
        assert min(plain["replays"], ddp["replays"]) > 0
