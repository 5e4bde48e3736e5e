"""Runs the GPU tests, PyTorch's stream sanitizer included, and records the outcome of each.

    python benchmarks/gpu_tests.py [--processes 4] [--limit-seconds 900] [--out FILE] [tests …]

CI has no GPU. So these tests are run by hand, and the result is committed.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent / "tools"))

from measuring import header, save

ROOT = Path(__file__).resolve().parent.parent
OUTCOME = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (.+?) *$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", help="files or tests; else all")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--limit-seconds", type=float, help="end the tests after so long")
    parser.add_argument(
        "--out",
        type=Path,
        help="write every test's outcome to this JSON file, and what failed to a .txt beside it",
    )
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", *arguments.tests, "-m", "gpu", "-vv"]
    command += ["-n", str(arguments.processes), "--timeout", "110"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            text, errors = run.communicate(timeout=arguments.limit_seconds)
        except subprocess.TimeoutExpired:
            text, errors = stopped(run)
    tests = {name: outcome.lower() for outcome, name in OUTCOME.findall(text)}
    counts = Counter(tests.values())
    if counts["passed"] + counts["skipped"] < len(tests) or run.returncode:
        print(text.partition("= FAILURES =")[2][:9000])
        if arguments.out is not None:
            arguments.out.with_suffix(".txt").write_text(text + errors, encoding="utf-8")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    result = {**header("gpu_tests.py"), "exit": run.returncode, "counts": counts, "tests": tests}
    save(arguments.out, result)


def stopped(run: subprocess.Popen[str]) -> tuple[str, str]:
    """End the tests. Interrupted, pytest still writes what has failed and why."""
    run.send_signal(signal.SIGINT)
    try:
        return run.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        run.kill()
        return run.communicate()


if __name__ == "__main__":
    main()
