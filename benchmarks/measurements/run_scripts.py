"""The plain scripts of inputs/works, unchanged, alone and under `headrace run`, in turns.

    python benchmarks/measurements/run_scripts.py --out run_scripts.json
    python benchmarks/measurements/run_scripts.py dcgan nanogpt --steps 400 --rounds 2

A row is written as soon as it is measured. `before` and `after` are what `headrace run` says of a
step, `equal` what its `--check 20` has found, and `gain` how much sooner the whole script ends.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, table

WORKS = Path(__file__).resolve().parents[1] / "inputs" / "works"
NAMES = ("dcgan", "nanogpt", "vit_small", "bert_base", "lstm", "unet", "actor_critic", "dlrm")
_STEP = re.compile(r"a step took ([\d.,]+) ms before, ([\d.,]+) ms after")
_TIMEOUT_S = 300


def run(command: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds that a command took, and how it ended."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return time.perf_counter() - start, done


def measured(name: str, steps: int, rounds: int, more: list[str]) -> dict[str, Any]:
    """A row: the script alone and sped up, in turns; checked once."""
    script = [str(WORKS / f"{name}.py"), "--steps", str(steps), *more]
    headrace = ["-m", "headrace", "run"]
    alone, sped_up, steps_ms = [], [], []
    for _ in range(rounds):
        seconds, plain = run(script)
        alone.append(seconds)
        seconds, done = run([*headrace, *script])
        sped_up.append(seconds)
        if (plain.returncode, done.returncode) != (0, 0):
            return {"name": name, "error": (plain.stderr + done.stderr)[-2000:]}
        steps_ms += _STEP.findall(done.stderr)
    _, checked = run([*headrace, "--check", "20", *script])
    told = [line for line in checked.stderr.splitlines() if line.startswith("headrace: ")]
    times = [[float(one.replace(",", "")) for one in pair] for pair in steps_ms]
    return {
        "name": name,
        "alone_s": min(alone),
        "sped_up_s": min(sped_up),
        "before_ms": min((one[0] for one in times), default=None),
        "after_ms": min((one[1] for one in times), default=None),
        "exit_code_of_check": checked.returncode,
        "told": told,
        "table": checked.stderr.splitlines()[-12:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="as small as for a CPU")
    parser.add_argument("--out", type=Path, default=Path("run_scripts.json"))
    given = parser.parse_args()
    content: dict[str, Any] = {**header("run_scripts.py"), "rows": []}
    for name in given.names:
        row = measured(name, given.steps, given.rounds, ["--tiny"] if given.tiny else [])
        content["rows"].append(row)
        given.out.write_text(json.dumps(content, indent=1), encoding="utf-8")
        print(name, row.get("error") or "\n".join([*row["told"], *row["table"]]), flush=True)
    equal = {0: "yes", 4: "no"}
    rows = {
        row["name"]: {
            "before ms": row.get("before_ms"),
            "after ms": row.get("after_ms"),
            "gain s": row["alone_s"] - row["sped_up_s"] if "alone_s" in row else None,
            "equal": equal.get(row.get("exit_code_of_check", -1), "failed"),
        }
        for row in content["rows"]
    }
    print(table(rows))


if __name__ == "__main__":
    main()
