# SPDX-License-Identifier: Apache-2.0
"""What algorithms choose does not depend on the magnitude of inputs and weights, as far as float32 goes."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest import mock

import pytest
import qompose
import torch
from hypothesis import example, given, settings, strategies as st
from qompose import QuantizationConfig
from qompose.algorithms import SignRound
from qompose.observers import (
    AutoRangeObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    row_sample,
)
from torch import Tensor, nn

from tests.core.algorithms.test_gptq import FOUR_BITS, data
from tests.core.toy import INT8, PRODUCTS, export, prepare, seeded, toy

LEAST = {"eps": 1e-38}
BLOCKS = replace(
    FOUR_BITS, ch_axis=None, block_size=(1, 16),
    observer_or_fake_quant_ctr=PerBlockMinMaxObserver.with_args(block_size=(1, 16), **LEAST),
)  # fmt: skip
ROWS = replace(
    FOUR_BITS, observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(ch_axis=0, **LEAST)
)
AUTO = replace(INT8, observer_or_fake_quant_ctr=AutoRangeObserver.with_args(**LEAST))
WEIGHTS, STATIC = QuantizationConfig(None, None, BLOCKS), QuantizationConfig(AUTO, None, ROWS)
ALONE = "awq", "scale_search", "gptq", "gptq_sequential", SignRound(iterations=10, ranges=True)
CONFIGS = {
    **{str(word): replace(WEIGHTS, algorithms=(word,)) for word in ALONE},
    **{
        f"static {word}": replace(STATIC, algorithms=(word,))
        for word in ("smooth_quant", "equalization")
    },
    "static": replace(STATIC, algorithms=None),
}
own_hashes = row_sample._hashes


def hashes_without_magnitude(x: Tensor) -> Tensor:
    """Halves of the examples go by hashes of their values, which are others for values twice as large."""
    exponents = torch.frexp(x.double().abs().amax(1, keepdim=True)).exponent
    return own_hashes(torch.ldexp(x.double(), -exponents).float())


@functools.cache
def integers(name: str, of_weights: int, of_inputs: int) -> tuple[dict[str, Tensor], list[str]]:
    """What is stored, and said, of a model whose weights and inputs are multiplied by powers of two."""
    both = nn.Linear(48, 24), nn.Linear(24, 8)
    model = seeded(nn.Sequential(*both[: 2 if "equalization" in name else 1])).eval()
    for number, product in enumerate(model, start=1):
        assert isinstance(product, nn.Linear)
        product.weight.data *= 2.0**of_weights
        product.bias.data *= 2.0 ** (of_weights * number + of_inputs)
    x = (
        data(0, 128, 48)
        * torch.ones(48).index_fill(0, torch.tensor([3, 20]), 40.0)
        * 2.0**of_inputs
    )
    with mock.patch.object(row_sample, "_hashes", hashes_without_magnitude):
        prepared = prepare(export(model, x), toy(*PRODUCTS, config=CONFIGS[name]))
        converted = qompose.convert_pt2e(qompose.calibrate(prepared, [x], progress=False))
    found = {n: v for n, v in converted.state_dict().items() if not v.is_floating_point()}
    report = qompose.report(converted)
    return found, [line for line in report.rewrites if "bias_correction" not in line]


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=1)
@given(of_weights=st.integers(-35, 35), of_inputs=st.integers(-50, 50))
@example(of_weights=0, of_inputs=83)  # 1e25
@example(of_weights=-50, of_inputs=50)
def test_powers_of_two_change_nothing(name: str, of_weights: int, of_inputs: int) -> None:
    (wanted, effects), (found, said) = integers(name, 0, 0), integers(name, of_weights, of_inputs)
    assert wanted.keys() == found.keys() and effects
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert said == effects
