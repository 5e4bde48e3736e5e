"""Confirm on a GPU the races that `race_projects.py` finds without one.

    python benchmarks/proofs/race_confirm.py [--out results.json]

For each race, a loop keeps the reading stream busy and counts the values that came out wrong, with
the released code as it is, and with the missing call added. Then PyTorch's stream sanitizer watches
the released code once. The packages must be importable at the version that has the race: timm
1.0.29, diffusers 0.42.1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save
from race_projects import prepare_torchvision
from torch import nn

BATCHES = 60
# About 20 ms on a GPU at 1.5 GHz: the reader falls behind the prefetcher.
BUSY_CYCLES = 30_000_000


def constant_batches(shape: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pinned batches, each of which has its own number everywhere."""
    return [
        (
            torch.full(shape, float(number)).pin_memory(),
            torch.full((shape[0],), number).pin_memory(),
        )
        for number in range(BATCHES)
    ]


def count_wrong(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], corrected: bool) -> int:
    """Read each batch late, and count those whose numbers are another batch's."""
    seen = []
    for values, target in batches:
        if corrected:
            values.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        torch.cuda._sleep(BUSY_CYCLES)
        seen.append(torch.stack([values.min(), values.max(), target.min(), target.max()]))
    read = torch.stack(seen).tolist()
    return sum(set(numbers) != {float(number)} for number, numbers in enumerate(read))


def timm_loader(corrected: bool) -> int:
    """timm/data/loader.py:139, PrefetchLoader: the memory of a batch is reused while it is read"""
    from timm.data.loader import PrefetchLoader

    prefetched = PrefetchLoader(
        constant_batches((16, 3, 224, 224)),
        mean=(0.0, 0.0, 0.0),
        std=(1 / 255, 1 / 255, 1 / 255),
        device=torch.device("cuda"),
    )
    return count_wrong(iter(prefetched), corrected)


def timm_naflex(corrected: bool) -> int:
    """timm/data/naflex_loader.py:119, NaFlexPrefetchLoader: the same"""
    from timm.data.naflex_loader import NaFlexPrefetchLoader

    prefetched = NaFlexPrefetchLoader(
        [
            ({"patches": patches, "patch_coord": torch.zeros(64, 256, 2).pin_memory()}, target)
            for patches, target in constant_batches((64, 256, 768))
        ],
        mean=(0.0, 0.0, 0.0),
        std=(1 / 255, 1 / 255, 1 / 255),
        device=torch.device("cuda"),
    )
    return count_wrong(((inputs["patches"], target) for inputs, target in prefetched), corrected)


class Blocks(nn.Module):
    """A model whose children are all blocks: nothing is left for the group that prefetches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(6))
        for number, block in enumerate(self.blocks):
            nn.init.constant_(block.weight, (number + 1) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def diffusers_block(corrected: bool) -> int:
    """diffusers/hooks/group_offloading.py:210, block_level with use_stream=True, in a model whose
    children are all ModuleLists: the weights are used before they have arrived"""
    from diffusers.hooks import apply_group_offloading
    from diffusers.hooks.group_offloading import ModuleGroup

    released = ModuleGroup._onload_from_memory

    def waiting(group: ModuleGroup) -> None:
        released(group)
        torch.cuda.current_stream().wait_stream(group.stream)

    model = Blocks(4096)
    apply_group_offloading(
        model,
        onload_device=torch.device("cuda"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
    )
    if corrected:
        ModuleGroup._onload_from_memory = waiting
    try:
        with torch.no_grad():
            results = [model(torch.ones(4, 4096, device="cuda")).min() for _ in range(BATCHES)]
    finally:
        ModuleGroup._onload_from_memory = released
    # Each block multiplies the row by its number: 720 after six.
    return sum(abs(value - 720.0) > 1.0 for value in torch.stack(results).tolist())


def torch_stager(corrected: bool) -> int:
    """torch/distributed/checkpoint/staging.py, DefaultStager: the stream that copies the weights to
    the host does not wait for the stream that updates them"""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    weights = torch.zeros(1024, 1024, device="cuda")
    wrong = 0
    for number in range(BATCHES):
        stager = DefaultStager(StagingOptions())
        torch.cuda._sleep(BUSY_CYCLES)
        weights.fill_(number + 1)
        if corrected:
            stager._staging_stream.wait_stream(torch.cuda.current_stream())
        staged = stager.stage({"weights": weights}).result()["weights"]
        torch.cuda.synchronize()
        wrong += bool((staged != number + 1).any())
        stager.close()
    return wrong


CASES: dict[str, tuple[str, Callable[[bool], int]]] = {
    "timm_loader": ("timm", timm_loader),
    "timm_naflex": ("timm", timm_naflex),
    "diffusers_block": ("diffusers", diffusers_block),
    "torch_stager": ("torch", torch_stager),
}


def sanitized(name: str) -> str:
    """What PyTorch's stream sanitizer says about the released code."""
    command = [sys.executable, __file__, "--only", name]
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "data race" in run.stderr + run.stdout:
        return "data race"
    return "silent" if run.returncode == 0 else f"failed: {run.stderr.strip()[-300:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    parser.add_argument("--only", choices=CASES, help="run one case as released, and stop")
    options = parser.parse_args()
    prepare_torchvision()
    if options.only is not None:
        CASES[options.only][1](False)
        torch.cuda.synchronize()
        return
    rows = {}
    for name, (package, case) in CASES.items():
        try:
            version = importlib.metadata.version(package)
            wrong = {way: case(way == "corrected") for way in ("released", "corrected")}
            found = sanitized(name)
        except ImportError as problem:
            rows[name] = {"package": package, "skipped": str(problem)}
            continue
        rows[name] = {
            "package": f"{package} {version}",
            "where": case.__doc__,
            "passes": BATCHES,
            "wrong": wrong,
            "sanitizer": found,
            "confirmed": (wrong["released"] > 0 and wrong["corrected"] == 0)
            or found == "data race",
        }
    for name, row in rows.items():
        if "skipped" in row:
            print(f"{name:18} skipped: {row['skipped']}")
        else:
            print(
                f"{name:18} {row['package']:18} wrong {row['wrong']['released']} of {BATCHES}, "
                f"corrected {row['wrong']['corrected']}; sanitizer: {row['sanitizer']}; "
                f"{'confirmed' if row['confirmed'] else 'unconfirmed'}"
            )
    save(options.out, {**header("race_confirm.py"), "cases": rows})


if __name__ == "__main__":
    main()
