"""Run the stream code of released projects, unchanged, under `fake_cuda()`, and list their races.

    python benchmarks/proofs/race_projects.py                 # all projects that are installed
    python benchmarks/proofs/race_projects.py timm --report   # one, with the whole report
    python benchmarks/proofs/race_projects.py --without-waits
        # then again without the project's own waits

Needs no GPU. docs/race-checking-projects.md has the results, with versions.

`--without-waits` shows that silence means something. It leaves out the calls in the package that
make a stream or the host wait, and `record_stream`: first all of them, then each line alone. A line
may be silent alone: another wait can order the same work.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path[1:1] = map(str, Path(__file__).resolve().parents[1].glob("*/"))  # its sister folders

from measuring import header, save
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from headrace.fake import fake_cuda
from headrace.races import Finding

CASES: dict[str, tuple[str, Callable[[], None]]] = {}


def case(package: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a case of a package, which its function's docstring describes."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = package, function
        return function

    return register


#: Names of modules that have a stand-in until the end of the case.
STAND_INS: list[str] = []


def import_with_stand_ins(name: str, *needed: str) -> Any:
    """Import a module. What it imports and is not installed gets a stand-in: the cases call nothing
    of that. The import begins anew after each stand-in. A package that cannot be imported twice
    names in `needed` what it needs."""
    for other in needed:
        try:
            importlib.import_module(other)
        except ModuleNotFoundError:
            _stand_in(other)
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing in sys.modules or missing.partition(".")[0] == name.partition(".")[0]:
                raise
            _stand_in(missing)
        for known in [one for one in sys.modules if one.startswith(name.partition(".")[0])]:
            del sys.modules[known]


def _stand_in(name: str) -> None:
    sys.modules[name] = mock.MagicMock(__name__=name, __spec__=None, __path__=[])
    STAND_INS.append(name)


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(6)))


def images() -> DataLoader:
    pixels = torch.randint(0, 255, (24, 3, 8, 8), dtype=torch.uint8)
    return DataLoader(
        TensorDataset(pixels, torch.randint(0, 4, (24,))), batch_size=4, pin_memory=True
    )


def image_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(4))


def train_on(batches: object, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for pixels, target in batches:  # type: ignore[attr-defined]
        loss = nn.functional.cross_entropy(model(pixels), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@case("timm")
def timm_loader() -> None:
    """timm.data.loader.PrefetchLoader around a DataLoader, in a training loop"""
    from timm.data.loader import PrefetchLoader

    model = image_model().cuda()
    model(torch.zeros(1, 3, 8, 8, device="cuda"))
    for _ in range(2):
        train_on(PrefetchLoader(images(), device=torch.device("cuda")), model)


@case("timm")
def timm_erasing() -> None:
    """the same with random erasing"""
    from timm.data.loader import PrefetchLoader

    model = image_model().cuda()
    model(torch.zeros(1, 3, 8, 8, device="cuda"))
    train_on(
        PrefetchLoader(images(), device=torch.device("cuda"), re_prob=1.0, re_mode="pixel"), model
    )


@case("timm")
def timm_validation() -> None:
    """the same in evaluation: forward only"""
    from timm.data.loader import PrefetchLoader

    model = image_model().cuda().eval()
    with torch.inference_mode():
        for pixels, target in PrefetchLoader(images(), device=torch.device("cuda")):
            (model(pixels).argmax(1) == target).sum()


@case("timm")
def timm_naflex() -> None:
    """timm.data.naflex_loader.NaFlexPrefetchLoader, forward only"""
    from timm.data.naflex_loader import NaFlexPrefetchLoader

    def batches() -> object:
        for _ in range(6):
            patches = torch.randn(2, 5, 12).pin_memory()
            inputs = {"patches": patches, "patch_coord": torch.zeros(2, 5, 2).pin_memory()}
            yield inputs, torch.zeros(2, dtype=torch.long).pin_memory()

    model = nn.Linear(12, 4).cuda()
    with torch.no_grad():
        for inputs, target in NaFlexPrefetchLoader(batches(), device=torch.device("cuda")):
            model(inputs["patches"]).sum() + target.sum()


def _group_offloading(**options: object) -> None:
    from diffusers.hooks import apply_group_offloading

    model = blocks()
    apply_group_offloading(
        model,
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        use_stream=True,
        **options,
    )
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(2, 32, device="cuda"))


@case("diffusers")
def diffusers_leaf() -> None:
    """apply_group_offloading, leaf_level, use_stream=True"""
    _group_offloading(offload_type="leaf_level")


@case("diffusers")
def diffusers_leaf_record() -> None:
    """the same with record_stream=True"""
    _group_offloading(offload_type="leaf_level", record_stream=True)


@case("diffusers")
def diffusers_leaf_low_memory() -> None:
    """the same with low_cpu_mem_usage=True, record_stream=True"""
    _group_offloading(offload_type="leaf_level", record_stream=True, low_cpu_mem_usage=True)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@case("diffusers")
def diffusers_block() -> None:
    """apply_group_offloading, block_level, one block a group, use_stream=True"""
    from diffusers.hooks import apply_group_offloading

    model = Blocks()
    apply_group_offloading(
        model,
        onload_device=torch.device("cuda"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
    )
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(2, 32, device="cuda"))


@case("diffusers")
def diffusers_disk() -> None:
    """apply_group_offloading, leaf_level, use_stream=True, offload_to_disk_path"""
    with tempfile.TemporaryDirectory() as folder:
        _group_offloading(offload_type="leaf_level", offload_to_disk_path=folder)


@case("diffusers")
def diffusers_disk_record() -> None:
    """the same with record_stream=True"""
    with tempfile.TemporaryDirectory() as folder:
        _group_offloading(
            offload_type="leaf_level", offload_to_disk_path=folder, record_stream=True
        )


def _offload_activations(offload: object) -> None:
    model = blocks().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        with offload:  # type: ignore[attr-defined]
            loss = model(torch.ones(64, 32, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@case("torchtune")
def torchtune_offload() -> None:
    """OffloadActivations(use_streams=True) around three training steps"""
    training = import_with_stand_ins("torchtune.training")
    _offload_activations(
        training.OffloadActivations(use_streams=True, min_offload_size=1, max_fwd_stash_size=1)
    )


@case("trl")
def trl_offload() -> None:
    """OffloadActivations(use_streams=True) around three training steps"""
    from trl.models.activation_offloading import OffloadActivations

    _offload_activations(
        OffloadActivations(use_streams=True, min_offload_size=1, max_fwd_stash_size=1)
    )


class LossModel(nn.Module):
    """A model that returns its loss, as torchrec's pipelines expect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.layer(x)
        return result.sum(), result


