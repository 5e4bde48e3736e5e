"""Exports a trained model as a CTranslate2 model, and checks that both translate alike.

CTranslate2 runs Transformers on CPUs and GPUs without PyTorch, quantized if asked for. Its folder
has the weights, the vocabularies as lists of pieces, and the SentencePiece models beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headrace.atomic_files import temporary_folder
from headrace.errors import TranslationError
from headrace.extras import require
from headrace.translation.corpus.vocabulary import BOS, EOS, PAD, UNK, Vocabulary
from headrace.translation.decode import translate_ids
from headrace.translation.model import Translator

if TYPE_CHECKING:
    from headrace.translation.saved_model import TrainedModel

SRC_PIECES, TRG_PIECES = "src.model", "trg.model"
#: Of the compared translations, this share may differ: where two pieces are almost equally
#: probable, rounding decides. A wrong conversion changes nearly all.
MAX_DIFFERENT = 0.1


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """How many sentences both models translated to the same pieces."""

    sentences: int
    equal: int
    example: tuple[str, str, str] | None  # (source, ours, CTranslate2's) of the first difference

    @property
    def is_close(self) -> bool:
        return self.sentences - self.equal <= MAX_DIFFERENT * self.sentences


def export_ctranslate2(
    trained: TrainedModel, out: Path, *, check: Sequence[str] = ()
) -> ExportCheck | None:
    """Write a CTranslate2 model to the new folder `out`.

    With sentences to `check`, both models translate them first. If too many translations differ,
    `export_ctranslate2` raises an error and writes nothing.
    """
    require("export_ctranslate2()", "ctranslate2")
    if out.exists():
        raise TranslationError(f"{out}: already exists; expected the path of a new folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(out) as folder:
            _write(trained, folder)
            comparison = compare(trained, folder, check) if check else None
            if comparison is not None and not comparison.is_close:
                raise TranslationError(_explain(comparison, out))
            folder.rename(out)
    except OSError as problem:
        raise TranslationError(
            f"{out}: cannot be written ({problem.strerror or problem})"
        ) from problem
    return comparison


def compare(trained: TrainedModel, folder: Path, sentences: Sequence[str]) -> ExportCheck:
    """Translate sentences greedily with a model and its export, in float32 on the CPU."""
    import ctranslate2

    source, target = (_pieces(vocabulary) for vocabulary in trained.vocabularies)
    sources = trained.encode(sentences)
    chosen = [number for number, ids in enumerate(sources) if ids]
    longest = max((len(sources[number]) for number in chosen), default=0)
    limit = min(longest * 3 // 2 + 10, trained.model.settings.max_length - 1)
    ours = translate_ids(
        trained.model,
        [sources[number] for number in chosen],
        trained.device,
        beam=1,
        max_length=limit,
    )
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
    results = translator.translate_batch(
        [[source[i] for i in sources[number] if i != EOS] for number in chosen],
        beam_size=1,
        max_batch_size=64,
        max_decoding_length=limit,
        # Our search never ends at its first step, and never generates these two.
        min_decoding_length=1,
        suppress_sequences=[[target[PAD]], [target[BOS]]],
    )
    theirs = [result.hypotheses[0] for result in results]
    different = [at for at, ids in enumerate(ours) if [target[i] for i in ids] != theirs[at]]
    example = None
    if different:
        at = different[0]
        ids = {piece: i for i, piece in enumerate(target)}
        texts = trained.decode([ours[at], [ids[piece] for piece in theirs[at]]])
        example = sentences[chosen[at]], texts[0], texts[1]
    return ExportCheck(len(chosen), len(chosen) - len(different), example)


def _write(trained: TrainedModel, folder: Path) -> None:
    spec = _spec_of(trained.model)
    source, target = trained.vocabularies
    spec.register_source_vocabulary(_pieces(source))
    spec.register_target_vocabulary(_pieces(target))
    pieces = _pieces(target)
    spec.config.unk_token, spec.config.bos_token = pieces[UNK], pieces[BOS]
    spec.config.eos_token = pieces[EOS]
    spec.config.decoder_start_token = pieces[BOS]
    spec.config.add_source_eos = True
    spec.validate()
    spec.optimize()  # stores equal matrices once
    spec.save(str(folder))
    source.save(folder / SRC_PIECES)
    target.save(folder / TRG_PIECES)


def _pieces(vocabulary: Vocabulary) -> list[str]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.model)
    return [model.id_to_piece(i) for i in range(len(vocabulary))]


def _spec_of(model: Translator) -> Any:
    """The model's weights where CTranslate2 expects them."""
    from ctranslate2.specs import TransformerSpec

    settings = model.settings
    spec = TransformerSpec.from_config(
        (settings.encoder_layers, settings.decoder_layers),
        settings.heads,
        pre_norm=settings.norm == "pre",  # the activation is ReLU, as in our model
    )
    encoder, decoder = spec.encoder, spec.decoder
    # The rows that fill the matrices up to a multiple of 8 belong to no piece.
    encoder.embeddings[0].weight = _weight(model.src_embedding.weight, model.src_vocabulary)
    decoder.embeddings.weight = _weight(model.trg_embedding.weight, model.trg_vocabulary)
    decoder.projection.weight = _weight(model.output.weight, model.trg_vocabulary)
    if model.output.bias is not None:
        decoder.projection.bias = _weight(model.output.bias, model.trg_vocabulary)
    for side in (encoder, decoder):
        side.scale_embeddings = True  # by √width
        side.position_encodings.encodings = model.positions
    if settings.norm == "pre":
        _set_norm(encoder.layer_norm, model.encoder_norm)
        _set_norm(decoder.layer_norm, model.decoder_norm)
    layers: Any
    for layers, parts in ((model.encoder, encoder.layer), (model.decoder, decoder.layer)):
        for layer, part in zip(layers, parts, strict=True):
            attention = layer.attention
            _set_linears(part.self_attention, attention.qkv, attention.out)
            _set_norm(part.self_attention.layer_norm, layer.around_attention.norm)
            if layers is model.decoder:
                cross = layer.cross
                _set_linears(part.attention, cross.q, cross.kv, cross.out)
                _set_norm(part.attention.layer_norm, layer.around_cross.norm)
            widen, *_, narrow = layer.inner
            _set_linear(part.ffn.linear_0, widen)
            _set_linear(part.ffn.linear_1, narrow)
            _set_norm(part.ffn.layer_norm, layer.around_inner.norm)
    return spec


def _weight(matrix: Tensor, rows: int | None = None) -> Tensor:
    return matrix.detach()[:rows].to(torch.float32)


def _set_linear(part: Any, linear: nn.Linear) -> None:
    part.weight, part.bias = _weight(linear.weight), _weight(linear.bias)


def _set_linears(attention: Any, *linears: nn.Linear) -> None:
    for part, linear in zip(attention.linear, linears, strict=True):
        _set_linear(part, linear)


def _set_norm(part: Any, norm: nn.Module) -> None:
    assert isinstance(norm, nn.LayerNorm)
    part.gamma, part.beta = _weight(norm.weight), _weight(norm.bias)


def _explain(comparison: ExportCheck, out: Path) -> str:
    assert comparison.example is not None
    source, ours, theirs = comparison.example
    different = comparison.sentences - comparison.equal
    return (
        f"{out}: not written, because {different} of {comparison.sentences} translations differ; "
        f"expected at most {MAX_DIFFERENT:.0%}. {source!r} is {ours!r} here and {theirs!r} in "
        "CTranslate2. If they are equally good, export with --no-check"
    )
