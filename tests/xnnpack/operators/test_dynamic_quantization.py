# SPDX-License-Identifier: Apache-2.0
"""The quantization of rows at run time, against torch's own formula."""

from __future__ import annotations

import pytest
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from hypothesis import given
from qompose_xnnpack.operators.dynamic_quantization import quantize_rows

from tests.xnnpack.operators.arithmetic import examples, float_inputs, normal, sample

QD = torch.ops.quantized_decomposed


class TestQuantizeRows:
    @examples
    @given(float_inputs())
    def test_errs_by_half_a_step_over_a_range_with_zero(
        self, case: tuple[int, float, float]
    ) -> None:
        x = sample(case, 9, 33)
        quantized, scale, zp = quantize_rows(x)
        assert (quantized.dtype, scale.dtype, zp.dtype) == (torch.int8, torch.float32, torch.int32)
        assert (scale.shape, zp.shape) == ((9, 1), (9, 1))
        assert ((zp >= -128) & (zp <= 127)).all()
        back = (quantized.double() - zp) * scale
        # Half a step for the value, half a step for the zero point at the ends of the range.
        assert ((back - x).abs() <= scale.double() * 1.001).all()
        inside = (quantized > -128) & (quantized < 127)
        assert ((back - x).abs() <= scale.double() * 0.501)[inside].all()

    @examples
    @given(float_inputs())
    def test_agrees_with_torch_to_a_step(self, case: tuple[int, float, float]) -> None:
        x = sample(case, 9, 33)
        quantized, scale, zp = quantize_rows(x)
        scales, points = QD.choose_qparams_per_token_asymmetric.default(x, torch.int8)
        wide = (scales > torch.finfo(torch.float32).eps).flatten()
        torch.testing.assert_close(scale[wide].double(), scales[wide], rtol=1e-6, atol=0)
        assert ((zp - points)[wide].abs() <= 1).all()
        args = (scales, points, -128, 127, torch.int8)
        theirs = QD.quantize_per_token.default(x, *args)
        assert ((quantized.int() - theirs.int())[wide].abs() <= 1).all()

    def test_integers_over_the_whole_range_stay_themselves(self) -> None:
        x = torch.arange(-128.0, 128.0).repeat(2, 1) * torch.tensor([[1.0], [0.25]])
        quantized, scale, zp = quantize_rows(x)
        assert torch.equal(quantized[0], torch.arange(-128, 128).to(torch.int8))
        assert torch.equal(quantized[1], quantized[0])
        assert (scale.tolist(), zp.tolist()) == ([[1.0], [0.25]], [[0], [0]])

    @pytest.mark.parametrize("value", [0.0, 1e-42, -1e-42, 1e-38])
    def test_rows_of_almost_nothing_are_zero(self, value: float) -> None:
        quantized, scale, zp = quantize_rows(torch.full((1, 5), value))
        assert ((quantized.double() - zp) * scale == 0).all()


class TestNarrowRows:
    """Rows whose range is below 255 steps of torch's least scale, 2**-23."""

    def test_keep_their_precision_where_the_operators_of_the_graph_lose_it(self) -> None:
        x = normal(0, 2, 64) * torch.tensor([[1e-8], [1e-4]])
        quantized, scale, zp = quantize_rows(x)
        ours = (quantized.double() - zp) * scale
        scales, points = QD.choose_qparams_per_token_asymmetric.default(x, torch.int8)
        args = (scales, points, -128, 127, torch.int8)
        integers = QD.quantize_per_token.default(x, *args)
        theirs = QD.dequantize_per_token.default(integers, *args, torch.float32)
        assert scales.flatten()[0] == 2.0**-23 > 100 * scale.flatten()[0]
        assert (ours - x).norm(dim=1).less(0.01 * x.norm(dim=1)).all()
        assert (theirs - x).norm(dim=1).less(0.01 * x.norm(dim=1)).tolist() == [False, True]
