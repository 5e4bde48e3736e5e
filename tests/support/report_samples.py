"""Results as `bench`, `tune` and `train` write them, with made-up but realistic numbers."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import yaml

from headrace.plan import PRESETS

# ms a step, the GPU's own ms, kernels a step, launches a step: an H200 at 30 sentences × 60 tokens.
_PACES: dict[str, tuple[float, float, int]] = {
    "baseline": (36.1, 8.3, 1250),
    "interval": (35.2, 8.3, 1250),
    "event": (34.8, 8.3, 1250),
    "streams4": (35.9, 8.4, 1255),
    "pipeline": (33.9, 8.3, 1250),
    "graph": (8.6, 8.2, 1250),
    "max": (6.2, 5.9, 520),
    "lightning": (71.4, 8.5, 1290),
    "accelerate": (43.7, 8.4, 1270),
}
_WAITS: dict[str, dict[str, tuple[float, float]]] = {
    "baseline": {"sync": (1.0, 5.9), "losses": (1.0, 0.31), "pageable_copy": (2.0, 0.12)},
    "interval": {"sync": (0.1, 1.9), "losses": (0.1, 0.05), "pageable_copy": (2.0, 0.12)},
    "event": {"sync": (0.1, 1.7), "data": (1.0, 0.04)},
    "streams4": {"sync": (0.1, 1.8), "data": (1.0, 0.05)},
    "pipeline": {"run_ahead": (0.3, 0.2), "data": (1.0, 0.04)},
    "graph": {"run_ahead": (1.0, 6.1), "data": (1.0, 0.03)},
    "max": {"run_ahead": (1.0, 4.2), "data": (1.0, 0.03)},
    "lightning": {},
    "accelerate": {},
}
_KERNELS = [
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
    "flash_fwd_kernel",
    "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
    "layer_norm_grad_input_kernel",
    "multi_tensor_apply_kernel<adamw>",
    "softmax_warp_forward",
]


def bench_sample(
    plans: tuple[str, ...] = tuple(_PACES), *, steps: int = 3, losses: int = 60, seed: int = 0
) -> dict[str, Any]:
    """A bench result with everything in it."""
    random_ = random.Random(seed)
    rows = [_row(plan, steps, losses, random_) for plan in plans]
    return {
        "kind": "headrace bench",
        "version": 1,
        "work": {
            "name": "translation",
            "description": "Transformer base, 30 sentences × 60 tokens",
            "options": {"batch": 30, "length": 60},
            "unit": "tokens",
            "units_per_step": 1800,
        },
        "settings": {
            "plans": [plan for plan in plans if plan in PRESETS],
            "peers": [plan for plan in plans if plan not in PRESETS],
            "steps": 30, "warmup": 10, "repeats": 5, "seed": 0, "precision": "bf16",
            "tolerance": 0.01,
        },
        "environment": {
            "command": "headrace bench --work translation --peers lightning,accelerate",
            "date": "2026-11-15T12:00:00", "headrace": "0.1.0", "torch": "2.11.0",
            "python": "3.12.3", "device": "cuda:0", "device_name": "NVIDIA H200",
            "device_memory_bytes": 150_000_000_000, "driver": "570.1", "cpu": "Xeon",
            "cores": 16, "platform": "Linux",
        },
        "rows": rows,
        "noise": {"plan": "pipeline", "difference_share": 0.006},
        "verdict": {
            "waits_for": "launches",
            "take": "graph",
            "sentences": [
                "The GPU waits for launches: the host needs 34 ms to launch 1,250 kernels that "
                "run for 8.3 ms.",
                "graph replays the whole step as one launch and comes within 5 % of the GPU's own "
                "time; max is faster still, with other kernels and losses within 0.01.",
            ],
        },
    }  # fmt: skip


def _row(plan: str, steps: int, losses: int, random_: random.Random) -> dict[str, Any]:
    median, busy_ms, kernels = _PACES[plan]
    repeats = [median * (1 + random_.uniform(-0.03, 0.04)) for _ in range(5)]
    busy = busy_ms / median
    waits = _WAITS[plan]
    blocked = sum(ms for reason, (_, ms) in waits.items() if reason != "data")
    own = plan == "max"
    base = [10.4 * math.exp(-step / 40) + 1.2 + 0.2 * math.sin(step) for step in range(losses)]
    worst = 0.004 if own else 0.0
    return {
        "plan": plan,
        "kind": "plan" if plan in PRESETS else "peer",
        "fields": PRESETS[plan].to_dict() if plan in PRESETS else None,
        "error": None,
        "ms_per_step": {
            "median": median, "low": min(repeats), "high": max(repeats), "repeats": repeats,
        },
        "speedup": _PACES["baseline"][0] / median,
        "per_s": 1800 / median * 1000,
        "waits": {
            "per_step": sum(count for count, _ in waits.values()),
            "ms_per_step": sum(ms for _, ms in waits.values()),
            "by_reason": {
                reason: {"per_step": count, "ms_per_step": ms}
                for reason, (count, ms) in waits.items()
            },
        },
        "host_blocked_ms": blocked,
        "data_wait_ms": waits.get("data", (0.0, 0.0))[1],
        "gpu": {
            "busy_share": busy, "compute_share": busy * 0.99, "copy_share": 0.02,
            "idle_share": 1 - busy, "busy_ms_per_step": busy_ms,
            "over_busy_share": median / busy_ms - 1,
            "launches_per_step": 2 if plan in ("graph", "max") else kernels,
        },
        "nvml_share": min(1.0, busy * 1.8),
        "power_w": 180 + 420 * busy,
        "cpu_share": 1.2,
        "peak_memory_bytes": 4.1e9 if plan not in ("graph", "max") else 5.3e9,
        "reserved_memory_bytes": 6.0e9,
        "streams": [
            {"name": "compute", "busy_share": busy * 0.99, "kernels_per_step": float(kernels),
             "copies_per_step": 0.0},
            {"name": "transfer", "busy_share": 0.01, "kernels_per_step": 0.0,
             "copies_per_step": 2.0},
        ],
        "overlap_share": 0.0 if plan == "baseline" else 0.01,
        "losses": [value + (random_.uniform(-worst, worst) if own else 0) for value in base],
        "equal": {
            "verdict": "reference" if plan == "baseline" else "within" if own else "identical",
            "tolerance": 0.01, "largest": worst, "first_step": 1 if own else None,
            "why": "other kernels" if own else "",
        },
        "graphs": None,
        "timeline": {"steps": steps, "spans": timeline_spans(plan, steps, random_)},
        "samples": [
            {
                "at_s": 0.1 * at,
                "gpu_share": min(1.0, max(0.0, busy * 1.8 + random_.uniform(-0.1, 0.1))),
                "gpu_memory_bytes": 6.0e9,
                "power_w": 180 + 420 * busy + random_.uniform(-15, 15),
                "cpu_share": 1.2 + random_.uniform(-0.2, 0.2),
            }
            for at in range(40)
        ],
        "score": {
            "total": 40 + 43 * (1 - median / 80), "gain": 30 * (1 - median / 72), "effort": 20,
            "complexity": 10, "maintainability": 12, "memory": 8, "risk": 4,
        } if plan in PRESETS else None,
    }  # fmt: skip


def timeline_spans(plan: str, steps: int, random_: random.Random) -> list[dict[str, Any]]:
    """Kernels with the gaps that the plan leaves, copies, and the host's work beside them."""
    median, busy_ms, kernels = _PACES[plan]
    spans = []

    def span(lane: str, name: str, kind: str, start: float, end: float) -> None:
        spans.append(
            {
                "lane": lane,
                "name": name,
                "kind": kind,
                "start_ns": round(start),
                "end_ns": round(end),
            }
        )

    step_ns = median * 1e6
    for step in range(steps):
        begin = step * step_ns
        span("host", "launch", "host", begin, begin + step_ns * (0.1 if median < 9 else 0.8))
        wait = 0.6 if median < 9 else 0.17
        if plan not in ("lightning", "accelerate"):
            span("host", "run_ahead" if median < 9 else "sync", "wait",
                 begin + step_ns * (1 - wait), begin + step_ns * 0.995)  # fmt: skip
        span("transfer", "Memcpy HtoD (Pinned -> Device)", "copy", begin, begin + 60_000)
        pace = step_ns / kernels
        for index in range(kernels):
            at = begin + index * pace
            length = busy_ms * 1e6 / kernels * random_.uniform(0.4, 1.6)
            name = _KERNELS[index % len(_KERNELS)]
            span("compute", name, "kernel", at, at + min(length, pace))
    return spans