@case("torchrec")
def torchrec_pipeline() -> None:
    """TrainPipelineBase over six batches"""
    pipelines = import_with_stand_ins("torchrec.distributed.train_pipeline.train_pipelines")
    model = LossModel().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = pipelines.TrainPipelineBase(model, optimizer, torch.device("cuda", 0))
    batches = iter([torch.randn(4, 8).pin_memory() for _ in range(6)])
    with suppress(StopIteration):
        while True:
            pipeline.progress(batches)


@case("deepspeed")
def deepspeed_offload() -> None:
    """checkpointed inputs offloaded on side streams, in a Llama, three training steps"""
    os.environ["DS_ACCELERATOR"] = "cuda"
    offloading = import_with_stand_ins(
        "deepspeed.runtime.activation_checkpointing.offload_activations"
    )
    model = _llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.ones(2, 8, dtype=torch.long, device="cuda")
    for _ in range(3):
        with offloading.CheckpointHiddenStatesOffload(min_offload_bytes=1):
            model(tokens, labels=tokens, use_cache=False).loss.backward()


@case("torch_geometric")
def pyg_loader() -> None:
    """torch_geometric.loader.PrefetchLoader in a training loop"""
    from torch_geometric.loader import PrefetchLoader

    batches = [(torch.ones(4, 32), torch.zeros(4, dtype=torch.long)) for _ in range(6)]
    train_on(PrefetchLoader(batches), nn.Linear(32, 4).cuda())


