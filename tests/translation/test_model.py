"""The translation model: against plain arithmetic, masks, one token at a time, and graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.device import Device
from headrace.engine import Engine
from headrace.errors import TranslationError
from headrace.fake import FakeDevice
from headrace.translation import EOS, MODEL_PRESETS, ModelSettings, Translator, translation_loss
from headrace.translation.corpus.vocabulary import BOS, PAD
from headrace.translation.layers import _ReluDropout
from headrace.translation.model import sinusoids

SMALL = ModelSettings(16, 4, 2, 2, 24, 0.0, max_length=20)
TINY = SMALL.replace(
    encoder_layers=1, decoder_layers=1, dropout=0.1
)  # the fake device takes its time
NORMS = pytest.mark.parametrize("norm", ["pre", "post"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other, long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(settings: ModelSettings = SMALL, src: int = 11, trg: int = 13, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Translator(settings, src, trg, **options)
    for parameter in model.parameters():  # biases and norms that are not 0 and 1
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def ids(rows: int, length: int, vocabulary: int, seed: int = 1) -> Tensor:
    """Rows of different lengths, from 1 to `length`, padded."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.randint(EOS + 1, vocabulary, (rows, length), generator=draw)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=draw)
    lengths[0] = length
    return found.masked_fill(torch.arange(length) >= lengths, PAD)


