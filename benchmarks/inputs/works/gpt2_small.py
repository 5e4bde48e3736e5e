"""GPT-2 small (12 layers, 124 M parameters) from transformers: 12 × 1024 tokens, bf16.

The plain script, then the same training under every plan:

    python benchmarks/inputs/works/gpt2_small.py --steps 100
    headrace bench --work benchmarks/inputs/works/gpt2_small.py:work --precision bf16
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from samples import Samples, loader_of, run
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

PRECISION = "bf16"


def work(
    *,
    tiny: bool = False,
    batch_size: int = 12,
    batches: int = 64,
    seed: int = 0,
    workers: int = 2,
    prefetch_factor: int = 2,
    pin: bool = False,
) -> Any:
    """GPT-2 small, 12 × 1024 tokens."""
    size = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100} if tiny else {}
    length = 16 if tiny else 1024
    if tiny:
        batch_size = min(batch_size, 2)
    config = GPT2Config(
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **size,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=True)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (batches * batch_size, length), generator=draw)
    loader = loader_of(
        Samples(ids),
        batch_size,
        seed=seed,
        workers=workers,
        prefetch_factor=prefetch_factor,
        pin=pin,
    )
    return model, optimizer, loss, loader


def loss(model: Any, batch: Any) -> Tensor:
    (ids,) = batch
    logits = model(input_ids=ids).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(device: torch.device, *, seed: int = 0, **options: Any) -> Iterator[Tensor]:
    """The plain training loop. Yields the loss of each step, which stays on the device."""
    torch.manual_seed(seed)
    model, optimizer, _, loader = work(seed=seed, **options)
    model.to(device).train()
    torch.manual_seed(seed)
    while True:
        for batch in loader:
            ids = batch[0].to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(input_ids=ids).logits
                value = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield value.detach()


def main(arguments: list[str] | None = None) -> None:
    run(__doc__, train, arguments)


if __name__ == "__main__":
    main()
