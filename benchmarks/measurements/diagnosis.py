"""What `headrace diagnose` says against the truth, on this machine's GPU.

    python benchmarks/measurements/diagnosis.py --out result.json
    python benchmarks/measurements/diagnosis.py --cases item,mask --works none --out part.json
    python benchmarks/measurements/diagnosis.py --cases none --repeats 2 --steps 12 --out works.json

1. `slow_scripts.py`: twelve slow loops with known causes. Is the cause named, is the line found,
   and does the predicted step match the fixed version's? Both run in turns, in one process.
2. `works/`: the plain scripts. First each is measured in turns with the plans `pipeline` and
   `graph`, as `eleven_works.py` does; then it is diagnosed, and the predictions are compared.
3. The cost of looking: a step with the hooks of `diagnose` installed against one without.

The last lines are a table, and what does not hold.
"""

from __future__ import annotations

import os

# Before PyTorch is loaded: the profiler needs them for loops that replay graphs.
os.environ.setdefault("TEARDOWN_CUPTI", "0")
os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import dataclasses
import gzip
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

import eleven_works
import slow_scripts
from measuring import header, interleaved_ms, save

from headrace.device import Device, open_device
from headrace.diagnosis import Settings
from headrace.diagnosis.explanation import explain
from headrace.diagnosis.session import Session
from headrace.main_program import ProgramEnded
from headrace.records import DiagnosisResult, Environment, TimeParts
from headrace.text_table import text_table

