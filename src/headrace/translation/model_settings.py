"""The size of the translation model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import TranslationError


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The size of the model. Vocabulary sizes are not settings: they come with the data."""

    width: int = 512  # between layers (d_model); even
    heads: int = 8  # divides width
    encoder_layers: int = 6
    decoder_layers: int = 6
    inner: int = 2048  # width of the feed-forward layers
    dropout: float = 0.1
    norm: Literal["pre", "post"] = "pre"  # before each sublayer (more stable) or after it
    tied: bool = True  # output and target embedding share weights; if joint, source too
    max_length: int = 512  # maximum tokens per sentence, with bos and eos
    attention_dropout: float | None = None  # of attention weights; None: as dropout

    def __post_init__(self) -> None:
        if self.width % 2 or self.width % self.heads:
            raise TranslationError(
                f"width = {self.width}: expected an even number, a multiple of heads = {self.heads}"
            )

    @classmethod
    def preset(cls, name: str) -> ModelSettings:
        """The settings of this name in `MODEL_PRESETS`."""
        if name not in MODEL_PRESETS:
            raise TranslationError(f"no model {name!r}; known: {', '.join(MODEL_PRESETS)}")
        return MODEL_PRESETS[name]

    def replace(self, **changes: Any) -> ModelSettings:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


#: `base` and `big` are the sizes of the original Transformer; `tiny` and `small` are for small
#: corpora.
MODEL_PRESETS: dict[str, ModelSettings] = {
    "tiny": ModelSettings(128, 4, 2, 2, 512, 0.1),
    "small": ModelSettings(256, 4, 4, 4, 1024, 0.1),
    "base": ModelSettings(512, 8, 6, 6, 2048, 0.1),
    "big": ModelSettings(1024, 16, 6, 6, 4096, 0.3),
}
