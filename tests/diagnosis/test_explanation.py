"""From windows to a result: lines joined with the trace, gains, sentences, the screen and page."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.diagnosis.explanation import explain
from headrace.diagnosis.forms import FORMS
from headrace.diagnosis.loaders import LoaderFacts
from headrace.diagnosis.python_lines import LineTime
from headrace.diagnosis.script import Limit, exit_code_of, parse_limits
from headrace.diagnosis.session import Measurements, Observations
from headrace.diagnosis.steps import Period
from headrace.diagnosis.text import text_of
from headrace.diagnosis.trace import Call
from headrace.diagnosis.waits import Wait
from headrace.records import DiagnosisResult, Environment, LineRecord
from headrace.report.diagnosis_page import diagnosis_page
from support.diagnosis.made_traces import MS, US, Loop


def wait(line: int, form: str = "item") -> Wait:
    return Wait(FORMS[form], LineRecord("/home/ada/train.py", line, "main", f"line {line}"))


def seen(loop: Loop, waits: list[list[Wait]], clean_ms: float | None = None) -> Observations:
    trace = loop.run()
    ns = round((clean_ms or trace.step_ms) * 1e6)
    return Observations(
        steps=50,
        calls=50,
        period=Period((0,), 0, 1),
        calls_per_step=1,
        measured=Measurements(
            clean_ns=[ns] * 10,
            clean_total_ns=10 * ns,
            trace=trace,
            profiled_steps=trace.steps,
            profiled_total_ns=trace.end_ns,
            waits=waits,
            is_complete=True,
        ),
    )


def result_of(observed: Observations) -> DiagnosisResult:
    return explain(observed, "train.py", None, Environment(device="cuda:0"))


def test_each_line_gets_its_waits_of_the_trace() -> None:
    loop = Loop(reads=2, kernel=20 * US)
    result = result_of(seen(loop, [[wait(42), wait(57)]] * 3))
    first, second = sorted(result.lines, key=lambda one: one.line.line if one.line else 0)
    assert (first.per_step, second.per_step) == (1.0, 1.0)
    # The first of the two blocks. Either alone gains nothing: the other would block instead.
    assert first.blocked_ms is not None
    assert second.blocked_ms is not None
    assert first.blocked_ms > 10 * second.blocked_ms
    assert first.gain_ms == pytest.approx(0, abs=0.01)
    assert result.waits_in_trace == result.waits_per_step == 2.0
    assert result.outcome == "complete"
    assert result.parts is not None
    assert result.parts.total == pytest.approx(result.step_ms)


def test_copies_that_need_not_block_are_joined_if_their_line_is_certain() -> None:
    loop = Loop(reads=1, kernel=20 * US, copy=300 * US, pageable=True)
    copy = replace(wait(31, "to"), operation="copy from pageable memory")
    other = replace(wait(32, "to"), operation="copy from pageable memory")
    for waits, blocked in (([copy, wait(42)], True), ([copy, copy, wait(42)], True)):
        result = result_of(seen(loop, [waits] * 3))
        (line,) = (one for one in result.lines if one.line and one.line.line == 31)
        assert ((line.blocked_ms or 0) > 0.2) is blocked
    result = result_of(seen(loop, [[copy, other, wait(42)]] * 3))
    times = {one.line.line: one.blocked_ms for one in result.lines if one.line}
    assert (times[31], times[32]) == (None, None)
    assert times[42] == pytest.approx(0.2, abs=0.05)


def test_a_loop_of_few_waits_is_scaled_to_the_clean_step() -> None:
    loop = Loop(reads=1, kernel=20 * US)
    result = result_of(seen(loop, [[wait(42)]] * 3, clean_ms=loop.run().step_ms / 2))
    (line,) = result.lines
    whole = result_of(seen(loop, [[wait(42)]] * 3))
    assert line.gain_ms == pytest.approx((whole.lines[0].gain_ms or 0) / 2)
    assert result.verdict[0].startswith("A step takes 0.4 ms; the GPU computes for 0.4 ms of it (")
    assert "because the host waited for it and then had to launch anew" in result.verdict[0]


def test_steps_with_another_number_of_waits_are_not_joined() -> None:
    result = result_of(seen(Loop(reads=2), [[wait(42)], [wait(42)] * 3]))
    assert all(line.blocked_ms is None for line in result.lines)
    assert "no times for the lines" in " ".join(result.missing)


def test_a_copy_to_the_host_and_a_synchronization_after_it_are_two_waits() -> None:
    observed = seen(Loop(), [[wait(41, "cpu"), wait(42, "device synchronize")]] * 3)
    assert observed.measured.trace is not None
    added = []
    for mark in observed.measured.trace.marks:
        added += [Call(mark - 20, mark - 10, "wait", "cudaMemcpyAsync")]
        added += [Call(mark - 9, mark - 1, "wait", "cudaDeviceSynchronize")]
    calls = sorted((*observed.measured.trace.calls, *added), key=lambda one: one.start_ns)
    observed.measured.trace = replace(observed.measured.trace, calls=tuple(calls), work=())
    result = result_of(observed)
    assert result.waits_in_trace == 2
    assert all(one.blocked_ms is not None for one in result.lines)


def test_a_step_that_waits_much_more_often_is_told() -> None:
    observed = seen(Loop(reads=1), [[wait(42)]] * 3)
    assert observed.measured.trace is not None
    last = observed.measured.trace.marks[-2]  # the last step saves a checkpoint
    saved = tuple(Call(last + at, last + at, "wait") for at in range(30))
    calls = observed.measured.trace.calls
    observed.measured.trace = replace(observed.measured.trace, calls=(*calls, *saved))
    sentence = (
        f"1 of {observed.measured.trace.steps} profiled steps waited up to 31 times instead of 1"
    )
    assert any(sentence in text for text in result_of(observed).missing)
    observed.measured.waits.append([wait(42)] * 31)
    assert not any(sentence in text for text in result_of(observed).missing)


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (Loop(load=9 * MS), "for the data loader"),
        (Loop(kernel=5 * US, launch=30 * US), "because the host cannot launch kernels fast enough"),
        (Loop(logging=9 * MS), "for Python between the launches"),
        (Loop(copy=3 * MS, pageable=True), "for copies between host and device"),
        (Loop(), "It is busy: faster kernels would help, better feeding would not."),
    ],
)
def test_the_verdict_names_the_cause(loop: Loop, sentence: str) -> None:
    result = result_of(seen(loop, [[]] * 3))
    assert len(result.verdict) == 2
    assert sentence in " ".join(result.verdict)


@pytest.mark.parametrize(("workers", "tensors"), [(2, 8), (0, 30), (2, 9)])
def test_many_tensors_per_batch_are_worth_a_note(workers: int, tensors: int) -> None:
    observed = seen(Loop(), [[]] * 3)
    observed.measured.loader = LoaderFacts(workers, pins=True, batch_tensors=tensors)
    found = [note for note in result_of(observed).notes if "a batch has" in note]
    assert len(found) == ((workers, tensors) == (2, 9))


def test_no_step_is_predicted_to_outrun_its_loader() -> None:
    # 40 launches of 60 µs, 20 µs of work each: a graph would take 1 ms.
    observed = seen(Loop(kernel=20 * US, launch=60 * US), [[]] * 3)
    observed.measured.loader = LoaderFacts(workers=2, pins=True, batch_tensors=5, batch_ms=1.5)
    result = result_of(observed)
    steps_ms = {one.change: one.step_ms for one in result.predictions}
    assert steps_ms["with the plan graph"] == pytest.approx(1.5)
    assert steps_ms["with the plan pipeline"] == pytest.approx(result.step_ms, rel=0.02)
    assert "the loader delivers a batch every 1.5 ms" in text_of(result)
    assert "the loader would be the limit" in " ".join(result.notes)
    observed.measured.loader.batch_ms = 0.5
    result = result_of(observed)
    steps_ms = {one.change: one.step_ms for one in result.predictions}
    assert steps_ms["with the plan graph"] < 1.2
    assert not any("the limit" in note for note in result.notes)


def test_the_last_line_is_the_command_that_speeds_the_script_up() -> None:
    result = result_of(seen(Loop(kernel=20 * US, launch=60 * US), [[]] * 3))
    steps_ms = {one.change: one.step_ms for one in result.predictions}
    assert steps_ms["with headrace run"] == pytest.approx(steps_ms["with the plan graph"], rel=0.01)
    for command, last in (
        ("headrace diagnose --then continue train.py --lr 1", "headrace run train.py --lr 1"),
        ("headrace diagnose -m train.py a", "headrace run -m train.py a"),
    ):
        environment = replace(result.environment, command=command)
        text = text_of(replace(result, program="train.py", environment=environment))
        assert text.splitlines()[-1] == f"To run it sped up, unchanged: {last}"
    of_trace = replace(result.environment, command="headrace diagnose trace.json")
    assert "To run it" not in text_of(replace(result, program="trace.json", environment=of_trace))
    busy = result_of(seen(Loop(), [[]] * 3))
    environment = replace(busy.environment, command="headrace diagnose train.py")
    assert "To run it" not in text_of(replace(busy, program="train.py", environment=environment))


def test_the_screen_and_the_page_show_it() -> None:
    observed = seen(Loop(reads=1, kernel=20 * US, load=3 * MS), [[wait(42)]] * 3)
    observed.measured.loader = LoaderFacts(workers=0, pins=True, batch_tensors=2)
    result = result_of(observed)
    text = text_of(result)
    assert max(map(len, text.splitlines()[:12])) <= 120
    for part in (
        "/home/ada/train.py:42",
        "line 42",
        "plan pipeline",
        "4 loader processes",
        "input",
    ):
        assert part in text
    assert "the DataLoader has no worker processes" in text
    read = DiagnosisResult.from_dict(json.loads(result.to_json()))
    assert read == result
    page = diagnosis_page(read, "diagnosis.json")
    # On the timeline: the wait, and the idle time that it caused.
    assert "/home/ada/train.py:42 line 42" in page
    assert "synchronization: /home/ada/train.py:42 line 42" in page
    assert "<code>headrace.DeferredScalars</code>" in page
    assert "Where the time goes" in page
    assert "blocked ms" in page
    untimed = replace(read.lines[0], blocked_ms=None, idle_ms=None, gain_ms=None)
    page = diagnosis_page(replace(read, lines=(untimed,)), "diagnosis.json")
    assert "those with the most waits first" in page
    assert "blocked ms" not in page


def test_uneven_steps_and_waits_of_other_threads_are_told() -> None:
    logger = replace(wait(57), in_other_thread=True)
    observed = seen(Loop(reads=1), [[wait(42), logger]] * 3)
    observed.measured.clean_ns[3] = 138 * MS
    result = result_of(observed)
    assert any("/home/ada/train.py:57 waits in a thread of its own" in one for one in result.notes)
    assert any("the longest of 10 steps took 138.0 ms" in one for one in result.notes)
    times = {one.line.line: one.blocked_ms for one in result.lines if one.line}
    assert times[42] is not None  # joined, although the trace has no wait of the other thread
    assert times[57] is None


def test_code_that_is_cut_shows_what_waits() -> None:
    text = f"print({'a, ' * 40}loss.item(), step)"
    line = LineRecord("train.py", 3, "", text)
    waits = [Wait(FORMS["item"], line), Wait(FORMS["cpu"], line)]
    for count in (1, 2):
        shown = text_of(result_of(seen(Loop(reads=count), [waits[:count]] * 3)))
        assert "loss.item()" in shown
        assert max(map(len, shown.splitlines())) <= 120


def test_a_line_that_waits_in_two_forms_says_which() -> None:
    observed = seen(Loop(reads=2), [[wait(42), wait(42, "cpu")]] * 3)
    text = text_of(result_of(observed))
    assert "/home/ada/train.py:42   .item(): line 42" in text
    assert "/home/ada/train.py:42   .cpu(), .to('cpu'): line 42" in text


def test_the_users_line_stands_for_generated_code_and_leads_to_a_librarys() -> None:
    ours = LineRecord("train.py", 9, "main", "step(model)")
    library = LineRecord("/usr/lib/python3/site-packages/lib/a.py", 3, "read", "return x.item()")
    generated = LineRecord("<string>", 1, "", "")
    for line, place, code in (
        (library, "train.py:9 → a.py:3", "return x.item()"),
        (generated, "train.py:9", "step(model)"),
    ):
        found = result_of(seen(Loop(reads=1), [[Wait(FORMS["item"], line, ours)]] * 3))
        assert f" {place}   {code}  " in text_of(found)
        page = diagnosis_page(found, "diagnosis.json")
        assert ("<code>return x.item()</code>, called from <b>train.py:9</b>" in page) is (
            line is library
        )
        assert "&lt;string&gt;" not in page


def test_forms_with_the_same_advice_share_it_and_lines_that_are_left_out_are_counted() -> None:
    forms = ("item", "tolist", "item")
    waits = [wait(line, forms[line % 3]) for line in range(1, 14)]
    text = text_of(result_of(seen(Loop(reads=13), [waits] * 3)))
    assert "  and 3 more; --html shows all\n" in text
    assert text.count("Keep the value on the device") == 1
    assert ".tolist(); .item(): Keep" in text or ".item(); .tolist(): Keep" in text


def test_the_page_has_the_code_around_each_line() -> None:
    here, text = __file__, "def test_the_page_has_the_code_around_each_line() -> None:"
    code = Path(here).read_text(encoding="utf-8").splitlines()
    line = LineRecord(here, code.index(text) + 1, "", text)
    observed = seen(Loop(logging=9 * MS), [[Wait(FORMS["item"], line)]] * 3)
    observed.measured.python_lines = [LineTime(line, None, 9.0, 0.5)]
    result = result_of(observed)
    for one in (*result.lines, *result.python_lines):
        assert one.excerpt is not None
        assert one.excerpt.lines[3] == text
        assert one.excerpt.first == line.line - 3
    (python,) = result.python_lines
    assert result.parts is not None
    assert python.idle_ms == pytest.approx(result.parts.host / 2)
    assert python.gain_ms is not None
    assert 0 < python.gain_ms <= result.parts.host
    assert "line of Python between launches" in text_of(result)
    observed.measured.python_lines = [
        LineTime(line, None, 0.25, 0.5)
    ]  # in other steps than were profiled
    assert [one.idle_ms for one in result_of(observed).python_lines] == [0.25]
    observed.measured.python_lines = [LineTime(line, None, 2.5, 0.4)]  # most of it was not sampled
    assert result_of(observed).python_lines == ()
    assert "spread over many short stretches" in result_of(observed).missing[0]
    page = diagnosis_page(result, "diagnosis.json")
    assert page.count(f'<span class="line"><i>{line.line}</i> {html.escape(text)}</span>') == 2


def test_limits_end_with_3() -> None:
    result = result_of(seen(Loop(reads=1, load=3 * MS), [[wait(42)]] * 3))
    assert parse_limits("waits>2, idle>=20%") == [
        Limit("waits", 2.0, False),
        Limit("idle", 20.0, True),
    ]
    told: list[str] = []
    for text, code in (("waits>1", 0), ("waits>=1", 3), ("idle>5%", 3), ("unattributed>5%", 0)):
        assert exit_code_of(result, parse_limits(text), told.append) == code, text
    assert exit_code_of(replace(result, exit_code=7), [], told.append) == 7
    # A script that fails says more than a limit that could not be measured, and less than one
    # that is exceeded.
    for text, code in (("races>0", 7), ("waits>=1", 3), ("races>0,waits>=1", 3)):
        failed = replace(result, exit_code=7)
        assert exit_code_of(failed, parse_limits(text), told.append) == code, text
    assert told[0] == "--fail-on: waits is 1 (>= 1)"


def test_a_trace_that_cannot_be_replayed_predicts_nothing() -> None:
    observed = seen(Loop(reads=1), [[wait(42)]] * 3)
    assert observed.measured.trace is not None
    work = tuple(
        replace(one, call=None) if at % 5 == 0 else one
        for at, one in enumerate(observed.measured.trace.work)
    )
    observed.measured.trace = replace(observed.measured.trace, work=work)
    result = result_of(observed)
    assert result.predictions == ()
    assert result.lines[0].gain_ms is None
    assert "no predictions: a replay of the trace differs from the trace by" in result.missing[0]
