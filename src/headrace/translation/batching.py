"""How a run's corpus is divided into batches: padded or packed, and of which size."""

from __future__ import annotations

import numpy as np

from headrace.device import Device
from headrace.errors import TranslationError
from headrace.parallel import Ranks
from headrace.plan import LoaderPlan, Plan, effective_plan, load_plan
from headrace.translation.corpus.batches import BatchPlan
from headrace.translation.corpus.division import Batching
from headrace.translation.corpus.encoded import IdPairs
from headrace.translation.corpus.packed import PackedPlan, packed_size, pair_sizes
from headrace.translation.corpus.prepared import Prepared
from headrace.translation.settings import TrainSettings, is_plan_file, resolve_precision

_GRAPH_SHAPES = 16
# Packed batches gain by one compiled graph instead of sixteen shapes. Measured with 26,000 tokens;
# with few tokens the gain is small, and padded batches keep attention dropout.
_PACKED_FROM_TOKENS = 8192


def check_packed(settings: TrainSettings) -> None:
    """Raise if `packed` is on together with a setting that packed batches do not have."""
    obstacle = _packed_obstacle(settings)
    if settings.packed == "on" and obstacle is not None:
        raise TranslationError(f"packed = on with {obstacle}; or packed = off")


def _packed_obstacle(settings: TrainSettings) -> str | None:
    """The setting that padded batches have and packed ones do not, if it is set."""
    if settings.attention_dropout:
        return f"attention_dropout = {settings.attention_dropout:g}: expected 0"
    if settings.shapes:
        return f"shapes = {settings.shapes}: packed batches have one shape; expected none"
    if settings.on_oom == "halve":
        return "on_oom = halve: packed batches have no rows to halve; expected on_oom = raise"
    return None


def why_padded(settings: TrainSettings, data: Prepared, ranks: Ranks, device: Device) -> str | None:
    """Why `packed = auto` takes padded batches; None if it takes packed ones.

    Packed batches need `flex_attention`, which only compiled code on a CUDA GPU has. With a mask of
    all queries × keys they would be slower than padded ones.
    """
    plan, loader = resolve_plans(settings, device)
    if not device.compiles:
        return f"flex_attention does not run on {device.description()}"
    plan = effective_plan(plan)
    if not plan.compile:
        return f"plan {plan.name} does not compile"
    if ranks.several:
        return "several ranks: only --packed on packs"
    tokens = batch_tokens(settings, data.splits["train"], loader)
    if tokens < _PACKED_FROM_TOKENS:
        return f"{tokens:,} target tokens per batch, less than {_PACKED_FROM_TOKENS:,}"
    if tokens < (longest := _longest(data)[1]):
        return f"{tokens:,} target tokens per batch, and the longest sentence takes {longest:,}"
    return _packed_obstacle(settings)


def resolve_plans(settings: TrainSettings, device: Device) -> tuple[Plan, LoaderPlan]:
    loader = LoaderPlan()
    if is_plan_file(settings.plan):
        stored = load_plan(settings.plan)
        plan, loader = stored.plan, stored.loader
    else:
        plan = Plan.of(settings.plan)
        if plan.graphs != "off":
            # Two shapes per bucket: full batches, and the last one, which has the same size in
            # every epoch. A plan.yaml sets its own limit.
            limit = min(4096, 2 * (settings.shapes or _GRAPH_SHAPES))
            plan = plan.replace(graph_shapes=limit, name=plan.name)
    precision = resolve_precision(settings.precision, device)
    if precision != plan.precision:
        plan = plan.replace(precision=precision, name=plan.name)
    workers = settings.workers if settings.workers is not None else loader.workers
    if workers is None:
        workers = 2 if device.asynchronous else 0
    prefetch_factor = settings.prefetch_factor or loader.prefetch_factor
    return plan, LoaderPlan(workers, prefetch_factor, loader.batch_size)


def plan_batches(
    settings: TrainSettings, data: Prepared, plan: Plan, loader: LoaderPlan, device: Device
) -> Batching:
    train, shapes = data.splits["train"], settings.shapes
    if settings.packed == "on":
        tokens = batch_tokens(settings, train, loader)
        longest = _longest(data)
        if settings.tokens is not None and settings.tokens < longest[1]:
            raise TranslationError(
                f"tokens = {settings.tokens} with packed = on: the longest target sentence of "
                f"train and valid takes {longest[1]} tokens of a batch; expected at least "
                f"{longest[1]}. A smaller max_length drops long pairs"
            )
        size = packed_size(train.lengths, tokens, longest)
        return PackedPlan(train.lengths, size, seed=settings.seed)
    if shapes is None and plan.graphs != "off" and device.captures:
        shapes = min(_GRAPH_SHAPES, plan.graph_shapes)
    return BatchPlan(
        train.lengths,
        sentences=loader.batch_size or settings.sentences,
        tokens=settings.tokens,
        shapes=shapes or None,
        seed=settings.seed,
    )


def _longest(data: Prepared) -> tuple[int, int]:
    """The tokens that the longest source and the longest target of train and valid take."""
    sizes = [pair_sizes(data.splits[name].lengths) for name in ("train", "valid")]
    src, trg = np.concatenate(sizes).max(axis=0, initial=1)
    return int(src), int(trg)


def batch_tokens(settings: TrainSettings, train: IdPairs, loader: LoaderPlan) -> int:
    """Target tokens per batch, without padding: as set, or those of so many mean sentences."""
    if settings.tokens is not None:
        return settings.tokens
    sentences = loader.batch_size or settings.sentences
    return max(1, sentences * (train.tokens[1] - len(train)) // max(1, len(train)))


def plan_validation(
    settings: TrainSettings, data: Prepared, loader: LoaderPlan, training: Batching
) -> Batching:
    """Packed in the shape of training, if that is packed: the compiled code then serves both.
    Otherwise of the size of training: larger batches might not fit into memory."""
    lengths = data.splits["valid"].lengths
    if isinstance(training, PackedPlan):
        return training.for_validation(lengths)
    tokens = settings.tokens
    if tokens is not None:  # valid may have a longer sentence than train
        tokens = max(tokens, int(lengths[:, 1].max(initial=1)))
    sentences = loader.batch_size or settings.sentences
    return BatchPlan(lengths, sentences=sentences, tokens=tokens, shuffle=False)
