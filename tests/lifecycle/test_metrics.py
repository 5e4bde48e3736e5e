"""The metrics file: each line whole or not there, and TensorBoard's events beside it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RunError
from headrace.lifecycle import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_line_can_be_read_at_once(path: Path) -> None:
    with MetricsLog(path) as metrics:
        metrics.write("step", 1, loss=3.25, lr=1e-4)
        assert path.read_text() == '{"kind": "step", "step": 1, "loss": 3.25, "lr": 0.0001}\n'
        metrics.write("valid", 1, bleu=27.5, samples=["ein Hund", "一只狗"], waits={"data": 3})
        assert list(read_metrics(path))[1] == {
            "kind": "valid",
            "step": 1,
            "bleu": 27.5,
            "samples": ["ein Hund", "一只狗"],
            "waits": {"data": 3},
        }


def test_nan_and_infinity_become_null(path: Path) -> None:
    with MetricsLog(path) as metrics:
        metrics.write("step", 1, loss=math.nan, deep={"a": (math.inf, [-math.inf, 1.0])})
    assert json.loads(path.read_text()) == {
        "kind": "step",
        "step": 1,
        "loss": None,
        "deep": {"a": [None, [None, 1.0]]},
    }


def test_half_a_surrogate_pair_is_written_as_json_has_it(path: Path) -> None:
    with MetricsLog(path) as metrics:
        metrics.write("note", 1, text="a\udc80b\nc")
    assert [line["text"] for line in read_metrics(path)] == ["a\udc80b\nc"]


def test_what_is_not_plain_writes_nothing(path: Path) -> None:
    with MetricsLog(path) as metrics:
        with pytest.raises(TypeError):
            metrics.write("step", 1, loss=object())
        metrics.write("step", 2)
    assert [line["step"] for line in read_metrics(path)] == [2]


def write_steps(path: Path, *steps: int) -> None:
    with MetricsLog(path) as metrics:
        for step in steps:
            metrics.write("step", step, loss=float(step))


def test_a_second_run_appends(path: Path) -> None:
    write_steps(path, 1, 2)
    write_steps(path, 3)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"kind": "st', b"{", b'{"kind": "step", "step": 9}', b"\0\0"])
def test_a_torn_last_line_is_dropped(path: Path, torn: bytes) -> None:
    write_steps(path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write_steps(path, 3)
    assert path.read_bytes().startswith(whole)
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@given(kept=st.integers(0, 3), cut=st.integers(0, 200_000), size=st.integers(1, 150_000))
def test_wherever_it_was_torn(
    kept: int, cut: int, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with MetricsLog(path) as metrics:
        for step in range(kept + 1):
            metrics.write("note", step, text="x" * (size if step == kept else 5))
    written = path.read_bytes()
    last_line = written.rfind(b"\n", 0, -1) + 1
    path.write_bytes(written[: min(last_line + cut, len(written) - 1)])
    MetricsLog(path).close()
    assert path.read_bytes() == written[:last_line]


def test_rewind_drops_later_steps(path: Path) -> None:
    with MetricsLog(path) as metrics:
        for step in (1, 2, 3):
            metrics.write("step", step)
            metrics.write("valid", step)
    with path.open("ab") as file:
        file.write(b'{"kind": "note"}\n{"kind": "step", "step": 4')
    with MetricsLog(path) as metrics:
        metrics.rewind(2)
        metrics.write("step", 3, again=True)
    assert [(line["kind"], line.get("step")) for line in read_metrics(path)] == [
        *(("step", 1), ("valid", 1), ("step", 2), ("valid", 2), ("note", None), ("step", 3)),
    ]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_resumed_run_writes_the_same_file(path: Path, tmp_path: Path) -> None:
    write_steps(path, 1, 2, 3, 4)
    other = tmp_path / "other.jsonl"
    write_steps(other, 1, 2, 3)
    with MetricsLog(other) as metrics:
        metrics.rewind(2)
    write_steps(other, 3, 4)
    assert other.read_bytes() == path.read_bytes()


def test_rewind_before_the_first_step(path: Path) -> None:
    write_steps(path, 1)
    with MetricsLog(path) as metrics:
        metrics.rewind(0)
    assert path.read_bytes() == b""


def test_damaged_lines_are_left_out_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(b'{"step": 1}\n\0\0\0\n[1]\n\xff\n{"step": 2}\n')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert "skipped 3 damaged lines" in caplog.text


def test_a_file_that_cannot_be(tmp_path: Path, path: Path) -> None:
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be opened \(No such file"):
        MetricsLog(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be read"):
        list(read_metrics(path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_so(path: Path) -> None:
    with MetricsLog(path) as metrics, Path("/dev/full").open("ab", buffering=0) as full:
        metrics._file.close()
        metrics._file = full
        with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written \(No space left"):
            metrics.write("step", 1)


# --- TensorBoard ----------------------------------------------------------------------------------


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events: Any = accumulator.EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_numbers_are_events(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with MetricsLog(path, tmp_path / "events") as metrics:
        metrics.write("step", 1, loss=2.0, epoch=0, name="text", yes=True)
        metrics.write("step", 2, loss=math.nan, waits={"data": {"count": 3}})
    assert shown(tmp_path / "events") == {
        "step/loss": [(1, 2.0)],
        "step/waits/data/count": [(2, 3.0)],
    }


def test_resuming_hides_what_comes_after_the_checkpoint(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for resumed, values in ((False, (1.0, 2.0, 3.0)), (True, (4.0,))):
        with MetricsLog(path, tmp_path / "events") as metrics:
            if resumed:
                metrics.rewind(1)
            for step, loss in enumerate(values, 2 if resumed else 1):
                metrics.write("step", step, loss=loss)
    assert shown(tmp_path / "events") == {"step/loss": [(1, 1.0), (2, 4.0)]}


def test_without_numbers_no_events_are_made(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    MetricsLog(path, tmp_path / "events").close()
    assert not (tmp_path / "events").exists()


def test_what_is_written_again_is_shown_once(path: Path, tmp_path: Path) -> None:
    """Killed between an epoch's line and its checkpoint: the line is dropped and written again,
    what else was of that step stays."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "events"
    with MetricsLog(path, tensorboard=folder) as metrics:
        for step in (5, 10):
            metrics.write("step", step, loss=float(step))
        metrics.write("epoch", 10, loss=0.5)
        metrics.write("step", 11, loss=9.0)
    with MetricsLog(path, tensorboard=folder) as metrics:
        metrics.rewind(10, lambda line: line["kind"] == "epoch")
        metrics.write("epoch", 10, loss=0.5)
    assert shown(folder) == {"step/loss": [(5, 5.0), (10, 10.0)], "epoch/loss": [(10, 0.5)]}
    assert [(line["kind"], line["step"]) for line in read_metrics(path)] == [
        ("step", 5),
        ("step", 10),
        ("epoch", 10),
    ]


