# SPDX-License-Identifier: Apache-2.0
"""Comparisons of models of the zoo with the quantizers of the plugins: all is paired, faults are found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import qompose
import torch
from qompose.reporting.report_data import KERNEL_ERROR
from torch import nn

from tests.core.diagnosis.brute import stages
from tests.products import x86, xnnpack
from tests.sampling import at_once
from tests.zoo import ZooModel, by_name

MODELS = [
    "bert",  # a pooler that nobody reads
    "t5_encoder",  # masks, and dropouts behind kernels
    "whisper_encoder",
    "mobilenet_v2_padded",  # batch norms that are folded
    "key_cache",  # a buffer that it writes to
    "euler_steps",  # numbers that become tensors
    "empty_parts",
    "autocast",
]


QUANTIZERS = {"xnnpack": xnnpack, "x86": x86, "x86 dynamic": lambda: x86(is_dynamic=True)}


def forms(model: ZooModel, quantizer: Any) -> dict[str, Any]:
    program = model.export(dynamic=model.dynamic_shapes is not None)
    return stages(program, qompose.compose("embedding", quantizer), [model.inputs()])


@pytest.mark.parametrize(
    ("name", "quantizer"),
    at_once(
        [(name, quantizer) for name in MODELS for quantizer in QUANTIZERS],
        ("euler_steps", "xnnpack"),
        ("key_cache", "x86"),
        ("autocast", "x86 dynamic"),
    ),
)
def test_all_that_is_quantized_is_paired_and_no_kernel_is_wrong(name: str, quantizer: str) -> None:
    model = by_name(name)
    made = forms(model, QUANTIZERS[quantizer]())
    data = [model.inputs()]
    for one, other in (("float", "converted"), ("float", "lowered"), ("converted", "lowered")):
        found = qompose.compare(made[one], made[other], data)
        assert found.unpaired == (), (one, other)
        assert found.of_cause(KERNEL_ERROR) == (), (one, other)
    assert min(row.sqnr for row in qompose.compare(made["float"], made["prepared"], data)) > 90


@pytest.mark.parametrize("size", [1e-7, 1e-30])
@pytest.mark.parametrize(
    "quantizer", [partial(xnnpack, per_token=False), x86], ids=["xnnpack", "x86"]
)
def test_a_scale_per_tensor_has_no_least_that_rounds_inputs_away(
    quantizer: Any, size: float
) -> None:
    x, model = torch.randn(8, 16), nn.Linear(16, 16).eval()
    nn.init.zeros_(model.bias)
    program = torch.export.export(model, (x,))
    prepared = qompose.prepare_pt2e(program, quantizer(is_dynamic=True))
    converted = qompose.convert_pt2e(prepared)
    for quantized in (converted, qompose.lower(converted)):
        exact, found = (m(x * size).double() for m in (model, quantized))
        assert (found - exact).norm() < 0.02 * exact.norm()
        assert not quantized(x * 0).any()


@pytest.mark.parametrize("size", at_once((1.0, 1e-5, 3e-6, 1e-6, 1e-9), 1.0, 1e-6, 1e-9))
@pytest.mark.parametrize("per_token", [True, False])
def test_inputs_below_the_least_scale_of_torch(size: float, per_token: bool) -> None:
    """torch rounds them away per token, XNNPACK does not: its kernel is nearer to the float model."""
    x, model = torch.randn(8, 16), nn.Linear(16, 16, bias=False).eval()
    program = torch.export.export(model, (x,))
    quantizer = xnnpack(is_dynamic=True, per_token=per_token)
    converted = qompose.convert_pt2e(qompose.prepare_pt2e(program, quantizer))
    lowered = qompose.lower(converted)
    found = qompose.compare(program, lowered, [x * size], converted=converted)["linear"]
    assert found.cause == "rounding"
    assert found.own_sqnr > 35
    kernel = next(node for node in lowered.graph.nodes if "linear_dynamic" in str(node.target))
    right = kernel.target
    kernel.target = lambda *args: right(*args) * 1.5
    found = qompose.compare(program, lowered, [x * size], converted=converted)["linear"]
    # Of 1e-9 Q/DQ keeps nothing per token.
    assert found.cause == ("rounding" if size == 1e-9 and per_token else KERNEL_ERROR)
