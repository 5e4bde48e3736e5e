"""Public training programs with one line added, and others unchanged under `headrace run`.

    python benchmarks/measurements/public_loops.py --checkouts scratch/public
        --out public-loops.json
    python benchmarks/measurements/public_loops.py --device fake vae nanoGPT

`public_programs.py` lists the programs. First each is trained for some steps, plain and sped up,
several at a time: are the weights equal after each step, bit for bit? Plain Adam and its like
round otherwise when their step is captured: loops that then differ are compared once more, both
with optimizers that are capturable from the start. Then each is timed alone, plain and sped up in
turns. Every run is a process of its own. Needs a checkout of each repository.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save
from public_programs import LINE, UNCHANGED, Program
from public_run import Wanted, prepare, run

_FORK = multiprocessing.get_context("fork")


def load_early() -> None:
    """Import what several programs import, so that it takes its time once."""
    for name in (
        "timm",
        "torch.utils.tensorboard",
        "matplotlib.pyplot",
        "pandas",
        "einops",
        "tqdm",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class Runs:
    """Runs programs in processes of their own, each in a fresh copy of its prepared folder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder, self._count = options, folder, 0

    def prepare(self, program: Program) -> None:
        where = self._folder / program.name / "prepared"
        prepare(program, self._options.checkouts, where, self._options.device != "cuda")

    def one(self, program: Program, wanted: Wanted) -> dict[str, Any]:
        """The result of a run that is ended after a while."""
        self._count += 1
        base = self._folder / program.name / f"{os.getpid()}-{self._count}"
        shutil.copytree(base.parent / "prepared", base / "files")
        process = _FORK.Process(target=_child, args=(program, wanted, base))
        process.start()
        process.join(self._options.limit)
        if process.is_alive():
            process.kill()
            process.join()
        result = base / "result.json"
        found: dict[str, Any] = {}
        if result.exists():
            found = json.loads(_without_folders(result.read_text(), base))
        else:
            found["failed"] = f"more than {self._options.limit} s, or exit {process.exitcode}"
        if "failed" in found:
            said = (base / "output").read_text(errors="replace").strip()
            found["failed"] += f": {said[-600:]}"
        shutil.rmtree(base, ignore_errors=True)
        return found


def _without_folders(text: str, base: Path) -> str:
    """Lines of a program or a library are named from its own folder."""
    return re.sub(r"[^ \"(]*/site-packages/", "", text.replace(f"{base / 'files'}/", ""))


