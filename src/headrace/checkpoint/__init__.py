"""Checkpoints: folders that are complete or not there, and never unpickled.

In goes a state: nested dicts of tensors and plain values. Out comes a folder, from which any number
of ranks reads the same state again.

    with CheckpointWriter(device, folder) as writer:
        for step, batch in enumerate(loader, 1):
            ...
            if step % 1000 == 0:
                writer.save({"model": model.state_dict(), "step": step}, step)   # does not wait

    newest = latest_checkpoint(folder)                  # the newest good one, or None
    state = load_checkpoint(newest)

`docs/checkpoints.md` describes the files.
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
