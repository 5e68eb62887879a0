# SPDX-License-Identifier: Apache-2.0
"""A backend's quantizer for ResNet-18 as readers of the field's tutorials write it.

Operators are found by the modules and functions that they come from. qompose's names are imported where a
tutorial imports torchao's; nothing else of either package is used.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from qompose import QuantizationConfig, QuantizationSpec, Quantizer
from qompose.observers import MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from qompose.spec import (
    QuantizationAnnotation,
    SharedQuantizationSpec,
    get_bias_qspec,
    get_input_act_qspec,
    get_module_name_filter,
    get_output_act_qspec,
    get_weight_qspec,
)
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.source_matcher_utils import SourcePartition, get_source_partitions
from torch.nn import functional as F

KEY = "quantization_annotation"

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


def config() -> QuantizationConfig:
    bias = QuantizationSpec(
        dtype=torch.float32,
        observer_or_fake_quant_ctr=PlaceholderObserver.with_args(dtype=torch.float32),
    )
    return QuantizationConfig(ACTIVATION, ACTIVATION, WEIGHT, bias)


def partitions_of(
    model: GraphModule, sources: list[Any], filter_fn: Callable[[Node], bool] | None = None
) -> list[SourcePartition]:
    found = get_source_partitions(model.graph, sources, filter_fn)
    return list(itertools.chain.from_iterable(found.values()))


def is_taken(nodes: Iterable[Node]) -> bool:
    return any(KEY in node.meta and node.meta[KEY]._annotated for node in nodes)


class ToyQuantizer(Quantizer):
    """One configuration for the operators of this backend, perhaps only those in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.config: QuantizationConfig | None = None
        self.within: Callable[[Node], bool] | None = None

    def set_global(self, config: QuantizationConfig | None) -> ToyQuantizer:
        self.config = config
        return self

    def only_in(self, module_name: str) -> ToyQuantizer:
        self.within = get_module_name_filter(module_name)
        return self

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
