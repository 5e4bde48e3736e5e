"""Greedy and beam search, compared with plain searches and with all possible sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace.device import Device, open_device
from headrace.errors import CaptureError, TranslationError
from headrace.fake import FakeDevice
from headrace.translation import EOS, ModelSettings, Translator, beam_search, decode, greedy
from headrace.translation.corpus.vocabulary import BOS, PAD, UNK
from headrace.translation.decode import translate_ids

CPU = open_device("cpu")
SETTINGS = ModelSettings(8, 2, 1, 1, 8, 0.1, max_length=40)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other, long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(seed: int, vocabulary: int = 6, *, eos: float = 0.0, spread: float = 1.0) -> Translator:
    """A model with random weights. `eos` makes it end sooner or later."""
    torch.manual_seed(seed)
    model = Translator(SETTINGS.replace(tied=False), 9, vocabulary)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=spread)
    with torch.no_grad():
        model.output.bias[EOS] += eos
    return model.train()


def sources(rows: int, length: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    found = torch.randint(4, 9, (rows, length), generator=draw)
    for row in range(rows):
        found[row, 1 + row % length :] = PAD
    return found


def score(log_p: float, tokens: int, length_penalty: float) -> float:
    """The length penalty of a hypothesis with this many tokens, eos included."""
    return log_p / ((5 + tokens) / 6) ** length_penalty


@torch.no_grad()
def log_ps(model: Translator, src: Tensor, prefixes: list[list[int]]) -> Tensor:
    """(prefixes, length + 1, vocabulary): what each prefix of one length makes of its tokens."""
    trg = torch.tensor([[BOS, *prefix] for prefix in prefixes])
    return model(src.expand(len(prefixes), -1), trg).log_softmax(dim=2)


def every_score(
    model: Translator, src: Tensor, limit: int, length_penalty: float
) -> dict[tuple[int, ...], float]:
    """The score of each translation of 1 to `limit` tokens."""
    tokens = [i for i in range(model.trg_vocabulary) if i not in (PAD, BOS, EOS)]
    found = {}
    for length in range(1, limit + 1):
        all_ids = [list(ids) for ids in itertools.product(tokens, repeat=length)]
        log_p = log_ps(model, src, all_ids)
        for row, ids in enumerate(all_ids):
            total = sum(log_p[row, at, i].item() for at, i in enumerate([*ids, EOS]))
            found[tuple(ids)] = score(total, length + 1, length_penalty)
    return found


def plain_beams(
    model: Translator, src: Tensor, beam: int, length_penalty: float, limit: int
) -> list[int]:
    """The same search for one sentence, with lists and nothing kept from step to step."""
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for step in range(limit + 1):
        candidates = []
        for at, log_p in enumerate(log_ps(model, src, [ids for _, ids in running])[:, -1]):
            total, ids = running[at]
            for token in range(model.trg_vocabulary):
                end = token == EOS
                if token in (PAD, BOS) or (end and step == 0) or (not end and step == limit):
                    continue
                candidates.append((total + log_p[token].item(), ids, token))
        candidates.sort(key=lambda candidate: -candidate[0])
        for total, ids, token in candidates[:beam]:
            if token == EOS:
                ended.append((score(total, step + 1, length_penalty), ids))
        running = [(total, [*ids, token]) for total, ids, token in candidates if token != EOS]
        running = running[:beam]
        best = max((value for value, _ in ended), default=-math.inf)
        reachable = max(
            (score(t, limit + 1, length_penalty) for t, _ in running), default=-math.inf
        )
        if len(ended) >= beam or best >= reachable:
            break
    return max(ended, key=lambda found: found[0])[1]


class TestAgainstAllSequences:
    @given(
        seed=st.integers(0, 10_000),
        vocabulary=st.sampled_from([5, 6]),
        limit=st.integers(1, 4),
        length_penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
        eos=st.sampled_from([-1.0, 0.0, 2.0]),
    )
    @settings(max_examples=40, deadline=None, derandomize=True)
    def test_a_large_beam_is_exact(
        self, seed: int, vocabulary: int, limit: int, length_penalty: float, eos: float
    ) -> None:
        model = make(seed, vocabulary, eos=eos)
        src = sources(3, 4, seed)
        found = beam_search(
            model, src, CPU, beam=130, length_penalty=length_penalty, max_length=limit
        )
        model.eval()
        for row, ids in enumerate(found):
            scores = every_score(model, src[row : row + 1], limit, length_penalty)
            assert scores[tuple(ids)] == pytest.approx(max(scores.values()), abs=1e-4)


class TestAgainstPlainSearch:
    @given(
        seed=st.integers(0, 10_000),
        beam=st.integers(1, 4),
        limit=st.integers(1, 7),
        length_penalty=st.sampled_from([0.0, 0.6, 1.0]),
        eos=st.sampled_from([-1.0, 0.0, 2.0]),
    )
    @settings(max_examples=40, deadline=None, derandomize=True)
    def test_beam_search_equals_a_plain_one(
        self, seed: int, beam: int, limit: int, length_penalty: float, eos: float
    ) -> None:
        model = make(seed, 9, eos=eos)
        src = sources(3, 4, seed)
        found = beam_search(
            model, src, CPU, beam=beam, length_penalty=length_penalty, max_length=limit
        )
        model.eval()
        assert found == [
            plain_beams(model, src[row : row + 1], beam, length_penalty, limit) for row in range(3)
        ]

    @given(seed=st.integers(0, 10_000), limit=st.integers(1, 20))
    @settings(max_examples=40, deadline=None, derandomize=True)
    def test_greedy_is_a_beam_of_one(self, seed: int, limit: int) -> None:
        model = make(seed, 9, eos=1.0)
        src = sources(4, 5, seed)
        found = greedy(model, src, CPU, max_length=limit)
        assert found == beam_search(model, src, CPU, beam=1, max_length=limit)
        model.eval()
        for row, ids in enumerate(found):
            assert ids == plain_beams(model, src[row : row + 1], 1, 0.0, limit)


class TestResults:
    @pytest.mark.parametrize("beam", [1, 2, 5])
    def test_no_special_ids(self, beam: int) -> None:
        for seed in range(20):
            model = make(seed, 6)
            with torch.no_grad():  # it would say nothing else
                model.output.bias[PAD] += 20
                model.output.bias[BOS] += 20
            for ids in beam_search(model, sources(4, 5), CPU, beam=beam, max_length=12):
                assert 1 <= len(ids) <= 12
                assert set(ids) <= {UNK, 4, 5}

    def test_lengths_are_bounded_by_the_source(self) -> None:
        model = make(0, eos=-100.0)
        src = sources(3, 3)  # of 1, 2 and 3 tokens
        for found in (greedy(model, src, CPU), beam_search(model, src, CPU)):
            assert [len(ids) for ids in found] == [11, 13, 14]
        longest = torch.full((1, 40), 5)
        assert [len(ids) for ids in greedy(model, longest, CPU)] == [39]
        assert [len(ids) for ids in greedy(model, src, CPU, max_length=1000)] == [39] * 3

    @pytest.mark.parametrize("beam", [1, 3])
    def test_a_translation_does_not_depend_on_its_batch(self, beam: int) -> None:
        for seed in range(10):
            model = make(seed, 9, eos=1.0)
            src = sources(5, 5, seed)
            together = beam_search(model, src, CPU, beam=beam)
            alone = [
                beam_search(model, row[row != PAD].unsqueeze(0), CPU, beam=beam)[0] for row in src
            ]
            assert together == alone

    def test_a_row_of_padding_does_no_harm(self) -> None:
        model = make(3, 9)
        src = sources(3, 5)
        expected = beam_search(model, src, CPU)
        padded = torch.cat((src[:1], torch.zeros(1, 5, dtype=torch.int64), src[1:]))
        found = beam_search(model, padded, CPU)
        assert [found[0], *found[2:]] == expected

    def test_bf16(self) -> None:
        model = make(3, 9, eos=1.0)
        with torch.autocast("cpu", torch.bfloat16):
            found = beam_search(model, sources(3, 5), CPU)
            assert len(greedy(model, sources(3, 5), CPU)) == 3
        assert all(set(ids) <= {UNK, *range(4, 9)} for ids in found)

    def test_a_larger_length_penalty_gives_longer_translations(self) -> None:
        lengths = []
        for length_penalty in (0.0, 1.0, 5.0):
            found = [
                ids
                for seed in range(20)
                for ids in beam_search(
                    make(seed, 9), sources(3, 4), CPU, beam=8, length_penalty=length_penalty
                )
            ]
            lengths.append(sum(map(len, found)))
        assert lengths == sorted(lengths)
        assert lengths[0] < lengths[2]

    def test_modules_keep_their_training_mode(self) -> None:
        model = make(0)
        model.encoder[0].eval()
        before = [module.training for module in model.modules()]
        greedy(model, sources(2, 3), CPU)
        assert [module.training for module in model.modules()] == before
        model.step = None  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError):
            greedy(model, sources(2, 3), CPU)
        assert [module.training for module in model.modules()] == before
        assert all(parameter.grad is None for parameter in model.parameters())


class TestStopping:
    def steps(self, monkeypatch: Any, model: Translator, **options: Any) -> int:
        calls = []
        step = model.step

        def counted(last: Tensor, state: Any) -> Any:
            calls.append(last.shape)
            return step(last, state)

        monkeypatch.setattr(model, "step", counted)
        beam_search(model, sources(4, 5), CPU, max_length=39, **options)
        return len(calls)

    @pytest.mark.parametrize("beam", [1, 3])
    def test_the_search_stops_soon_after_the_last_sentence_is_done(
        self, monkeypatch: Any, beam: int
    ) -> None:
        """They end at step 2. The search asks at step 4 and reads the answer at step 6."""
        model = make(0, 9, eos=100.0)
        assert self.steps(monkeypatch, model, beam=beam, length_penalty=0.0) == 6

    def test_the_search_does_not_stop_earlier(self, monkeypatch: Any) -> None:
        assert self.steps(monkeypatch, make(0, 9, eos=-100.0)) == 40

    @pytest.mark.parametrize("every", [1, 2, 7, 1000])
    def test_more_steps_change_nothing(self, monkeypatch: Any, every: int) -> None:
        model = make(5, 9, eos=1.0)
        expected = beam_search(model, sources(6, 5), CPU), greedy(model, sources(6, 5), CPU)
        monkeypatch.setattr(decode, "_ASK_EVERY", every)
        found = beam_search(model, sources(6, 5), CPU), greedy(model, sources(6, 5), CPU)
        assert found == expected


class TestTranslateIds:
    @pytest.mark.parametrize("beam", [1, 3])
    @pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
    def test_order_is_restored(self, beam: int, batch_tokens: int) -> None:
        model = make(1, 9, eos=1.0)
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(0, 7, (15,), generator=draw).tolist()
        given_ids = [torch.randint(4, 9, (n,), generator=draw).tolist() for n in lengths]
        told: list[tuple[int, int]] = []
        found = translate_ids(
            model,
            given_ids,
            CPU,
            beam=beam,
            batch_tokens=batch_tokens,
            progress=lambda done, total: told.append((done, total)),
        )
        expected = [
            beam_search(model, torch.tensor([ids]), CPU, beam=beam)[0] if ids else []
            for ids in given_ids
        ]
        assert found == expected
        assert told[-1] == (15, 15)
        assert told == sorted(told)
        if batch_tokens == 1:
            assert len(told) == sum(n > 0 for n in lengths)

    def test_nothing_to_translate(self) -> None:
        assert translate_ids(make(0), [], CPU) == []
        assert translate_ids(make(0), [[], []], CPU) == [[], []]

    def test_on_every_device(self, device: Device) -> None:
        given_ids = [[4, 5, 6, EOS], [7, EOS], [8, 8, EOS], [5, EOS]]
        expected = translate_ids(make(2, 9, eos=1.0), given_ids, CPU)
        model = make(2, 9, eos=1.0).to(device.torch_device)
        found = translate_ids(model, given_ids, device, batch_tokens=24)
        assert found == expected
        assert device.pinned.lent == 0

    @pytest.mark.parametrize("beam", [1, 3])
    def test_a_step_is_captured_and_gives_the_same_translations(
        self, capturing: Device, monkeypatch: Any, beam: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One graph per batch, closed after it. If a capture fails, the search runs without."""
        given_ids = [[4, 5, 6, EOS], [7, EOS], [8, 8, EOS], [5, EOS]]
        options: dict[str, Any] = {"beam": beam, "batch_tokens": 8 * beam}
        expected = translate_ids(make(2, 9, eos=1.0), given_ids, CPU, **options)
        model = make(2, 9, eos=1.0).to(capturing.torch_device)
        steps, capture, graphs = [], capturing.capture, []
        step = model.step

        def counted(last: Tensor, state: Any) -> Any:
            steps.append(last.shape)
            return step(last, state)

        def kept(work: Any, pool: object) -> Any:
            graph, result = capture(work, pool)
            graphs.append(graph)
            return graph, result

        def refused(work: Any, pool: object) -> Any:
            raise CaptureError("not today")

        monkeypatch.setattr(model, "step", counted)
        monkeypatch.setattr(capturing, "capture", kept)
        assert translate_ids(model, given_ids, capturing, **options) == expected
        assert len(graphs) == 2
        assert len(steps) == 2 * (2 + 1)  # two eager steps and a capture per batch
        monkeypatch.setattr(capturing, "capture", refused)
        assert translate_ids(model, given_ids, capturing, **options) == expected
        assert "decoding runs without a graph: not today" in caplog.text

    def test_all_host_waits_are_in_the_ledger_and_few(self) -> None:
        with FakeDevice() as device:
            model = make(2, 9, eos=-100.0).to(device.torch_device)
            hidden = len(device.hidden_waits)
            translate_ids(model, [[4, 5, EOS], [6, EOS]], device, beam=2)
            assert device.hidden_waits[hidden:] == []
            waits = device.ledger.statistics()
            assert waits["translations"].count == 1
            assert waits["search"].count == 3  # of 15 steps: heard at 6, 10 and 14
            assert waits["capture"].count == 1
            assert waits.count == 5

    @pytest.mark.parametrize(
        ("given_ids", "message"),
        [
            ([[4], [5] * 41], "source 1 has 41 ids: expected at most 40"),
            ([[4, 9]], "source 0 has ids from 4 to 9: expected 1 to 8"),
            ([[PAD, 4]], "source 0 has ids from 0 to 4"),
        ],
    )
    def test_ids_that_the_model_does_not_know_are_refused(
        self, given_ids: list[list[int]], message: str
    ) -> None:
        with pytest.raises(TranslationError, match=message):
            translate_ids(make(0), given_ids, CPU)
