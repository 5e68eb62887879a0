# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks, each a few layers of the architecture it is named after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import ZooModel, floats, net, zoo_model


def conv_bn(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    act: Callable[[], nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """`conv -> batch norm -> act`, size kept at stride 1."""
    conv = nn.Conv2d(
        inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
    )
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([act()] if act else []))


def classifier(features: int, classes: int = 10) -> nn.Sequential:
    """Global average pool and a linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


class Residual(nn.Module):
    """`act(body(x) + shortcut(x))`; without `act`, a linear bottleneck."""

    def __init__(
        self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()
        self.act = act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.shortcut(x))


def basic_block(inputs: int, outputs: int, stride: int = 1) -> Residual:
    """ResNet-18's block."""
    body = nn.Sequential(
        conv_bn(inputs, outputs, stride=stride), conv_bn(outputs, outputs, act=None)
    )
    project = stride != 1 or inputs != outputs
    shortcut = conv_bn(inputs, outputs, 1, stride, act=None) if project else None
    return Residual(body, shortcut, nn.ReLU(inplace=True))


def bottleneck(channels: int, groups: int = 1) -> Residual:
    """ResNet-50's block, or ResNeXt's with `groups`."""
    inner = channels // 2
    body = nn.Sequential(
        conv_bn(channels, inner, 1),
        conv_bn(inner, inner, groups=groups),
        conv_bn(inner, channels, 1, act=None),
    )
    return Residual(body, None, nn.ReLU())


def inverted_residual(inputs: int, outputs: int, stride: int = 1, expand: int = 4) -> nn.Module:
    """MobileNet-V2's block: expand, depthwise, linear projection."""
    inner = inputs * expand
    body = nn.Sequential(
        conv_bn(inputs, inner, 1, act=nn.ReLU6),
        conv_bn(inner, inner, 3, stride, groups=inner, act=nn.ReLU6),
        conv_bn(inner, outputs, 1, act=None),
    )
    return Residual(body) if stride == 1 and inputs == outputs else body


@net(
    down=lambda: nn.Conv2d(32, 8, 1), up=lambda: nn.Conv2d(8, 32, 1), gate=lambda: nn.Hardsigmoid()
)
def squeeze_excite(m: Any, x: Tensor) -> Tensor:
    """Channel gates from the global average."""
    squeezed = F.relu(m.down(F.adaptive_avg_pool2d(x, 1)))
    return x * m.gate(m.up(squeezed))


def mobilenet_v3() -> nn.Module:
    """Hard-swish, squeeze-and-excitation and a linear bottleneck."""
    body = nn.Sequential(
        conv_bn(8, 32, 1, act=nn.Hardswish),
        conv_bn(32, 32, 5, groups=32, act=nn.Hardswish),
        squeeze_excite(),
        conv_bn(32, 8, 1, act=None),
    )
    stem = conv_bn(3, 8, stride=2, act=nn.Hardswish)
    return nn.Sequential(stem, Residual(body), classifier(8))


@net(
    depthwise=lambda: nn.Conv2d(8, 8, 7, padding=3, groups=8),
    norm=lambda: nn.LayerNorm(8),
    up=lambda: nn.Linear(8, 32),
    down=lambda: nn.Linear(32, 8),
    scale=lambda: nn.Parameter(torch.full((8,), 0.1)),
)
def conv_next_block(m: Any, x: Tensor) -> Tensor:
    """Depthwise 7x7, channels-last layer norm, GELU MLP, layer scale."""
    inner = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
    inner = m.down(F.gelu(m.up(inner))) * m.scale
    return x + inner.permute(0, 3, 1, 2)


@net(
    down1=lambda: conv_bn(3, 8),
    down2=lambda: conv_bn(8, 16),
    bottom=lambda: conv_bn(16, 16),
    up2=lambda: nn.ConvTranspose2d(16, 8, 2, 2),
    merge2=lambda: conv_bn(24, 16),
    merge1=lambda: conv_bn(24, 8),
    head=lambda: nn.Conv2d(8, 2, 1),
)
def u_net(m: Any, x: Tensor) -> Tensor:
    """One level down, one level up by transposed convolution, one by interpolation; `cat` skips."""
    high = m.down1(x)
    middle = m.down2(F.max_pool2d(high, 2))
    low = m.bottom(F.avg_pool2d(middle, 2))
    merged = m.merge2(torch.cat([m.up2(low), middle], dim=1))
    grown = F.interpolate(merged, scale_factor=2.0, mode="nearest")
    return m.head(m.merge1(torch.cat([grown, high], dim=1)))


@net(
    point=lambda: conv_bn(3, 4, 1),
    three=lambda: nn.Sequential(conv_bn(3, 4, 1), conv_bn(4, 8)),
    five=lambda: nn.Sequential(conv_bn(3, 4, 1), conv_bn(4, 4, 5)),
    pooled=lambda: nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_bn(3, 4, 1)),
    head=lambda: classifier(20),
)
def inception(m: Any, x: Tensor) -> Tensor:
    """Four branches of different receptive field, concatenated."""
    branches = [m.point(x), m.three(x), m.five(x), m.pooled(x)]
    return m.head(torch.cat(branches, dim=1))