def batches(count: int = 3, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    found = []
    for seed in range(count):
        trg = ids(rows, 6, 13, seed=seed + 50)
        trg[:, 0] = BOS
        found.append((ids(rows, 5, 11, seed=seed), trg))
    return found


# --- the reference: one sentence at a time, heads by nn.MultiheadAttention -----------------------


def attend(layer: Any, q: Tensor, memory: Tensor, causal: bool = False) -> Tensor:
    """`layer`'s attention, done by torch's module with the same weights. q (length, width)."""
    width = q.size(1)
    plain = nn.MultiheadAttention(width, layer.heads, batch_first=True)
    fused = [layer.qkv] if hasattr(layer, "qkv") else [layer.q, layer.kv]
    with torch.no_grad():
        plain.in_proj_weight.copy_(torch.cat([part.weight for part in fused]))
        plain.in_proj_bias.copy_(torch.cat([part.bias for part in fused]))
        plain.out_proj.weight.copy_(layer.out.weight)
        plain.out_proj.bias.copy_(layer.out.bias)
    future = torch.ones(len(q), len(memory), dtype=torch.bool).triu(1) if causal else None
    found: Tensor = plain(q, memory, memory, attn_mask=future, need_weights=True)[0]
    return found


def around(settings: ModelSettings, part: Any, x: Tensor, work: Any) -> Tensor:
    if settings.norm == "pre":
        return x + work(part.norm(x))
    found: Tensor = part.norm(x + work(x))
    return found


def feed(layer: Any, x: Tensor) -> Tensor:
    found: Tensor = layer.inner[3](torch.relu(layer.inner[0](x)))
    return found


def place(at: int, width: int) -> Tensor:
    found = torch.zeros(width)
    for i in range(0, width, 2):
        rate = 10_000 ** (-i / width)
        found[i], found[i + 1] = math.sin(at * rate), math.cos(at * rate)
    return found


def embed(table: Any, row: Tensor) -> Tensor:
    width = table.weight.size(1)
    return torch.stack(
        [table.weight[i] * math.sqrt(width) + place(at, width) for at, i in enumerate(row)]
    )


def reference(model: Translator, src: Tensor, trg: Tensor) -> Tensor:
    """One sentence, no padding: src (source length,), trg (length,) -> (length, vocabulary)."""
    settings: Any = model.settings
    pre = settings.norm == "pre"
    x = embed(model.src_embedding, src)
    layer: Any
    for layer in model.encoder:
        x = around(
            settings, layer.around_attention, x, lambda h, a=layer.attention: attend(a, h, h)
        )
        x = around(settings, layer.around_inner, x, lambda h, la=layer: feed(la, h))
    memory = model.encoder_norm(x) if pre else x
    y = embed(model.trg_embedding, trg)
    for layer in model.decoder:
        y = around(
            settings, layer.around_attention, y, lambda h, a=layer.attention: attend(a, h, h, True)
        )
        y = around(settings, layer.around_cross, y, lambda h, a=layer.cross: attend(a, h, memory))
        y = around(settings, layer.around_inner, y, lambda h, la=layer: feed(la, h))
    y = model.decoder_norm(y) if pre else y
    bias = 0 if model.output.bias is None else model.output.bias
    return (y @ model.output.weight.T + bias)[:, : model.trg_vocabulary]


class TestForward:
    @NORMS
    @pytest.mark.parametrize("tied", [True, False])
    @torch.no_grad()
    def test_against_plain_arithmetic(self, norm: str, tied: bool) -> None:
        model = make(SMALL.replace(norm=norm, tied=tied))
        src, trg = ids(5, 7, 11), ids(5, 6, 13, seed=2)
        logits = model(src, trg)
        assert logits.shape == (5, 6, 13)
        for row in range(5):
            real_src, real_trg = src[row][src[row] != PAD], trg[row][trg[row] != PAD]
            expected = reference(model, real_src, real_trg)
            torch.testing.assert_close(logits[row, : len(real_trg)], expected, atol=1e-5, rtol=1e-5)

    @NORMS
    def test_padding_changes_nothing(self, norm: str) -> None:
        model = make(SMALL.replace(norm=norm))
        src, trg = ids(4, 7, 11), ids(4, 6, 13, seed=2)
        wider_src = torch.cat((src, torch.zeros(4, 5, dtype=torch.int64)), dim=1)
        wider_trg = torch.cat((trg, torch.zeros(4, 3, dtype=torch.int64)), dim=1)
        wide = model(wider_src, wider_trg)[:, : trg.size(1)]
        torch.testing.assert_close(wide, model(src, trg), atol=1e-5, rtol=1e-5)

    def test_padding_has_no_gradient(self) -> None:
        model = make()
        src, trg = ids(4, 7, 11), ids(4, 6, 13, seed=2)
        looked_up: list[Tensor] = []

        def keep(module: nn.Module, args: Any, states: Tensor) -> None:
            states.retain_grad()
            looked_up.append(states)

        model.src_embedding.register_forward_hook(keep)
        model(src, trg)[trg.ne(PAD)].square().sum().backward()
        gradient = looked_up[0].grad
        assert gradient is not None
        assert (gradient[src.eq(PAD)] == 0).all()
        assert (gradient[src.ne(PAD)] != 0).all()

    @NORMS
    def test_the_future_changes_nothing(self, norm: str) -> None:
        model = make(SMALL.replace(norm=norm))
        src, trg = ids(3, 7, 11), torch.randint(4, 13, (3, 6))
        expected = model(src, trg)
        for at in range(1, 6):
            changed = trg.clone()
            changed[:, at:] = 5 + (trg[:, at:] - 4) % 8
            found = model(src, changed)
            torch.testing.assert_close(found[:, :at], expected[:, :at], atol=1e-5, rtol=1e-5)
            assert not torch.allclose(found[:, at], expected[:, at])

    @NORMS
    def test_a_row_of_padding_is_finite(self, norm: str) -> None:
        model = make(SMALL.replace(norm=norm, dropout=0.1)).train()
        src, trg = ids(3, 7, 11), ids(3, 6, 13)
        src[1], trg[1] = PAD, PAD
        # Said of the mask too: of nothing at all some kernels make 0, others NaN.
        assert model.encode(src).mask.any(dim=3).all()
        logits = model(src, trg)
        assert logits.isfinite().all()
        logits.sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    def test_bf16_is_close_to_float32(self) -> None:
        model = make()
        src, trg = ids(3, 7, 11), ids(3, 6, 13)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(src, trg)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), model(src, trg), atol=0.5, rtol=0.1)

    def test_dropout_is_for_training_alone(self) -> None:
        model = make(SMALL.replace(dropout=0.5))
        src, trg = ids(3, 7, 11), ids(3, 6, 13)
        assert torch.equal(model(src, trg), model(src, trg))
        model.train()
        assert not torch.equal(model(src, trg), model(src, trg))

    def test_sinusoids(self) -> None:
        expected = torch.stack([place(at, 6) for at in range(9)])
        torch.testing.assert_close(sinusoids(9, 6), expected, atol=1e-6, rtol=1e-5)


