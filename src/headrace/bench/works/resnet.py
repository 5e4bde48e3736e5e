"""ResNet with bottleneck blocks; [3, 4, 6, 3] blocks are ResNet-50."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class ResNet(nn.Module):
    """images (batch, 3, height, width) -> logits (batch, classes).

    `blocks` is the number of blocks in each of the four stages, `width` the first stage's channels.
    """

    def __init__(self, blocks: Sequence[int], width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        channels = width
        for number, count in enumerate(blocks):
            inner = width << number
            for place in range(count):
                stride = 2 if number and not place else 1
                stages.append(_Bottleneck(channels, inner, stride))
                channels = inner * _Bottleneck.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(images)))
        return logits


class _Bottleneck(nn.Module):
    """Convolutions of 1 × 1, 3 × 3 and 1 × 1 with a shortcut; the 3 × 3 one has the stride."""

    expansion = 4

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = inner * self.expansion
        self.body = nn.Sequential(
            *_conv_norm(channels, inner, 1),
            nn.ReLU(inplace=True),
            *_conv_norm(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(inner, outer, 1),
        )
        changes = stride != 1 or channels != outer
        self.shortcut = (
            nn.Sequential(*_conv_norm(channels, outer, 1, stride)) if changes else nn.Identity()
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return y


def _conv_norm(
    channels: int, outer: int, kernel: int, stride: int = 1
) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, outer, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outer)