FOLDER = Path(__file__).resolve().parents[1] / "inputs"
WORKS = sorted(path.stem for path in (FOLDER / "works").glob("*.py") if path.stem != "samples")
PLANS = ("pipeline", "graph")
_MAX_JOB_S = 90
WINDOWS = Settings(warmup=10, clean=20, profiled=8, lines=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(slow_scripts.CASES), help="or none")
    parser.add_argument("--works", default=",".join(WORKS), help="or none")
    parser.add_argument("--tiny", action="store_true", help="small models, for a trial on a CPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget-seconds", type=float, default=540.0)
    parser.add_argument("--traces", type=Path, help="keep the trace of each loop in this folder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end = time.monotonic() + options.budget_seconds
    result: dict[str, Any] = {"cases": {}, "works": {}, "skipped": []}
    jobs = [("cases", name) for name in _names(options.cases)]
    jobs += [("works", name) for name in _names(options.works)]
    for kind, name in jobs:
        if time.monotonic() > end:
            result["skipped"].append(name)
            continue
        result[kind][name] = found = in_a_process(partial(JOBS[kind], name, options))
        print(name, json.dumps(found)[:400], flush=True)
        if options.out is not None:
            save(options.out, result)
    if options.cases != "none":
        result["overhead"] = in_a_process(partial(_overhead, options))
    result = header("diagnosis.py") | result  # not before: it opens the GPU
    _report(result)
    if options.out is not None:
        save(options.out, result)


def in_a_process(job: Callable[[Device], dict[str, Any]]) -> dict[str, Any]:
    """Do one job in a process of its own: launches are slower after the first profile of a process,
    and `diagnose` profiles once. It forks, to import everything only once; so this process must not
    use the GPU. A job that hangs is ended."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            found = job(open_device("auto"))
        except Exception as problem:  # a failure is a result, too
            traceback.print_exc()
            found = {"error": f"{type(problem).__name__}: {problem}"}
        sender.send(found)

    process = context.Process(target=work)
    process.start()
    sender.close()
    found: dict[str, Any] = {"error": f"no result after {_MAX_JOB_S} s"}
    try:
        if receiver.poll(_MAX_JOB_S):
            found = receiver.recv()
        else:
            process.kill()
    except EOFError:
        found = {"error": "its process died"}
    process.join()
    return found


def _names(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def observe(name: str, steps: Iterator[Any], traces: Path | None = None) -> DiagnosisResult:
    """Diagnose a loop, as the command does: then it is ended. With `traces`, its trace is kept
    there, to be replayed elsewhere."""

    def end() -> None:
        raise ProgramEnded

    session = Session(WINDOWS, on_complete=end, takes_batches=True)
    with suppress(ProgramEnded), session:
        for _ in islice(steps, 60):
            pass
    trace = session.seen.measured.trace
    if traces is not None and trace is not None:
        traces.mkdir(parents=True, exist_ok=True)
        with gzip.open(traces / f"{name}.json.gz", "wt", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(trace), file)
    return explain(session.seen, name, None, Environment())


# --- slow scripts ---------------------------------------------------------------------------------


def _case(name: str, options: Any, device: Device) -> dict[str, Any]:
    case, target = slow_scripts.CASES[name], device.torch_device
    tiny = options.tiny
    loops = {
        kind: slow_scripts.train(name, target, fixed=kind == "fixed", tiny=tiny)
        for kind in ("slow", "fixed")
    }

    def runner(loop: Iterator[None]) -> Any:
        return lambda steps: [None for _ in islice(loop, steps)]

    ways = {kind: runner(loop) for kind, loop in loops.items()}
    measured = interleaved_ms(ways, device, steps=options.steps, repeats=options.repeats)
    ratios = [
        slow / fixed
        for slow, fixed in zip(measured["slow"]["all"], measured["fixed"]["all"], strict=True)
    ]
    result = observe(name, slow_scripts.train(name, target, tiny=tiny), options.traces)
    gain = statistics.median(ratios)
    predicted = _predicted(result, case.change)
    return {
        "cause": case.cause,
        "found": largest_idle(result),
        "line": line_found(result) if case.change == "line" or case.cause == "host" else None,
        "slow_ms": measured["slow"]["ms"],
        "fixed_ms": measured["fixed"]["ms"],
        "speedup": round(gain, 4),
        "speedup_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "predicted_speedup": predicted,
        # The step that is predicted, against the fixed one, both relative to the slow one.
        "error": None if predicted is None else round(gain / predicted - 1, 4),
        **summary(result),
    }


def _predicted(result: DiagnosisResult, change: str) -> float | None:
    if result.step_ms is None:
        return None
    if change == "line":
        gains = [one.gain_ms for one in result.lines if one.line and "# slow" in one.line.text]
        known = [gain for gain in gains if gain is not None]
        return round(result.step_ms / (result.step_ms - sum(known)), 4) if known else None
    for one in result.predictions:
        if one.change == change:
            return round(one.speedup, 4)
    return None


def largest_idle(result: DiagnosisResult) -> str | None:
    parts = result.parts
    if parts is None:
        return None
    idle = [name for name in TimeParts.__slots__ if name != "computing"]
    return max(idle, key=lambda name: getattr(parts, name))


def line_found(result: DiagnosisResult) -> bool:
    lines = [one.line for one in (*result.lines, *result.python_lines)]
    return any(line is not None and "# slow" in line.text for line in lines)


def summary(result: DiagnosisResult) -> dict[str, Any]:
    parts = result.parts
    return {
        "outcome": result.outcome,
        "verdict": list(result.verdict),
        "step_ms": result.step_ms,
        "profiled_ms": result.profiled_ms,
        "watched_ms": result.watched_ms,
        "parts": None
        if parts is None
        else {name: round(getattr(parts, name), 4) for name in TimeParts.__slots__},
        "waits_by_line": result.waits_per_step,
        "waits_in_trace": result.waits_in_trace,
        "loader_ms": result.loader_ms,
        "lines": [
            [
                f"{Path(one.line.file).name}:{one.line.line}" if one.line else None,
                one.form,
                one.per_step,
                one.blocked_ms,
                one.idle_ms,
                one.gain_ms,
            ]
            for one in result.lines[:10]
        ],
        "python_lines": [
            [f"{Path(one.line.file).name}:{one.line.line}", one.ms, one.idle_ms, one.gain_ms]
            for one in result.python_lines
        ],
        "replay_error": result.replay_error,
        "predictions": {one.change: round(one.speedup, 4) for one in result.predictions},
        "missing": list(result.missing),
    }


def _overhead(options: Any, device: Device) -> dict[str, Any]:
    """A step with the hooks of `diagnose` installed, which only count, against one without."""
    loops = [slow_scripts.train("timing", device.torch_device, fixed=True, tiny=options.tiny)]
    loops.append(slow_scripts.train("timing", device.torch_device, fixed=True, tiny=options.tiny))

    def plain(steps: int) -> None:
        for _ in islice(loops[0], steps):
            pass

    def watched(steps: int) -> None:
        with Session(Settings(warmup=1_000_000)):
            for _ in islice(loops[1], steps):
                pass

    ways = {"plain": plain, "watched": watched}
    measured = interleaved_ms(ways, device, steps=5 * options.steps, repeats=options.repeats)
    pairs = zip(measured["watched"]["all"], measured["plain"]["all"], strict=True)
    return measured | {"share": round(statistics.median(a / b for a, b in pairs) - 1, 5)}


# --- works ----------------------------------------------------------------------------------------


@contextmanager
def steps_of_work(name: str, device: Device, tiny: bool) -> Iterator[Iterator[Any]]:
    """The steps of a script in `works/`, as it is measured."""
    sys.path.insert(0, str(FOLDER / "works"))
    try:
        spec = importlib.util.spec_from_file_location(name, FOLDER / "works" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        steps = module.train(device.torch_device, **({"tiny": True} if tiny else {"pin": True}))
        yield steps
        steps.close()
    finally:
        sys.path.pop(0)


def _work(name: str, options: Any, device: Device) -> dict[str, Any]:
    measured = _measured(name, device, options)
    with steps_of_work(name, device, options.tiny) as steps:
        result = observe(name, steps, options.traces)
    predicted = {one.change: one.speedup for one in result.predictions}
    # As the plain script's time differs between the turns and the diagnosis, both speed-ups are
    # relative to the plain script's time beside them. A graph's own time hardly varies.
    errors, errors_of_ms = {}, {}
    for plan in PLANS:
        row, speedup = measured.get(plan, {}), predicted.get(f"with the plan {plan}")
        if "speed-up" in row and speedup is not None and result.step_ms is not None:
            errors[plan] = round(row["speed-up"][0] / speedup - 1, 4)
            errors_of_ms[plan] = round(result.step_ms / speedup / row["ms"] - 1, 4)
    found = {"measured": measured, "errors": errors, "errors_of_ms": errors_of_ms}
    return found | summary(result)


def _measured(name: str, device: Device, options: Any) -> dict[str, Any]:
    """The plain script and the plans, in turns: milliseconds, and speed-ups over the plain one."""
    wanted = argparse.Namespace(
        plans=PLANS,
        tiny=options.tiny,
        verbose=False,
        steps=options.steps,
        repeats=options.repeats,
        warmup=8,
        compare=0,
        traced_steps=0,
    )
    plans = eleven_works.measured(name, device, wanted)["plans"]
    kept = ("ms", "all", "speed-up", "captured", "error")
    return {plan: {key: row[key] for key in kept if key in row} for plan, row in plans.items()}


# --- the report -----------------------------------------------------------------------------------


def _report(result: dict[str, Any]) -> None:
    rows = [
        [
            name,
            one.get("cause"),
            one.get("found"),
            one.get("line"),
            one.get("waits_by_line"),
            one.get("waits_in_trace"),
            one.get("speedup"),
            one.get("predicted_speedup"),
            _percent(one.get("error")),
            _percent(one.get("replay_error")),
            one.get("error") if isinstance(one.get("error"), str) else "",
        ]
        for name, one in result["cases"].items()
    ]
    columns = ("case", "cause", "found", "line", "by line", "in trace", "×", "predicted", "error")
    if rows:
        print(text_table((*columns, "replay", ""), rows))
    rows = [
        [
            name,
            one.get("step_ms"),
            _shares(one),
            str(one.get("predictions")),
            str(one.get("errors")),
            one.get("error", ""),
        ]
        for name, one in result["works"].items()
    ]
    if rows:
        print(text_table(("work", "ms", "parts %", "predicted ×", "errors", ""), rows))
    cases = [one for one in result["cases"].values() if "cause" in one]
    errors = [abs(one["error"]) for one in cases if isinstance(one.get("error"), float)]
    right = sum(one["cause"] == one["found"] for one in cases)
    works = [one for one in result["works"].values() if one.get("errors")]
    result["totals"] = {
        "causes_right": f"{right} of {len(cases)}",
        "median_error": statistics.median(errors) if errors else None,
        "largest_replay_error": max(
            (one.get("replay_error") or 0.0 for one in cases), default=None
        ),
        "largest_unattributed_share": max(map(_unattributed_share, cases), default=None),
        "lines_found": f"{sum(bool(one.get('line')) for one in cases)} of "
        f"{sum(one.get('line') is not None for one in cases)}",
        "predicted": f"{len(errors)} of {len(cases)}",
        "median_error_of_works": _median_error(works, "errors", PLANS),
        **{
            f"median_error_of_{kind}_of_{plan}": _median_error(works, key, (plan,))
            for kind, key in (("speed-up", "errors"), ("ms", "errors_of_ms"))
            for plan in PLANS
        },
        "overhead_of_the_clean_window": result.get("overhead", {}).get("share"),
    }
    print(json.dumps(result["totals"]))


def _median_error(works: list[dict[str, Any]], key: str, plans: Sequence[str]) -> float | None:
    found = [abs(one[key][plan]) for one in works for plan in plans if plan in one[key]]
    return round(statistics.median(found), 4) if found else None


def _unattributed_share(one: dict[str, Any]) -> float:
    parts, step_ms = one.get("parts"), one.get("step_ms")
    return parts["unattributed"] / step_ms if parts and step_ms else 0.0


def _percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, float) else "–"


def _shares(one: dict[str, Any]) -> str:
    parts, total = one.get("parts"), one.get("step_ms")
    if not parts or not total:
        return "–"
    shown = {name: value / total for name, value in parts.items() if value / total >= 0.02}
    return " ".join(f"{name[:5]} {share:.0%}" for name, share in shown.items())


JOBS = {"cases": _case, "works": _work}

if __name__ == "__main__":
    main()
