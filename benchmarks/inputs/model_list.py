"""Models of transformers, timm and torchvision with random weights, and a batch for each.

A model has two sizes: `tiny` ones train in a moment on a CPU, the others are those that people
train, with fewer layers where the usual number takes long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: Draws a batch: the model's positional and keyword arguments.
Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Listed:
    """A model of a library. `make(tiny)` returns it, with a function that draws a batch."""

    library: str
    name: str
    make: Callable[[bool], tuple[nn.Module, Callable[[], Batch]]]


def loss_of(outputs: Any) -> torch.Tensor:
    """A loss from whatever a model returns: its own, the sum of several, or a mean square."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float().square().mean()
    if isinstance(outputs, dict):
        if isinstance(outputs.get("loss"), torch.Tensor):
            return outputs["loss"].mean()
        outputs = list(outputs.values())
    losses = [loss_of(one) for one in outputs if isinstance(one, torch.Tensor | dict | list)]
    return torch.stack([one for one in losses if one.requires_grad]).sum()


# --- transformers -----------------------------------------------------------------------------

#: How large a model is, in the words that configurations have for it.
_TINY = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
     "num_decoder_layers"), 2,
) | dict.fromkeys(
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
     "decoder_attention_heads"), 4,
) | dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64) | {
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 211,
    "embedding_size": 64, "d_ff": 96, "d_kv": 16, "rotary_dim": 8,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim",
                     "hidden_dim", "moe_intermediate_size"), 96),
}  # fmt: skip
_USUAL = {
    name: {2: 6, 4: 8, 64: 512, 16: 64, 96: 2048, 211: 16_000, 8: 32}[value]
    for name, value in _TINY.items()
} | {"num_key_value_heads": 4, "num_kv_heads": 4, "moe_intermediate_size": 512}


def _configured(kind: str, tiny: bool, changes: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]
    has = vars(config())
    wanted = (_TINY if tiny else _USUAL) | changes
    names = set(has) | set(config.attribute_map) | set(changes)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if has.get(token) is not None:
            wanted = wanted | {token: 1}
    given = {name: value for name, value in wanted.items() if name in names}
    for name in list(given):  # a size for each stage: the library's own
        value = has.get(config.attribute_map.get(name, name))
        if isinstance(value, list | tuple) and not isinstance(changes.get(name), list):
            del given[name]
    return config(**given)


def _words(tiny: bool) -> torch.Tensor:
    rows, length = (2, 16) if tiny else (8, 128)
    return torch.randint(4, 200, (rows, length))


def _text(kind: str, head: str, **changes: Any) -> Listed:
    """A language model: `head` is the end of its Auto class' name."""

    def make(tiny: bool) -> tuple[nn.Module, Callable[[], Batch]]:
        import transformers

        config = _configured(kind, tiny, changes)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config)

        def batch() -> Batch:
            words = _words(tiny)
            mask = torch.ones_like(words)
            mask[0, -3:] = 0
            given = {"input_ids": words, "attention_mask": mask}
            given["labels"] = words[:, 0] % 2 if head == "SequenceClassification" else words
            return (), given

        return model, batch

    return Listed("transformers", kind, make)


def _images(kind: str, head: str = "ImageClassification", **changes: Any) -> Listed:
    def make(tiny: bool) -> tuple[nn.Module, Callable[[], Batch]]:
        import transformers

        side, rows = (64, 2) if tiny else (224, 8)
        given = {"image_size": [side, side] if kind == "yolos" else side, "num_labels": 10}
        config = _configured(kind, tiny, given | changes)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config)

        def batch() -> Batch:
            labels: Any = torch.randint(0, 10, (rows,))
            if head == "SemanticSegmentation":
                labels = torch.randint(0, 10, (rows, side, side))
            if head == "ObjectDetection":
                labels = [
                    {"class_labels": torch.randint(0, 10, (n % 3 + 1,)),
                     "boxes": torch.rand(n % 3 + 1, 4) / 2 + 0.25}
                    for n in range(rows)
                ]  # fmt: skip
            return (), {"pixel_values": torch.rand(rows, 3, side, side), "labels": labels}

        return model, batch

    return Listed("transformers", kind, make)


def _speech(kind: str, **changes: Any) -> Listed:
    def make(tiny: bool) -> tuple[nn.Module, Callable[[], Batch]]:
        from transformers import AutoModelForCTC

        narrow = {"conv_dim": (32,) * 7, "num_conv_pos_embedding_groups": 4} if tiny else {}
        config = _configured(kind, tiny, {"vocab_size": 40, "pad_token_id": 0} | narrow | changes)
        rows, length = (2, 6000) if tiny else (4, 32_000)
        return AutoModelForCTC.from_config(config), lambda: (
            (),
            {"input_values": torch.randn(rows, length), "labels": torch.randint(1, 40, (rows, 5))},
        )

    return Listed("transformers", kind, make)


def _whisper() -> Listed:
    def make(tiny: bool) -> tuple[nn.Module, Callable[[], Batch]]:
        from transformers import AutoModelForSpeechSeq2Seq

        config = _configured("whisper", tiny, {"max_source_positions": 50, "num_mel_bins": 16})
        rows = 2 if tiny else 8
        return AutoModelForSpeechSeq2Seq.from_config(config), lambda: (
            (),
            {
                "input_features": torch.randn(rows, 16, 100),
                "labels": torch.randint(4, 200, (rows, 12)),
            },
        )

    return Listed("transformers", "whisper", make)


