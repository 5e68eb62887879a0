# SPDX-License-Identifier: Apache-2.0
"""Networks that predict for every place of an image: detectors, segmenters, generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .convolutional import classifier, conv_bn
from .entry import ZooModel, floats, net, zoo_model

WIDTH = 8
ANCHORS = 2
CLASSES = 3


@net(
    levels=lambda: nn.ModuleList([conv_bn(3, 8, stride=2), conv_bn(8, 12, stride=2)]),
    scores=lambda: nn.ModuleList(nn.Conv2d(n, ANCHORS * CLASSES, 3, padding=1) for n in (8, 12)),
    boxes=lambda: nn.ModuleList(nn.Conv2d(n, ANCHORS * 4, 3, padding=1) for n in (8, 12)),
)
def ssd_heads(m: Any, x: Tensor) -> dict[str, Tensor]:
    """Heads of their own at each scale, their maps brought to rows and concatenated."""
    scores, boxes = [], []
    for level, score, box in zip(m.levels, m.scores, m.boxes, strict=True):
        x = level(x)
        scores.append(score(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, CLASSES))
        boxes.append(box(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4))
    return {"scores": torch.cat(scores, dim=1).softmax(-1), "boxes": torch.cat(boxes, dim=1)}


@net(
    stem=lambda: conv_bn(3, WIDTH),
    tower=lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
    norms=lambda: nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(3)),
    scales=lambda: nn.Parameter(torch.rand(3) + 0.5),
    head=lambda: nn.Conv2d(WIDTH, CLASSES, 3, padding=1),
)
def retina_head(m: Any, x: Tensor) -> list[Tensor]:
    """One tower of convolutions at three scales, under a batch norm of each scale's own."""
    level, outputs = m.stem(x), []
    for index, norm in enumerate(m.norms):
        tower = F.relu(norm(m.tower(level)))
        outputs.append(m.head(tower) * m.scales[index])
        level = F.max_pool2d(level, 2)
    return outputs


def _decoded(raw: Tensor) -> Tensor:
    """Centres relative to their cell, sizes relative to the stride."""
    rows, columns = torch.arange(raw.shape[2]), torch.arange(raw.shape[3])
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).to(raw.dtype)
    centre, size, scores = raw.split([2, 2, CLASSES], dim=1)
    centre = (centre.sigmoid() * 2 - 0.5 + grid) * 2
    size = (size.sigmoid() * 2) ** 2 * 4
    return torch.cat([centre, size, scores.sigmoid()], dim=1).flatten(2)


@net(
    stem=lambda: conv_bn(3, WIDTH, stride=2, act=nn.SiLU),
    inner=lambda: conv_bn(WIDTH // 2, WIDTH // 2, act=nn.SiLU),
    merge=lambda: conv_bn(3 * WIDTH // 2, WIDTH, 1, act=nn.SiLU),
    after_pools=lambda: conv_bn(3 * WIDTH, WIDTH, 1, act=nn.SiLU),
    head=lambda: nn.Conv2d(WIDTH, 4 + CLASSES, 1),
)
def yolo_head(m: Any, x: Tensor) -> Tensor:
    """A cross-stage block, spatial pyramid pooling, and boxes decoded on an integer grid."""
    left, right = m.stem(x).split(WIDTH // 2, dim=1)
    x = m.merge(torch.cat([left, right, right + m.inner(right)], dim=1))
    once = F.max_pool2d(x, 3, 1, 1)
    x = m.after_pools(torch.cat([x, once, F.max_pool2d(once, 3, 1, 1)], dim=1))
    return _decoded(m.head(x))


@net(
    point=lambda: conv_bn(3, 4, 1),
    dilated=lambda: nn.ModuleList(nn.Conv2d(3, 4, 3, padding=r, dilation=r) for r in (1, 2)),
    pooled=lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.ReLU()),
    project=lambda: conv_bn(16, WIDTH, 1),
    head=lambda: nn.Conv2d(WIDTH, CLASSES, 1),
)
def aspp(m: Any, x: Tensor) -> Tensor:
    """DeepLab's pyramid: dilated branches and a pooled one interpolated back, concatenated."""
    size = x.shape[-2:]
    pooled = F.interpolate(m.pooled(x), size=size, mode="bilinear", align_corners=False)
    branches = [m.point(x), *(F.relu(branch(x)) for branch in m.dilated), pooled]
    y = m.head(m.project(torch.cat(branches, dim=1)))
    return F.interpolate(y, scale_factor=2.0, mode="bilinear").argmax(dim=1)


@net(
    stem=lambda: conv_bn(3, WIDTH, stride=2, act=nn.SiLU),
    expand=lambda: conv_bn(WIDTH, 16, 1, act=nn.SiLU),
    depthwise=lambda: conv_bn(16, 16, 5, groups=16, act=nn.SiLU),
    squeeze=lambda: nn.Conv2d(16, 4, 1),
    excite=lambda: nn.Conv2d(4, 16, 1),
    project=lambda: conv_bn(16, WIDTH, 1, act=None),
    head=lambda: classifier(WIDTH),
)
def efficient_block(m: Any, x: Tensor) -> Tensor:
    """EfficientNet's: expansion, depthwise, squeeze-and-excitation by sigmoid, SiLU throughout."""
    x = m.stem(x)
    y = m.depthwise(m.expand(x))
    gates = m.excite(F.silu(m.squeeze(y.mean((2, 3), keepdim=True))))
    return m.head(x + m.project(y * gates.sigmoid()))


@net(
    stem=lambda: conv_bn(3, WIDTH),
    three=lambda: conv_bn(WIDTH, WIDTH, act=None),
    one=lambda: conv_bn(WIDTH, WIDTH, 1, act=None),
    identity=lambda: nn.BatchNorm2d(WIDTH),
)
def rep_vgg(m: Any, x: Tensor) -> Tensor:
    """Three parallel branches summed before one activation, one of them only a batch norm."""
    x = m.stem(x)
    return F.relu(m.three(x) + m.one(x) + m.identity(x))


@net(
    down=lambda: nn.Conv2d(3, WIDTH, 3, 2, padding=1, padding_mode="reflect"),
    first=lambda: nn.InstanceNorm2d(WIDTH, affine=True),
    inner=lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, padding_mode="replicate"),
    second=lambda: nn.InstanceNorm2d(WIDTH),
    up=lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(WIDTH, 3, 3, padding=1)),
)
def style_transfer(m: Any, x: Tensor) -> Tensor:
    """Instance norms with and without affine, reflected borders, nearest upsampling."""
    y = F.relu(m.first(m.down(x)))
    y = y + m.second(m.inner(y))
    return (m.up(y).tanh() + 1) * 127.5


