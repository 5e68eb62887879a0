# SPDX-License-Identifier: Apache-2.0
"""Specifications that backends need not spell out: what they say, and what calibration makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose import QuantizationSpec, activation_spec, weight_spec
from qompose.errors import ConfigError
from torch import Tensor


def qparams(spec: QuantizationSpec, data: Tensor) -> tuple[Tensor, Tensor]:
    observer: Any = spec.observer_or_fake_quant_ctr(  # as prepare makes it
        dtype=spec.dtype, quant_min=spec.quant_min, quant_max=spec.quant_max, qscheme=spec.qscheme,
        **({} if spec.ch_axis is None else {"ch_axis": spec.ch_axis}),
        **({} if spec.block_size is None else {"block_size": spec.block_size}),
    )  # fmt: skip
    observer(data)
    scale, zero_point = observer.calculate_qparams()
    return scale, zero_point


@pytest.mark.parametrize("word", ["histogram", "mse", "minmax", "moving_average"])
@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.int8, -128, 127), (torch.uint8, 0, 127)])
def test_static_activations(word: str, dtype: torch.dtype, low: int, high: int) -> None:
    scale, zero_point = qparams(
        activation_spec(dtype, low, high, range=word), torch.linspace(-1, 3, 99)
    )
    assert scale.numel() == 1 and float(scale) == pytest.approx(4 / (high - low), rel=0.05)
    assert low <= int(zero_point) <= high


@pytest.mark.parametrize("per_token", [False, True])
def test_dynamic_activations(per_token: bool) -> None:
    spec = activation_spec(torch.int8, -128, 127, is_dynamic=True, per_token=per_token)
    assert spec.is_dynamic and spec.block_size == ((-1,) if per_token else None)


def test_what_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"range must .*'widest'"):
        activation_spec(torch.int8, -128, 127, range="widest", is_dynamic=True)
    with pytest.raises(ConfigError):
        activation_spec(torch.int8, -128, 127, per_token=True)
    with pytest.raises(ConfigError):
        weight_spec(-8, 7, group_size=0)
    with pytest.raises(ConfigError, match=r"weight_range must .*'widest'"):
        weight_spec(-8, 7, range="widest")
    with pytest.raises(ConfigError, match=r"weight_range='mse' is for .* a group of 32 weights"):
        weight_spec(-8, 7, group_size=32, range="mse")


@pytest.mark.parametrize(
    ("options", "shape"),
    [({}, (3,)), ({"per_channel": False}, ()), ({"group_size": 4}, (3, 2))],
    ids=["channels", "tensor", "groups"],
)
def test_weights(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    weight = torch.arange(1.0, 25.0).view(3, 8)
    scale, zero_point = qparams(weight_spec(-127, 127, **options), weight)
    assert scale.squeeze().shape == shape and not zero_point.any()
    largest = weight.amax() if shape == () else weight.view(*shape, -1).amax(-1)
    torch.testing.assert_close(
        scale.squeeze().float(), largest / 127, rtol=2**-8 if len(shape) == 2 else 0.01, atol=0
    )


@pytest.mark.parametrize("per_channel", [True, False])
def test_the_range_of_weights(per_channel: bool) -> None:
    """The less the power, the more is clipped of four bits; all of the weights' least scale is kept."""
    weight = torch.randn(4, 900, generator=torch.Generator().manual_seed(0))
    scales = []
    for word in ("mse", "histogram", "minmax"):
        spec = weight_spec(-8, 7, per_channel=per_channel, range=word)
        scales.append(qparams(spec, weight)[0].amax())
        assert float(qparams(spec, 1e-9 * weight)[0].amin()) == 2**-12
    assert scales[0] < scales[1] < scales[2]