@net(
    stem=lambda: nn.Conv2d(3, 8, 3, padding=1),
    norms=lambda: nn.ModuleList(nn.BatchNorm2d(8 + 4 * i) for i in range(3)),
    convs=lambda: nn.ModuleList(nn.Conv2d(8 + 4 * i, 4, 3, padding=1) for i in range(3)),
    head=lambda: classifier(20),
)
def dense_net(m: Any, x: Tensor) -> Tensor:
    """Pre-activation layers (norm before conv, so nothing folds), each sees all before it."""
    features = m.stem(x)
    for norm, conv in zip(m.norms, m.convs, strict=True):
        features = torch.cat([features, conv(F.relu(norm(features)))], dim=1)
    return m.head(features)


@net(
    branch=lambda: nn.Sequential(
        conv_bn(4, 4, 1), conv_bn(4, 4, groups=4, act=None), conv_bn(4, 4, 1)
    )
)
def shuffle_unit(m: Any, x: Tensor) -> Tensor:
    """ShuffleNet-V2's unit: half the channels pass through, then both halves are interleaved."""
    left, right = x.chunk(2, dim=1)
    both = torch.cat([left, m.branch(right)], dim=1)
    return both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


@net(
    stem=lambda: conv_bn(3, 8, stride=2),
    deep=lambda: conv_bn(8, 16, stride=2),
    lateral=lambda: nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1)]),
    scores=lambda: nn.Conv2d(8, 3, 3, padding=1),
    boxes=lambda: nn.Conv2d(8, 4, 3, padding=1),
)
def pyramid_detector(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Feature pyramid with one head shared by both scales: class scores and boxes per anchor."""
    shallow = m.stem(x)
    deep = m.lateral[1](m.deep(shallow))
    fine = m.lateral[0](shallow) + F.interpolate(deep, scale_factor=2.0, mode="nearest")
    scores = [m.scores(level).flatten(2) for level in (fine, deep)]
    boxes = [m.boxes(level).exp().flatten(2) for level in (fine, deep)]
    return torch.cat(scores, dim=2).sigmoid(), torch.cat(boxes, dim=2).transpose(1, 2)


def _activations() -> nn.Module:
    acts = (
        nn.ReLU(inplace=True), nn.ReLU6(), nn.Hardtanh(-0.5, 0.5), nn.Hardswish(), nn.SiLU(),
        nn.GELU(), nn.LeakyReLU(0.1), nn.ELU(), nn.Sigmoid(), nn.Tanh(), nn.PReLU(),
    )  # fmt: skip
    return nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), act) for act in acts)


@net(layers=_activations)
def activations(m: Any, x: Tensor) -> Tensor:
    """A convolution before each activation kernels fuse, functional, module and in-place forms."""
    for layer in m.layers:
        x = layer(x)
    return torch.clamp(F.relu_(x), 0.0, 6.0)


@net(
    branches=lambda: nn.ModuleList(
        nn.Conv2d(3, 4, 3, padding="same", dilation=rate) for rate in (1, 2, 3)
    ),
    norm=lambda: nn.GroupNorm(2, 4),
    reduce=lambda: nn.Conv2d(4, 4, (1, 3), stride=(1, 2), padding=(0, 1)),
)
def dilated_context(m: Any, x: Tensor) -> Tensor:
    """Parallel dilated convolutions with `padding="same"`, strided by an asymmetric kernel."""
    total = m.branches[0](x) + m.branches[1](x) + m.branches[2](x)
    return m.reduce(F.relu(m.norm(total)))


def transposed_conv_bn() -> nn.Module:
    """Transposed convolutions, grouped too; their output channels are dimension 1 of the weight."""
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 2, 2, groups=2, bias=False), nn.BatchNorm2d(4),
    )  # fmt: skip


def conv1d() -> nn.Module:
    """An audio classifier's front."""
    return nn.Sequential(
        nn.Conv1d(2, 8, 5, 2, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm1d(8),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def conv3d() -> nn.Module:
    """A video classifier's front."""
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(4, 4, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def lenet() -> nn.Module:
    """No batch norm, fully connected end."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(16, 10),
    )  # fmt: skip


def super_resolution() -> nn.Module:
    """Sub-pixel upsampling."""
    return nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )  # fmt: skip


def resnet18() -> nn.Module:
    """ResNet-18's stem and three of its blocks, narrow."""
    return nn.Sequential(
        conv_bn(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1), basic_block(8, 8), basic_block(8, 16, 2),
        basic_block(16, 16), classifier(16),
    )  # fmt: skip


def mobilenet_v2() -> nn.Module:
    """MobileNet-V2's stem, three blocks and head, narrow."""
    return nn.Sequential(
        conv_bn(3, 8, stride=2, act=nn.ReLU6), inverted_residual(8, 8),
        inverted_residual(8, 12, 2), inverted_residual(12, 12), conv_bn(12, 32, 1, act=nn.ReLU6),
        classifier(32),
    )  # fmt: skip


def _net(name: str, make: Callable[[], nn.Module], *tags: str) -> ZooModel:
    return zoo_model(name, make, floats(2, 3, 16, 16), tags={"conv", *tags})


MODELS: tuple[ZooModel, ...] = (
    _net("conv_bn_relu", lambda: nn.Sequential(conv_bn(3, 8), conv_bn(8, 8), classifier(8)), "bn"),
    _net("lenet", lenet),
    _net("resnet18", resnet18, "bn", "residual"),
    _net("bottleneck", lambda: nn.Sequential(conv_bn(3, 16), bottleneck(16)), "bn", "residual"),
    _net("resnext", lambda: nn.Sequential(conv_bn(3, 16), bottleneck(16, 4)), "bn", "residual"),
    _net("mobilenet_v2", mobilenet_v2, "bn", "residual", "depthwise"),
    _net("mobilenet_v3", mobilenet_v3, "bn", "residual", "depthwise"),
    _net("depthwise_separable",
         lambda: nn.Sequential(conv_bn(3, 3, groups=3), conv_bn(3, 8, 1), classifier(8)), "bn", "depthwise"),
    _net("convnext", lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), conv_next_block(), classifier(8)),
         "residual", "depthwise"),
    _net("unet", u_net, "bn", "cat", "transposed"),
    _net("inception", inception, "bn", "cat"),
    _net("densenet", dense_net, "bn", "cat"),
    _net("shufflenet", lambda: nn.Sequential(conv_bn(3, 8), shuffle_unit()), "bn", "cat", "depthwise"),
    _net("pyramid_detector", pyramid_detector, "bn", "cat", "multi_output", "shared"),
    _net("dilated_context", dilated_context),
    _net("super_resolution", super_resolution),
    zoo_model("conv_activations", activations, floats(2, 4, 8, 8), tags={"conv", "inplace"}),
    zoo_model("transposed_conv_bn", transposed_conv_bn, floats(2, 4, 6, 6),
              tags={"conv", "bn", "transposed"}),
    zoo_model("conv1d", conv1d, floats(2, 2, 32), tags={"conv", "bn", "depthwise"}),
    zoo_model("conv3d", conv3d, floats(2, 1, 4, 8, 8), tags={"conv", "bn"}),
)  # fmt: skip
