"""Greedy and beam search: from source ids to the ids of a translation, in batches.

The score of a hypothesis of n tokens, eos included, is log p / ((5 + n) / 6)^α, where α is the
`length_penalty`. With 0, log-probabilities are compared directly, which favours short hypotheses; 1
is close to the mean over tokens. The search never generates pad, bos or an empty translation. At
its length limit a hypothesis is forced to end: eos is added with its log-probability.

On a device that captures graphs, the first steps of a batch run eagerly; then a step is captured
and replayed. So no Python number of a step depends on its position, which is a tensor.

Hypotheses stay on the device and are read back once, at the end. Every few steps the search asks
the device whether all sentences are done, and reads the answer two steps later, when it has usually
arrived. Except for rounding, a translation does not depend on the other sentences in its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing

import torch
from torch import Tensor

from headrace.device import Device, Graph
from headrace.engine import DeferredScalars
from headrace.errors import CaptureError, TranslationError
from headrace.parallel import eval_mode
from headrace.translation.corpus.vocabulary import EOS, PAD
from headrace.translation.model import Translator
from headrace.translation.search import BatchSearch, Beams, Greedy

# The search asks "are all sentences done?" every 4 steps, and reads the answer 2 steps later.
_ASK_EVERY, _ANSWER_AFTER = 4, 2
# A capture takes about as long as two eager steps.
_EAGER_STEPS, _WORTH_CAPTURING = 2, 12


def greedy(
    model: Translator, src: Tensor, device: Device, *, max_length: int | None = None
) -> list[list[int]]:
    """Take the most probable token at each step. src is (sentences, length), on the device.

    `max_length` is in tokens without eos. None allows 1.5 times the source's length plus 10. The
    model's max_length is a limit in any case.
    """
    with torch.no_grad(), eval_mode(model):
        limits, steps = _limits(model, src, max_length)
        hypotheses = Greedy(model, src, limits, steps)
        return _run(hypotheses, device, steps)


def beam_search(
    model: Translator,
    src: Tensor,
    device: Device,
    *,
    beam: int = 3,
    length_penalty: float = 0.6,
    max_length: int | None = None,
) -> list[list[int]]:
    """Find the best hypothesis of each sentence. src is (sentences, length), on the device.

    At each step, those of the `beam` best candidates that end with eos are finished, and the `beam`
    best that do not end continue. A sentence is done when `beam` hypotheses have ended,
    or when no running one can become better than the best that ended. A beam of 1 gives the same as
    `greedy`, where `max_length` is explained.
    """
    with torch.no_grad(), eval_mode(model):
        limits, steps = _limits(model, src, max_length)
        hypotheses = Beams(model, src, limits, steps, beam, length_penalty)
        return _run(hypotheses, device, steps)


def translate_ids(
    model: Translator,
    sources: Sequence[Sequence[int]],
    device: Device,
    *,
    batch_tokens: int = 16384,
    beam: int = 3,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[list[int]]:
    """Translate any number of sentences. The translations are in the order of the sources.

    Sentences of similar length form a batch, the longest first, with at most `batch_tokens` source
    tokens times beams, padding included. After each batch, `progress` is called with the number of
    translated sentences and of all. A sentence without ids gets an empty translation.
    """
    _check_sources(model, sources)
    found: list[list[int]] = [[] for _ in sources]
    order = sorted((i for i, ids in enumerate(sources) if ids), key=lambda i: -len(sources[i]))
    done = len(sources) - len(order)
    while order:
        longest = len(sources[order[0]])
        size = max(1, batch_tokens // (longest * beam))
        batch, order = order[:size], order[size:]
        src = _to_device([sources[i] for i in batch], device)
        if beam == 1:
            results = greedy(model, src, device, max_length=max_length)
        else:
            results = beam_search(
                model,
                src,
                device,
                beam=beam,
                length_penalty=length_penalty,
                max_length=max_length,
            )
        for i, ids in zip(batch, results, strict=True):
            found[i] = ids
        done += len(batch)
        if progress is not None:
            progress(done, len(sources))
    return found


def _limits(model: Translator, src: Tensor, max_length: int | None) -> tuple[Tensor, int]:
    """The token limit of each sentence, (sentences,), and the number of steps for the longest."""
    longest = model.settings.max_length - 1  # bos takes one position
    if max_length is None:
        limits = (src.ne(PAD).sum(dim=1) * 3 // 2 + 10).clamp(max=longest)
        return limits, min(src.size(1) * 3 // 2 + 10, longest) + 1
    limit = min(max_length, longest)
    return src.new_full((src.size(0),), limit), limit + 1


def _run(hypotheses: BatchSearch, device: Device, steps: int) -> list[list[int]]:
    """Advance until all sentences are done or no step is left. Returns their ids."""
    graph: Graph | None = None
    is_worth = device.captures and steps >= _WORTH_CAPTURING
    with closing(DeferredScalars(device, every=1)) as questions:
        for step in range(steps):
            if is_worth and step == _EAGER_STEPS:
                graph = _captured(hypotheses, device)
            if graph is None:
                hypotheses.advance()
            else:
                graph.replay()
            if step % _ASK_EVERY == _ASK_EVERY - 1:
                questions.push(step, {"done": hypotheses.done.all()})
            elif step % _ASK_EVERY == _ANSWER_AFTER - 1:
                answers = questions.drain("search")
                if any(answer.values["done"] for answer in answers):
                    break
    found = [_cut_at_eos(row) for row in _read_back(hypotheses.ids, device)]
    if graph is not None:
        graph.close()  # only now: the device has replayed it for the last time
    return found


def _captured(hypotheses: BatchSearch, device: Device) -> Graph | None:
    try:
        return hypotheses.capture(device)
    except CaptureError as problem:
        device.warn_once("decode", "decoding runs without a graph: %s", problem)
        return None


def _cut_at_eos(row: list[float]) -> list[int]:
    ids = []
    for number in row:
        if number in (EOS, PAD):
            break
        ids.append(int(number))
    return ids


def _read_back(ids: Tensor, device: Device) -> list[list[float]]:
    """Read a 2-d tensor back from the device. Every search waits here, once."""
    buffer = device.pinned.take(ids.numel() * ids.element_size())
    on_host = buffer.view(ids.shape, ids.dtype)
    arrived = device.event()
    device.copy(on_host, ids, known_pinned=True)
    arrived.record()
    device.wait(arrived, "translations")
    rows = device.read_host(on_host)
    buffer.release()
    return rows


def _to_device(sentences: list[Sequence[int]], device: Device) -> Tensor:
    """Pad the sentences and copy them to the device: (sentences, length)."""
    shape = (len(sentences), max(len(ids) for ids in sentences))
    buffer = device.pinned.take(math.prod(shape) * torch.int64.itemsize)
    staging = buffer.view(shape, torch.int64).fill_(PAD)
    for row, ids in zip(staging, sentences, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int64, device="cpu")
    src = device.empty(shape, torch.int64)
    device.copy(src, staging, known_pinned=True)
    copied = device.event()
    copied.record()
    buffer.release(after=copied)
    return src


def _check_sources(model: Translator, sources: Sequence[Sequence[int]]) -> None:
    """Raise for ids that the model does not know: on a GPU they would make CUDA unusable."""
    longest, vocabulary = model.settings.max_length, model.src_vocabulary
    for number, ids in enumerate(sources):
        if len(ids) > longest:
            raise TranslationError(
                f"source {number} has {len(ids)} ids: expected at most {longest}, "
                "the model's max_length"
            )
        if ids and not 0 < min(ids) <= max(ids) < vocabulary:
            raise TranslationError(
                f"source {number} has ids from {min(ids)} to {max(ids)}: expected 1 to "
                f"{vocabulary - 1}, the source vocabulary without padding"
            )
