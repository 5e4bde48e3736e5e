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

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import closing

import torch
from torch import Tensor

from headrace.device import Device, Graph
from headrace.engine import DeferredScalars
from headrace.errors import CaptureError, TranslationError
from headrace.parallel import eval_mode
from headrace.translation.corpus.vocabulary import BOS, EOS, PAD
from headrace.translation.model import Translator

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
        hypotheses = _Greedy(model, src, limits, steps)
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
        hypotheses = _Beams(model, src, limits, steps, beam, length_penalty)
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


class _Search:
    """A search over a batch. `advance` is one step, on the device alone. Its Python code is the
    same each time, so it can be captured once and replayed."""

    def __init__(
        self, model: Translator, src: Tensor, limits: Tensor, steps: int, beam: int
    ) -> None:
        sentences = src.size(0)
        self._model, self._limits = model, limits
        self._state = model.start(model.encode(src), steps, beam)
        self._last = src.new_full((sentences, beam), BOS)
        self.ids = src.new_full((sentences, steps), PAD)
        self.done = torch.zeros(sentences, dtype=torch.bool, device=src.device)
        self._in_place = False

    def advance(self) -> None:
        raise NotImplementedError

    def capture(self, device: Device) -> Graph:
        """A graph of `advance`, for this object's tensors."""
        self._in_place = True
        graph, _ = device.capture(self.advance, device.graph_pool())
        return graph

    def _set(self, name: str, value: Tensor) -> None:
        """Set a tensor for the next step; in the same memory if a graph reads it there."""
        if self._in_place:
            getattr(self, name).copy_(value)
        else:
            setattr(self, name, value)


class _Greedy(_Search):
    """One hypothesis per sentence."""

    def __init__(self, model: Translator, src: Tensor, limits: Tensor, steps: int) -> None:
        super().__init__(model, src, limits, steps, 1)

    def advance(self) -> None:
        step = self._state.position.clone()
        logits, self._state = self._model.step(self._last, self._state)
        ids = _mask_forbidden(logits, step, self._limits).argmax(dim=2)
        self._set("_last", ids)
        self.ids.index_copy_(1, step, ids)  # ids after eos are ignored
        self._set("done", self.done | ids[:, 0].eq(EOS))


class _Beams(_Search):
    """Running hypotheses are (sentences, beams), the best ended ones (sentences,)."""

    def __init__(
        self,
        model: Translator,
        src: Tensor,
        limits: Tensor,
        steps: int,
        beam: int,
        length_penalty: float,
    ) -> None:
        super().__init__(model, src, limits, steps, beam)
        sentences, self._beam = src.size(0), beam
        lengths = torch.arange(steps, dtype=torch.float64, device=src.device)
        self._penalties = (((lengths + 6) / 6) ** length_penalty).float()
        self._running = src.new_full((sentences, beam, steps), PAD)
        # All beams start equal, so only the first one counts.
        self._scores = torch.full((sentences, beam), -math.inf, device=src.device)
        self._scores[:, 0] = 0.0
        self._first_row = torch.arange(0, sentences * beam, beam, device=src.device).unsqueeze(1)
        self._candidate = torch.arange(2 * beam, device=src.device)
        self._largest_penalty = ((limits + 6) / 6) ** length_penalty
        self._ended_count = torch.zeros(sentences, dtype=torch.int64, device=src.device)
        self._best = torch.full((sentences,), -math.inf, device=src.device)

    def advance(self) -> None:
        step = self._state.position.clone()
        logits, self._state = self._model.step(self._last, self._state)
        vocabulary = logits.size(2)
        log_p = _mask_forbidden(logits.float().log_softmax(dim=2), step, self._limits)
        # Each beam has only one candidate that ends: of 2 × `beam`, at least `beam` do not.
        totals = (self._scores.unsqueeze(2) + log_p).flatten(1)
        scores, at = totals.topk(2 * self._beam, dim=1)
        beams, ids = at // vocabulary, at % vocabulary
        ends = ids.eq(EOS)
        self._keep_best_ended(step, scores, beams, ends)
        self._continue_running(step, scores.masked_fill(ends, -math.inf), beams, ids)

    def _keep_best_ended(self, step: Tensor, scores: Tensor, beams: Tensor, ends: Tensor) -> None:
        """Keep the best hypothesis that ends now, if it is better than those that ended before."""
        ended = ends & (self._candidate < self._beam) & scores.isfinite()
        penalty = self._penalties.index_select(0, step)
        values, at = (scores / penalty).masked_fill(~ended, -math.inf).max(dim=1, keepdim=True)
        ids = _select(self._running, beams.gather(1, at)).squeeze(1)
        ids.index_fill_(1, step, EOS)
        better = values.squeeze(1) > self._best
        self._set("ids", torch.where(better.unsqueeze(1), ids, self.ids))
        self._set("_best", torch.where(better, values.squeeze(1), self._best))
        self._set("_ended_count", self._ended_count + ended.sum(dim=1))

    def _continue_running(self, step: Tensor, scores: Tensor, beams: Tensor, ids: Tensor) -> None:
        """Continue with the best candidates that do not end, in sentences that are not done."""
        scores, at = scores.topk(self._beam, dim=1)
        beams, ids = beams.gather(1, at), ids.gather(1, at)
        # Log-probabilities only fall, so the score of a running hypothesis can at best become its
        # present log-probability over the largest penalty.
        reachable = scores[:, 0] / self._largest_penalty
        self._set("done", self.done | self._ended_count.ge(self._beam) | self._best.ge(reachable))
        self._set("_scores", scores.masked_fill(self.done.unsqueeze(1), -math.inf))
        self._set("_running", _select(self._running, beams).index_copy_(2, step, ids.unsqueeze(2)))
        self._set("_last", ids)
        state = self._model.reorder(self._state, (self._first_row + beams).flatten())
        if self._in_place:
            state = dataclasses.replace(state, cache=self._state.cache.copy_(state.cache))
        self._state = state


def _select(hypotheses: Tensor, beams: Tensor) -> Tensor:
    """hypotheses (sentences, beams, length), beams (sentences, n) -> (sentences, n, length)."""
    at = beams.unsqueeze(2).expand(-1, -1, hypotheses.size(2))
    return hypotheses.gather(1, at)


def _mask_forbidden(values: Tensor, step: Tensor, limits: Tensor) -> Tensor:
    """Set ids that must not come at this step to -∞. values (sentences, beams, vocabulary), step
    (1,)."""
    values[:, :, PAD] = -math.inf
    values[:, :, BOS] = -math.inf
    # The first id is not eos, the last one is.
    is_eos = torch.arange(values.size(2), device=values.device).eq(EOS)
    forbidden = torch.where(is_eos, step.eq(0), limits.le(step).view(-1, 1, 1))
    return values.masked_fill(forbidden, -math.inf)


def _limits(model: Translator, src: Tensor, max_length: int | None) -> tuple[Tensor, int]:
    """The token limit of each sentence, (sentences,), and the number of steps for the longest."""
    longest = model.settings.max_length - 1  # bos takes one position
    if max_length is None:
        limits = (src.ne(PAD).sum(dim=1) * 3 // 2 + 10).clamp(max=longest)
        return limits, min(src.size(1) * 3 // 2 + 10, longest) + 1
    limit = min(max_length, longest)
    return src.new_full((src.size(0),), limit), limit + 1


def _run(hypotheses: _Search, device: Device, steps: int) -> list[list[int]]:
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


def _captured(hypotheses: _Search, device: Device) -> Graph | None:
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