def tune_sample() -> dict[str, Any]:
    """A tune result: the start, the winner, an equal one, dropped ones, one out of memory."""
    graph = PRESETS["graph"].to_dict()

    def trial(
        number: int, changed: dict[str, Any], ms: list[float], status: str, why: str = ""
    ) -> dict[str, Any]:
        plan = graph | {key: value for key, value in changed.items() if key in graph}
        loader = {"workers": 2} | {key: value for key, value in changed.items() if key == "workers"}
        words = [f"{key} {value}".replace("_", " ") for key, value in changed.items()]
        return {
            "id": number, "name": ", ".join(["graph", *words]), "plan": plan, "loader": loader,
            "changed": changed, "runs_ms": ms, "ms_per_step": statistics.median(ms) if ms else None,
            "status": status, "why": why, "peak_memory_bytes": 5_300_000_000,
        }  # fmt: skip

    trials = [
        trial(0, {}, [9.0, 9.1, 9.05], "slower"),
        trial(1, {"prefetch_depth": 4}, [8.6, 8.61, 8.63], "winner"),
        trial(2, {"prefetch_depth": 4, "workers": 4}, [8.6, 8.64, 8.7], "same as winner"),
        trial(3, {"graphs": "off"}, [34.1], "slower", why="296.1% behind graph"),
        trial(4, {"prefetch_depth": 64}, [], "out of memory", why="CUDA out of memory: 4 GiB"),
    ]
    bench = bench_sample(("baseline",), steps=1)
    return {
        "kind": "headrace tune", "version": 1, "work": bench["work"],
        "environment": bench["environment"] | {"command": "headrace tune --work translation"},
        "settings": {"repeats": 3}, "trials": trials,
        "winner": {"plan": trials[1]["plan"], "loader": {"workers": 2}},
        "sentences": ["prefetch_depth 4 is 5 % faster than 2; workers make no difference."],
    }  # fmt: skip


