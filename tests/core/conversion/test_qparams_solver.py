# SPDX-License-Identifier: Apache-2.0
"""What is wrong with parameters is said in a line, however many channels a tensor has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from qompose.conversion.qparams_solver import few_levels, invalid
from qompose.spec.qdq import QParams
from qompose.spec.qparams import choose_qparams

CHANNELS = 100_000


def of_channels(scale: float = 1.0, zero_point: Any = 0) -> QParams:
    """Parameters that are fine but for those of the last channel."""
    scales, zeros = torch.ones(CHANNELS), torch.zeros(CHANNELS, dtype=torch.int64)
    zeros = zeros if isinstance(zero_point, int) else zeros.float()
    scales[-1], zeros[-1] = scale, zero_point
    return QParams(scales, zeros, -8, 7, torch.int8, 0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"scale": 0.0}, f"has the scale 0 (1 of {CHANNELS}), which is not positive and finite"),
        ({"scale": float("nan")}, f"has the scale nan (1 of {CHANNELS}), which is"),
        ({"zero_point": float("inf")}, f"has the zero point inf (1 of {CHANNELS})"),
        ({"zero_point": 8}, f"has the zero point 8 (1 of {CHANNELS}), outside [-8, 7]"),
    ],
    ids=str,
)
def test_invalid_parameters(parameters: Any, message: str) -> None:
    (found,) = invalid(of_channels(**parameters), (CHANNELS, 4))
    assert message in found


def test_valid_parameters() -> None:
    assert not [*invalid(of_channels(), (CHANNELS, 4))]
    assert not [*invalid(of_channels(zero_point=100.5), (CHANNELS, 4))]
    assert [*invalid(of_channels(), (7, 4))] == [
        f"has {CHANNELS} scales and {CHANNELS} zero points, not 7"
    ]


def test_channels_that_eps_leaves_few_integers() -> None:
    least, most = torch.tensor([-1.0, 2.0, 5.0, 0.0]), torch.tensor([1.0, 2.01, 5.0, 0.5])
    found = choose_qparams(
        least, most, dtype=torch.uint8, quant_min=None, quant_max=None,
        qscheme=torch.per_channel_affine_float_qparams, eps=1e-3,
    )  # fmt: skip
    q = QParams(*found, 0, 255, torch.uint8, 0)
    told = "1 of 4 channels take up less than a quarter of the 256 integers, since 0.001, the eps"
    assert few_levels(q, least, most, 1e-3).startswith(told)
    as_torch = replace(q, scale=torch.where(q.scale > 1e-3, q.scale, 1.0))
    assert few_levels(as_torch, least, most, 1e-3).startswith(told)
    fine = replace(q, scale=(most - least) / 255)
    assert few_levels(fine, least, most, 1e-6) == ""
    whole = replace(q, zero_point=q.zero_point.round().long())
    assert few_levels(whole, least, most, 1e-3) == ""