class TestIncremental:
    @NORMS
    @pytest.mark.parametrize("beams", [1, 3])
    @torch.no_grad()
    def test_step_by_step_equals_all_positions_at_once(self, norm: str, beams: int) -> None:
        model = make(SMALL.replace(norm=norm))
        src = ids(4, 7, 11)
        trg = torch.randint(4, 13, (4, beams, 6))
        state = model.start(model.encode(src), 9, beams)
        found = []
        for at in range(6):
            logits, state = model.step(trg[:, :, at], state)
            assert logits.shape == (4, beams, 13)
            found.append(logits)
        for beam in range(beams):
            expected = model(src, trg[:, beam])
            stepwise = torch.stack([logits[:, beam] for logits in found], dim=1)
            torch.testing.assert_close(stepwise, expected, atol=1e-5, rtol=1e-5)

    @torch.no_grad()
    def test_reordered_hypotheses_continue_their_parents(self) -> None:
        model = make()
        src, trg = ids(2, 5, 11), torch.randint(4, 13, (2, 3, 4))
        state = model.start(model.encode(src), 4, 3)
        for at in range(3):
            _, state = model.step(trg[:, :, at], state)
        parents = torch.tensor([[2, 0, 2], [1, 1, 0]])
        state = model.reorder(state, (parents + torch.tensor([[0], [3]])).flatten())
        logits, _ = model.step(trg[:, :, 3], state)
        for sentence in range(2):
            for beam in range(3):
                parent = trg[sentence, parents[sentence, beam], :3]
                whole = torch.cat((parent, trg[sentence, beam, 3:]))
                expected = model(src[sentence : sentence + 1], whole.unsqueeze(0))[0, -1]
                torch.testing.assert_close(logits[sentence, beam], expected, atol=1e-5, rtol=1e-5)

    @torch.no_grad()
    def test_shapes_and_dtype_do_not_change(self) -> None:
        model = make()
        with torch.autocast("cpu", torch.bfloat16):
            state = model.start(model.encode(ids(2, 5, 11)), 4)
            before = [state.cache.shape, state.written.shape]
            assert state.cache.dtype == torch.bfloat16
            for _ in range(4):
                logits, state = model.step(torch.full((2, 1), 5), state)
                assert logits.isfinite().all()
        assert [state.cache.shape, state.written.shape] == before


