# SPDX-License-Identifier: Apache-2.0
"""Networks that predict for every place of an image: detectors, segmenters, generators."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .convolutional import classifier, conv_bn
from .entry import ZooModel, floats, zoo_model

WIDTH = 8
ANCHORS = 2
CLASSES = 3


class SsdHeads(nn.Module):
    """Heads of their own at each scale, their maps brought to rows and concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([conv_bn(3, 8, stride=2), conv_bn(8, 12, stride=2)])
        self.scores = nn.ModuleList(nn.Conv2d(n, ANCHORS * CLASSES, 3, padding=1) for n in (8, 12))
        self.boxes = nn.ModuleList(nn.Conv2d(n, ANCHORS * 4, 3, padding=1) for n in (8, 12))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores, boxes = [], []
        for level, score, box in zip(self.levels, self.scores, self.boxes, strict=True):
            x = level(x)
            scores.append(score(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, CLASSES))
            boxes.append(box(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4))
        return {"scores": torch.cat(scores, dim=1).softmax(-1), "boxes": torch.cat(boxes, dim=1)}


class RetinaHead(nn.Module):
    """One tower of convolutions at three scales, under a batch norm of each scale's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, WIDTH)
        self.tower = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(3))
        self.scales = nn.Parameter(torch.rand(3) + 0.5)
        self.head = nn.Conv2d(WIDTH, CLASSES, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        level, outputs = self.stem(x), []
        for index, norm in enumerate(self.norms):
            tower = F.relu(norm(self.tower(level)))
            outputs.append(self.head(tower) * self.scales[index])
            level = F.max_pool2d(level, 2)
        return outputs


class YoloHead(nn.Module):
    """A cross-stage block, spatial pyramid pooling, and boxes decoded on an integer grid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, WIDTH, stride=2, act=nn.SiLU)
        self.inner = conv_bn(WIDTH // 2, WIDTH // 2, act=nn.SiLU)
        self.merge = conv_bn(3 * WIDTH // 2, WIDTH, 1, act=nn.SiLU)
        self.after_pools = conv_bn(3 * WIDTH, WIDTH, 1, act=nn.SiLU)
        self.head = nn.Conv2d(WIDTH, 4 + CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).split(WIDTH // 2, dim=1)
        x = self.merge(torch.cat([left, right, right + self.inner(right)], dim=1))
        once = F.max_pool2d(x, 3, 1, 1)
        x = self.after_pools(torch.cat([x, once, F.max_pool2d(once, 3, 1, 1)], dim=1))
        return self.decode(self.head(x))

    def decode(self, raw: Tensor) -> Tensor:
        """Centres relative to their cell, sizes relative to the stride."""
        rows, columns = torch.arange(raw.shape[2]), torch.arange(raw.shape[3])
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).to(raw.dtype)
        centre, size, scores = raw.split([2, 2, CLASSES], dim=1)
        centre = (centre.sigmoid() * 2 - 0.5 + grid) * 2
        size = (size.sigmoid() * 2) ** 2 * 4
        return torch.cat([centre, size, scores.sigmoid()], dim=1).flatten(2)


class Aspp(nn.Module):
    """DeepLab's pyramid: dilated branches and a pooled one interpolated back, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.point = conv_bn(3, 4, 1)
        self.dilated = nn.ModuleList(nn.Conv2d(3, 4, 3, padding=r, dilation=r) for r in (1, 2))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.ReLU())
        self.project = conv_bn(16, WIDTH, 1)
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        pooled = F.interpolate(self.pooled(x), size=size, mode="bilinear", align_corners=False)
        branches = [self.point(x), *(F.relu(branch(x)) for branch in self.dilated), pooled]
        y = self.head(self.project(torch.cat(branches, dim=1)))
        return F.interpolate(y, scale_factor=2.0, mode="bilinear").argmax(dim=1)


class EfficientBlock(nn.Module):
    """EfficientNet's: expansion, depthwise, squeeze-and-excitation by sigmoid, SiLU throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, WIDTH, stride=2, act=nn.SiLU)
        self.expand = conv_bn(WIDTH, 16, 1, act=nn.SiLU)
        self.depthwise = conv_bn(16, 16, 5, groups=16, act=nn.SiLU)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = conv_bn(16, WIDTH, 1, act=None)
        self.head = classifier(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depthwise(self.expand(x))
        gates = self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return self.head(x + self.project(y * gates.sigmoid()))


class RepVgg(nn.Module):
    """Three parallel branches summed before one activation, one of them only a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, WIDTH)
        self.three = conv_bn(WIDTH, WIDTH, act=None)
        self.one = conv_bn(WIDTH, WIDTH, 1, act=None)
        self.identity = nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return F.relu(self.three(x) + self.one(x) + self.identity(x))


class StyleTransfer(nn.Module):
    """Instance norms with and without affine, reflected borders, nearest upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, WIDTH, 3, 2, padding=1, padding_mode="reflect")
        self.first = nn.InstanceNorm2d(WIDTH, affine=True)
        self.inner = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, padding_mode="replicate")
        self.second = nn.InstanceNorm2d(WIDTH)
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(WIDTH, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(self.down(x)))
        y = y + self.second(self.inner(y))
        return (self.up(y).tanh() + 1) * 127.5


class SpatialTransformer(nn.Module):
    """A predicted affine map samples the image again, on coordinates added as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.localise = nn.Sequential(conv_bn(3, 4, stride=2), nn.AdaptiveAvgPool2d(2))
        self.theta = nn.Linear(16, 6)
        self.register_buffer("identity", torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
        self.conv = nn.Conv2d(5, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        theta = (self.identity + 0.1 * self.theta(self.localise(x).flatten(1))).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        sampled = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
        return self.conv(torch.cat([sampled, grid.permute(0, 3, 1, 2)], dim=1))


class Autoencoder(nn.Module):
    """A variational one in eval mode: the code is its mean, the reconstruction a flat image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, WIDTH, 3, 2, 1), nn.ELU()
        )
        self.mean, self.spread = nn.Linear(WIDTH * 16, 4), nn.Linear(WIDTH * 16, 4)
        self.widen = nn.Linear(4, WIDTH * 16)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, 6, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(6, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        code = self.encoder(x).flatten(1)
        mean, spread = self.mean(code), self.spread(code).clamp(-8, 8)
        image = self.decoder(self.widen(mean).view(-1, WIDTH, 4, 4))
        return torch.sigmoid(image), mean, spread


class PixelUnshuffle(nn.Module):
    """Space to depth, a group norm, depth to space; a global skip from the bicubic image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.PixelUnshuffle(2), nn.Conv2d(12, 16, 3, padding=1), nn.GroupNorm(4, 16),
            nn.PReLU(16), nn.Conv2d(16, 48, 1), nn.PixelShuffle(4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + F.interpolate(x, scale_factor=2.0, mode="bicubic")


def _net(name: str, make: type[nn.Module], *tags: str) -> ZooModel:
    return zoo_model(name, make, floats(2, 3, 16, 16), tags={"conv", *tags})


MODELS: tuple[ZooModel, ...] = (
    _net("ssd_heads", SsdHeads, "bn", "cat", "multi_output"),
    _net("retina_head", RetinaHead, "bn", "shared", "multi_output"),
    _net("yolo_head", YoloHead, "bn", "cat", "residual"),
    _net("aspp", Aspp, "bn", "cat"),
    _net("efficient_block", EfficientBlock, "bn", "depthwise", "residual"),
    _net("repvgg", RepVgg, "bn", "residual"),
    _net("style_transfer", StyleTransfer, "residual"),
    _net("spatial_transformer", SpatialTransformer, "bn", "cat"),
    _net("autoencoder", Autoencoder, "transposed", "multi_output"),
    _net("pixel_unshuffle", PixelUnshuffle, "residual"),
)
