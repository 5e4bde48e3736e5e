"""The built-in workloads: translation, resnet and mlp. Their data is random, drawn from the seed.

Batches are in host memory before training starts, so that loading costs nothing; with `workers`, a
DataLoader's worker processes draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from headrace.bench.works.parameters import settable
from headrace.bench.works.resnet import ResNet
from headrace.bench.works.training import ModelTraining
from headrace.bench.works.work import Unit, Workload, work_of
from headrace.errors import WorkOptionError
from headrace.schema import require_whole
from headrace.translation import EOS, ModelSettings, Translator, translation_loss

Draw = Callable[[torch.Generator], tuple[Tensor, ...]]


@dataclass(frozen=True)
class BuiltIn:
    """A built-in workload. `description` is a template for its options. `small` are the defaults on
    a CPU, which would take an hour with the ordinary ones."""

    build: Callable[..., ModelTraining]
    unit: Unit
    description: str
    small: Mapping[str, Any]

    def work(self, options: Mapping[str, Any], *, small: bool = False) -> Workload:
        name, defaults = self.build.__name__, self.build.__kwdefaults__ or {}
        for option in settable(self.build):
            if option in options:
                check_option(name, option, options[option], defaults[option])
        work = work_of(self.build, {**(self.small if small else {}), **options}, name=name)
        description = self.description.format(**work.options)
        return Workload(name, description, self.unit, self.build, work.options, work.where)


def translation(
    *,
    batch: int = 30,
    length: int = 60,
    dropout: float = 0.1,
    preset: str = "base",
    vocabulary: int = 32_000,
    lr: float = 1e-4,
    batches: int = 16,
    seed: int = 0,
    pin: bool = False,
    workers: int = 0,
    prefetch_factor: int = 2,
) -> ModelTraining:
    """The Transformer of `headrace train`, on sentences of one length without padding."""
    settings = ModelSettings.preset(preset).replace(
        dropout=dropout, max_length=max(512, length + 1)
    )
    model = Translator(settings, vocabulary, vocabulary)
    data = RandomBatches(partial(_sentences, batch, length, vocabulary), batches, seed)
    return ModelTraining(
        model, _adamw(model, lr), translation_loss(), loader_of(data, pin, workers, prefetch_factor)
    )


def resnet(
    *,
    batch: int = 128,
    size: int = 224,
    depth: int = 50,
    classes: int = 1000,
    width: int = 64,
    lr: float = 1e-4,
    batches: int = 8,
    seed: int = 0,
    pin: bool = False,
    workers: int = 0,
    prefetch_factor: int = 2,
) -> ModelTraining:
    """ResNet on square images of random noise."""
    if depth not in _RESNETS:
        raise WorkOptionError(f"depth = {depth}: expected {', '.join(map(str, _RESNETS))}")
    model = ResNet(_RESNETS[depth], width, classes)
    data = RandomBatches(partial(_images, batch, size, classes), batches, seed)
    return ModelTraining(
        model, _adamw(model, lr), classification, loader_of(data, pin, workers, prefetch_factor)
    )


def mlp(
    *,
    batch: int = 64,
    width: int = 64,
    layers: int = 3,
    dropout: float = 0.0,
    lr: float = 1e-4,
    batches: int = 16,
    seed: int = 0,
    pin: bool = False,
    workers: int = 0,
    prefetch_factor: int = 2,
) -> ModelTraining:
    """A few small layers: steps too short to hide any overhead."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
        if dropout:
            parts.append(nn.Dropout(dropout))
    model = nn.Sequential(*parts, nn.Linear(width, 10))
    data = RandomBatches(partial(_rows, batch, width), batches, seed)
    return ModelTraining(
        model, _adamw(model, lr), classification, loader_of(data, pin, workers, prefetch_factor)
    )


def classification(model: Any, batch: Any) -> Tensor:
    """batch: inputs (batch, …) and classes (batch,)."""
    return functional.cross_entropy(model(batch[0]), batch[1])


_RESNETS = {14: (1, 1, 1, 1), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}

BUILT_IN = {
    "translation": BuiltIn(
        translation,
        "tokens",
        "Transformer {preset}, {batch} sentences × {length} tokens",
        {"preset": "tiny", "batch": 8, "length": 20, "vocabulary": 1000},
    ),
    "resnet": BuiltIn(
        resnet,
        "samples",
        "ResNet-{depth}, {batch} images of {size} × {size}",
        {"depth": 14, "batch": 4, "size": 64, "width": 16},
    ),
    "mlp": BuiltIn(mlp, "samples", "{layers} layers of {width}, {batch} rows", {}),
}


class RandomBatches(Dataset[tuple[Tensor, ...]]):
    """`count` random batches; batch k depends only on k and the seed."""

    def __init__(self, draw: Draw, count: int, seed: int) -> None:
        self.draw, self.count, self.seed = draw, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.draw(torch.Generator(device="cpu").manual_seed((self.seed << 20) + index))


def loader_of(data: RandomBatches, pin: bool, workers: int, prefetch_factor: int) -> Iterable[Any]:
    """A list of all batches, drawn once per process; with workers, a DataLoader."""
    if not workers:
        return _in_memory(data.draw, data.count, data.seed, pin)
    return DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin,
        persistent_workers=True,
        generator=torch.Generator(device="cpu").manual_seed(data.seed),
    )


# All plans share the batches: drawing and pinning a gigabyte of images for each would take long.
@lru_cache(maxsize=2)
def _ready(build: Any, arguments: Any, count: int, seed: int, pin: bool) -> list[Any]:
    data = RandomBatches(partial(build, *arguments), count, seed)
    return [
        tuple(part.pin_memory() if pin else part for part in batch)
        for batch in map(data.__getitem__, range(count))
    ]


def _in_memory(draw: Any, count: int, seed: int, pin: bool) -> list[Any]:
    return list(_ready(draw.func, draw.args, count, seed, pin))


def _sentences(
    batch: int, length: int, vocabulary: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """src (batch, length) and trg (batch, length + 1): `length` target tokens are predicted."""

    def ids(extra: int) -> Tensor:
        return torch.randint(
            EOS + 1, vocabulary, (batch, length + extra), generator=draw, device="cpu"
        )

    return ids(0), ids(1)


def _images(batch: int, size: int, classes: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, size, size, generator=draw, device="cpu")
    return images, torch.randint(0, classes, (batch,), generator=draw, device="cpu")


def _rows(batch: int, width: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = torch.randn(batch, width, generator=draw, device="cpu")
    return rows, torch.randint(0, 10, (batch,), generator=draw, device="cpu")


def _adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    # Fused, since only a fused optimizer computes the same bits in a graph as in eager mode.
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def check_option(work: str, name: str, value: object, default: object) -> None:
    """Raise unless an option has its default's type. Counts must be at least 1, `workers` at least
    0."""
    if isinstance(default, str):
        if not isinstance(value, str):
            raise WorkOptionError(
                f"{work}: {name} = {value!r}: expected a name, such as {default!r}"
            )
    elif isinstance(default, float):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise WorkOptionError(f"{work}: {name} = {value!r}: expected a number from 0, below 1")
    else:
        require_whole(f"{work}: {name}", value, 0 if name == "workers" else 1, WorkOptionError)
