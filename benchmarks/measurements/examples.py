"""Each script in examples/ with its one line and without it, in turns, in one process.

    python benchmarks/measurements/examples.py --out examples.json
    python benchmarks/measurements/examples.py gpt lstm --steps 200 --rounds 3

A row is written as soon as it is measured. `equal`: the last loss with the line is that without it,
bit for bit, in a short training with PyTorch's deterministic kernels. No new round begins after
`--seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, table

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("classifier", "gpt", "gan", "diffusion", "lstm", "ppo")
MARK = "# <- the one line"


def main_of(name: str, *, sped_up: bool) -> Any:
    """The `main` of an example, with its marked line or without."""
    path = EXAMPLES / f"{name}.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if sped_up or MARK not in line)
    names: dict[str, Any] = {"__name__": name, "__file__": str(path)}
    exec(compile(text, path, "exec"), names)
    return names["main"]


def run(name: str, steps: int, *, sped_up: bool) -> tuple[float, float]:
    """The last loss, and milliseconds per step over the second half."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = main_of(name, sped_up=sped_up)(steps=steps)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def is_equal(name: str, steps: int) -> bool:
    """Whether the line changes no bit of the last loss."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, sped_up = (run(name, steps, sped_up=one)[0] for one in (False, True))
    finally:
        torch.use_deterministic_algorithms(False)
    return plain == sped_up


def ranged(ms: list[float]) -> str:
    return f"{min(ms):.2f} to {max(ms):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    begun = time.monotonic()
    warnings.filterwarnings("ignore", message=".*deterministic")
    rows: dict[str, dict[str, Any]] = {
        name: {
            "plain_ms": [],
            "sped_up_ms": [],
            "equal": is_equal(name, 6 if name == "ppo" else 40),
        }
        for name in given.names
    }
    for number in range(given.rounds):
        for name, row in rows.items():
            if time.monotonic() - begun > given.seconds:
                break
            steps = given.steps // 4 if name == "ppo" else given.steps  # 24 forwards each
            _, ms = run(name, steps, sped_up=False)
            _, fast_ms = run(name, steps, sped_up=True)
            row["plain_ms"].append(round(ms, 4))
            row["sped_up_ms"].append(round(fast_ms, 4))
            print(f"round {number + 1}  {name:10}  {ms:8.2f} → {fast_ms:8.2f} ms", flush=True)
            if given.out is not None:
                stored = {**header("examples.py"), "rows": rows}
                given.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    shown = {
        name: {
            "plain ms": ranged(row["plain_ms"]),
            "sped up ms": ranged(row["sped_up_ms"]),
            "×": ranged([a / b for a, b in zip(row["plain_ms"], row["sped_up_ms"], strict=True)]),
            "equal": row["equal"],
        }
        for name, row in rows.items()
        if row["plain_ms"]
    }
    print(table(shown))


if __name__ == "__main__":
    main()
