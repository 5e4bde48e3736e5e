"""Checkpoints: folders written beside and renamed, never unpickled.

In goes a state, nested dicts of tensors and plain values; out comes a folder that is whole or not
there, from which the same state is read again, on any number of ranks.

    with CheckpointWriter(device, folder) as writer:
        for step, batch in enumerate(loader, 1):
            ...
            if step % 1000 == 0:
                writer.save({"model": model.state_dict(), "step": step}, step)   # goes on at once

    newest = latest_checkpoint(folder)                  # the newest good one, or None
    state = load_checkpoint(newest)

What lies in such a folder is written down in `docs/checkpoints.md`.
"""

from __future__ import annotations

from headrace.checkpoint.folders import latest_checkpoint, load_checkpoint, save_checkpoint
from headrace.checkpoint.pieces import StoredTensor
from headrace.checkpoint.sharded import agreed_checkpoint
from headrace.checkpoint.states import PerRank
from headrace.checkpoint.weights import weights_from_file, weights_to_file
from headrace.checkpoint.writer import CheckpointWriter

__all__ = [
    "CheckpointWriter",
    "PerRank",
    "StoredTensor",
    "agreed_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "weights_from_file",
    "weights_to_file",
]
