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

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.checkpoint.finding import latest_checkpoint as latest_checkpoint
    from headrace.checkpoint.folders import save_checkpoint as save_checkpoint
    from headrace.checkpoint.pieces import StoredTensor as StoredTensor
    from headrace.checkpoint.reading import load_checkpoint as load_checkpoint
    from headrace.checkpoint.sharded import agreed_checkpoint as agreed_checkpoint
    from headrace.checkpoint.states import PerRank as PerRank
    from headrace.checkpoint.weights import weights_from_file as weights_from_file
    from headrace.checkpoint.weights import weights_to_file as weights_to_file
    from headrace.checkpoint.writer import CheckpointWriter as CheckpointWriter

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
