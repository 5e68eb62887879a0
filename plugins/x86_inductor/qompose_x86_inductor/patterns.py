# SPDX-License-Identifier: Apache-2.0
"""The functions that oneDNN computes behind a product, by the steps of their patterns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from qompose.backend import Region, kit


@dataclass(frozen=True)
class Activation:
    """A function that follows a product, and oneDNN's name for it.

    `arguments` name the operator's schema arguments that oneDNN expects as numbers; `algorithm` names the
    argument that chooses a variant; `bounded` says that the numbers are the bounds of its values.
    """

    step: kit.Step
    post_op: str
    arguments: tuple[str, ...] = ()
    algorithm: str | None = None
    bounded: bool = False

    @property
    def name(self) -> str:
        """Return its name in rules."""
        return self.step.name

    def write(self, region: Region) -> list[Any]:
        """Return name, numbers and algorithm of the function of a region, as operators take them."""
        given = [float(region.argument("act", name)) for name in self.arguments]
        numbers = _finite(kit.float_bounds(region, "act")) if self.bounded else given
        algorithm = self.algorithm and region.argument("act", self.algorithm)
        return [self.post_op, numbers, *([algorithm] if algorithm else [])]


def _finite(bounds: tuple[float, float]) -> list[float]:
    """Return bounds as the float32 numbers that are the furthest where there are none."""
    furthest = torch.finfo(torch.float32).max
    return [math.copysign(furthest, b) if math.isinf(b) else b for b in bounds]


RELU = Activation(kit.RELU, "relu")
HARDTANH = Activation(kit.any_of("hardtanh", kit.HARDTANH, kit.CLAMP), "hardtanh", bounded=True)
RELU6 = Activation(kit.RELU6, "hardtanh", bounded=True)
HARDSWISH = Activation(kit.HARDSWISH, "hardswish")
SILU = Activation(kit.SILU, "swish")
GELU = Activation(kit.GELU, "gelu", algorithm="approximate")
LEAKY_RELU = Activation(kit.LEAKY_RELU, "leaky_relu", ("negative_slope",))
TANH = Activation(kit.TANH, "tanh")


def anchor_of(name: str) -> str:
    """Return what the operator of a product is called in its patterns."""
    return "linear" if name == "linear" else "conv"
