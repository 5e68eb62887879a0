# SPDX-License-Identifier: Apache-2.0
"""A network for phones on digits of other styles: depthwise convolutions, hardswish, squeeze and excite."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from accuracy_tasks.images import STYLES, calibration, large_digits, loss_on_styles, styled
from accuracy_tasks.subject import Settings, Subject, classes

BLOCKS = ((16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1))
"""Channels in and out, and stride, of each block."""
EXPANSION = 4


def _convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    padding = size // 2
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class SqueezeExcite(nn.Module):
    """Scales each channel by what the means of all channels say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.up(F.relu(self.down(means))))


class InvertedResidual(nn.Module):
    """Wider by a convolution of 1 x 1, mixed in space channel by channel, narrower again."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = EXPANSION * inputs
        self.kept = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            *_convolution(inputs, wide, 1), nn.Hardswish(),
            *_convolution(wide, wide, 5, stride, wide), nn.Hardswish(),
            SqueezeExcite(wide), *_convolution(wide, outputs, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.kept else self.layers(x)


class MobileNet(nn.Sequential):
    """Built as MobileNet-V3 is, for small grey images."""

    def __init__(self) -> None:
        first, last = BLOCKS[0][0], BLOCKS[-1][1]
        super().__init__(
            *_convolution(1, first, 3), nn.Hardswish(),
            *(InvertedResidual(*block) for block in BLOCKS),
            *_convolution(last, 4 * last, 1), nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4 * last, 128), nn.Hardswish(), nn.Linear(128, 10),
        )  # fmt: skip


def mobilenet(settings: Settings) -> Subject:
    """Trained on every style, calibrated with the plain one, and judged on the others."""
    images, _, test, labels = large_digits()
    net = settings.trained("mobilenet", MobileNet, loss_on_styles, steps=600)
    title = (
        f"MobileNet-V3-like, digits: calibrated with plain images; judged on {', '.join(STYLES)}"
    )
    return Subject(title, net, calibration(images), styled(test, labels, settings), classes)
