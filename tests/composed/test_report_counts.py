# SPDX-License-Identifier: Apache-2.0
"""Reports of the real backends: what they count is in the graph, and in the program of another runtime."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any

import pytest
import qompose
import torch
from qompose.reporting.report_data import KERNEL

from tests.counting import check, first_of_every_tag
from tests.sampling import at_once
from tests.zoo import ZooModel, by_name

SLOW = ("resnet18", "mobilenet_v2", "pyramid_detector", "unet", "mixed_regions", "scan_two_values")
MODELS = [model for model in first_of_every_tag() if model.name not in SLOW]


def all_three() -> Any:
    """Linears of one, the rest of the other: their integers differ where they meet."""
    linears: Any = qompose.compose("x86_inductor").members[0]
    config = linears.backend.default_config
    linears.set_global(None).set_object_type(torch.nn.Linear, config)
    return qompose.compose("embedding", linears, "xnnpack")


QUANTIZERS = {
    "xnnpack": lambda: qompose.compose("embedding", "xnnpack"),
    "x86_inductor": lambda: qompose.compose("embedding", "x86_inductor"),
    "all three": all_three,
}
EVERY = list(itertools.product(MODELS, QUANTIZERS))


def converted_with(quantizer: Any, model: ZooModel) -> Any:
    prepared = qompose.prepare_pt2e(model.export(), quantizer)
    check(prepared)
    with torch.no_grad():
        prepared(*model.inputs())
    converted = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    check(converted)
    return converted


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # simulated, as the report says
@pytest.mark.parametrize(
    ("model", "name"), at_once(EVERY, *EVERY[:: len(QUANTIZERS) * 3 + 1]), ids=str
)
def test_reports_say_what_graphs_hold(model: ZooModel, name: str) -> None:
    check(qompose.lower(converted_with(QUANTIZERS[name](), model)))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # ExecuTorch's own
@pytest.mark.skipif(not find_spec("executorch"), reason="needs executorch")
@pytest.mark.parametrize(
    "name", at_once(("lenet", "embedding_mlp", "conv_activations", "mlp"), "conv_activations")
)
def test_reports_say_what_the_delegate_took(name: str) -> None:
    """A kernel that computes in float inside a delegate is none."""
    converted = converted_with(QUANTIZERS["xnnpack"](), by_name(name))
    program = qompose.lower(converted, "executorch")
    report, record = qompose.report(program), program.meta["qompose"]
    delegation = program.delegation
    taken = delegation.delegated_claims & delegation.int8_claims
    gathered = {op.claim for op in delegation.portable if op.int8}
    moved = {n for n, kernel in record.kernels.items() if n not in taken | gathered}
    for number in moved:  # moves bytes, outside of the delegate, or nothing
        kernel = record.kernels[number]
        assert kernel.endswith("on integers") or kernel == "no operator", record.kernels
    assert set(record.kernels) == taken | gathered | moved
    assert report.counts.kernels == len(record.kernels)
    owned = {operator.claim for operator in record.plan.operators} - {None}
    lowered = {
        operator.claim
        for row, operator in zip(report.rows, record.plan.operators, strict=True)
        if row.state == KERNEL
    }
    assert lowered == owned & set(record.kernels)
    assert lowered.isdisjoint(record.fallbacks)
    assert record.bytes == len(program.buffer)
