# SPDX-License-Identifier: Apache-2.0
"""Specifications are values; what they cannot be is refused with the bound."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.errors import ConfigError
from qompose.observers import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    annotate_input_qspec_map,
    annotate_output_qspec,
)
from qompose.spec.quantization_spec import integer_range_key, sharing_key, spec_to_dict
from torch import nn

from tests.core.toy import INT8, STATIC, WEIGHT, WEIGHT_PER_TENSOR, Model, export, randn

FACTS: dict[str, Any] = {
    "dtype": torch.int8, "observer_or_fake_quant_ctr": MinMaxObserver.with_args(eps=2**-12),
    "quant_min": -128, "quant_max": 127, "qscheme": torch.per_tensor_affine,
}  # fmt: skip


FLOAT_POINTS = torch.per_channel_affine_float_qparams
DYNAMIC_SYMMETRIC = {
    "dtype": torch.uint8, "observer_or_fake_quant_ctr": PlaceholderObserver, "quant_min": 0,
    "quant_max": 255, "qscheme": torch.per_tensor_symmetric, "is_dynamic": True,
}  # fmt: skip
IN_BLOCKS = {**FACTS, "qscheme": torch.per_channel_symmetric, "block_size": (1, 32)}


@pytest.mark.parametrize(
    ("facts", "change", "named"),
    [
        (FACTS, {"quant_min": -129}, "quant_min=-129"), (FACTS, {"quant_max": 128}, "quant_max=128"),
        (FACTS, {"quant_min": 5, "quant_max": 5}, "quant_min=5"),
        (FACTS, {"dtype": torch.uint8}, "quant_min=-128"), (FACTS, {"dtype": torch.float16}, "quant_min"),
        (FACTS, {"dtype": torch.float64, "quant_min": None, "quant_max": None}, "float64"),
        (FACTS, {"dtype": None}, "torch.int8"),
        (FACTS, {"dtype": "int8"}, "torch.int8"), (FACTS, {"dtype": torch.int64}, "dtype"),
        (FACTS, {"dtype": torch.int4, "quant_min": -8, "quant_max": 7}, "int8"),
        (FACTS, {"observer_or_fake_quant_ctr": None}, "observer"),
        (DYNAMIC_SYMMETRIC, {"quant_max": 127}, ""),  # a range without a middle
        (IN_BLOCKS, {"block_size": ()}, "block_size"), (IN_BLOCKS, {"block_size": 32}, "block_size .*32"),
        (IN_BLOCKS, {"block_size": (0,)}, "block_size"), (IN_BLOCKS, {"block_size": (4, -2)}, "block_size"),
        (IN_BLOCKS, {"block_size": (2.0,)}, "block_size"),
        (IN_BLOCKS, {"qscheme": torch.per_tensor_affine}, "torch.per_tensor_affine"),
        (IN_BLOCKS, {"qscheme": None}, "None"), (IN_BLOCKS, {"is_dynamic": True}, "block_size"),
        (IN_BLOCKS, {"is_dynamic": True, "block_size": (-1,), "quant_min": -8}, "int8"),
        (IN_BLOCKS, {"is_dynamic": True, "block_size": None, "ch_axis": 0}, ""),
        (IN_BLOCKS, {"is_dynamic": True, "block_size": (-1,), "qscheme": FLOAT_POINTS}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_specifications(
    facts: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    """Each is one field away from what is possible."""
    QuantizationSpec(**facts)
    with pytest.raises(ConfigError, match=named or None):
        QuantizationSpec(**{**facts, **change})


@pytest.mark.parametrize(
    ("factory", "axis"),
    [
        (PerChannelMinMaxObserver, 0),
        (PerChannelMinMaxObserver.with_args(ch_axis=1), 1),
        (partial(PerChannelMinMaxObserver, ch_axis=2), 2),
    ],
    ids=["no observer says", "its own factory", "a partial"],
)
def test_channels_without_an_axis_have_that_of_the_observer(factory: Any, axis: int) -> None:
    """As engines of this field take it; what a specification says comes before."""
    facts = {**FACTS, "qscheme": torch.per_channel_symmetric, "observer_or_fake_quant_ctr": factory}
    assert QuantizationSpec(**facts).ch_axis == axis
    assert QuantizationSpec(**facts, ch_axis=3).ch_axis == 3
    derived = DerivedQuantizationSpec([], max, torch.int32, qscheme=torch.per_channel_symmetric)
    assert derived.ch_axis == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scale": 0.0}, "scale"), ({"scale": -1.0}, "scale"), ({"scale": float("nan")}, "scale"),
        ({"scale": float("inf")}, "scale"), ({"zero_point": 256}, "zero_point=256"),
        ({"zero_point": 1.5}, "zero_point"), ({"quant_max": 300}, "quant_max=300"),
        ({"scale": "1"}, "scale"), ({"zero_point": None}, "zero_point"),
        ({"is_dynamic": True}, ""), ({"qscheme": torch.per_channel_affine}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_fixed_parameters(change: dict[str, Any], named: str) -> None:
    facts: dict[str, Any] = {"dtype": torch.uint8, "scale": 1 / 256, "zero_point": 0}
    FixedQParamsQuantizationSpec(**{**facts, "zero_point": 255})
    with pytest.raises(ConfigError, match=named or None):
        FixedQParamsQuantizationSpec(**{**facts, **change})


@pytest.mark.parametrize("dtype", [None, "int8", 8], ids=str)
def test_parameters_without_an_observer_have_a_dtype_too(dtype: Any) -> None:
    for make in (partial(DerivedQuantizationSpec, [], max), FixedQParamsQuantizationSpec):
        facts = {} if isinstance(make, partial) else {"scale": 1 / 256, "zero_point": 0}
        with pytest.raises(ConfigError, match="dtype"):
            make(dtype=dtype, **facts)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"quant_min": -(2**31) - 1, "quant_max": 0}, "quant_min"),
        ({"is_dynamic": True}, ""),
    ],
    ids=str,
)
def test_impossible_derived_parameters(facts: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named or None):
        DerivedQuantizationSpec([], max, torch.int32, **facts)


def test_specifications_compare_by_value() -> None:
    """Which torch's own do not: a partial of an observer is equal to nothing but itself."""
    one, other = (
        QuantizationSpec(**{**FACTS, "observer_or_fake_quant_ctr": MinMaxObserver.with_args(eps=e)})
        for e in (2**-12, 2**-12)
    )
    assert one == other
    assert hash(one) == hash(other)
    assert replace(one, quant_min=-127) != other
    assert replace(one, observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=0.5)) != other
    assert replace(one, observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=2**-12)) != other


