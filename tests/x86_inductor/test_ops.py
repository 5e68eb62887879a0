# SPDX-License-Identifier: Apache-2.0
"""The runtime operators against integer arithmetic, over random shapes, qparams and extremes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from qompose_x86_inductor import ops
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = torch.ops.qompose_x86
QUANTIZED = [torch.uint8, torch.int8]
DTYPES = [*QUANTIZED, torch.float32]
LINEAR_POST_OPS = [
    ("none", [], "none"),
    ("relu", [], "none"),
    ("gelu", [], "none"),
    ("gelu", [], "tanh"),
    ("hardtanh", [-0.5, 1.5], "none"),
    ("hardswish", [], "none"),
    ("swish", [], "none"),
    ("tanh", [], "none"),
    ("leaky_relu", [0.1], "none"),
]
CONV_POST_OPS = [row for row in LINEAR_POST_OPS if "conv2d" in ops.POST_OPS[row[0]].operators]
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
    return Case(
        x_dtype,
        out_dtype,
        draw(st.integers(*bounds(x_dtype))),
        draw(st.integers(*out_bounds)),
        draw(st.sampled_from(["random", "highest", "lowest"])),
        draw(st.integers(0, 2**31)),
        draw(st.booleans()),
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


@MODEST
@given(
    cases(),
    st.lists(st.integers(0, 4), max_size=3),
    st.tuples(st.integers(1, 140), st.integers(1, 40)),
    st.sampled_from(LINEAR_POST_OPS),
)
def test_linear(case: Case, leading: list[int], features: tuple[int, int], post_op: Any) -> None:
    x, weight, w_scale, bias = case.tensors([*leading, features[0]], [features[1], features[0]])
    got = OPS.linear(x, 0.02, case.x_zp, weight, w_scale, bias, *case.out, *post_op)
    expected = real(integer_linear(x, case.x_zp, weight), 0.02, w_scale, bias, 0)
    assert_one_step(got, activate(expected, post_op), case.out)
    assert got.is_contiguous()


@MODEST
@given(cases(), geometries(), st.sampled_from(CONV_POST_OPS), st.booleans())
def test_conv2d(case: Case, geometry: Any, post_op: Any, channels_last: bool) -> None:
    x, weight, w_scale, bias = case.tensors(*geometry[:2])
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    got = OPS.conv2d(
        x, 0.02, case.x_zp, weight, w_scale, bias, *geometry[2], *case.out, *post_op[:2]
    )
    sums = integer_conv(x, case.x_zp, weight, geometry[2])
    assert_one_step(got, activate(real(sums, 0.02, w_scale, bias, 2), post_op), case.out)
    assert got.is_contiguous(memory_format=torch.channels_last)


@MODEST
@given(
    cases(), geometries(), st.sampled_from(DTYPES), st.sampled_from(["none", "relu"]), st.booleans()
)
def test_conv2d_add(
    case: Case, geometry: Any, other_dtype: torch.dtype, post_op: str, channels_last: bool
) -> None:
    x, weight, w_scale, bias = case.tensors(*geometry[:2])
    sums = integer_conv(x, case.x_zp, weight, geometry[2])
    if other_dtype == torch.float32:
        other, scale, zero_point = torch.randn(sums.shape), 1.0, 0
    else:
        low, high = bounds(other_dtype)
        other = torch.randint(low, high + 1, sums.shape, dtype=other_dtype)
        scale, zero_point = 0.05, 11
    other = other.contiguous(memory_format=torch.channels_last) if channels_last else other
    before = other.clone()
    summand = (other, scale, zero_point)
    got = OPS.conv2d_add(
        x, 0.02, case.x_zp, weight, w_scale, bias, *geometry[2], *summand, *case.out, post_op
    )
    expected = real(sums, 0.02, w_scale, bias, 2) + (other.double() - zero_point) * scale
    assert_one_step(got, activate(expected, (post_op, [], "none")), case.out)
    assert torch.equal(other, before)
    assert got.is_contiguous(memory_format=torch.channels_last)


@MODEST
@given(st.data())
def test_max_pool2d_picks_the_largest_integer(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(QUANTIZED))
    kernel = [data.draw(st.integers(1, 4)) for _ in range(2)]
    stride = [data.draw(st.integers(1, 3)) for _ in range(2)]
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    shape = [data.draw(st.integers(0, 2)), *(data.draw(st.integers(1, n)) for n in (70, 40, 20))]
    shape[2:] = [max(s, k) for s, k in zip(shape[2:], kernel, strict=True)]
    torch.manual_seed(data.draw(st.integers(0, 9999)))
    low, high = bounds(dtype)
    x = torch.randint(low, high + 1, shape, dtype=dtype)
    arguments = (kernel, stride, padding, [1, 1], data.draw(st.booleans()))
    got = OPS.max_pool2d(x, *arguments)
    assert torch.equal(got.float(), F.max_pool2d(x.float(), *arguments))
    assert got.dtype == dtype and got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("x_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("value", [127, -128])
def test_the_largest_possible_sums_are_exact(x_dtype: torch.dtype, value: int) -> None:
    x = torch.full((5, 4096), bounds(x_dtype)[1], dtype=x_dtype)
    weight = torch.full((7, 4096), value, dtype=torch.int8)
    sums = integer_linear(x, 0, weight).float()
    ones = torch.ones(7)
    assert torch.equal(OPS.linear(x, 1.0, 0, weight, ones, None), sums)
    image, kernel = x.reshape(5, 4096, 1, 1), weight.reshape(7, 4096, 1, 1)
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    got = OPS.conv2d(image, 1.0, 0, kernel, ones, None, *geometry)
    assert torch.equal(got.flatten(1), sums)


def _calls() -> dict[str, tuple[Any, ...]]:
    x, weight = torch.randint(0, 256, (2, 4, 6, 5), dtype=torch.uint8), torch.ones(3, 4, 1, 1)
    product = (x, 0.1, 3, weight.to(torch.int8), torch.ones(3), None)
    geometry = ([2, 1], [1, 1], [1, 1], 1)
    other = torch.randn(2, 3, 4, 7)
    flat = (torch.ones(2, 3, 8, dtype=torch.int8), 0.1, 3, torch.ones(5, 8, dtype=torch.int8))
    return {
        "linear": (*flat, torch.ones(5), torch.ones(5), 0.2, 1, torch.uint8, "relu"),
        "conv2d": (*product, *geometry, 0.2, 1, torch.int8),
        "conv2d_add": (*product, *geometry, other, 1.0, 0, 0.2, 1, torch.int8, "relu"),
        "max_pool2d": (x, [3, 2], [2, 2], [1, 1]),
    }


@pytest.mark.parametrize("name", sorted(ops.SCHEMAS))
def test_operators_keep_the_rules_of_torch_library(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, _calls()[name])


@pytest.mark.parametrize("name", sorted(ops.SCHEMAS))
def test_fake_results_are_laid_out_like_real_ones(name: str) -> None:
    call = _calls()[name]
    found = getattr(OPS, name)(*call)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in call]
        fake = getattr(OPS, name)(*fakes)
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


@pytest.mark.parametrize(
    ("name", "position", "value", "message"),
    [
        ("linear", 0, torch.ones(2, 8), "x uint8/int8"),
        ("linear", 4, torch.ones(4), r"w_scale float32 \(5,\), not \(4,\)"),
        ("linear", 8, torch.float32, "out_scale=1"),
        ("linear", 8, torch.int32, "out_dtype torch.int32"),
        ("linear", 9, "sigmoid", "'sigmoid' with 0 argument"),
        ("linear", 9, "hardtanh", "hardtanh/2"),
        ("conv2d", 0, torch.ones(4, 6, 5, dtype=torch.uint8), "rank 4"),
        ("conv2d_add", 11, 0.5, "other is torch.float32 with scale 0.5"),
        ("max_pool2d", 0, torch.ones(4, 6, 5, dtype=torch.uint8), "rank 4"),
    ],
)
def test_what_an_operator_does_not_take(name: str, position: int, value: Any, message: str) -> None:
    call = [*_calls()[name]]
    call[position] = value
    with pytest.raises(ValueError, match=message):
        getattr(OPS, name)(*call)
