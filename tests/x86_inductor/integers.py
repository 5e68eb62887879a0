# SPDX-License-Identifier: Apache-2.0
"""What the tests of the operators share: random products, integer arithmetic, how far results may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import settings, strategies as st
from qompose_x86_inductor.onednn.post_ops import POST_OPS
from torch import Tensor

OPS = torch.ops.qompose_x86
QUANTIZED = [torch.uint8, torch.int8]
DTYPES = [*QUANTIZED, torch.float32]
LINEAR_POST_OPS = [
    ("none", [], "none"), ("relu", [], "none"), ("gelu", [], "none"), ("gelu", [], "tanh"),
    ("hardtanh", [-0.5, 1.5], "none"), ("hardswish", [], "none"), ("swish", [], "none"), ("tanh", [], "none"),
    ("leaky_relu", [0.1], "none"),
]  # fmt: skip
CONV_POST_OPS = [row for row in LINEAR_POST_OPS if "conv2d" in POST_OPS[row[0]].operators]
MODEST = settings(max_examples=40, deadline=None)


@dataclass(frozen=True)
class Case:
    """One product: activation and output qparams, and where the random values come from."""

    x_dtype: torch.dtype
    out_dtype: torch.dtype
    x_zp: int
    out_zp: int
    fill: str
    seed: int
    has_bias: bool

    def tensors(self, x_shape: list[int], w_shape: list[int]) -> tuple[Tensor, Tensor, Tensor, Any]:
        torch.manual_seed(self.seed)
        low, high = bounds(self.x_dtype)
        if self.fill == "random":
            x = torch.randint(low, high + 1, x_shape, dtype=self.x_dtype)
            weight = torch.randint(-128, 128, w_shape, dtype=torch.int8)
        else:
            x = torch.full(x_shape, high, dtype=self.x_dtype)
            weight = torch.full(w_shape, 127 if self.fill == "highest" else -128, dtype=torch.int8)
        w_scale = torch.rand(w_shape[0]) * 0.01 + 0.0005
        return x, weight, w_scale, torch.randn(w_shape[0]) if self.has_bias else None

    @property
    def out(self) -> tuple[float, int, torch.dtype]:
        quantized = self.out_dtype in QUANTIZED
        return (0.037, self.out_zp, self.out_dtype) if quantized else (1.0, 0, self.out_dtype)


def bounds(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


@st.composite
def cases(draw: st.DrawFn) -> Case:
    x_dtype, out_dtype = draw(st.sampled_from(QUANTIZED)), draw(st.sampled_from(DTYPES))
    out_bounds = bounds(out_dtype) if out_dtype in QUANTIZED else (0, 0)
    fill = draw(st.sampled_from(["random", "highest", "lowest"]))
    zero_points = draw(st.integers(*bounds(x_dtype))), draw(st.integers(*out_bounds))
    return Case(
        x_dtype, out_dtype, *zero_points, fill, draw(st.integers(0, 2**31)), draw(st.booleans())
    )


@st.composite
def geometries(draw: st.DrawFn) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """Image shape, weight shape, (stride, padding, dilation, groups)."""
    groups, per_group, out_per_group = (draw(st.integers(1, n)) for n in (3, 8, 6))
    kernel = [draw(st.integers(1, 3)) for _ in range(2)]
    stride, dilation = ([draw(st.integers(1, 2)) for _ in range(2)] for _ in range(2))
    padding = [draw(st.integers(0, 2)) for _ in range(2)]
    size = [draw(st.integers(d * (k - 1) + 1, 9)) for k, d in zip(kernel, dilation, strict=True)]
    image = [draw(st.integers(0, 3)), groups * per_group, *size]
    return image, [groups * out_per_group, per_group, *kernel], (stride, padding, dilation, groups)


def integer_linear(x: Tensor, x_zp: int, weight: Tensor) -> Tensor:
    return (x.long() - x_zp) @ weight.long().T


def integer_conv(x: Tensor, x_zp: int, weight: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    """int64 sums, tap by tap, without any convolution kernel."""
    stride, padding, dilation, groups = geometry
    padded = F.pad(x.long() - x_zp, [padding[1], padding[1], padding[0], padding[0]])
    shape = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(padded.shape[2:], weight.shape[2:], stride, dilation, strict=True)
    ]
    sums = torch.zeros(x.shape[0], weight.shape[0], *shape, dtype=torch.int64)
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            taps = padded[:, :, i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]]
            taps = taps[:, :, : shape[0], : shape[1]].unflatten(1, (groups, -1))
            per_group = weight[:, :, i, j].long().unflatten(0, (groups, -1))
            sums += torch.einsum("ngchw,goc->ngohw", taps, per_group).flatten(1, 2)
    return sums


def real(sums: Tensor, x_scale: float, w_scale: Tensor, bias: Tensor | None, axes: int) -> Tensor:
    channels = (-1, *[1] * axes)
    scaled = sums.double() * x_scale * w_scale.double().reshape(channels)
    return scaled if bias is None else scaled + bias.double().reshape(channels)


def assert_one_step(got: Tensor, expected: Tensor, out: tuple[float, int, torch.dtype]) -> None:
    """At most one step on integers; on float32, 2e-3 plus rounding (gelu and tanh are fitted)."""
    scale, zero_point, dtype = out
    assert got.dtype == dtype and got.shape == expected.shape
    if dtype == torch.float32:
        torch.testing.assert_close(got.double(), expected, atol=2e-3, rtol=2e-6)
        return
    steps = (torch.round(expected / scale) + zero_point).clamp(*bounds(dtype))
    assert got.numel() == 0 or (got.double() - steps).abs().max() <= 1


def activate(values: Tensor, post_op: tuple[str, list[float], str]) -> Tensor:
    return {
        "none": lambda: values,
        "relu": lambda: values.clamp(min=0),
        "gelu": lambda: F.gelu(values, approximate=post_op[2]),
        "hardtanh": lambda: F.hardtanh(values, *post_op[1]),
        "hardswish": lambda: values * (values + 3).clamp(0, 6) / 6,
        "swish": lambda: values * values.sigmoid(),
        "tanh": lambda: values.tanh(),
        "leaky_relu": lambda: torch.where(values > 0, values, values * post_op[1][-1]),
    }[post_op[0]]()
