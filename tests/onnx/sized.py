# SPDX-License-Identifier: Apache-2.0
"""A model whose sizes are open, for the tests of what reads them."""

from __future__ import annotations

from typing import Any

import qompose
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Dim = torch.export.Dim
SIZES = (Dim(name, min=8, max=64) for name in ("height", "width"))
OPEN = ({0: Dim("batch", max=64), **dict(enumerate(SIZES, 2))},)


class Sized(nn.Module):
    """A convolution whose result is laid out by its own sizes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 4, 3, 2, 1)
        self.wide = nn.ConvTranspose2d(16, 4, (2, 4), (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        batch, _, height, width = y.shape
        if self.kind == "reshape":
            return y.view(batch, 2, 4, 2, height, width)
        if self.kind == "expand":
            return y.unsqueeze(1).expand(batch, 2, 16, height, width)
        if self.kind == "resize":
            return F.interpolate(y, size=(2 * height, 3 * width))
        return self.up(y) if self.kind == "up" else self.wide(y)


def converted(kind: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    batches = [(torch.randn(2, 3, 20, 24),) for _ in range(2)]
    program = torch.export.export(Sized(kind).eval(), batches[0], dynamic_shapes=OPEN)
    prepared = qompose.prepare_pt2e(program, qompose.compose("onnx"))
    qompose.calibrate(prepared, batches, progress=False)
    return qompose.convert_pt2e(prepared), torch.randn(3, 3, 14, 18)
