# SPDX-License-Identifier: Apache-2.0
"""Linears of floats that are quantized when they run, against float64 and the Q/DQ operators."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.backend import kit
from qompose_x86_inductor.onednn import exactness, packed_weights
from qompose_x86_inductor.onednn.post_ops import POST_OPS
from qompose_x86_inductor.operators.linear_dynamic import linear_in_graph, quantize_in_graph
from torch import Tensor, nn

OPS = torch.ops.qompose_x86
EPS = torch.finfo(torch.float32).eps
MODEST = settings(max_examples=40, deadline=None)
WHOLE = (0, 255, EPS)
POSTS: tuple[tuple[Any, ...], ...] = (
    ("none",), ("relu",), ("gelu", [], "none"), ("gelu", [], "tanh"), ("swish",), ("hardswish",),
    ("hardtanh", [-0.5, 0.75]), ("leaky_relu", [0.25]), ("tanh",),
)  # fmt: skip
# Relative to the sum of magnitudes: float32 rounds each of a few additions and products.
ROUNDING = 2.0**-21


def operands(
    seed: int, *x_shape: int, channels: int = 6, extreme: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Floats, an int8 weight, scales and a bias."""
    torch.manual_seed(seed)
    weight = torch.randint(-128, 128, (channels, x_shape[-1]), dtype=torch.int8)
    weight = torch.where(weight < 0, -128, 127).to(torch.int8) if extreme else weight
    scales = torch.rand(channels) * 0.02 + 1e-4
    return torch.randn(x_shape), weight, scales, torch.randn(channels)


