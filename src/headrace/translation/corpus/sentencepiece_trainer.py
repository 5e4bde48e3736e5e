"""Trains a SentencePiece model, in this process or in a child.

Training is one call into C++, which no signal interrupts. A child process can be ended: so Ctrl-C
works. The model is the same, byte for byte.

This file is also the child's program. It imports SentencePiece and little else.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.child_processes import child_environment, end_with_parent

# Less text takes less time than a child needs to start.
_IN_PROCESS_CHARACTERS = 20_000
_REFUSED = 3  # the child's exit code if SentencePiece raised an error


def train_model(text: Sequence[str], options: Mapping[str, Any]) -> bytes:
    """The model of these sentences. Raises RuntimeError with SentencePiece's own message."""
    if not sys.executable or sum(map(len, text)) < _IN_PROCESS_CHARACTERS:
        return _train(text, options)
    request = json.dumps({"text": list(text), "options": dict(options)}).encode()
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", __file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
    ) as child:
        try:
            model, message = child.communicate(request)
        finally:
            child.kill()
    if child.returncode == 0:
        return model
    reason = message.decode(errors="replace").strip()
    if child.returncode != _REFUSED:
        last = reason.splitlines()[-1] if reason else "no message"
        reason = f"its process ended with code {child.returncode}: {last}"
    raise RuntimeError(reason)


def _train(text: Sequence[str], options: Mapping[str, Any]) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, **options
    )
    return model.getvalue()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    end_with_parent(int(sys.argv[1]))
    request = json.load(sys.stdin.buffer)
    try:
        model = _train(request["text"], request["options"])
    except RuntimeError as problem:
        sys.stderr.write(str(problem))
        sys.exit(_REFUSED)
    sys.stdout.buffer.write(model)


if __name__ == "__main__":
    _main()
