# SPDX-License-Identifier: Apache-2.0
"""More networks of points, volumes, pairs of images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.convolutional import classifier, conv_bn
from tests.zoo.entry import ZooModel, floats, zoo_model

WIDTH = 8


class PointNet(nn.Module):
    """A learnt transform of points, shared layers, a maximum over all points."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.matrix = nn.Linear(8, 9)
        self.rest = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 16, 1)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, points: Tensor) -> Tensor:
        matrix = self.matrix(self.turn(points).amax(-1)).view(-1, 3, 3)
        turned = torch.bmm(matrix + torch.eye(3, device=points.device), points)
        return F.log_softmax(self.head(torch.max(self.rest(turned), dim=2)[0]), dim=-1)


class Unet3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 8, 3, padding=1)
        self.up, self.head = nn.ConvTranspose3d(8, 4, 2, 2), nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        deep = F.relu(self.deep(F.max_pool3d(skip, 2)))
        return self.head(torch.cat([self.up(deep), skip], dim=1))


class Correlation(nn.Module):
    """Optical flow: features of two images by one network, all pairs of places, lookups around each."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.flow = conv_bn(3, WIDTH, stride=2), nn.Conv2d(64, 2, 3, padding=1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        one, two = self.features(first), self.features(second)
        volume = torch.einsum("nchw,ncij->nhwij", one, two) / WIDTH**0.5
        return self.flow(volume.flatten(3).permute(0, 3, 1, 2))


class Capsules(nn.Module):
    """Votes, routed by agreement in three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 5, 2)
        self.votes = nn.Parameter(0.3 * torch.randn(1, 144, 3, 6, 4))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        norm = x.square().sum(-1, keepdim=True)
        return x * norm / (1 + norm) / (norm + 1e-6).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        y = self.squash(self.stem(x).flatten(2).transpose(1, 2).reshape(x.shape[0], 144, 1, 1, 4))
        votes = (self.votes @ y.transpose(-1, -2)).squeeze(-1)
        logits = torch.zeros_like(votes[..., :1])
        for _ in range(3):
            out = self.squash((logits.softmax(dim=2) * votes).sum(dim=1, keepdim=True))
            logits = logits + (votes * out).sum(-1, keepdim=True)
        return out.squeeze(1).norm(dim=-1)


class ConvMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.BatchNorm2d(16))
        self.depth = nn.Sequential(
            nn.Conv2d(16, 16, 3, groups=16, padding="same"), nn.GELU(), nn.BatchNorm2d(16)
        )
        self.point = nn.Sequential(nn.Conv2d(16, 16, 1), nn.GELU(), nn.BatchNorm2d(16))
        self.head = classifier(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x)
        return self.head(self.point(y + self.depth(y)))


