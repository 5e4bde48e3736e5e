"""Compares the race checker with a brute-force oracle on random stream programs.

    python benchmarks/proofs/race_oracle.py [--programs 100000] [--seed 0] [--out results.json]

The programs and the oracle are in tests/support/races/race_oracle.py: kernels, copies, events, host
waits, threads, graphs, collectives, frees and reallocations. A difference is printed with its
program.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.processes.process_groups import fake_process_group
from support.races.race_oracle import patched_once, random_program


def patched(seeds: range) -> Iterator[int]:
    with fake_process_group(), patched_once():
        yield from seeds


def store(path: Path | None, seed: int, counts: dict[str, int]) -> None:
    save(path, {**header("race_oracle.py"), "result": {"first seed": seed, **counts}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="the first program's [default: 0]")
    parser.add_argument("--out", type=Path, help="write the counts to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts = {"programs": 0, "lines": 0, "with races": 0, "with threads": 0, "differences": 0}
    end = arguments.seed + arguments.programs
    start = time.monotonic()
    for seed in patched(range(arguments.seed, end)):
        program = random_program(seed, collectives=True)
        differences = program.differences()
        counts["programs"] += 1
        counts["lines"] += len(program.lines)
        counts["with races"] += program.is_racy
        counts["with threads"] += program.threads > 1
        if differences:
            counts["differences"] += 1
            if counts["differences"] <= 5:
                print(f"seed {seed}:", *differences, program, sep="\n  ", flush=True)
        if counts["programs"] % 5000 == 0:
            print(counts, f"{time.monotonic() - start:.0f} s", flush=True)
            store(arguments.out, arguments.seed, counts)
    print("\n".join(f"{name:14} {count:>10,}" for name, count in counts.items()))
    store(arguments.out, arguments.seed, counts)
    sys.exit(1 if counts["differences"] else 0)


if __name__ == "__main__":
    main()
