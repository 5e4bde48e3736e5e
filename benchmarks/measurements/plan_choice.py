"""Is `headrace train --plan auto` right: what compiling takes and gains, and what it estimates.

    python benchmarks/measurements/plan_choice.py --data FOLDER [--cases base-packed …] [--out FILE]

FOLDER holds `multi30k` (train and val, .en and .de). Each case trains under `graph` and then under
`max`, with an empty compiler cache. "pays from s" is the time under `graph` from which on `max` is
faster in all; the estimates are those that the trainer chooses by. On an H200 a case takes one to
four minutes. `--quick` only shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save, table

from headrace.device import open_device
from headrace.parallel import SINGLE
from headrace.translation import TrainSettings, prepared_for
from headrace.translation.batching import batch_tokens
from headrace.translation.plan_choice import LoaderPlan, _seconds_under_graph, choose_plan
from headrace.translation.run_size import compiling
from translation import first_pairs, headrace, metrics, rate_of

COMMON: dict[str, Any] = {
    "src": "en", "trg": "de", "epochs": 1000, "valid_sentences": 0, "samples": 0, "beam": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "tiny-30": {"preset": "tiny", "max_steps": 2000},
    "small-30": {"preset": "small", "max_steps": 2000},
    "small-4096": {"preset": "small", "tokens": 4096, "max_steps": 1500},
    "base-30": {"preset": "base", "max_steps": 1500},
    "base-padded": {"preset": "base", "tokens": 26_000, "packed": "off", "max_steps": 400},
    "base-packed": {"preset": "base", "tokens": 26_000, "max_steps": 400},
}
QUICK = {"layers": 1, "width": 16, "heads": 2, "inner": 32, "tokens": 400, "max_steps": 4}


def measured(name: str, corpus: Path, values: dict[str, Any], runs: Path) -> dict[str, Any]:
    settings = TrainSettings.from_dict(COMMON | values | {"data": str(corpus)})
    data = prepared_for(settings)
    device = open_device("auto")
    choice = choose_plan(settings, data, SINGLE, device)
    found, start, is_packed = {}, {}, False
    for plan in ("graph", "max"):
        run = runs / f"{name}-{plan}"
        shutil.rmtree(run, ignore_errors=True)
        words = [f"--{key.replace('_', '-')}={value}" for key, value in (COMMON | values).items()]
        headrace(
            "train", corpus, *words, "--plan", plan, "--project", runs, "--name", run.name,
            limit_s=400,
        )  # fmt: skip
        found[plan], (start,) = rate_of(run), metrics(run, "start")
        is_packed = TrainSettings.read(run / "config.yaml").packed == "on"
    train, expected = data.splits["train"], compiling(packed=is_packed)
    batches = settings.max_steps or 0
    tokens = min(train.tokens[1], batch_tokens(settings, train, LoaderPlan()))
    compile_s = start.get("compile_s", 0.0)
    speedup = found["max"]["target tokens/s"] / found["graph"]["target tokens/s"]
    return {
        "packed": is_packed,
        "graph tok/s": found["graph"]["target tokens/s"],
        "estimate": round(tokens * batches / _seconds_under_graph(settings, data, device)),
        "max tok/s": found["max"]["target tokens/s"],
        "compile s": round(compile_s, 1),
        "speedup": round(speedup, 2),
        "pays from s": round(_break_even_s(compile_s, speedup)),
        "estimate s": round(_break_even_s(expected.seconds, expected.speedup)),
        "chosen": f"{choice.plan}: {choice.why}",
        "settings": settings.to_dict(),
    }


def _break_even_s(compile_s: float, speedup: float) -> float:
    return compile_s / (1 - 1 / speedup) if speedup > 1 else -1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("build/runs"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--quick", action="store_true", help="tiny models, a few pairs and updates")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    corpus = arguments.data / "multi30k"
    corpus = first_pairs(corpus) if arguments.quick else corpus
    rows: dict[str, Any] = {}
    result = header("plan_choice.py") | {"rows": rows}
    for name in arguments.cases:
        with tempfile.TemporaryDirectory(prefix="headrace-compiled-") as cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            values = CASES[name] | (QUICK if arguments.quick else {})
            rows[name] = measured(name, corpus, values, arguments.runs)
        print(f"{name}: {rows[name]['chosen']}", flush=True)
        save(arguments.out, result)
    hidden = ("chosen", "settings")
    print(table({n: {k: v for k, v in row.items() if k not in hidden} for n, row in rows.items()}))


if __name__ == "__main__":
    main()
