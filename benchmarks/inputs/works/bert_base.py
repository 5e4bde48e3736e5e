"""BERT base from transformers, masked words, padded sentences: 32 × 128 tokens, bf16, dropout 0.1.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/bert_base.py --steps 100
    headrace bench --work benchmarks/inputs/works/bert_base.py:work --precision bf16
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from samples import Samples, loader_of, run
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

PRECISION = "bf16"
MASKED = 0.15
MASK_ID, IGNORED = 103, -100


def work(
    *,
    tiny: bool = False,
    batch_size: int = 32,
    batches: int = 64,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """BERT base with an attention mask, 32 × 128 tokens."""
    size, length = {}, 128
    if tiny:
        batch_size, length = min(batch_size, 2), 16
        size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        size |= {"intermediate_size": 64, "vocab_size": 200}
    config = BertConfig(**size)
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    draw = torch.Generator().manual_seed(seed)
    shape = (batches * batch_size, length)
    words = torch.randint(104, config.vocab_size, shape, generator=draw)
    lengths = torch.randint(length // 2, length + 1, (shape[0], 1), generator=draw)
    mask = torch.arange(length) < lengths
    masked = (torch.rand(shape, generator=draw) < MASKED) & mask
    masked[:, 0] = True  # the mean over no masked word would not be a number
    samples = Samples(
        words.masked_fill(masked, MASK_ID).masked_fill(~mask, 0),
        mask.long(),
        words.masked_fill(~masked, IGNORED),
    )
    loader = loader_of(
        samples,
        batch_size,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    return model, optimizer, loss, loader


def loss(model: Any, batch: Any) -> Tensor:
    ids, mask, labels = batch
    found: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    return found


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    model, optimizer, _, loader = work(seed=seed, **options)
    model.to(device).train()
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            ids, mask, labels = (part.to(device, non_blocking=True) for part in batch)
            with torch.autocast(device.type, torch.bfloat16):
                value = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield value.detach()


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