def run_sample(folder: Path, *, steps: int = 4000, gpu: bool = True, finished: bool = True) -> Path:
    """A run's folder as `train` leaves it."""
    random_ = random.Random(1)
    (folder / "weights").mkdir(parents=True)
    for name in ("best", "last"):
        (folder / "weights" / f"{name}.safetensors").write_bytes(b"\0" * 2048)
    settings = {
        "src": "zh",
        "trg": "en",
        "preset": "base",
        "plan": "graph",
        "epochs": 8,
        "lr": 7e-4,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    lines: list[dict[str, Any]] = []
    every = max(1, steps // 8)
    for step in range(1, steps + 1):
        loss = 9 * math.exp(-step / (steps / 4)) + 1.3 + random_.uniform(-0.1, 0.1)
        if step % 4 == 0:
            lines.append({"kind": "step", "step": step, "epoch": step // every, "loss": loss})
        if step % 10 == 0:
            use = {"step": step, "at_s": step * 0.05, "cpu_share": 1.1 + random_.uniform(-0.1, 0.1)}
            if gpu:
                use |= {"gpu_share": 0.96, "gpu_memory_bytes": 6e9, "power_w": 520.0}
            lines.append({"kind": "use", **use, "host_memory_bytes": 8e9, "workers_cpu_share": 0.4})
        if step == every and gpu:
            lines.append({"kind": "busy", "step": step, "steps": 10, "busy_share": 0.951,
                          "wall_ms_per_step": 8.6, "busy_ms_per_step": 8.2,
                          "compute_share": 0.94, "copy_share": 0.02, "idle_share": 0.049,
                          "overlap_share": 0.012, "streams": [
                              {"name": "compute", "busy_share": 0.94, "kernels_per_step": 1250.0,
                               "copies_per_step": 0.0}]})  # fmt: skip
        if step % every == 0:
            lines.append({"kind": "epoch", "step": step, "epoch": step // every - 1, "loss": loss,
                          "valid_loss": loss + 0.2, "bleu": 48 * step / steps, "replays": every,
                          "tokens_per_s": 209_000.0, "data_wait_share": 0.004,
                          "host_blocked_share": 0.71, "peak_memory_bytes": 5_300_000_000,
                          "waits": {"run_ahead": every, "data": every},
                          "samples": [["他有两只猫。", "He has two cats.",
                                       f"He has {step // every} cats."]]})  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    if finished:
        scores = {"bleu": 47.02, "chrf": 63.4, "bleu_signature": "nrefs:1|case:mixed|tok:13a",
                  "chrf_signature": "chrF2", "bleu_lower": None}  # fmt: skip
        examples = [["我有三本书。", "I have three books.", "I have three books."]] * 3
        (folder / "result.json").write_text(
            json.dumps({"updates": steps, "scores": scores, "examples": examples})
        )
    return folder
