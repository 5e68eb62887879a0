# SPDX-License-Identifier: Apache-2.0
"""ResNets for images of 1000 classes, by He et al., "Deep residual learning" (2015), table 1.

ResNeXt: Xie et al., "Aggregated residual transformations" (2017), table 1.
"""

from __future__ import annotations

from torch import Tensor, nn

CLASSES = 1000
WIDTHS = (64, 128, 256, 512)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    padding = kernel // 2
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, the first with the stride."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.bn1(self.conv1(x)))
        inner = self.bn2(self.conv2(inner))
        inner += self.downsample(x)
        return self.relu(inner)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions to four times the width; the stride in the 3x3, which is version 1.5."""

    expansion = 4
    groups, widening = 1, 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        outputs, width = width * self.expansion, width * self.widening
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = (
            _conv(width, width, 3, stride, self.groups),
            nn.BatchNorm2d(width),
        )
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.bn1(self.conv1(x)))
        inner = self.relu(self.bn2(self.conv2(inner)))
        inner = self.bn3(self.conv3(inner))
        inner += self.downsample(x)
        return self.relu(inner)


class GroupedBottleneck(Bottleneck):
    """ResNeXt's: twice as wide, and 32 groups in the 3x3."""

    groups, widening = 32, 2


class ResNet(nn.Module):
    """A stem to a quarter of the size, four stages of `depths` blocks, average pool, linear layer."""

    def __init__(self, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inputs = 64
        for number, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True), start=1):
            stage = _stage(block, inputs, width, depth, stride=1 if number == 1 else 2)
            setattr(self, f"layer{number}", stage)
            inputs = width * block.expansion
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _stage(
    block: type[BasicBlock | Bottleneck], inputs: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    """`depth` blocks; the first has the stride, and projects its shortcut where shapes differ."""
    outputs = width * block.expansion
    project = None
    if stride != 1 or inputs != outputs:
        project = nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
    others = (block(outputs, width, 1, None) for _ in range(depth - 1))
    return nn.Sequential(block(inputs, width, stride, project), *others)


def resnet18() -> nn.Module:
    return ResNet(BasicBlock, (2, 2, 2, 2))


def resnet50() -> nn.Module:
    return ResNet(Bottleneck, (3, 4, 6, 3))


def resnext50() -> nn.Module:
    return ResNet(GroupedBottleneck, (3, 4, 6, 3))