class TestGraphs:
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_a_step_is_captured_with_the_same_losses(
        self, capturing: Device, precision: str
    ) -> None:
        found = []
        for plan in ("pipeline", "graph"):
            torch.manual_seed(0)
            model = Translator(TINY, 11, 13).to(capturing.torch_device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            engine = Engine(
                model,
                optimizer,
                translation_loss(),
                plan=plan,
                device=capturing,
                precision=precision,
                clip_norm=1.0,
                accumulate=2,
                deterministic=True,
            )
            torch.manual_seed(5)
            result = engine.epoch(batches(8))
            found.append((result.losses, result.metrics))
            report = engine.graphs
            engine.close()
        assert report is not None
        assert report.why is None
        assert report.replays == 8 - report.one_by_one >= 4
        assert found[0] == found[1]

    def test_no_hidden_waits(self) -> None:
        with FakeDevice() as device:
            model = Translator(TINY, 11, 13).to(device.torch_device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            engine = Engine(model, optimizer, translation_loss(), plan="pipeline", device=device)
            before = len(device.hidden_waits)
            engine.epoch(batches())
            assert device.hidden_waits[before:] == []

    def test_compiles_whole_with_any_length(self) -> None:
        # Compiled code draws other dropout masks.
        model, loss = make(TINY.replace(dropout=0.0)).train(), translation_loss()
        compiled = torch.compile(loss, backend="eager", fullgraph=True, dynamic=True)
        for length in (4, 7):
            src, trg = ids(3, length, 11), ids(3, length + 2, 13)
            torch.manual_seed(3)
            found = compiled(model, (src, trg))
            torch.manual_seed(3)
            expected = loss(model, (src, trg))
            for name in ("loss", "weight", "nll"):
                torch.testing.assert_close(found[name], expected[name])

    def test_compiled_relu_and_dropout_are_those_of_pytorch(self) -> None:
        """Half of the positive values are dropped, the others are doubled; NaN stays."""
        torch.manual_seed(0)
        part = _ReluDropout(0.5)
        x = torch.randn(40, 50).requires_grad_()
        y = torch.compile(part, backend="eager", fullgraph=True)(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        kept = y > 0
        assert torch.equal(y, torch.where(kept, 2 * x, 0))
        assert torch.equal(gradient, 2.0 * kept)
        assert 0.45 < kept.sum() / (x > 0).sum() < 0.55
        assert torch.compile(part, backend="eager")(torch.full((99,), math.nan)).isnan().any()
        part.eval()
        assert torch.equal(torch.compile(part, backend="eager")(x), x.relu())


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"width": 15}, "width = 15: expected an even number, a multiple of heads = 4"),
            ({"width": 18}, "width = 18: expected an even number, a multiple"),
        ],
    )
    def test_invalid_settings_are_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(TranslationError, match=message):
            SMALL.replace(**changes)

    def test_presets(self) -> None:
        assert list(MODEL_PRESETS) == ["tiny", "small", "base", "big"]
        with pytest.raises(TranslationError, match="no model 'huge'; known: tiny, small"):
            ModelSettings.preset("huge")

    def test_which_weights_are_shared(self) -> None:
        tied = make(SMALL, 13, 13)
        assert tied.output.weight is tied.trg_embedding.weight
        assert tied.src_embedding.weight is not tied.trg_embedding.weight
        joint = make(SMALL, 13, 13, joint=True)
        assert joint.src_embedding.weight is joint.trg_embedding.weight
        assert joint.output.weight is joint.trg_embedding.weight
        loose = make(SMALL.replace(tied=False), 13, 13, joint=True)
        assert loose.src_embedding.weight is not loose.trg_embedding.weight
        assert loose.output.weight is not loose.trg_embedding.weight

    @pytest.mark.parametrize("tied", [True, False])
    def test_vocabulary_matrices_have_a_multiple_of_8_rows(self, tied: bool) -> None:
        """The extra rows of 13 ids have no logits, so they get no gradient."""
        model = make(SMALL.replace(tied=tied))
        assert model.src_embedding.weight.shape == (16, SMALL.width)
        logits = model(ids(3, 7, 11), ids(3, 6, 13))
        assert logits.shape == (3, 6, 13)
        logits.square().sum().backward()
        for weight in (model.output.weight, model.trg_embedding.weight):
            assert weight.grad is not None
            assert weight.grad[:13].any()
            assert not weight.grad[13:].any()

    def test_too_long(self) -> None:
        model = make()
        with pytest.raises(TranslationError, match="21 tokens long: expected at most 20"):
            model(torch.full((1, 21), 5), torch.full((1, 3), 5))
        with pytest.raises(TranslationError, match="length = 21: expected 1 to 20"):
            model.start(model.encode(torch.full((1, 3), 5)), 21)

    def test_initial_weights(self) -> None:
        torch.manual_seed(0)
        model = Translator(ModelSettings.preset("tiny"), 500, 600)
        assert (model.trg_embedding.weight[PAD] == 0).all()
        assert model.trg_embedding.weight[1:].std().item() == pytest.approx(128**-0.5, rel=0.05)
        layer: Any = model.encoder[0]
        bound = math.sqrt(6 / (128 + 128))  # of each third by itself
        for block in layer.attention.qkv.weight.chunk(3):
            assert bound * 0.95 < block.abs().max() <= bound
        logits = model(ids(4, 9, 500), ids(4, 9, 600))
        assert 0.3 < logits.std() < 3

    def test_weights_load_into_a_model_of_another_max_length(self) -> None:
        model = make()
        longer = Translator(SMALL.replace(max_length=40), 11, 13)
        longer.load_state_dict(model.state_dict())
        src, trg = ids(3, 7, 11), ids(3, 6, 13)
        assert torch.equal(longer.eval()(src, trg), model(src, trg))
