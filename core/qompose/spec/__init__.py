# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of PT2E: how one tensor is quantized, and annotations that say so."""

from qompose.spec.algorithm_choice import SmoothQuant
from qompose.spec.claim import (
    ObserverOrFakeQuantize,
    OperatorConfig,
    OperatorPatternType,
    annotate_input_qspec_map,
    annotate_output_qspec,
    get_bias_qspec,
    get_input_act_qspec,
    get_module_name_filter,
    get_output_act_qspec,
    get_weight_qspec,
    is_valid_annotation,
)
from qompose.spec.quantization_spec import (
    DerivedQuantizationSpec,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)

__all__ = [
    "DerivedQuantizationSpec",
    "EdgeOrNode",
    "FixedQParamsQuantizationSpec",
    "ObserverOrFakeQuantize",
    "OperatorConfig",
    "OperatorPatternType",
    "QuantizationAnnotation",
    "QuantizationConfig",
    "QuantizationSpec",
    "QuantizationSpecBase",
    "SharedQuantizationSpec",
    "SmoothQuant",
    "annotate_input_qspec_map",
    "annotate_output_qspec",
    "get_bias_qspec",
    "get_input_act_qspec",
    "get_module_name_filter",
    "get_output_act_qspec",
    "get_weight_qspec",
    "is_valid_annotation",
]
