# SPDX-License-Identifier: Apache-2.0
"""The small helpers that quantizers annotate with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import qompose
import torch
from qompose.spec import QuantizationAnnotation
from torch import nn
from torch.fx import Node

from tests.core.toy import INT8, WEIGHT, WEIGHT_PER_TENSOR, randn
from tests.zoo import by_name

aten = torch.ops.aten


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


def test_module_names() -> None:
    """An operator is inside a module and those around it; a parameter is where it is read."""
    model = by_name("resnet18").export().module(check_guards=False)
    inside = qompose.spec.get_module_name_filter("3.body")
    names = {node.name for node in model.graph.nodes if inside(node)}
    first = next(n for n in model.graph.nodes if inside(n) and n.target == aten.conv2d.default)
    weight = first.args[1]
    assert isinstance(weight, Node)
    assert {first.name, weight.name} <= names
    assert not any(node.name in names for node in model.graph.nodes if node.op == "placeholder")
    assert {
        n.name for n in model.graph.nodes if qompose.spec.get_module_name_filter("3.bod")(n)
    } == set()


def test_containers() -> None:
    """Export does not record lists of modules; what they hold is inside them all the same."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(3, 3)])
    model.forward = lambda x: model.layers[0](x)  # type: ignore[method-assign]
    program = torch.export.export(model, (randn(2, 3),))
    inside = qompose.spec.get_module_name_filter("layers")
    assert [n.name for n in program.graph.nodes if inside(n)] == ["linear"]


def test_valid_annotations() -> None:
    assert not qompose.spec.is_valid_annotation(None)
    assert not qompose.spec.is_valid_annotation(QuantizationAnnotation(_annotated=True))
    assert qompose.spec.is_valid_annotation(QuantizationAnnotation(output_qspec=INT8))
