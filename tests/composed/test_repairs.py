# SPDX-License-Identifier: Apache-2.0
"""Algorithms on the backends themselves: they help in the kernels, and change nothing where nobody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.testing.fixtures import sqnr
from torch import Tensor, nn

from tests.core.algorithms.test_correction import deep, rows
from tests.core.algorithms.test_equalization import IMAGES, uneven
from tests.core.algorithms.test_smoothing import block, tokens
from tests.products import x86, xnnpack

BACKENDS: dict[str, Callable[..., Any]] = {
    "xnnpack": lambda **options: xnnpack(**{"is_per_channel": False, **options}),
    "x86_inductor": x86,
}


def repaired(
    backend: str,
    model: nn.Module,
    batches: list[Tensor],
    repair: str,
    near: int = 35,
    **options: Any,
) -> tuple[float, float, list[str]]:
    """The distances of the kernels from float on the first batch, in dB, without the repair and with it, and
    its lines of the report; its kernels are `near` dB to the simulation."""
    plain, result = (
        qompose.quantize(
            model, (batches[0],),
            backends=BACKENDS[backend](algorithms=algorithms, **options), calibration=batches,
        )
        for algorithms in ((), (repair,))
    )  # fmt: skip
    assert not any(repair in line for line in (*plain.report.rewrites, *plain.report.notes))
    assert result.report.count("int8 kernel") == plain.report.count("int8 kernel") > 0
    with torch.no_grad():
        assert sqnr(result.converted(batches[0]), result.model(batches[0])) > near
        without, gained = (sqnr(model(batches[0]), r.model(batches[0])) for r in (plain, result))
    return without, gained, [line for line in result.report.rewrites if repair in line]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equalization(backend: str) -> None:
    without, gained, lines = repaired(backend, uneven(), [IMAGES], "equalization", near=40)
    assert gained > max(without + 10, 35)
    assert sum("equalization: " in line for line in lines) == 3


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("xnnpack", {"balance": False}),
        pytest.param(
            "xnnpack", {"is_dynamic": True, "is_per_channel": True}, marks=pytest.mark.full
        ),
        ("x86_inductor", {"balance": False}),
        pytest.param("x86_inductor", {"is_dynamic": True}, marks=pytest.mark.full),
        ("x86_inductor", {"is_dynamic": True, "per_token": True}),
    ],
)
def test_smooth_quant(backend: str, options: dict[str, Any]) -> None:
    batches = [tokens(seed) for seed in range(4)]
    without, gained, lines = repaired(backend, block(), batches, "smooth_quant", **options)
    assert gained > max(without + 10, 33)
    assert "by first.weight and first.bias" in lines[0]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1)).eval()


@pytest.mark.parametrize("images", [False, True], ids=["linears", "convolutions"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_correction(backend: str, images: bool) -> None:
    """With weights of four bits, whose rounding moves the means of outputs."""
    model = convolutions() if images else deep()
    batches = [IMAGES.sigmoid() + 1] if images else [rows(seed) for seed in range(3)]
    options = {"weight_qmin": -8, "weight_qmax": 7}
    without, gained, lines = repaired(backend, model, batches, "bias_correction", **options)
    assert gained > without + 2
    assert sum("bias_correction on" in line for line in lines) == (4 if images else 5)