def _child(program: Program, wanted: Wanted, base: Path) -> None:
    output = os.open(base / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    found = run(program, base / "files", wanted)
    part = base / "result.part"
    part.write_text(json.dumps(found))
    part.rename(base / "result.json")
    os._exit(0)  # no loader's worker is waited for


# --- equality ---------------------------------------------------------------------------------


def equality(program: Program, runs: Runs, options: argparse.Namespace) -> dict[str, Any]:
    """Train plain twice and sped up once, and compare the weights."""
    way = "line" if program in LINE else "run"
    wanted = {"device": options.device, "steps": options.steps}
    plain = runs.one(program, Wanted("plain", **wanted))
    if "failed" in plain:
        return {"failed": f"plain: {plain['failed']}"}
    sped = runs.one(program, Wanted(way, **wanted, check=options.check))
    if "failed" in sped:
        return {"failed": f"sped up: {sped['failed']}"}
    found = {"equal": compare(plain, sped), "steps": plain["marks"]}
    if found["equal"] != "equal" and any(part["rounding"] for part in sped.get("report", ())):
        both = [runs.one(program, Wanted(one, **wanted, capturable=True)) for one in ("plain", way)]
        failed = [one["failed"] for one in both if "failed" in one]
        found["both capturable"] = failed or compare(*both)
    if "equal" not in (found["equal"], found.get("both capturable")):
        again = runs.one(program, Wanted("plain", **wanted))
        found["plain twice"] = again.get("failed") or compare(plain, again)
    return found | {key: sped[key] for key in ("report", "run", "told") if key in sped}


def compare(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Whether the weights were the same after each step."""
    pairs = list(zip(one["digests"], other["digests"], strict=False))
    if not pairs or one["marks"] != other["marks"]:
        return f"{one['marks']} and {other['marks']} steps"
    first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    return "equal" if first is None else f"differs from step {first + 1}"


# --- times ------------------------------------------------------------------------------------


def timed(program: Program, runs: Runs, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step, plain and sped up, one after the other."""
    found: dict[str, Any] = {}
    for way in ("plain", "line" if program in LINE else "run"):
        one = runs.one(program, Wanted(way, options.device, seconds=options.seconds))
        name = "plain" if way == "plain" else "sped up"
        found[name] = one.get("failed") or {
            "ms": round(statistics.median(one["ms"]), 3) if one["ms"] else None,
            "all": [round(ms, 3) for ms in one["ms"]],
            "peak_mb": one.get("peak_mb"),
        }
    return found


def in_parallel(
    programs: list[Program], call: Callable[[Program], Any], at_once: int, folder: Path
) -> Iterator[tuple[Program, Any]]:
    """Call a function for each program in processes, and yield what it returns as it comes."""
    waiting = list(programs)
    running: dict[str, tuple[Program, Any]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            program = waiting.pop(0)
            process = _FORK.Process(target=_manage, args=(program, call, folder))
            process.start()
            running[program.name] = program, process
        time.sleep(0.05)
        for name, (program, process) in list(running.items()):
            if not process.is_alive():
                del running[name]
                path = folder / program.name / "equality.json"
                yield (
                    program,
                    json.loads(path.read_text())
                    if path.exists()
                    else {"failed": f"exit code {process.exitcode}"},
                )


def _manage(program: Program, call: Callable[[Program], Any], folder: Path) -> None:
    (folder / program.name / "equality.json").write_text(json.dumps(call(program)))


def verdict(found: dict[str, Any]) -> str:
    """Whether a program trains as it did, in words."""
    if found["equal"] == "equal":
        return "equal"
    if found.get("both capturable") == "equal":
        return "equal, if capturable"
    checks = [part["check"] for part in parts_of(found) if part.get("check")]
    if checks and all(one["is_equal"] for one in checks):
        return "parts equal"
    if found["way"] == "run" and any(part.get("rounding") for part in parts_of(found)):
        return "rounds otherwise"
    again = found.get("plain twice", "equal")
    return found["equal"] if again == "equal" else "plain runs differ"


def parts_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The models and optimizers, and the parts into which models were divided."""
    parts = found.get("report") or (found.get("run") or {}).get("parts") or []
    return [part for part in parts if part.get("kind") != "data"]


def times_of(found: dict[str, Any], way: str) -> list[float]:
    timings = [one[way] for one in found.get("times", ())]
    return [one["ms"] for one in timings if isinstance(one, dict) and one["ms"] is not None]


def line(name: str, found: dict[str, Any]) -> str:
    """A program's line of the table."""
    if "failed" in found:
        return f"{name[:28]:28} {found['failed'][:150]}"
    parts = parts_of(found)
    captured = sum(bool(one.get("captures")) for one in parts)
    times = "  ".join(
        f"{way} " + " ".join(f"{ms:.2f}" for ms in times_of(found, way))
        for way in ("plain", "sped up")
    )
    return f"{name[:28]:28} {captured}/{len(parts)} parts  {verdict(found):22} {times}"


def markdown(result: dict[str, Any], way: str) -> str:
    """The programs of one way as a table for a page."""
    rows = ["| program | parts as graphs | plain, ms | sped up, ms | gain | weights |",
            "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, found in result["programs"].items():
        if found["way"] != way:
            continue
        cells = [f"{name} ({found['repository']})"]
        if "failed" in found:
            rows.append(f"| {cells[0]} | does not run | | | | |")
            continue
        parts, both = parts_of(found), [times_of(found, way) for way in ("plain", "sped up")]
        cells.append(f"{sum(bool(one.get('captures')) for one in parts)} of {len(parts)}")
        cells += [spread(times, ".1f") for times in both]
        pairs = list(zip(*both, strict=False))
        cells.append(spread([one / other for one, other in pairs], ".2f"))
        rows.append(f"| {' | '.join([*cells, verdict(found)])} |")
    return "\n".join(rows)


def spread(values: list[float], how: str) -> str:
    if not values:
        return ""
    low, high = f"{min(values):{how}}", f"{max(values):{how}}"
    return low if low == high else f"{low}–{high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which programs [default: all]")
    parser.add_argument("--checkouts", type=Path, default=Path("scratch/public"))
    parser.add_argument("--device", default="cuda", help="cuda or fake [default: cuda]")
    parser.add_argument("--steps", type=int, default=25, help="steps that are compared")
    parser.add_argument("--check", type=int, default=20, help="of `headrace run`")
    parser.add_argument("--seconds", type=float, default=0.5, help="a timing takes so long")
    parser.add_argument("--rounds", type=int, default=2, help="timings of each program")
    parser.add_argument("--until", type=float, default=230, help="no timing after so many seconds")
    parser.add_argument("--limit", type=float, default=60, help="a run takes at most so long")
    parser.add_argument("--at-once", type=int, default=14, help="programs compared at a time")
    parser.add_argument("--only", choices=["line", "run"], help="only these programs")
    parser.add_argument("--table", type=Path, help="print this stored result as tables, and end")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    options = parser.parse_args()
    if options.table:
        stored = json.loads(options.table.read_text())
        print(markdown(stored, "line"), markdown(stored, "run"), sep="\n\n")
        return
    options.checkouts = options.checkouts.resolve()
    begun = time.monotonic()
    programs = [*(LINE if options.only != "run" else ()),
                *(UNCHANGED if options.only != "line" else ())]  # fmt: skip
    if options.names:
        programs = [one for one in programs if one.name in options.names]
    found: dict[str, Any] = {}
    result: dict[str, Any] = {"steps": options.steps, "programs": found}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = Runs(options, folder)

        def first(program: Program) -> dict[str, Any]:
            runs.prepare(program)
            return equality(program, runs, options)

        for program in programs:
            (folder / program.name).mkdir()
        load_early()
        for program, equal in in_parallel(programs, first, options.at_once, folder):
            found[program.name] = {
                "repository": program.repository, "commit": program.commit,
                "script": program.script, "arguments": program.arguments,
                "way": "line" if program in LINE else "run", **equal, "times": [],
            }  # fmt: skip
            save(options.out, result)
            print(line(program.name, found[program.name]), flush=True)
        print(f"compared after {time.monotonic() - begun:.0f} s", flush=True)
        for _ in range(options.rounds if options.device == "cuda" else 0):
            for program in programs:
                if time.monotonic() - begun > options.until:
                    break
                if "failed" not in found[program.name]:
                    found[program.name]["times"].append(timed(program, runs, options))
                    save(options.out, result)
    result["seconds"] = round(time.monotonic() - begun, 1)
    result |= header("public_loops.py")
    save(options.out, result)
    print("\n".join(line(program.name, found[program.name]) for program in programs))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