class CrossCovariance(nn.Module):
    """XCiT: attention between channels, with learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.qkv, self.out = (
            nn.Conv2d(3, 16, 4, 4),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
        )
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        query, key, value = self.qkv(y).transpose(1, 2).chunk(3, dim=1)
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        seen = (query @ key.transpose(-1, -2) * self.temperature).softmax(-1) @ value
        return self.out(seen.transpose(1, 2)).mean(dim=1)


class Swin(nn.Module):
    """Shifted windows: a roll, a partition, attention with a bias by position, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 2, 2), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(1, 16, 16))
        self.merge = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).permute(0, 2, 3, 1)
        shifted = torch.roll(self.norm(y), (-2, -2), dims=(1, 2))
        rows = shifted.view(-1, 2, 4, 2, 4, 16).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 16)
        query, key, value = self.qkv(rows).chunk(3, dim=-1)
        seen = (query @ key.transpose(1, 2) / 4 + self.bias).softmax(-1) @ value
        back = (
            self.out(seen).view(-1, 2, 2, 4, 4, 16).permute(0, 1, 3, 2, 4, 5).reshape(-1, 8, 8, 16)
        )
        y = y + torch.roll(back, (2, 2), dims=(1, 2))
        corners = [y[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return self.merge(torch.cat(corners, dim=-1))


class Detr(nn.Module):
    """Queries that attend to the places of an image; classes and boxes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.queries = conv_bn(3, 16, stride=4), nn.Parameter(torch.randn(5, 16))
        self.places = nn.Parameter(torch.randn(16, 16))
        self.body = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.classes, self.boxes = (
            nn.Linear(16, 4),
            nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows = self.stem(x).flatten(2).transpose(1, 2) + self.places
        seen = self.body(rows, self.queries.expand(x.shape[0], -1, -1))
        return {"classes": self.classes(seen), "boxes": self.boxes(seen).sigmoid()}


class Distribution(nn.Module):
    """The head of newer YOLOs: sides of boxes as the mean of a distribution, by a fixed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.sides = conv_bn(3, WIDTH, stride=2), nn.Conv2d(WIDTH, 32, 1)
        self.scores = nn.Conv2d(WIDTH, 3, 1)
        self.mean = nn.Conv2d(8, 1, 1, bias=False)
        self.mean.weight.data[:] = torch.arange(8.0).view(1, 8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        sides = self.sides(y).view(x.shape[0], 4, 8, -1).transpose(1, 2).softmax(1)
        return torch.cat([self.mean(sides).squeeze(1), self.scores(y).flatten(2).sigmoid()], dim=1)


class Gram(nn.Module):
    """The losses of style transfer: Gram matrices at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv_bn(3, WIDTH), conv_bn(WIDTH, WIDTH, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = self.first(x)
        two = self.second(one)
        rows = [y.flatten(2) for y in (one, two)]
        return tuple(torch.bmm(r, r.mT) / r.shape[-1] for r in rows)  # type: ignore[return-value]


class ArcFace(nn.Module):
    """A cosine classifier: normalised features on normalised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.embed = conv_bn(3, WIDTH, stride=2), nn.Linear(WIDTH, 8)
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.normalize(self.embed(self.stem(x).mean(dim=(2, 3))))
        return 16.0 * F.linear(y, F.normalize(self.weight))


class Nerf(nn.Module):
    """Sines of positions, a skip to the middle, densities and colours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(27, 32), nn.Linear(59, 32)
        self.density, self.colour = (
            nn.Linear(32, 1),
            nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)),
        )

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        waves = [f(points * 2.0**n) for n in range(4) for f in (torch.sin, torch.cos)]
        y = torch.cat([points, *waves], dim=-1)
        z = F.relu(self.second(torch.cat([y, F.relu(self.first(y))], dim=-1)))
        return F.softplus(self.density(z)), self.colour(z).sigmoid()


class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 3)])

    def forward(self, places: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            places = torch.sin(6.0 * layer(places))
        return self.layers[-1](places)


_IMAGE = floats(2, 3, 16, 16)


def _image(name: str, make: object, *tags: str) -> ZooModel:
    return zoo_model(name, make, _IMAGE, tags={"further", "conv", *tags})  # type: ignore[arg-type]


MODELS: tuple[ZooModel, ...] = (
    zoo_model("pointnet", PointNet, floats(2, 3, 20), tags={"further", "conv", "matmul"}),
    zoo_model("unet_3d", Unet3d, floats(2, 1, 4, 8, 8), tags={"further", "conv", "transposed"}),
    zoo_model("correlation_flow", Correlation, _IMAGE, _IMAGE, tags={"further", "conv", "matmul"}),
    _image("capsules", Capsules, "matmul"), _image("convmixer", ConvMixer),
    _image("cross_covariance", CrossCovariance, "attention"), _image("shifted_windows", Swin, "attention"),
    _image("detr_queries", Detr, "attention"), _image("distribution_head", Distribution),
    _image("gram_matrices", Gram, "matmul"), _image("cosine_classifier", ArcFace),
    zoo_model("nerf", Nerf, floats(2, 10, 3), tags={"further", "linear"}),
    zoo_model("siren", Siren, floats(2, 10, 2), tags={"further", "linear"}),
)  # fmt: skip