@pytest.mark.parametrize(
    "other",
    [
        MinMaxObserver, partial(HistogramObserver, "x", eps=2.0), partial(MinMaxObserver, "y", eps=2.0),
        partial(MinMaxObserver, "x", eps=3.0), partial(MinMaxObserver, "x", eps=partial(int, 2)),
    ],
)  # fmt: skip
def test_estimated_in_the_same_way_is_by_the_same_function_with_the_same_arguments(
    other: Any,
) -> None:
    asked = partial(MinMaxObserver, "x", eps=2.0), partial(MinMaxObserver, "x", eps=2.0), other
    one, same, different = (
        sharing_key(replace(INT8, observer_or_fake_quant_ctr=factory)) for factory in asked
    )
    assert one == same != different


def test_what_converts_itself_shares_with_its_like_alone() -> None:
    kinds = [type(name, (MinMaxObserver,), {"convert": print}) for name in "ab"]
    specs = [replace(INT8, observer_or_fake_quant_ctr=kind) for kind in (*kinds, MinMaxObserver)]
    assert len({*map(integer_range_key, specs)}) == 3
    assert integer_range_key(INT8) == integer_range_key(specs[2]) != integer_range_key(WEIGHT)


def test_outputs_of_dynamic_configurations_are_float() -> None:
    """Conversion asked data for static ones. Dynamic ones are written in this field, and mean none."""
    dynamic = replace(INT8, is_dynamic=True)
    plain = QuantizationConfig(dynamic, None, INT8)
    assert QuantizationConfig(dynamic, dynamic, INT8) == plain
    with pytest.raises(ConfigError, match="output_activation"):
        QuantizationConfig(dynamic, INT8, INT8)
    with pytest.raises(ConfigError, match="cannot be dynamic"):
        QuantizationConfig(INT8, dynamic, INT8)


def test_configurations_compare_without_their_names() -> None:
    twin = replace(STATIC, name="another name")
    assert twin == STATIC
    assert hash(twin) == hash(STATIC)
    assert twin != replace(twin, bias=INT8)
    assert twin != replace(twin, is_qat=True)


def test_json_data() -> None:
    data = spec_to_dict(QuantizationSpec(**FACTS))
    assert json.loads(json.dumps(data)) == {
        "dtype": "int8", "qscheme": "per_tensor_affine", "quant_min": -128, "quant_max": 127,
        "is_dynamic": False, "observer": "MinMaxObserver",
    }  # fmt: skip
    assert spec_to_dict(None) is None
    fixed = spec_to_dict(FixedQParamsQuantizationSpec(torch.uint8, 0.5, 3))
    assert fixed is not None
    assert (fixed["scale"], fixed["zero_point"]) == (0.5, 3)


def test_annotation_helpers_make_what_is_missing_and_add_to_the_rest() -> None:
    graph = export(nn.Linear(3, 4), randn(2, 3)).graph
    (linear,) = (node for node in graph.nodes if node.op == "call_function")
    x, weight = linear.args[:2]
    annotate_input_qspec_map(linear, x, INT8)
    annotate_input_qspec_map(linear, weight, WEIGHT)
    annotate_output_qspec(linear, INT8)
    assert linear.meta[ANNOTATION_KEY] == QuantizationAnnotation({x: INT8, weight: WEIGHT}, INT8)


@pytest.mark.parametrize("role", ["input_act", "output_act", "weight", "bias"])
def test_specification_of_a_role(role: str) -> None:
    get = getattr(qompose.spec, f"get_{role}_qspec")
    specs = {"input_act": INT8, "output_act": replace(INT8, quant_min=0), "weight": WEIGHT}
    specs["bias"] = WEIGHT_PER_TENSOR
    assert get(QuantizationConfig(*specs.values())) is specs[role]
    assert get(QuantizationConfig(None, None, None, None)) is get(None) is None


# A layer two modules deep, and one in a list, which export does not record.
HELD = Model(
    lambda self, x: self.layers[0](self.body(x)),
    body=nn.Sequential(nn.Linear(3, 3)), layers=nn.ModuleList([nn.Linear(3, 3)]),
)  # fmt: skip


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
    model = export(HELD, randn(2, 3)).module(check_guards=False)
    chosen = qompose.spec.get_module_name_filter(path)
    assert {node.name for node in model.graph.nodes if chosen(node)} == inside


def test_valid_annotations() -> None:
    assert not qompose.spec.is_valid_annotation(None)
    assert not qompose.spec.is_valid_annotation(QuantizationAnnotation(_annotated=True))
    assert qompose.spec.is_valid_annotation(QuantizationAnnotation(output_qspec=INT8))