@net(
    localise=lambda: nn.Sequential(conv_bn(3, 4, stride=2), nn.AdaptiveAvgPool2d(2)),
    theta=lambda: nn.Linear(16, 6),
    identity=lambda: nn.Buffer(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])),
    conv=lambda: nn.Conv2d(5, 4, 3, padding=1),
)
def spatial_transformer(m: Any, x: Tensor) -> Tensor:
    """A predicted affine map samples the image again, on coordinates added as channels."""
    theta = (m.identity + 0.1 * m.theta(m.localise(x).flatten(1))).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    sampled = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    return m.conv(torch.cat([sampled, grid.permute(0, 3, 1, 2)], dim=1))


@net(
    encoder=lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, WIDTH, 3, 2, 1), nn.ELU()
    ),
    mean=lambda: nn.Linear(WIDTH * 16, 4),
    spread=lambda: nn.Linear(WIDTH * 16, 4),
    widen=lambda: nn.Linear(4, WIDTH * 16),
    decoder=lambda: nn.Sequential(
        nn.ConvTranspose2d(WIDTH, 6, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 3, 4, 2, 1)
    ),
)
def autoencoder(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A variational one in eval mode: the code is its mean, the reconstruction a flat image."""
    code = m.encoder(x).flatten(1)
    mean, spread = m.mean(code), m.spread(code).clamp(-8, 8)
    image = m.decoder(m.widen(mean).view(-1, WIDTH, 4, 4))
    return torch.sigmoid(image), mean, spread


@net(
    layers=lambda: nn.Sequential(
        nn.PixelUnshuffle(2),
        nn.Conv2d(12, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.PReLU(16),
        nn.Conv2d(16, 48, 1),
        nn.PixelShuffle(4),
    )
)
def pixel_unshuffle(m: Any, x: Tensor) -> Tensor:
    """Space to depth, a group norm, depth to space; a global skip from the bicubic image."""
    return m.layers(x) + F.interpolate(x, scale_factor=2.0, mode="bicubic")


def _net(name: str, make: Callable[[], nn.Module], *tags: str) -> ZooModel:
    return zoo_model(name, make, floats(2, 3, 16, 16), tags={"conv", *tags})


MODELS: tuple[ZooModel, ...] = (
    _net("ssd_heads", ssd_heads, "bn", "cat", "multi_output"),
    _net("retina_head", retina_head, "bn", "shared", "multi_output"),
    _net("yolo_head", yolo_head, "bn", "cat", "residual"),
    _net("aspp", aspp, "bn", "cat"),
    _net("efficient_block", efficient_block, "bn", "depthwise", "residual"),
    _net("repvgg", rep_vgg, "bn", "residual"),
    _net("style_transfer", style_transfer, "residual"),
    _net("spatial_transformer", spatial_transformer, "bn", "cat"),
    _net("autoencoder", autoencoder, "transposed", "multi_output"),
    _net("pixel_unshuffle", pixel_unshuffle, "residual"),
)
