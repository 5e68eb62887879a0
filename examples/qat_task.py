# SPDX-License-Identifier: Apache-2.0
"""A network that suffers from few bits, and the one loop that trains it in float and quantized.

Nothing here knows about quantization but that a model may have switches, which a schedule sets, and scales
that are learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import digits_task as task
import torch
from torch import Tensor, nn
from torch.nn import functional

TURN, SHIFT, ZOOM = 10.0, 0.1, 0.1
"""Degrees, and parts of an image's half: what a digit may be moved by and stay one."""
TEMPERATURE, FROM_TEACHER = 2.0, 0.7
SCALES = (".scale", ".zero_point")
"""How names of learned scales end."""
OF_SCALES = 0.2
"""The part of the rate that these have: AdamW's steps are as large for what is small, as scales are."""


class Inverted(nn.Module):
    """Wide, by channel, narrow again: the block of MobileNetV3, without its attention to channels."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        inner = 3 * inputs
        self.layers = nn.Sequential(
            *convolution(inputs, inner, 1),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.Hardswish(),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skips = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.skips else self.layers(x)


class MobileDigits(nn.Module):
    """A small MobileNetV3. `forward(images: (N, 1, 8, 8)) -> (N, 10)` logits."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = [*convolution(1, width, 3), Inverted(width, width)]
        for stage in (2, 3):
            layers.append(Inverted((stage - 1) * width, stage * width, stride=2))
            layers.append(Inverted(stage * width, stage * width))
        self.features = nn.Sequential(*layers, *convolution(3 * width, 8 * width, 1))
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


def convolution(inputs: int, outputs: int, size: int) -> list[nn.Module]:
    """A convolution with batch norm and activation."""
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.Hardswish()]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long is trained, at which highest rate, and in which batches."""

    epochs: int
    rate: float
    batch: int = 64


def train(
    model: nn.Module,
    data: task.Data,
    recipe: Recipe,
    seed: int,
    teacher: Callable[[Tensor], Tensor] | None = None,
    before: Callable[[int], Any] = lambda epoch: None,
    after: Callable[[int], Any] = lambda epoch: None,
    track: Callable[[range], Iterable[int]] = iter,
) -> None:
    """Train a model on moved images, in place, with AdamW and one cycle of rates.

    Args:
        teacher: gives logits to learn from besides the labels.
        before, after: are called with the number of each epoch.
        track: sees the epochs go by.
    """
    torch.manual_seed(seed)
    steps = len(data) // recipe.batch
    highest = [recipe.rate, OF_SCALES * recipe.rate]
    optimizer = torch.optim.AdamW(by_kind(model), weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, recipe.epochs * steps, pct_start=0.1, cycle_momentum=False
    )
    for epoch in track(range(recipe.epochs)):
        model.train()
        before(epoch)
        for rows in torch.randperm(len(data))[: steps * recipe.batch].split(recipe.batch):
            images = moved(data.images[rows])
            optimizer.zero_grad()
            with torch.no_grad():
                taught = None if teacher is None else teacher(images)
            loss(model(images), data.labels[rows], taught).backward()
            optimizer.step()
            rates.step()
        model.eval()
        after(epoch)


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups for an optimizer: weights, and learned scales."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": []}]
    for name, parameter in model.named_parameters():
        groups[name.endswith(SCALES)]["params"].append(parameter)
    return groups


def loss(logits: Tensor, labels: Tensor, taught: Tensor | None) -> Tensor:
    """Cross entropy; with a teacher's logits, mostly the distance to those (Hinton et al., 2015)."""
    right = functional.cross_entropy(logits, labels)
    if taught is None:
        return right
    own, aim = ((v / TEMPERATURE).log_softmax(-1) for v in (logits, taught))
    far = functional.kl_div(own, aim, reduction="batchmean", log_target=True)
    return FROM_TEACHER * TEMPERATURE**2 * far + (1 - FROM_TEACHER) * right


def moved(images: Tensor) -> Tensor:
    """Images `(N, 1, H, W)`, each turned, shifted and zoomed a little by chance."""
    chance = 2 * torch.rand(4, len(images)) - 1
    angle, zoom = math.radians(TURN) * chance[0], 1 + ZOOM * chance[1]
    cos, sin, (right, down) = zoom * angle.cos(), zoom * angle.sin(), SHIFT * chance[2:]
    maps = torch.stack([cos, -sin, right, sin, cos, down], 1).view(-1, 2, 3)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)