def test_tensorboard_is_loaded_only_if_asked_for(path: Path) -> None:
    program = (
        "import sys; from headrace.lifecycle.metrics import MetricsLog\n"
        f"with MetricsLog({str(path)!r}) as metrics: metrics.write('step', 1, loss=2.0)\n"
        "assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_tensorboard_that_is_missing_is_said_so(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match=r"not installed .*pip install 'headrace\[translate\]'"):
        MetricsLog(path, tmp_path / "events")


def test_events_that_cannot_be_written_are_a_warning(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "events").write_text("no folder")
    with MetricsLog(path, tensorboard=tmp_path / "events") as metrics:
        for step in (1, 2):
            metrics.write("step", step, loss=1.0)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    (record,) = caplog.records
    assert "events: TensorBoard events cannot be written (File exists)" in record.message


def test_sample_translations_are_text_in_tensorboard(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    samples = [["三|四", "three or four", "three"]]
    with MetricsLog(path, tmp_path / "events") as metrics:
        metrics.write("epoch", 40, epoch=1, loss=2.0, samples=samples)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events: Any = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (event,) = events.Tensors("epoch/samples/text_summary")
    assert event.step == 40
    assert event.tensor_proto.string_val[0].decode() == (
        "after epoch 2\n\n| source | reference | translation |\n| --- | --- | --- |\n"
        "| 三\\|四 | three or four | three |"
    )
    assert next(read_metrics(path))["samples"] == samples
