# SPDX-License-Identifier: Apache-2.0
"""The small helpers that quantizers annotate with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import qompose
from qompose.spec import QuantizationAnnotation
from torch import Tensor, nn

from tests.core.toy import INT8, WEIGHT, WEIGHT_PER_TENSOR, export, randn


@pytest.mark.parametrize("role", ["input_act", "output_act", "weight", "bias"])
def test_specification_of_a_role(role: str) -> None:
    get = getattr(qompose.spec, f"get_{role}_qspec")
    specs = {
        "input_act": INT8,
        "output_act": replace(INT8, quant_min=0),
        "weight": WEIGHT,
        "bias": WEIGHT_PER_TENSOR,
    }
    assert get(qompose.QuantizationConfig(*specs.values())) is specs[role]
    assert get(qompose.QuantizationConfig(None, None, None, None)) is None
    assert get(None) is None


class Held(nn.Module):
    """A layer two modules deep, in a list, which export does not record."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3))
        self.layers = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.body(x))


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("body", {"linear", "body_0_weight", "body_0_bias"}),
        ("body.0", {"linear", "body_0_weight", "body_0_bias"}),
        ("layers", {"linear_1", "layers_0_weight", "layers_0_bias"}),
        ("bod", set()),
    ],
)
def test_module_names(path: str, inside: set[str]) -> None:
    """An operator is inside a module and those around it; a parameter is where it is read."""
    model = export(Held(), randn(2, 3)).module(check_guards=False)
    chosen = qompose.spec.get_module_name_filter(path)
    assert {node.name for node in model.graph.nodes if chosen(node)} == inside


def test_valid_annotations() -> None:
    assert not qompose.spec.is_valid_annotation(None)
    assert not qompose.spec.is_valid_annotation(QuantizationAnnotation(_annotated=True))
    assert qompose.spec.is_valid_annotation(QuantizationAnnotation(output_qspec=INT8))
