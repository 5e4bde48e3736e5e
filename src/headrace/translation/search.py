"""Searches over a batch of hypotheses, on the device: greedy, and with beams."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from headrace.device import Device, Graph
from headrace.translation.corpus.vocabulary import BOS, EOS, PAD
from headrace.translation.model import Translator


class BatchSearch:
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


class Greedy(BatchSearch):
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


class Beams(BatchSearch):
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
