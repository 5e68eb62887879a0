# SPDX-License-Identifier: Apache-2.0
"""MobileNets for images of 1000 classes: one block, and a table of its rows for each version.

V2: Sandler et al., "Inverted residuals and linear bottlenecks" (2018), table 2. V3: Howard et al.,
"Searching for MobileNetV3" (2019), tables 1 and 2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from .convolutional import conv_bn

CLASSES = 1000
RELU = partial(nn.ReLU, inplace=True)
RELU6 = partial(nn.ReLU6, inplace=True)
HARDSWISH = partial(nn.Hardswish, inplace=True)

# expansion, outputs, repeats, stride of the first
V2 = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip

# kernel, expanded width, outputs, squeeze and excite, activation, stride
V3_LARGE = (
    (3, 16, 16, False, RELU, 1), (3, 64, 24, False, RELU, 2), (3, 72, 24, False, RELU, 1),
    (5, 72, 40, True, RELU, 2), (5, 120, 40, True, RELU, 1), (5, 120, 40, True, RELU, 1),
    (3, 240, 80, False, HARDSWISH, 2), (3, 200, 80, False, HARDSWISH, 1), (3, 184, 80, False, HARDSWISH, 1),
    (3, 184, 80, False, HARDSWISH, 1), (3, 480, 112, True, HARDSWISH, 1), (3, 672, 112, True, HARDSWISH, 1),
    (5, 672, 160, True, HARDSWISH, 2), (5, 960, 160, True, HARDSWISH, 1), (5, 960, 160, True, HARDSWISH, 1),
)  # fmt: skip
V3_SMALL = (
    (3, 16, 16, True, RELU, 2), (3, 72, 24, False, RELU, 2), (3, 88, 24, False, RELU, 1),
    (5, 96, 40, True, HARDSWISH, 2), (5, 240, 40, True, HARDSWISH, 1), (5, 240, 40, True, HARDSWISH, 1),
    (5, 120, 48, True, HARDSWISH, 1), (5, 144, 48, True, HARDSWISH, 1), (5, 288, 96, True, HARDSWISH, 2),
    (5, 576, 96, True, HARDSWISH, 1), (5, 576, 96, True, HARDSWISH, 1),
)  # fmt: skip


class SqueezeExcitation(nn.Module):
    """Each channel times a gate in [0, 1], which two linear layers make from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _divisible(channels / 4)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.activation = nn.Conv2d(channels, squeezed, 1), nn.ReLU()
        self.fc2, self.scale_activation = nn.Conv2d(squeezed, channels, 1), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.activation(self.fc1(self.avgpool(x)))
        return self.scale_activation(self.fc2(inner)) * x


def _divisible(width: float, by: int = 8) -> int:
    """The nearest multiple of `by` that is not less than nine tenths of `width`."""
    rounded = max(by, int(width + by / 2) // by * by)
    return rounded if rounded >= 0.9 * width else rounded + by


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project without activation; added to the input where shapes agree."""

    def __init__(
        self,
        inputs: int,
        width: int,
        outputs: int,
        stride: int,
        act: partial[nn.Module],
        kernel: int = 3,
        squeeze: bool = False,
    ) -> None:
        super().__init__()
        layers = [] if width == inputs else [conv_bn(inputs, width, 1, act=act)]
        layers += [conv_bn(width, width, kernel, stride, groups=width, act=act)]
        layers += [SqueezeExcitation(width)] if squeeze else []
        layers += [conv_bn(width, outputs, 1, act=None)]
        self.block = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.shortcut else self.block(x)


class MobileNet(nn.Module):
    """Convolutional features, their means, a classifier."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def mobilenet_v2() -> nn.Module:
    layers: list[nn.Module] = [conv_bn(3, 32, 3, 2, act=RELU6)]
    inputs = 32
    for expansion, outputs, repeats, first in V2:
        for stride in (first, *[1] * (repeats - 1)):
            layers.append(InvertedResidual(inputs, inputs * expansion, outputs, stride, RELU6))
            inputs = outputs
    layers.append(conv_bn(inputs, 1280, 1, act=RELU6))
    head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, CLASSES))
    return MobileNet(nn.Sequential(*layers), head)


def mobilenet_v3_large() -> nn.Module:
    return _mobilenet_v3(V3_LARGE, 1280)


def mobilenet_v3_small() -> nn.Module:
    return _mobilenet_v3(V3_SMALL, 1024)


def _mobilenet_v3(rows: tuple[tuple[Any, ...], ...], head_width: int) -> nn.Module:
    layers: list[nn.Module] = [conv_bn(3, 16, 3, 2, act=HARDSWISH)]
    inputs = 16
    for kernel, width, outputs, squeeze, act, stride in rows:
        layers.append(InvertedResidual(inputs, width, outputs, stride, act, kernel, squeeze))
        inputs = outputs
    layers.append(conv_bn(inputs, 6 * inputs, 1, act=HARDSWISH))
    head = nn.Sequential(
        nn.Linear(6 * inputs, head_width),
        HARDSWISH(),
        nn.Dropout(0.2),
        nn.Linear(head_width, CLASSES),
    )
    net = MobileNet(nn.Sequential(*layers), head)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = 1e-3  # TensorFlow's, in which it was trained
    return net
