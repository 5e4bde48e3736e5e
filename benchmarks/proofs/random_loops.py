"""Random training loops with `hr.speed_up` against the same loops without, bit for bit.

    python benchmarks/proofs/random_loops.py --device cuda --loops 500 --out random_loops.json
    python benchmarks/proofs/random_loops.py --device fake --loops 10000

A loop's models, calls, accumulation, shapes, schedule and changes come from its number. Prints a
line for each loop that differs, and a summary.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from parts_first import opened

from support.graphs.random_loops import random_loop
from support.graphs.sped_up import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, fake, … [default: auto]")
    parser.add_argument("--loops", type=int, default=500, help="how many [default: 500]")
    parser.add_argument("--first", type=int, default=0, help="the first loop's number [default: 0]")
    parser.add_argument("--steps", type=int, default=10, help="steps of each loop [default: 10]")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this time")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    options = parser.parse_args()
    begun_s, different, failed = time.monotonic(), [], []
    reasons: collections.Counter[str] = collections.Counter()
    replays = eager = done = 0
    for seed in range(options.first, options.first + options.loops):
        if options.seconds is not None and time.monotonic() - begun_s > options.seconds:
            break
        try:
            with opened(options.device) as device:
                plain, _ = train(device, lambda d, s=seed: random_loop(s, d), sped_up=False,
                                 steps=options.steps)  # fmt: skip
                sped_up, report = train(device, lambda d, s=seed: random_loop(s, d), sped_up=True,
                                        steps=options.steps)  # fmt: skip
        except Exception as problem:
            failed.append([seed, f"{type(problem).__name__}: {problem}"])
            print(f"loop {seed} failed: {failed[-1][1]}", flush=True)
            continue
        done += 1
        assert report is not None
        replays += sum(part.replays for part in report.parts)
        eager += sum(sum(part.eager.values()) for part in report.parts)
        reasons.update(part.why for part in report.parts if part.why is not None)
        if repr(plain) != repr(sped_up):
            first = next(at for at, pair in enumerate(zip(plain, sped_up, strict=True))
                         if repr(pair[0]) != repr(pair[1]))  # fmt: skip
            different.append([seed, first])
            print(f"loop {seed} differs at step {first}\n{report}", flush=True)
    found = {
        "torch": torch.__version__,
        "loops": done,
        "different": different,
        "failed": failed,
        "replays": replays,
        "eager_calls": eager,
        "eager_parts": dict(reasons),
        "seconds": round(time.monotonic() - begun_s, 1),
    }
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