@case("spdl")
def spdl_transfer() -> None:
    """spdl.io.transfer_tensor_h2d with its default of four cached batches, eight batches"""
    from spdl.io import transfer_tensor_h2d

    model = nn.Linear(32, 4).cuda()
    for _ in range(8):
        model(transfer_tensor_h2d(torch.ones(4, 32))).sum().backward()


@case("torchao")
def torchao_offload() -> None:
    """CPUOffloadOptimizer, also with offload_gradients=True, three training steps each"""
    from torchao.optim import CPUOffloadOptimizer

    for offload_gradients in (False, True):
        model = blocks().cuda()
        optimizer = CPUOffloadOptimizer(
            model.parameters(), offload_gradients=offload_gradients, minimal_size=100
        )
        for _ in range(3):
            model(torch.ones(4, 32, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@case("flexgen")
def flexgen_generation() -> None:
    """OptLM.generate with half of weights and cache on the host, overlap=True"""
    _flexgen(overlap=True)


@case("flexgen")
def flexgen_generation_without_overlap() -> None:
    """the same with overlap=False"""
    _flexgen(overlap=False)


def _flexgen(overlap: bool) -> None:
    optlm = import_with_stand_ins("flexgen.flex_opt")
    from flexgen.compression import CompressionConfig
    from flexgen.opt_config import OptConfig
    from flexgen.pytorch_backend import TorchDevice, TorchDisk, TorchMixedDevice

    gpu, host = TorchDevice("cuda:0"), TorchDevice("cpu")
    with tempfile.TemporaryDirectory() as folder:
        disk = TorchDisk(folder)
        every = TorchMixedDevice([gpu, host, disk])
        env = optlm.ExecutionEnv(gpu=gpu, cpu=host, disk=disk, mixed=every)
        unused = CompressionConfig(4, 64, 0, False)
        on_gpu_and_host = (50, 50, 50, 50, 100, 0)
        policy = optlm.Policy(
            *(2, 2, *on_gpu_and_host, overlap, True, True, False, 1.0),
            *(False, unused, False, unused),
        )
        size = OptConfig("tiny", 2, 64, 16, 2, 16, 32, vocab_size=64)
        model = optlm.OptLM(size, env, "_DUMMY_", policy)
        try:
            model.generate([[2, 3, 4, 5, 6, 7, 8, 9]] * 4, max_new_tokens=3)
        finally:
            env.close_copy_threads()


@case("basicsr")
def basicsr_prefetcher() -> None:
    """CUDAPrefetcher in a training loop"""
    prefetching = import_with_stand_ins("basicsr.data.prefetch_dataloader")
    # The prefetcher puts the copies into these dictionaries: nothing else may keep them.
    batches = (
        {"lq": torch.ones(4, 32).pin_memory(), "gt": torch.zeros(4, dtype=torch.long).pin_memory()}
        for _ in range(6)
    )
    prefetcher = prefetching.CUDAPrefetcher(batches, {"num_gpu": 1})
    handed_out = ((batch["lq"], batch["gt"]) for batch in iter(prefetcher.next, None))
    train_on(handed_out, nn.Linear(32, 4).cuda())


@case("megatron.core")
def megatron_hybrid_optimizer() -> None:
    """HybridDeviceOptimizer(offload_fraction=0.5, param_update_in_fp32=True), bf16 gradients"""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    model = blocks().to("cuda", torch.bfloat16)
    optimizer = HybridDeviceOptimizer(
        list(model.parameters()),
        offload_fraction=0.5,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        lr=0.01,
    )
    for _ in range(3):
        model(torch.ones(4, 32, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@case("xtuner")
def xtuner_offload() -> None:
    """async_save_on_cpu around each layer, as in its MoE models, three training steps"""
    offloading = import_with_stand_ins("xtuner.v1.utils.activation_offload")
    offloading.OffloadManager().clear(clear_pin_memory_cache=True)  # of an earlier run
    model = blocks().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stream = torch.cuda.Stream()
    for _ in range(3):
        hidden = torch.ones(4, 32, device="cuda", requires_grad=True)
        for index, layer in enumerate(model):
            with offloading.async_save_on_cpu(
                h2d_stream=stream,
                d2h_stream=stream,
                block_idx=index,
                group="text",
                custom_check_fn=partial(_is_at, hidden.data_ptr()),
                prefetch=True,
                reserve_pin_memory=True,
            ):
                hidden = checkpoint(layer, hidden, use_reentrant=True)
        hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _is_at(address: int, tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() == address


@case("vllm")
def vllm_prefetch() -> None:
    """PrefetchOffloader(prefetch_step=2), four of eight layers offloaded, three passes"""
    _vllm_prefetch(layers=8)


@case("vllm")
def vllm_prefetch_uneven() -> None:
    """the same with three of six layers offloaded"""
    _vllm_prefetch(layers=6)


def _vllm_prefetch(layers: int) -> None:
    prefetching = import_with_stand_ins(
        "vllm.model_executor.offloader.prefetch",
        *("zmq", "zmq.asyncio", "urllib3", "urllib3.util"),
    )
    from vllm.model_executor.offloader.base import NoopOffloader, set_offloader

    offloader = prefetching.PrefetchOffloader(group_size=2, num_in_group=1, prefetch_step=2)
    set_offloader(offloader)
    try:
        model = offloader.wrap_modules(nn.Linear(32, 32).cuda() for _ in range(layers))
        offloader.post_init()
        with torch.no_grad():
            for _ in range(3):
                hidden = torch.ones(2, 32, device="cuda")
                for layer in model:
                    hidden = layer(hidden)
    finally:
        set_offloader(NoopOffloader())


@case("fairscale")
def fairscale_offload() -> None:
    """OffloadModel in two slices, three training steps"""
    offload = import_with_stand_ins("fairscale.experimental.nn.offload")
    device, host = torch.device("cuda", 0), torch.device("cpu")
    train(offload.OffloadModel(model=blocks(), device=device, offload_device=host, num_slices=2))


@contextmanager
def two_ranks() -> Iterator[None]:
    """The first of two ranks, on PyTorch's fake process group: collectives do not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(4, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _fully_shard(model: nn.Sequential, **options: object) -> None:
    from torch.distributed.fsdp import fully_shard

    with two_ranks():
        mesh = torch.distributed.init_device_mesh("cuda", (2,))
        for block in model:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        train(model)


@case("torch")
def torch_fsdp2() -> None:
    """fully_shard, two ranks on PyTorch's fake process group, three training steps"""
    _fully_shard(blocks().cuda())


@case("torch")
def torch_fsdp2_kept() -> None:
    """the same with reshard_after_forward=False"""
    _fully_shard(blocks().cuda(), reshard_after_forward=False)


@case("torch")
def torch_fsdp2_offload() -> None:
    """the same with CPUOffloadPolicy"""
    from torch.distributed.fsdp import CPUOffloadPolicy

    _fully_shard(blocks(), offload_policy=CPUOffloadPolicy())


def _fsdp1(**options: object) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with two_ranks():
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(
            blocks(), auto_wrap_policy=policy, device_id=torch.device("cuda", 0), **options
        )
        train(model)


@case("torch")
def torch_fsdp1() -> None:
    """FullyShardedDataParallel, the same ranks and steps"""
    _fsdp1()


@case("torch")
def torch_fsdp1_offload() -> None:
    """the same with CPUOffload"""
    from torch.distributed.fsdp import CPUOffload

    _fsdp1(cpu_offload=CPUOffload(offload_params=True))


@case("torch")
def torch_ddp() -> None:
    """DistributedDataParallel with several buckets, one rank on gloo, the same steps"""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        train(nn.parallel.DistributedDataParallel(blocks().cuda(), bucket_cap_mb=0.005))
    finally:
        torch.distributed.destroy_process_group()


@case("torch")
def torch_async_save() -> None:
    """torch.distributed.checkpoint.async_save with a pinned stager, while training goes on"""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    model = blocks().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        for step in range(3):
            model(torch.ones(4, 32, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            stager = DefaultStager(StagingOptions(True, True, True, True))
            saved = checkpoint.async_save(
                model.state_dict(),
                checkpoint_id=f"{folder}/{step}",
                async_stager=stager,
                no_dist=True,
            )
            saved.staging_completion.result()
            optimizer.step()
            saved.upload_completion.result()


@case("torch")
def torch_save_on_cpu() -> None:
    """torch.autograd.graph.save_on_cpu(pin_memory=True)"""
    model = blocks().cuda()
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = model(torch.ones(4, 32, device="cuda")).sum()
        loss.backward()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).cuda().eval()


def _continuous_batching(**options: object) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _llama()
    model.set_attn_implementation("paged|sdpa")
    prompts = [[1 + (3 * row + column) % 30 for column in range(4 + row)] for row in range(5)]
    batching = ContinuousBatchingConfig(
        page_size=4, num_blocks=16, max_batch_tokens=16, use_async_batching=True, **options
    )
    generation = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    results = model.generate_batch(prompts, generation, batching, warmup=False)
    lengths = [len(result.generated_tokens) for result in results.values()]
    assert lengths == [6] * len(prompts), lengths


@case("transformers")
def transformers_batching() -> None:
    """generate_batch, use_async_batching=True"""
    _continuous_batching(use_cuda_graph=False)


@case("transformers")
def transformers_batching_offload() -> None:
    """the same with cpu_offload_space"""
    _continuous_batching(use_cuda_graph=False, cpu_offload_space=0.001)


@case("transformers")
def transformers_offloaded_cache() -> None:
    """DynamicCache(offloading=True), generation by hand"""
    from transformers import DynamicCache

    model = _llama()
    cache = DynamicCache(config=model.config, offloading=True)
    with torch.no_grad():
        tokens = torch.ones(1, 4, dtype=torch.long, device="cuda")
        for _ in range(4):
            logits = model(tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(-1)


@case("accelerate")
def accelerate_loop() -> None:
    """Accelerator.prepare and a training loop, non_blocking=True"""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    model = image_model()
    model(torch.zeros(1, 3, 8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(0, 4, (24,)))
    loader = DataLoader(data, batch_size=4, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for pixels, target in loader:
        loss = nn.functional.cross_entropy(model(pixels), target)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.gather_for_metrics(loss)


@case("accelerate")
def accelerate_cpu_offload() -> None:
    """cpu_offload: weights move to the device for each layer"""
    from accelerate import cpu_offload

    model = blocks()
    cpu_offload(model, execution_device=torch.device("cuda"))
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, 32, device="cuda"))


@case("lightning")
def lightning_trainer() -> None:
    """Trainer(accelerator="cuda", devices=1).fit"""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(8, 2)

        def training_step(self, batch: object, index: int) -> torch.Tensor:
            x, y = batch  # type: ignore[misc]
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    data = TensorDataset(torch.randn(24, 8), torch.randint(0, 2, (24,)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cuda",
            devices=1,
            max_epochs=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(Module(), DataLoader(data, batch_size=4, pin_memory=True))


@case("torchvision")
def torchvision_training() -> None:
    """resnet18 and a pinned loader"""
    from torchvision.models import resnet18

    model = resnet18(num_classes=4).cuda()
    data = TensorDataset(torch.randn(8, 3, 32, 32), torch.randint(0, 4, (8,)))
    loader = DataLoader(data, batch_size=4, pin_memory=True)
    train_on(((x.cuda(non_blocking=True), y.cuda(non_blocking=True)) for x, y in loader), model)


def prepare_torchvision() -> None:
    """A torchvision built for CUDA registers these operators from a library that needs CUDA."""
    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name, schema in (
        ("nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
        ("qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
    ):
        try:
            library.define(name + schema)
        except RuntimeError:  # it is there
            continue
    KEPT.append(library)


KEPT: list[object] = []


WAITS = {
    "Stream": ("wait_stream", "wait_event", "synchronize"),
    "Event": ("wait", "synchronize"),
    "Tensor": ("record_stream",),
}


class Waits:
    """The lines of a package that wait. Those for which `leaves_out` is true do nothing."""

    def __init__(self, package: str, leaves_out: Callable[[str], bool]) -> None:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        self._folder = Path(spec.origin or "").parent
        self._leaves_out = leaves_out
        self.lines: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside a `fake_cuda()` block: watch the package's calls."""
        with ExitStack() as stack:
            for kind, names in WAITS.items():
                owner = getattr(torch, kind)
                for name in names:
                    call = self._watch(getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, call))
            yield

    def _watch(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            frame = sys._getframe(1)
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(self._folder):
                line = f"{shortened(str(file))}:{frame.f_lineno}"
                self.lines.add(line)
                if self._leaves_out(line):
                    return None
            return original(*args, **kwargs)

        return call


def without_waits(name: str) -> dict[str, object]:
    """How many races a case has without its package's waits: all, and each line by itself."""
    package, _ = CASES[name]
    everything = Waits(package, lambda line: True)
    _, findings = run(name, everything)
    # Other lines may be reached if all waits do nothing: take those of the released code.
    released = Waits(package, lambda line: False)
    run(name, released)
    alone = {}
    for line in sorted(released.lines):
        _, found = run(name, Waits(package, line.__eq__))
        alone[line] = len(found)
    return {"all": len(findings) if released.lines else None, "alone": alone}


def run(name: str, waits: Waits | None = None) -> tuple[str, list[Finding]]:
    """How a case ended, and what was found."""
    package, function = CASES[name]
    if importlib.util.find_spec(package) is None:
        return "not installed", []
    with fake_cuda(check=False) as device, ExitStack() as stack:
        if waits is not None:
            stack.enter_context(waits.watched())
        try:
            function()
            torch.cuda.synchronize()
        except Exception:
            traceback.print_exc()
            return "failed", device.findings()
        finally:
            while STAND_INS:
                del sys.modules[STAND_INS.pop()]
    return "ran", device.findings()


def shortened(text: str) -> str:
    """Without the folders that modules are found in."""
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder:
            text = text.replace(folder + os.sep, "")
    return text


def version(package: str) -> str:
    """Of an installed package its version, of one in a clone on `PYTHONPATH` its commit."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return commit(package) or "–"


def commit(package: str) -> str | None:
    """The commit of the clone that a package is in. None if no clone has it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    git = ["git", "-C", str(Path(spec.origin).parent)]
    is_tracked = ["ls-files", "--error-unmatch", spec.origin]
    if subprocess.run([*git, *is_tracked], capture_output=True).returncode != 0:
        return None
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return head.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases or packages; default: all")
    parser.add_argument("--report", action="store_true", help="print the whole report")
    parser.add_argument(
        "--without-waits", action="store_true", help="run each case without its waits, too"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    prepare_torchvision()
    rows = []
    for name, (package, function) in CASES.items():
        if options.names and name not in options.names and package not in options.names:
            continue
        ended, findings = run(name)
        rows.append(
            {
                "case": name,
                "package": package,
                "version": version(package),
                "what": function.__doc__,
                "ended": ended,
                "races": [
                    {
                        "kind": finding.race.kind,
                        "first": shortened(str(finding.first[0])),
                        "second": shortened(str(finding.second[0])),
                        "missing": shortened(finding.race.missing),
                        "times": finding.times,
                    }
                    for finding in findings
                ],
            }
        )
        if options.without_waits and ended == "ran":
            rows[-1]["without waits"] = without_waits(name)
        if options.report:
            print("\n\n".join(map(str, findings)), file=sys.stderr)
    print(f"torch {torch.__version__}")
    for row in rows:
        print(
            f"{row['case']:28} {row['package']:13} {row['version']:12} {row['ended']:14} "
            f"races: {len(row['races'])}"
        )
        for race in row["races"]:
            print(f"    {race['kind']}: {race['first']}  /  {race['second']}")
        without = row.get("without waits")
        if without and without["alone"]:
            found = sum(races > len(row["races"]) for races in without["alone"].values())
            print(
                f"    without its waits: {without['all']} races; "
                f"found without one line: {found} of {len(without['alone'])}"
            )
    save(options.out, {**header("race_projects.py"), "cases": rows})


if __name__ == "__main__":
    main()
