"""The Transformer base of `headrace train`: 30 sentences of 60 tokens, bf16, dropout 0.1.

The plain script, then the same training under every plan:

    PYTHONPATH=src python benchmarks/inputs/works/transformer.py --steps 100
    headrace bench --work benchmarks/inputs/works/transformer.py:work --precision bf16
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from samples import Samples, loader_of, run
from torch import Tensor

from headrace.translation import EOS, ModelSettings, Translator, translation_loss

PRECISION = "bf16"


def work(
    *,
    tiny: bool = False,
    batch_size: int = 30,
    batches: int = 64,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """Transformer base, 30 sentences of 60 tokens."""
    settings, vocabulary, length = ModelSettings.preset("base"), 32_000, 60
    if tiny:
        settings = ModelSettings.preset("tiny").replace(encoder_layers=1, decoder_layers=1)
        vocabulary, length, batch_size = 50, 7, min(batch_size, 3)
    model = Translator(settings, vocabulary, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    draw = torch.Generator().manual_seed(seed)
    count = batches * batch_size
    samples = Samples(
        torch.randint(EOS + 1, vocabulary, (count, length), generator=draw),
        torch.randint(EOS + 1, vocabulary, (count, length + 1), generator=draw),
    )
    loader = loader_of(
        samples,
        batch_size,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    return model, optimizer, translation_loss(), loader


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    model, optimizer, loss, loader = work(seed=seed, **options)
    model.to(device).train()
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            sentences = [part.to(device, non_blocking=True) for part in batch]
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(model, sentences)["loss"]
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield value.detach()


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
