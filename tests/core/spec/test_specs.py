# SPDX-License-Identifier: Apache-2.0
"""Specifications are values; what they cannot be is refused with the bound."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch
from qompose import QuantizationConfig, QuantizationSpec
from qompose.errors import ConfigError
from qompose.observers import HistogramObserver, MinMaxObserver, PlaceholderObserver
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    annotate_input_qspec_map,
    annotate_output_qspec,
)
from qompose.spec.quantization_spec import describe_spec, granularity, spec_to_dict
from torch import nn

from tests.core.toy import DYNAMIC, INT8, RUN_TIME, STATIC, WEIGHT, WEIGHT_ONLY, export, randn

FACTS: dict[str, Any] = {
    "dtype": torch.int8,
    "observer_or_fake_quant_ctr": MinMaxObserver.with_args(eps=2**-12),
    "quant_min": -128,
    "quant_max": 127,
    "qscheme": torch.per_tensor_affine,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"quant_min": -129}, r"quant_min=-129.*\[-128, 127\]", id="below"),
        pytest.param({"quant_max": 128}, r"quant_max=128.*\[-128, 127\]", id="above"),
        pytest.param({"quant_min": 5, "quant_max": 5}, "quant_min=5, quant_max=5", id="empty"),
        pytest.param({"dtype": torch.uint8}, r"quant_min=-128.*\[0, 255\]", id="another type"),
        pytest.param(
            {"dtype": torch.float16}, "quant_min and quant_max do not apply", id="bounds of a float"
        ),
        pytest.param(
            {"qscheme": torch.per_channel_symmetric}, "per_channel_symmetric needs ch_axis",
            id="no axis",
        ),
        pytest.param({"dtype": None}, "such as torch.int8, got None", id="no dtype"),
        pytest.param({"dtype": "int8"}, "such as torch.int8, got 'int8'", id="a name of a dtype"),
    ],
)  # fmt: skip
def test_impossible_specifications(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizationSpec(**{**FACTS, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"scale": 0.0}, "scale must be positive, got 0.0", id="no scale"),
        pytest.param({"scale": -1.0}, "scale must be positive, got -1.0", id="negative scale"),
        pytest.param({"scale": float("nan")}, "scale must be positive", id="NaN"),
        pytest.param({"zero_point": 256}, r"zero_point=256 is outside \[0, 255\]", id="above"),
        pytest.param({"quant_max": 300}, "quant_max=300", id="bounds"),
    ],
)
def test_impossible_fixed_parameters(change: dict[str, Any], message: str) -> None:
    facts: dict[str, Any] = {"dtype": torch.uint8, "scale": 1 / 256, "zero_point": 0}
    FixedQParamsQuantizationSpec(**facts)
    with pytest.raises(ConfigError, match=message):
        FixedQParamsQuantizationSpec(**{**facts, **change})


@pytest.mark.parametrize("dtype", [None, "int8", 8], ids=str)
def test_parameters_without_an_observer_have_a_dtype_too(dtype: Any) -> None:
    for make in (partial(DerivedQuantizationSpec, [], max), FixedQParamsQuantizationSpec):
        facts = {} if isinstance(make, partial) else {"scale": 1 / 256, "zero_point": 0}
        with pytest.raises(ConfigError, match=r"dtype must be a torch\.dtype"):
            make(dtype=dtype, **facts)


def test_impossible_derived_bounds() -> None:
    with pytest.raises(ConfigError, match="quant_min"):
        DerivedQuantizationSpec([], max, torch.int32, quant_min=-(2**31) - 1, quant_max=0)


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


def test_configurations_compare_without_their_names() -> None:
    twin = QuantizationConfig(INT8, INT8, WEIGHT, name="another name")
    assert twin == STATIC
    assert hash(twin) == hash(STATIC)
    assert twin != replace(twin, bias=INT8)
    assert twin != replace(twin, is_qat=True)


def test_they_are_frozen() -> None:
    for frozen in (INT8, STATIC, FixedQParamsQuantizationSpec(torch.uint8, 1.0, 0)):
        with pytest.raises(FrozenInstanceError):
            frozen.dtype = torch.int8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "mode"), [(STATIC, "static"), (DYNAMIC, "dynamic"), (WEIGHT_ONLY, "weight-only")]
)
def test_modes(config: QuantizationConfig, mode: str) -> None:
    assert config.mode == mode
    assert str(replace(config, name="")) == f"{mode} per-channel"


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (INT8, "int8 [-128, 127] per_tensor_affine"),
        (WEIGHT, "int8 [-127, 127] per_channel_symmetric axis 0"),
        (RUN_TIME, "int8 [-128, 127] per_tensor_affine dynamic"),
        (None, "float"),
        (
            FixedQParamsQuantizationSpec(torch.uint8, 0.5, 7),
            "uint8 [0, 255] scale 0.5 zero point 7",
        ),
    ],
    ids=str,
)
def test_one_line_descriptions(spec: Any, line: str) -> None:
    assert describe_spec(spec) == line


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


def test_granularity() -> None:
    assert [granularity(spec) for spec in (WEIGHT, INT8, None)] == ["per-channel", "per-tensor", ""]


def test_annotation_helpers_make_what_is_missing_and_add_to_the_rest() -> None:
    graph = export(nn.Linear(3, 4), randn(2, 3)).graph
    (linear,) = (node for node in graph.nodes if node.op == "call_function")
    x, weight = linear.args[:2]
    annotate_input_qspec_map(linear, x, INT8)
    annotate_input_qspec_map(linear, weight, WEIGHT)
    annotate_output_qspec(linear, INT8)
    expected = QuantizationAnnotation({x: INT8, weight: WEIGHT}, INT8)
    assert linear.meta[ANNOTATION_KEY] == expected


def test_dynamic_symmetric_ranges_without_a_middle_are_refused() -> None:
    with pytest.raises(ConfigError, match="would have its zero point outside"):
        QuantizationSpec(
            torch.uint8, PlaceholderObserver, 0, 127, torch.per_tensor_symmetric, is_dynamic=True
        )
    QuantizationSpec(
        torch.uint8, PlaceholderObserver, 0, 255, torch.per_tensor_symmetric, is_dynamic=True
    )
