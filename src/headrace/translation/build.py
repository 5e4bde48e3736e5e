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
from headrace.errors import TranslationError
from headrace.parallel import SINGLE, Ranks, rank_device, wrap_ddp
from headrace.plan import LoaderPlan, Plan, in_force, load_plan
from headrace.translation.corpus.batches import BatchPlan, make_loader
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.loss import translation_loss
from headrace.translation.model import Translator, new_model
from headrace.translation.schedules import constant, inverse_sqrt, noam
from headrace.translation.settings import TrainSettings, chosen_precision, is_plan_file
from headrace.translation.weights import load_weights

_GRAPH_SHAPES = 16


@dataclass(frozen=True)
class RunParts:
    """A run, ready to train."""

    settings: TrainSettings
    data: Prepared
    ranks: Ranks
    device: Device
    model: Translator  # without DDP around it
    engine: Engine
    loader: Any  # a DataLoader whose sampler is a PlannedSampler
    valid: DataLoader[Any]

    @property
    def plan(self) -> Plan:
        """The engine's, with the precision that was chosen."""
        return self.engine.plan


def check_settings(settings: TrainSettings) -> None:
    """Raise what building a run would raise, as far as that is known without its corpus."""
    settings.model()
    check_policies(settings, in_force(Plan.of(settings.plan)))
    open_device(rank_device(settings.device))
    if settings.weights is not None and not Path(settings.weights).exists():
        raise TranslationError(
            f"weights = {settings.weights}: does not exist; expected a .safetensors file or a run "
            "folder"
        )


def check_policies(settings: TrainSettings, plan: Plan) -> None:
    """Raise for `on_nonfinite` and `on_oom` policies that no run has, or none under this plan."""
    NonFinitePolicy.of(settings.on_nonfinite)
    if settings.on_oom == "halve" and plan.graphs != "off":
        raise TranslationError(
            f"on_oom = halve: plan {plan.name} captures CUDA graphs, which keep their memory; "
            "expected a plan with graphs = off"
        )


def build_run(
    settings: TrainSettings,
    data: Prepared,
    ranks: Ranks = SINGLE,
    *,
    on_error: Callable[[BaseException], object] | None = None,
) -> RunParts:
    """Everything in its first state: weights follow from the seed, or from `settings.weights`.
    `on_error` is the engine's."""
    device = open_device(rank_device(settings.device))
    plan, loader = _plans(settings, device)
    batches = _batches(settings, data, plan, loader, device)
    torch.manual_seed(settings.seed)
    model = new_model(settings.model(), data.vocabularies)
    if settings.weights is not None:
        load_weights(model, Path(settings.weights))
    model = model.to(device.torch_device).train()
    spread = spread_over(ranks, model, settings.parallel, device)
    if ranks.several:
        torch.manual_seed(_seed_of(settings.seed, ranks.rank))  # each drops out its own
    optimizer = torch.optim.AdamW(
        spread.parameters(),
        lr=settings.lr,
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    engine = Engine(
        spread,
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
        # With workers a DataLoader has a timeout of its own, and ends them.
        loader_timeout=0 if loader.workers else settings.loader_timeout,
        on_error=on_error,
    )
    # HEADRACE_PLAN may have replaced the plan; batches stay as they were.
    pin, share = engine.plan.pin and device.asynchronous, (ranks.rank, ranks.size)
    timeout_s, splits = settings.loader_timeout, data.splits
    training = make_loader(
        splits["train"],
        batches,
        loader,
        pin=pin,
        timeout_s=timeout_s,
        share=share,
    )
    in_order = BatchPlan(splits["valid"].lengths, sentences=settings.sentences, shuffle=False)
    valid = make_loader(splits["valid"], in_order, LoaderPlan(workers=0), pin=pin, share=share)
    return RunParts(settings, data, ranks, device, model, engine, training, valid)


def spread_over(
    ranks: Ranks, model: Translator, how: Literal["ddp", "fsdp"], device: Device
) -> torch.nn.Module:
    """The model for these ranks: as it is for one alone."""
    if ranks.group is None:
        return model
    if how == "ddp":
        # Not on the default stream: a graph could not be captured of what was made there. That
        # backward then changes streams is meant, and costs no host wait.
        with suppress(AttributeError):  # of newer PyTorch
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        with device.use(device.stream("ddp")):
            return wrap_ddp(model, ranks.group)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # The logits are a view; nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.torch_device.type, (ranks.size,))
    for layer in (*model.encoder, *model.decoder):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _seed_of(seed: int, rank: int) -> int:
    digest = hashlib.sha256(f"seed {seed} of rank {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _plans(settings: TrainSettings, device: Device) -> tuple[Plan, LoaderPlan]:
    loader = LoaderPlan()
    if is_plan_file(settings.plan):
        stored = load_plan(settings.plan)
        plan, loader = stored.plan, stored.loader
    else:
        plan = Plan.of(settings.plan)
        if plan.graphs != "off":
            # Each bucket's last batch is not full, and of the same shape in every epoch. A
            # plan.yaml says itself how many graphs there may be.
            most = min(4096, 2 * (settings.shapes or _GRAPH_SHAPES))
            plan = plan.but(graph_shapes=most, name=plan.name)
    precision = chosen_precision(settings.precision, device)
    if precision != plan.precision:
        plan = plan.but(precision=precision, name=plan.name)
    workers = settings.workers if settings.workers is not None else loader.workers
    if workers is None:
        workers = 2 if device.asynchronous else 0
    ahead = settings.prefetch_factor or loader.prefetch_factor
    return plan, LoaderPlan(workers, ahead, loader.batch_size)


def _schedule(settings: TrainSettings, optimizer: torch.optim.Optimizer) -> LambdaLR:
    if settings.schedule == "noam":
        return noam(optimizer, settings.model().width, settings.warmup)
    shape = inverse_sqrt if settings.schedule == "inverse_sqrt" else constant
    return shape(optimizer, settings.warmup, settings.lr)


def _batches(
    settings: TrainSettings, data: Prepared, plan: Plan, loader: LoaderPlan, device: Device
) -> BatchPlan:
    shapes = settings.shapes
    if shapes is None and plan.graphs != "off" and device.captures:
        shapes = min(_GRAPH_SHAPES, plan.graph_shapes)
    return BatchPlan(
        data.splits["train"].lengths,
        sentences=loader.batch_size or settings.sentences,
        tokens=settings.tokens,
        shapes=shapes or None,
        seed=settings.seed,
    )