def _clip() -> Listed:
    def make(tiny: bool) -> tuple[nn.Module, Callable[[], Batch]]:
        from transformers import CLIPConfig, CLIPModel

        text = _configured("clip_text_model", tiny, {}).to_dict()
        side = 64 if tiny else 224
        vision = _configured("clip_vision_model", tiny, {"image_size": side}).to_dict()
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision))

        def batch() -> Batch:
            words = _words(tiny)
            pixels = torch.rand(len(words), 3, side, side)
            return (), {"input_ids": words, "pixel_values": pixels, "return_loss": True}

        return model, batch

    return Listed("transformers", "clip", make)


_CAUSAL = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "opt", "bloom"),
    *("gpt_neox", "gptj", "falcon", "starcoder2", "olmo2", "stablelm", "cohere", "codegen"),
    *("mixtral", "mamba"),
)
_MASKED = (
    *("bert", "roberta", "distilbert", "electra", "albert", "mpnet", "modernbert", "convbert"),
    *("deberta-v2", "fnet"),
)
_SEQ2SEQ = ("t5", "bart", "marian", "pegasus", "m2m_100")
_TRANSFORMERS = [
    *[_text(kind, "CausalLM") for kind in _CAUSAL],
    *[_text(kind, "MaskedLM") for kind in _MASKED],
    *[_text(kind, "Seq2SeqLM", decoder_start_token_id=1) for kind in _SEQ2SEQ],
    *[_images(kind) for kind in ("vit", "beit", "dinov2", "resnet", "convnext")],
    _images("segformer", "SemanticSegmentation"),
    _images("yolos", "ObjectDetection"),
    _images(
        "conditional_detr",
        "ObjectDetection",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=None,
    ),
    *[_speech(kind) for kind in ("wav2vec2", "hubert", "wavlm")],
    _whisper(),
    _clip(),
]

# --- timm and torchvision -----------------------------------------------------------------------

_TIMM = (
    *("resnet18", "resnet50", "resnext50_32x4d", "seresnet50", "densenet121", "vgg11_bn"),
    *("mobilenetv3_small_100", "mobilenetv2_100", "efficientnet_b0", "efficientnetv2_rw_t"),
    *("regnety_004", "convnext_atto", "convnextv2_atto", "nfnet_f0", "ghostnet_100", "hrnet_w18"),
    *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224"),
    *("swin_tiny_patch4_window7_224", "mixer_s16_224", "gmlp_ti16_224", "poolformer_s12"),
    *("maxvit_rmlp_pico_rw_256", "coat_tiny", "levit_128s", "xcit_nano_12_p16_224"),
    *("edgenext_xx_small", "repvgg_a0"),
)
#: Of these the image has a size of its own.
_SIDES = {"maxvit_rmlp_pico_rw_256": 256, "hrnet_w18": 64, "densenet121": 64, "vgg11_bn": 64}
_ANY_SIDE = ("mobile", "efficient", "regnet", "convnext", "nfnet", "ghost", "res", "poolformer",
             "edgenext", "repvgg", "seres")  # fmt: skip


def _timm(name: str) -> Listed:
    def make(tiny: bool) -> tuple[nn.Module, Callable[[], Batch]]:
        import timm

        model = timm.create_model(name, num_classes=10)
        side = _SIDES.get(name, 224)
        if tiny and name.startswith(_ANY_SIDE):
            side = 64
        rows = 2 if tiny else 16
        return model, lambda: ((torch.rand(rows, 3, side, side),), {})

    return Listed("timm", name, make)


def _detection(name: str) -> Listed:
    def make(tiny: bool) -> tuple[nn.Module, Callable[[], Batch]]:
        from torchvision.models import get_model

        side = 96 if tiny else 320
        size = {} if name.startswith("ssd") else {"min_size": side, "max_size": side}
        model = get_model(name, weights=None, weights_backbone=None, num_classes=5, **size)

        def batch() -> Batch:
            images = [torch.rand(3, side, side) for _ in range(2)]
            corners = [torch.rand(n + 1, 2) * side / 2 for n in range(2)]
            targets = [
                {"boxes": torch.cat([one, one + side / 3], dim=1),
                 "labels": torch.randint(1, 5, (len(one),)),
                 "masks": torch.randint(0, 2, (len(one), side, side), dtype=torch.uint8)}
                for one in corners
            ]  # fmt: skip
            return (images, targets), {}

        return model, batch

    return Listed("torchvision", name, make)


def _vision(name: str, *shape: int) -> Listed:
    """A model of torchvision's that takes images or clips; `shape` is a tiny one's."""

    def make(tiny: bool) -> tuple[nn.Module, Callable[[], Batch]]:
        from torchvision.models import get_model

        options: dict[str, Any] = {"weights": None, "num_classes": 5}
        if name.startswith(("deeplab", "lraspp", "fcn")):
            options["weights_backbone"] = None
        model = get_model(name, **options)
        rows = 2 if tiny or len(shape) == 4 else 8
        return model, lambda: ((torch.rand(rows, *shape),), {})

    return Listed("torchvision", name, make)


LISTED = [
    *_TRANSFORMERS,
    *map(_timm, _TIMM),
    *map(
        _detection,
        ("fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn",
         "ssdlite320_mobilenet_v3_large", "maskrcnn_resnet50_fpn"),
    ),
    _vision("deeplabv3_mobilenet_v3_large", 3, 64, 64),
    _vision("lraspp_mobilenet_v3_large", 3, 64, 64),
    _vision("fcn_resnet50", 3, 64, 64),
    _vision("r3d_18", 3, 8, 48, 48),
    _vision("mc3_18", 3, 8, 48, 48),
    _vision("r2plus1d_18", 3, 8, 48, 48),
    _vision("swin3d_t", 3, 8, 64, 64),
    _vision("googlenet", 3, 96, 96),
    _vision("inception_v3", 3, 160, 160),
    _vision("vit_b_16", 3, 224, 224),
]  # fmt: skip