def per_tensor_exactly(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, bounds: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The real values, and the magnitudes whose rounding is allowed for: float64."""
    scale, point = kit.choose_qparams(x, *bounds, EPS)
    shifted = kit.quantize(x, scale, point, *bounds, torch.uint8).double() - point.double()
    unit = scales.double() * scale.double()
    return scaled(shifted, weight, unit, bias)


def scaled(
    shifted: Tensor, weight: Tensor, unit: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    added = torch.zeros(1) if bias is None else bias.double()
    exact = shifted @ weight.double().T * unit + added
    return exact, shifted.abs() @ weight.double().abs().T * unit + added.abs()


def assert_close(actual: Tensor, exact: Tensor, size: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= size * ROUNDING + 1e-37).all()


@st.composite
def products(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `operands`, of any magnitude, perhaps without a bias."""
    shape = draw(st.sampled_from([(1, 1), (5,), (3, 64), (2, 3, 70), (1, 2, 3, 17), (2, 4096)]))
    seed, extreme = draw(st.integers(0, 2**16)), draw(st.booleans())
    x, weight, scales, bias = operands(seed, *shape, extreme=extreme)
    magnitude = draw(st.sampled_from([1e-12, 1e-3, 1.0, 1e4, 1e12]))
    return x * magnitude, weight, scales, bias if draw(st.booleans()) else None


def dynamic(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, low: int, high: int, eps: float,
    *post: Any,
) -> Tensor:  # fmt: skip
    """Both operators, one after the other."""
    quantized = OPS.quantize_dynamic(x, low, high, eps)
    return OPS.linear_dynamic(*quantized, weight, scales, bias, *post)  # type: ignore[no-any-return]


def traced(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, low: int, high: int, eps: float,
    *post: Any,
) -> Tensor:  # fmt: skip
    """The same as compilers see it."""
    quantized, zeros = quantize_in_graph(x, low, high, eps), torch.zeros_like(ZEROS)
    return linear_in_graph(*quantized, weight, scales, bias, *post, zero_points=zeros)


NOT_FINITE = (math.nan, math.inf, -math.inf)


class TestPerTensor:
    @MODEST
    @given(products(), st.sampled_from([(0, 255), (0, 127)]), st.sampled_from(POSTS))
    def test_is_the_scaled_integer_sum(self, given: Any, bounds: Any, post: Any) -> None:
        exact, size = per_tensor_exactly(*given, bounds)
        name, args, algorithm = (*post, [], "none")[:3] if len(post) == 1 else (*post, "none")[:3]
        wanted = POST_OPS[name].compute(exact, args, algorithm)
        actual = dynamic(*given, *bounds, EPS, *post)
        # Curves have slopes up to 1.2, and float32 forms of their own.
        assert_close(actual, wanted, 2 * size + (4 * wanted.abs() + 2 if name != "none" else 0))

    @pytest.mark.parametrize("post", [("none",), ("relu",)])
    @pytest.mark.parametrize("magnitude", [1e28, 1e30, 1e36, 3e37])
    def test_large_inputs_have_finite_results(self, magnitude: float, post: Any) -> None:
        """Sums of integers times the input's scale alone are beyond float32."""
        x, weight, scales, bias = operands(0, 3, 64)
        x *= magnitude / x.abs().max()
        exact, size = per_tensor_exactly(x, weight, scales, bias, (0, 255))
        wanted = exact.relu() if post == ("relu",) else exact
        assert_close(dynamic(x, weight, scales, bias, *WHOLE, *post), wanted, size)
        narrow = weight.clamp(*exactness.NARROW)  # graphs hold what oneDNN multiplies exactly
        for added in (bias, None):
            rest = (x, narrow, scales, added, *WHOLE, *post)
            assert torch.equal(traced(*rest), dynamic(*rest))

    @pytest.mark.parametrize("value", [*NOT_FINITE, 3.4e38])
    @pytest.mark.parametrize("post", POSTS)
    def test_what_is_not_finite_makes_all_of_it_nan(self, value: float, post: Any) -> None:
        """As the Q/DQ operators do: the scale is not finite then, and there is one scale."""
        x, weight, scales, bias = operands(0, 3, 8)
        x[1, 2] = value
        x[0, 0] = -3.4e38 if value == 3.4e38 else x[0, 0]  # a range beyond float32
        assert dynamic(x, weight, scales, bias, *WHOLE, *post).isnan().all()
        assert traced(x, weight, scales, bias, *WHOLE, *post).isnan().all()


ZEROS = torch.zeros(6, dtype=torch.int32)


def per_tensor(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return dynamic(x, weight, scales, bias, *WHOLE)


def in_graph(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return traced(x, weight, scales, bias, *WHOLE)


class TestOperator:
    def test_layouts_and_modes_change_nothing(self) -> None:
        x, *rest = operands(0, 2, 5, 16)
        whole = per_tensor(x, *rest)
        spread = torch.randn(5, 2, 32)[..., ::2].transpose(0, 1).copy_(x)
        assert not spread.is_contiguous()
        assert torch.equal(per_tensor(spread, *rest), whole)
        with torch.inference_mode():
            assert torch.equal(per_tensor(x.clone(), *(t.clone() for t in rest)), whole)

    @pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (3, 0)])
    def test_what_is_empty_gives_the_bias(self, shape: tuple[int, ...]) -> None:
        x, weight, scales, bias = operands(0, *shape)
        actual = per_tensor(x, weight, scales, bias)
        assert actual.shape == (*shape[:-1], 6)
        assert torch.equal(actual, bias.expand(*shape[:-1], 6))

    def test_where_onednn_would_not_be_exact_the_sums_still_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = operands(0, 3, 64, extreme=True)
        wanted = per_tensor(*given)
        monkeypatch.setattr(exactness, "admits", lambda weight: False)
        x, weight, *rest = given
        again = weight.clone()
        torch.testing.assert_close(per_tensor(x, again, *rest), wanted, rtol=1e-6, atol=1e-5)
        assert packed_weights.linear(again).weight is None

    def test_other_inputs_are_named(self) -> None:
        x, *rest = operands(0, 3, 8)
        for function, device in itertools.product((per_tensor, in_graph), ("cpu", "meta")):
            with pytest.raises(ValueError, match=r"quantize_dynamic.*float16"):
                function(*(v.to(device) for v in (x.half(), *rest)))
            with pytest.raises(ValueError, match=r"linear_dynamic.*\(3, 7\)"):
                function(*(v.to(device) for v in (x[:, :7], *rest)))

    def test_a_product_of_floats_is_refused(self) -> None:
        x, *rest = operands(0, 3, 8)
        _, *qparams = OPS.quantize_dynamic(x, *WHOLE)
        for device in ("cpu", "meta"):
            given = (v.to(device) for v in (x, *qparams, *rest))
            with pytest.raises(ValueError, match=r"linear_dynamic.*float32"):
                OPS.linear_dynamic(*given)

    def test_torch_knows_them(self) -> None:
        x, *rest = operands(0, 2, 3, 8)
        for one in (x, x.transpose(0, 1), x[..., ::2], x[:0]):
            torch.library.opcheck(OPS.quantize_dynamic.default, (one, *WHOLE))
        quantized = OPS.quantize_dynamic(x, *WHOLE)
        torch.library.opcheck(OPS.linear_dynamic.default, (*quantized, *rest))


class Traced(nn.Module):
    def __init__(self, *rest: Any) -> None:
        super().__init__()
        self.rest = rest
        self.x, weight, self.scales, self.bias = operands(1, 2, 3, 24)
        self.weight = weight.clamp(*exactness.NARROW)  # graphs hold what oneDNN multiplies exactly

    def forward(self, x: Tensor) -> Tensor:
        return traced(x, self.weight, self.scales, self.bias, *self.rest)


@pytest.mark.parametrize("rest", [(*WHOLE, "gelu", [], "tanh"), (0, 127, EPS, "relu")])
def test_in_a_graph_it_is_the_same_without_our_operators(rest: tuple[Any, ...]) -> None:
    module = Traced(*rest)
    wanted = dynamic(module.x, module.weight, module.scales, module.bias, *rest)
    assert torch.equal(module(module.x), wanted)
