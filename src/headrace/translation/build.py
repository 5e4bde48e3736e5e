"""Builds a run from its settings and its corpus: device, model, engine and loaders."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from headrace.device import Device, open_device
from headrace.engine import Engine, NonFinitePolicy
from headrace.errors import PlanError, TranslationError
from headrace.parallel import SINGLE, Ranks, rank_device, wrap_ddp
from headrace.plan import LoaderPlan, Plan, effective_plan
from headrace.translation.batching import check_packed, plan_batches, plan_validation, resolve_plans
from headrace.translation.corpus.loader import make_loader
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.loss import translation_loss
from headrace.translation.model import Translator, new_model
from headrace.translation.schedules import constant, inverse_sqrt, noam
from headrace.translation.settings import TrainSettings, is_plan_file
from headrace.translation.weights import load_weights, run_of_weights


@dataclass(frozen=True)
class RunParts:
    """All parts of a run, ready to train."""

    settings: TrainSettings
    data: Prepared
    ranks: Ranks
    device: Device
    model: Translator  # not wrapped in DDP
    engine: Engine
    loader: Any  # a DataLoader whose sampler is a PlannedSampler
    valid_loader: DataLoader[Any]

    @property
    def plan(self) -> Plan:
        """The engine's plan, with the resolved precision."""
        return self.engine.plan


def check_settings(settings: TrainSettings) -> None:
    """Raise the errors of `build_run` that can be found without the corpus."""
    (settings.replace(preset="tiny") if settings.preset == "auto" else settings).model()
    check_policies(settings)
    check_packed(settings)
    open_device(rank_device(settings.device))
    if settings.weights is not None and not Path(settings.weights).exists():
        raise TranslationError(
            f"weights = {settings.weights}: does not exist; expected a .safetensors file or a run "
            "folder"
        )


def check_policies(settings: TrainSettings) -> None:
    """Raise if `on_nonfinite` or the plan is unknown, or `on_oom` does not work under this plan."""
    NonFinitePolicy.of(settings.on_nonfinite)
    # With `on_oom = halve`, `plan = auto` chooses this one.
    if settings.plan == "auto":
        chosen = Plan.preset("pipeline")
    else:
        try:
            chosen = Plan.of(settings.plan)
        except PlanError as problem:
            if is_plan_file(settings.plan):
                raise
            raise PlanError(f"{problem}, auto") from None
    plan = effective_plan(chosen)
    if settings.on_oom == "halve" and plan.graphs != "off":
        raise TranslationError(
            f"on_oom = halve: plan {plan.name} captures CUDA graphs, which keep their memory; "
            "expected a plan with graphs = off"
        )


def may_compile(settings: TrainSettings, device: Device) -> bool:
    """Whether the step will be compiled, or `plan = auto` may still choose to compile it."""
    is_open = settings.plan == "auto"
    plan = Plan.preset("max") if is_open else resolve_plans(settings, device)[0]
    return device.compiles and effective_plan(plan).compile


def build_run(
    settings: TrainSettings,
    data: Prepared,
    ranks: Ranks = SINGLE,
    *,
    loads_weights: bool = True,
    on_error: Callable[[BaseException], object] | None = None,
) -> RunParts:
    """Build a run in its initial state, with weights from the seed or from `settings.weights`.

    Without `loads_weights`, those are not read: a checkpoint has later ones. `on_error` is passed
    to the engine.
    """
    device = open_device(rank_device(settings.device))
    plan, loader = resolve_plans(settings, device)
    batches = plan_batches(settings, data, plan, loader, device)
    torch.manual_seed(settings.seed)
    model = new_model(settings.model(), data.vocabularies)
    if settings.weights is not None and loads_weights:
        _check_heads(settings, settings.weights)
        load_weights(model, Path(settings.weights))
    model = model.to(device.torch_device).train()
    parallel = parallelize(ranks, model, settings.parallel, device)
    if ranks.several:
        # Each rank must drop out other values.
        torch.manual_seed(_rank_seed(settings.seed, ranks.rank))
    optimizer = torch.optim.AdamW(
        parallel.parameters(),
        lr=settings.lr,
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    engine = Engine(
        parallel,
        optimizer,
        translation_loss(settings.smoothing),
        plan=plan,
        device=device,
        scheduler=_schedule(settings, optimizer),
        clip_norm=settings.clip_norm or None,
        accumulate=settings.accumulate,
        ema_decay=settings.ema,
        deterministic=settings.deterministic,
        on_nonfinite=settings.on_nonfinite,
        on_oom=settings.on_oom,
        # With workers the DataLoader itself enforces the timeout.
        loader_timeout=0 if loader.workers else settings.loader_timeout,
        on_error=on_error,
    )
    # HEADRACE_PLAN may have replaced the engine's plan. The batches are those of the settings.
    pin, share = engine.plan.pin and device.asynchronous, (ranks.rank, ranks.size)
    timeout_s, splits = settings.loader_timeout, data.splits
    train_loader = make_loader(
        splits["train"],
        batches,
        loader,
        pin=pin,
        timeout_s=timeout_s,
        share=share,
    )
    valid_batches = plan_validation(settings, data, loader, batches)
    valid_loader = make_loader(
        splits["valid"], valid_batches, LoaderPlan(workers=0), pin=pin, share=share
    )
    return RunParts(settings, data, ranks, device, model, engine, train_loader, valid_loader)


def _check_heads(settings: TrainSettings, weights: str) -> None:
    """Raise if the model of these weights has another number of heads. Their shapes do not tell."""
    run = run_of_weights(weights)
    trained = None if run is None else TrainSettings.read(run / "config.yaml")
    if trained is None or trained.preset == "auto":
        return
    found, expected = settings.model().heads, trained.model().heads
    if found != expected:
        raise TranslationError(
            f"heads = {found}: the run of weights = {weights} has heads = {expected}; expected the "
            "same"
        )


def parallelize(
    ranks: Ranks, model: Translator, mode: Literal["ddp", "fsdp"], device: Device
) -> torch.nn.Module:
    """The model wrapped in DDP or sharded with FSDP; unchanged in a single process."""
    if ranks.group is None:
        return model
    if mode == "ddp":
        # On a stream of its own: what DDP makes on the default stream cannot be captured in a
        # graph. Backward then runs on another stream, and PyTorch would warn about it.
        with suppress(AttributeError):  # older PyTorch has no such warning
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        with device.use(device.stream("ddp")):
            return wrap_ddp(model, ranks.group)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The warning is about in-place changes of the view. Nothing changes the logits in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.torch_device.type, (ranks.size,))
    for layer in (*model.encoder, *model.decoder):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _rank_seed(seed: int, rank: int) -> int:
    digest = hashlib.sha256(f"seed {seed} of rank {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _schedule(settings: TrainSettings, optimizer: torch.optim.Optimizer) -> LambdaLR:
    if settings.schedule == "noam":
        return noam(optimizer, settings.model().width, settings.warmup)
    schedule = inverse_sqrt if settings.schedule == "inverse_sqrt" else constant
    return schedule(optimizer, settings.warmup, settings.lr)
