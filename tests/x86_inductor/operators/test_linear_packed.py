# SPDX-License-Identifier: Apache-2.0
"""Linears by packed weights of four and eight bits, in C++ and in torch's operators, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.backend import kit
from qompose_x86_inductor.native import packed_linear
from qompose_x86_inductor.operators import linear_packed
from qompose_x86_inductor.operators.linear_packed import (
    OPERATOR,
    UNIT,
    LinearSizes,
    PackedLinear,
    Rows,
    pack,
    reference,
    unpack,
)
from torch import Tensor

MODEST = settings(max_examples=60, deadline=None)
FORMS: dict[str, Callable[..., Tensor]] = {"C++": OPERATOR, "torch": reference}
every_form = pytest.mark.parametrize("form", FORMS)
every_row = pytest.mark.parametrize("rows", list(Rows))
# Relative to the sum of magnitudes: float32 rounds each of the sums of a few hundred products.
ROUNDING = 2.0**-19


class Linear(NamedTuple):
    """Arguments of the operator, and the weight that they mean in float64 (out, in)."""

    tensors: tuple[Tensor | None, ...]
    sizes: LinearSizes
    weight: Tensor

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        return x, *self.tensors, [*self.sizes]


def a_linear(
    bits: int, channels: int, depth: int, group: int | None, rows: Rows, *, zeros: bool, bias: bool
) -> Linear:
    most, groups = 1 << (bits - 1), depth // group if group else 1
    integers = torch.randint(-most, most, (channels, depth), dtype=torch.int8)
    scales = torch.rand(channels, groups) * 0.02 + 1e-4
    scales = scales.bfloat16().float() if group else scales
    points = torch.randint(-8, 8, (channels, groups), dtype=torch.int8) if zeros else None
    shifted = integers.double().reshape(channels, groups, depth // groups)
    shifted = shifted if points is None else shifted - points.double()[..., None]
    weight = (shifted * scales.double()[..., None]).reshape(channels, depth)
    columns = weight.sum(1).float() if rows == Rows.AFFINE else None
    whole = -(-depth // UNIT) * UNIT
    added = torch.randn(channels) if bias else None
    sizes = LinearSizes(channels, whole, group or whole, bits, int(rows), depth)
    return Linear((*pack(integers, scales, points, bits), columns, added), sizes, weight)


def exactly(x: Tensor, linear: Linear) -> tuple[Tensor, Tensor]:
    """The result in float64, and the magnitudes whose rounding is allowed for."""
    rows, bias = x.reshape(-1, x.shape[-1]), linear.tensors[-1]
    real, size = rows.double(), rows.double().abs()
    if linear.sizes.rows != Rows.FLOATS:
        symmetric = linear.sizes.rows == Rows.SYMMETRIC
        scale, point = kit.choose_qparams_per_row(rows, symmetric=symmetric)
        integers = kit.quantize_rows(rows, scale, point).double()
        real = (integers - (0 if point is None else point.double())) * scale.double()
        size = (integers.abs() + 128) * scale.double()
    added = torch.zeros(1).double() if bias is None else bias.double()
    shape = (*x.shape[:-1], len(linear.weight))
    sums, sizes = real @ linear.weight.T + added, size @ linear.weight.abs().T + added.abs()
    return sums.view(shape), sizes.view(shape)


def assert_exact(actual: Tensor, x: Tensor, linear: Linear) -> None:
    exact, size = exactly(x, linear)
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= size * ROUNDING + 1e-37).all()


@st.composite
def linears(draw: st.DrawFn) -> tuple[Tensor, Linear]:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    group = draw(st.sampled_from([None, 32, 64, 256]))
    depth = group * draw(st.integers(1, 3)) if group else draw(st.sampled_from([1, 7, 70, 257]))
    zeros = group is not None and draw(st.booleans())
    linear = a_linear(
        draw(st.sampled_from([4, 8])), draw(st.sampled_from([1, 6, 16, 21, 64, 100])), depth, group,
        draw(st.sampled_from(list(Rows))), zeros=zeros, bias=draw(st.booleans()),
    )  # fmt: skip
    shape = draw(st.sampled_from([(), (1,), (0,), (5,), (2, 3), (11,), (12,), (41,)]))
    x = torch.randn(*shape, depth) + draw(st.sampled_from([0.0, 3.0, -100.0]))
    return x * draw(st.sampled_from([1e-12, 1.0, 1e12])), linear


@every_form
@MODEST
@given(linears())
def test_is_the_product_of_what_is_packed(form: str, given: tuple[Tensor, Linear]) -> None:
    x, linear = given
    assert_exact(FORMS[form](*linear.arguments(x)), x, linear)


@MODEST
@given(linears())
def test_unpacked_it_is_the_weight(given: tuple[Tensor, Linear]) -> None:
    _, linear = given
    weight, scales, zeros, *_ = linear.tensors
    assert weight is not None and scales is not None
    floats = unpack(PackedLinear(weight, scales, zeros), linear.sizes)
    assert torch.allclose(floats[:, : linear.weight.shape[1]].double(), linear.weight, rtol=1e-6)
    bits = 8 * weight.numel() / (-(-len(linear.weight) // 16) * 16 * linear.sizes.depth)
    assert bits == linear.sizes.bits


@every_row
@every_form
def test_rows_do_not_depend_on_each_other(rows: Rows, form: str) -> None:
    """Nor do they read beyond theirs; many rows are computed in another way than few."""
    linear = a_linear(4, 20, 64, 32, rows, zeros=True, bias=True)
    x = torch.randn(40, 64) * torch.tensor([1.0, 1e-20, 1e20, 0.0]).repeat(10)[:, None]
    few = torch.cat([FORMS[form](*linear.arguments(part)) for part in x.split(3)])
    for result in (FORMS[form](*linear.arguments(x)), few):
        assert_exact(result, x, linear)


@pytest.mark.parametrize("rows", [Rows.SYMMETRIC, Rows.AFFINE])
@pytest.mark.parametrize(
    ("bits", "farthest"), [(4, 0), (4, 8), (4, 16), (4, 17), (4, 128), (8, 0), (8, 128)]
)
def test_many_rows_are_those_of_few_bit_by_bit(rows: Rows, bits: int, farthest: int) -> None:
    """Whatever zero points there are: sums of integers are exact, and groups are added in their order."""
    linear = a_linear(bits, 53, 96, 32, rows, zeros=farthest > 0, bias=True)
    points = linear.tensors[2]
    if points is not None:
        points.random_(-farthest, farthest)
        points.view(-1)[:2] = torch.tensor([-farthest, min(farthest, 127)])
    x = torch.randn(47, 96) + torch.arange(-2.0, 2.7, 0.1)[:47, None]
    few = torch.cat([OPERATOR(*linear.arguments(part)) for part in x.split(3)])
    assert torch.equal(OPERATOR(*linear.arguments(x)), few)


@every_row
@every_form
@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_row_only(
    rows: Rows, form: str, count: int, value: float
) -> None:
    linear = a_linear(8, 20, 40, None, rows, zeros=False, bias=True)
    x = torch.randn(count, 40)
    x[1, 2] = value
    found = FORMS[form](*linear.arguments(x)).isfinite()
    assert found.all(1).tolist() == [row != 1 for row in range(count)]
    assert not found[1].any() or rows == Rows.FLOATS


@every_row
def test_threads_change_nothing(rows: Rows) -> None:
    linear = a_linear(4, 1000, 512, 128, rows, zeros=True, bias=True)
    before = torch.get_num_threads()
    for count in (1, 5, 40):
        x = torch.randn(count, 512)
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(OPERATOR(*linear.arguments(x)))
        torch.set_num_threads(before)
        assert torch.equal(*results)


@every_form
@every_row
def test_layouts_and_modes_change_nothing(form: str, rows: Rows) -> None:
    linear = a_linear(4, 20, 64, 32, rows, zeros=False, bias=True)
    x = torch.randn(2, 5, 64)
    whole = FORMS[form](*linear.arguments(x))
    gaps = torch.zeros(5, 2, 128)[..., ::2].transpose(0, 1).copy_(x)
    assert not gaps.is_contiguous()
    assert torch.equal(FORMS[form](*linear.arguments(gaps)), whole)
    with torch.inference_mode():
        assert torch.equal(FORMS[form](*linear.arguments(x.clone())), whole)


@every_form
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (3, 0)])
@every_row
def test_what_is_empty_gives_the_bias(form: str, shape: tuple[int, ...], rows: Rows) -> None:
    linear = a_linear(8, 6, shape[-1], None, rows, zeros=False, bias=True)
    bias = linear.tensors[-1]
    assert bias is not None
    actual = FORMS[form](*linear.arguments(torch.randn(shape)))
    assert torch.equal(actual, bias.expand(*shape[:-1], 6))


def test_without_a_compiler_torch_computes_it_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.codecache import CppCodeCache

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler")

    linear, x = a_linear(4, 6, 64, 32, Rows.FLOATS, zeros=True, bias=False), torch.randn(3, 64)
    with monkeypatch.context() as patch:
        patch.setattr(CppCodeCache, "load", fail)
        packed_linear.compiled.cache_clear()
        with pytest.warns(UserWarning, match="no compiler"):
            assert_exact(OPERATOR(*linear.arguments(x)), x, linear)
        packed_linear.compiled.cache_clear()
        patch.setenv("QOMPOSE_NATIVE_CODE", "0")
        assert_exact(OPERATOR(*linear.arguments(x)), x, linear)
    packed_linear.compiled.cache_clear()


@every_row
def test_torch_knows_it(rows: Rows) -> None:
    linear = a_linear(4, 20, 64, 32, rows, zeros=True, bias=True)
    torch.library.opcheck(OPERATOR, linear.arguments(torch.randn(2, 3, 64)))


@every_form
def test_other_inputs_are_named(form: str) -> None:
    linear = a_linear(8, 6, 63, None, Rows.FLOATS, zeros=False, bias=True)
    for x in (torch.randn(3, 63).double(), torch.randn(3, 62), torch.randn(3, 64)):
        with pytest.raises(ValueError, match=r"linear_packed.*x float32"):
            FORMS[form](*linear.arguments(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    linear, x = a_linear(4, 21, 64, 32, Rows.FLOATS, zeros=True, bias=True), torch.randn(13, 64)
    expected = OPERATOR(*linear.arguments(x))
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(OPERATOR(*linear.arguments(x)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("place", [1, 4])  # scales, bias
def test_constants_of_another_dtype_are_named(place: int) -> None:
    linear, x = a_linear(8, 6, 64, None, Rows.FLOATS, zeros=False, bias=True), torch.randn(3, 64)
    tensors = [
        None if t is None else t.half() if n == place else t for n, t in enumerate(linear.tensors)
    ]
    with pytest.raises(ValueError, match=r"linear_packed.*float16"):
        OPERATOR(x, *tensors, [*linear.sizes])


def test_scales_take_half_the_bytes_where_bfloat16_holds_them() -> None:
    halves, wholes = torch.tensor([[0.5]]), torch.tensor([[1 / 3]])
    weight = torch.zeros(1, 32, dtype=torch.int8)
    assert pack(weight, halves, None, 4).scales.dtype is torch.bfloat16
    assert pack(weight, wholes, None, 4).scales.dtype is torch.float32
    assert pack(weight, halves, torch.zeros(1, 1), 4).zero_points is None
    assert linear_packed.LANES == 16
