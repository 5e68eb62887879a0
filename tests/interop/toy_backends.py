# SPDX-License-Identifier: Apache-2.0
"""A backend's quantizer for ResNet-18 as readers of the field's tutorials write it, in two styles.

Operators are found by the modules and functions that they come from, or by patterns. qompose's names are
imported where a tutorial imports torchao's; nothing else of either package is used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from qompose import QuantizationConfig, QuantizationSpec, Quantizer
from qompose.observers import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.spec import (
    OperatorConfig,
    OperatorPatternType,
    QuantizationAnnotation,
    SharedQuantizationSpec,
    get_bias_qspec,
    get_input_act_qspec,
    get_module_name_filter,
    get_output_act_qspec,
    get_weight_qspec,
)
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.matcher_with_name_node_map_utils import SubgraphMatcherWithNameNodeMap
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions
from torch.nn import functional as F

from tests.interop.twins import KEY, is_taken, partitions_of

ACTIVATION = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_affine,
    is_dynamic=False,
    observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=2**-12),
)
WEIGHT = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-12),
)


def histogram_config() -> QuantizationConfig:
    """The configuration that a tutorial would take; `config` has ranges that every engine finds alike."""
    activation = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=HistogramObserver.with_args(eps=2**-12),
    )
    return QuantizationConfig(activation, activation, WEIGHT, None)


def config() -> QuantizationConfig:
    return QuantizationConfig(ACTIVATION, ACTIVATION, WEIGHT, None)


def config_with_float_bias() -> QuantizationConfig:
    bias = QuantizationSpec(
        dtype=torch.float32,
        observer_or_fake_quant_ctr=PlaceholderObserver.with_args(dtype=torch.float32),
    )
    return QuantizationConfig(ACTIVATION, ACTIVATION, WEIGHT, bias)


class _Backend(Quantizer):
    """One configuration for the operators of this backend, perhaps only those in one module."""

    patterns: tuple[OperatorPatternType, ...] = (
        [nn.Conv2d, nn.ReLU],
        [nn.Conv2d],
        [nn.Linear],
        [nn.MaxPool2d],
        [torch.add],
    )

    def __init__(self) -> None:
        super().__init__()
        self.config: QuantizationConfig | None = None
        self.within: Callable[[Node], bool] | None = None

    def set_global(self, config: QuantizationConfig | None) -> _Backend:
        self.config = config
        return self

    def only_in(self, module_name: str) -> _Backend:
        self.within = get_module_name_filter(module_name)
        return self

    @classmethod
    def get_supported_operators(cls) -> list[OperatorConfig]:
        return [OperatorConfig(config(), list(cls.patterns))]

    def validate(self, model: GraphModule) -> None:
        """Accept everything."""

    def mark_product(self, node: Node, x: Node, output: Node) -> None:
        """Annotate an operator with a weight, and the operator that finishes it."""
        if is_taken([node, output]):
            return
        inputs = {x: get_input_act_qspec(self.config), node.args[1]: get_weight_qspec(self.config)}
        if len(node.args) > 2 and isinstance(node.args[2], Node):
            inputs[node.args[2]] = get_bias_qspec(self.config)
        result = get_output_act_qspec(self.config)
        if output is node:
            node.meta[KEY] = QuantizationAnnotation(inputs, result, _annotated=True)
            return
        node.meta[KEY] = QuantizationAnnotation(inputs, _annotated=True)
        output.meta[KEY] = QuantizationAnnotation(output_qspec=result, _annotated=True)

    def mark_sum(self, node: Node) -> None:
        if not is_taken([node]):
            inputs = dict.fromkeys(node.all_input_nodes, get_input_act_qspec(self.config))
            result = get_output_act_qspec(self.config)
            node.meta[KEY] = QuantizationAnnotation(inputs, result, _annotated=True)

    def mark_pool(self, node: Node) -> None:
        if self.config is not None and not is_taken([node]):
            x = node.all_input_nodes[0]
            shared = SharedQuantizationSpec((x, node))
            inputs = {x: get_input_act_qspec(self.config)}
            node.meta[KEY] = QuantizationAnnotation(inputs, shared, _annotated=True)


class PartitionsQuantizer(_Backend):
    """Finds operators by the modules and functions that they come from."""

    def annotate(self, model: GraphModule) -> GraphModule:
        self.mark_linear(model)
        for partition in partitions_of(model, [nn.Conv2d, F.conv2d], self.within):
            convolution = partition.output_nodes[0]
            if convolution.target != torch.ops.aten.conv2d.default:
                raise ValueError(f"{convolution} is no convolution")
            self.mark_product(convolution, convolution.args[0], convolution)
        for partition in partitions_of(model, [nn.MaxPool2d, F.max_pool2d], self.within):
            self.mark_pool(partition.output_nodes[0])
        for partition in partitions_of(model, [operator.add, torch.add], self.within):
            self.mark_sum(partition.output_nodes[0])
        return model

    def mark_linear(self, model: GraphModule) -> None:
        """Find the parameters of a linear layer among those of its partition."""
        for source, partitions in get_source_partitions(
            model.graph, [nn.Linear, F.linear], self.within
        ).items():
            assert source in (nn.Linear, F.linear)
            for partition in partitions:
                x, node = partition.input_nodes[0], partition.output_nodes[0]
                weights = [p for p in partition.params if model.get_parameter(p.target).ndim == 2]
                assert weights == [node.args[1]]
                self.mark_product(node, x, node)


class _Wrapped(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(*arguments)


def _conv(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    result = F.conv2d(x, weight, bias)
    return result, {"x": x, "op": result, "output": result}


def _conv_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    product = F.conv2d(x, weight, bias)
    result = F.relu(product)
    return result, {"x": x, "op": product, "output": result}


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    result = F.linear(x, weight, bias)
    return result, {"x": x, "op": result, "output": result}


def _sum(x: Tensor, other: Tensor) -> Any:
    result = x + other
    return result, {"op": result}


def _pool(x: Tensor) -> Any:
    result = F.max_pool2d(x, 3, 2, 1)
    return result, {"op": result}


_IMAGES = (torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4))
_ROWS = (torch.randn(2, 3), torch.randn(4, 3), torch.randn(4))


class PatternsQuantizer(_Backend):
    """Finds operators by patterns written in torch and captured as models are."""

    def annotate(self, model: GraphModule) -> GraphModule:
        products = ((_conv_relu, _IMAGES), (_conv, _IMAGES), (_linear, _ROWS))
        for pattern, inputs in products:
            for found in self.matches(model, pattern, inputs):
                self.mark_product(found["op"], found["x"], found["output"])
        for found in self.matches(model, _pool, _IMAGES[:1]):
            self.mark_pool(found["op"])
        for found in self.matches(model, _sum, (_IMAGES[0], _IMAGES[0] + 1)):
            self.mark_sum(found["op"])
        return model

    def matches(
        self, model: GraphModule, pattern: Callable[..., Any], inputs: tuple[Tensor, ...]
    ) -> list[dict[str, Node]]:
        captured = torch.export.export(_Wrapped(pattern), inputs).module(check_guards=False)
        matcher = SubgraphMatcherWithNameNodeMap(captured, ignore_literals=True)
        found = [match.name_node_map for match in matcher.match(model.graph)]
        return [nodes for nodes in found if self.within is None or self.within(nodes["op"])]
