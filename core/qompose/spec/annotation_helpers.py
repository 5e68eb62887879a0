# SPDX-License-Identifier: Apache-2.0
"""Helpers that read and write `node.meta["quantization_annotation"]` under their torchao names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.fx import Node

from qompose.program.graph import module_stack
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec.quantization_spec import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
)

RoleSpec: TypeAlias = "QuantizationSpec | FixedQParamsQuantizationSpec | None"
"""What a configuration gives to a role; None leaves it in float."""
OperatorPatternType: TypeAlias = list[Callable[..., Any]]
"""Module types and functions that are quantized together, such as `[nn.Conv2d, nn.ReLU]`."""
ObserverOrFakeQuantize: TypeAlias = nn.Module
"""What `derive_qparams_fn` gets of each tensor: a module that has `calculate_qparams`."""


class OperatorConfig(NamedTuple):
    """A configuration, and the patterns that a quantizer supports with it."""

    config: QuantizationConfig
    operators: list[OperatorPatternType]


def get_input_act_qspec(quantization_config: QuantizationConfig | None) -> RoleSpec:
    """Return how a configuration quantizes inputs that are activations; None: not at all."""
    return None if quantization_config is None else quantization_config.input_activation


def get_output_act_qspec(quantization_config: QuantizationConfig | None) -> RoleSpec:
    """Return how a configuration quantizes outputs; None: not at all."""
    return None if quantization_config is None else quantization_config.output_activation


def get_weight_qspec(quantization_config: QuantizationConfig | None) -> RoleSpec:
    """Return how a configuration quantizes weights; None: not at all."""
    return None if quantization_config is None else quantization_config.weight


def get_bias_qspec(quantization_config: QuantizationConfig | None) -> RoleSpec:
    """Return how a configuration quantizes biases; None: not at all."""
    return None if quantization_config is None else quantization_config.bias


def get_module_name_filter(module_name: str) -> Callable[[Node], bool]:
    """Return a predicate: whether an operator is in the module at a path, or in one inside it.

    A parameter is where an operator reads it. `get_source_partitions` takes the predicate as `filter_fn`.
    """

    def is_in_module(node: Node) -> bool:
        if node.op == "get_attr":
            return any(is_in_module(user) for user in node.users)
        paths = (path for path, _ in module_stack(node))
        return any(path == module_name or path.startswith(f"{module_name}.") for path in paths)

    return is_in_module


def is_valid_annotation(annotation: QuantizationAnnotation | None) -> bool:
    """Tell whether an annotation asks for anything."""
    if annotation is None:
        return False
    return bool(annotation.input_qspec_map) or annotation.output_qspec is not None


def annotate_input_qspec_map(
    node: Node, input_node: Node, qspec: QuantizationSpecBase | None
) -> None:
    """Add one edge's specification to a node's annotation, making the annotation where there is none."""
    annotation = node.meta.setdefault(ANNOTATION_KEY, QuantizationAnnotation())
    annotation.input_qspec_map[input_node] = qspec


def annotate_output_qspec(node: Node, qspec: QuantizationSpecBase | None) -> None:
    """Set the output specification of a node's annotation, making the annotation where there is none."""
    node.meta.setdefault(ANNOTATION_KEY, QuantizationAnnotation()).output_qspec = qspec
