"""Training under DDP and FSDP2 on this machine: losses compared with the plain engine's, the cost
of wrapping a model, graphs under DDP, and how long an all-reduce takes.

    python benchmarks/measurements/ranks.py [--out results.json]
    torchrun --nproc-per-node N benchmarks/measurements/ranks.py [--out results.json]

With one process nothing is exchanged: the script then measures the cost of the wrapping itself, and
shows that NCCL works under every plan. Each rank trains on its share of the same global batches.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from engine_works import Translator, translation_loss
from measuring import header, interleaved_ms, save, table
from torch import nn

from headrace.device import Device, open_device
from headrace.engine import Engine
from headrace.parallel import wrap_ddp
from headrace.parallel.models import full_tensor

SENTENCES, LENGTH, BATCHES = 32, 60, 8
PRECISION = "bf16"
# How it is spread, under which plan, with which options.
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain pipeline": ("plain", "pipeline", {}),
    "ddp pipeline": ("ddp", "pipeline", {}),
    "fsdp pipeline": ("fsdp", "pipeline", {}),
    "plain graph": ("plain", "graph", {}),
    "ddp graph": ("ddp", "graph", {}),
    "fsdp graph": ("fsdp", "graph", {}),
}
SIZES_MB = (0.001, 1, 25, 100, 400)


class WithoutDropout(Translator):
    def __init__(self) -> None:
        super().__init__(vocabulary=8000, layers=3)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0


def batches(rank: int, size: int) -> list[Any]:
    """A rank's rows of the same global batches."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(BATCHES):
        src = torch.randint(4, 8000, (SENTENCES, LENGTH), generator=draw)
        trg = torch.randint(4, 8000, (SENTENCES, LENGTH + 1), generator=draw)
        found.append((src[rank::size].contiguous(), trg[rank::size].contiguous()))
    return found


def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": translation_loss(model, batch), "weight": batch[1].numel()}


def spread(model: nn.Module, how: str, device: Device) -> nn.Module:
    if how == "ddp":
        # As PyTorch wants it for graphs: not on the default stream.
        with device.use(device.stream("ddp")):
            return wrap_ddp(model)
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.torch_device.type, (dist.get_world_size(),))
        core = model.core
        for layer in (*core.encoder.layers, *core.decoder.layers):  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def new_engine(way: str, device: Device) -> Engine:
    how, plan, options = WAYS[way]
    torch.manual_seed(0)
    model = spread(WithoutDropout().to(device.torch_device).train(), how, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Engine(
        model, optimizer, loss, plan=plan, device=device, precision=PRECISION, clip_norm=1.0,
        **options,
    )  # fmt: skip


def trained(way: str, device: Device, mine: list[Any], epochs: int) -> dict[str, Any]:
    """Every loss, and whether the step was captured."""
    engine = new_engine(way, device)
    results = [engine.epoch(mine) for _ in range(epochs)]
    weights = (full_tensor(parameter.detach()) for parameter in engine.model.parameters())
    total = sum(float(weight.double().abs().sum()) for weight in weights)
    row: dict[str, Any] = {
        "losses": [one for result in results for one in result.losses],
        "weights": total,
        "replays": sum(result.statistics.replays for result in results),
        "peak MB": results[-1].statistics.peak_memory_bytes >> 20,
        "host waits": results[-1].waits.device_waits(),
        "waits": {reason.reason: reason.count for reason in results[-1].waits.reasons},
    }
    if engine.graphs is not None:
        row["graphs"] = asdict(engine.graphs)
    engine.close()
    return row


def compared(device: Device, mine: list[Any], epochs: int = 4) -> dict[str, Any]:
    """Compare losses with the plain engine's on all rows: exactly, with one rank."""
    rows = {way: trained(way, device, mine, epochs) for way in WAYS if is_possible(way)}
    expected = trained("plain pipeline", device, batches(0, 1), epochs)["losses"]
    for row in rows.values():
        found = row.pop("losses")
        row["first loss"], row["last loss"] = found[0], found[-1]
        row["largest difference"] = max(
            abs(one - other) for one, other in zip(found, expected, strict=True)
        )
    return rows


def is_possible(way: str) -> bool:
    """A plain model of several ranks would be several models."""
    return WAYS[way][0] != "plain" or dist.get_world_size() == 1


def speed(device: Device, mine: list[Any]) -> dict[str, Any]:
    ways = {}
    for way in WAYS:
        if is_possible(way):
            engine = new_engine(way, device)
            ways[way] = lambda steps, engine=engine: engine.epoch(
                [mine[at % len(mine)] for at in range(steps)]
            )
    return interleaved_ms(ways, device, steps=24, repeats=4, warm_up=16)


def all_reduce_times(device: Device) -> dict[str, Any]:
    """Microseconds of an all-reduce by size, on the device."""
    rows = {}
    for megabytes in SIZES_MB:
        tensor = torch.zeros(int(megabytes * 1e6) // 4, device=device.torch_device)
        times = []
        for _ in range(7):
            device.synchronize("bench")
            start = time.perf_counter()
            for _ in range(5):
                dist.all_reduce(tensor)
            device.synchronize("bench")
            times.append((time.perf_counter() - start) / 5 * 1e6)
        median = statistics.median(times)
        # What a ring moves through each rank's link: 2 (n - 1) / n of the bytes.
        ranks = dist.get_world_size()
        moved = 2 * (ranks - 1) / ranks * tensor.numel() * 4
        rows[f"{megabytes} MB"] = {
            "µs": round(median, 1),
            "GB/s": round(moved / median / 1e3, 2),
        }
    return rows


def main() -> None:
    faulthandler.dump_traceback_later(240, exit=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        device, backend = open_device(f"cuda:{local}"), "cpu:gloo,cuda:nccl"
    else:
        device, backend = open_device("cpu"), "gloo"
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            store = f"file://{folder}/store"
            dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        result = measured(device, arguments.out)
        if dist.get_rank() == 0:
            save(arguments.out, result)
        dist.destroy_process_group()


def measured(device: Device, out: Path | None) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = batches(rank, ranks)
    result = header("ranks.py") | {
        "ranks": ranks,
        "backend": str(dist.get_backend_config()),
        "work": f"transformer 3+3 layers, {SENTENCES} × {LENGTH} a global batch, {PRECISION}",
    }
    parts = (("losses", compared), ("ms a step", speed))
    for name, part in parts:
        result[name] = part(device, mine)
        if rank == 0:
            print(f"\n{name}\n{table(result[name])}", flush=True)
            save(out, result)
    if ranks > 1:
        result["all-reduce"] = all_reduce_times(device)
        if rank == 0:
            print(f"\nall-reduce\n{table(result['all-reduce'])}")
    return result


if __name__ == "__main__":
    main()
