# SPDX-License-Identifier: Apache-2.0
"""Quantizers as readers of the field's tutorials write them, each an exercise of one of its sections.

They import qompose's names where a tutorial imports torchao's, and use nothing else of either package.
"""

from __future__ import annotations

import operator

import torch
from qompose import QuantizationSpec, Quantizer
from qompose.observers import MinMaxObserver, PerChannelMinMaxObserver
from qompose.spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    ObserverOrFakeQuantize,
    QuantizationAnnotation,
    SharedQuantizationSpec,
    annotate_input_qspec_map,
    annotate_output_qspec,
)
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.interop.twins import KEY, partitions_of

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
WEIGHT_PER_TENSOR = QuantizationSpec(
    dtype=torch.int8,
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_tensor_symmetric,
    observer_or_fake_quant_ctr=MinMaxObserver,
)


class _Toy(Quantizer):
    """What all of them have in common."""

    def annotate(self, model: GraphModule) -> GraphModule:
        self.mark(model)
        return model

    def mark(self, model: GraphModule) -> None:
        raise NotImplementedError

    def validate(self, model: GraphModule) -> None:
        """Accept everything."""


# 1. A common operator.


class SumQuantizer(_Toy):
    """Both operands and the result, each with parameters of its own."""

    def mark(self, model: GraphModule) -> None:
        for partition in partitions_of(model, [operator.add, torch.add]):
            add = partition.output_nodes[0]
            add.meta[KEY] = QuantizationAnnotation(
                input_qspec_map={add.args[0]: ACTIVATION, add.args[1]: ACTIVATION},
                output_qspec=ACTIVATION,
                _annotated=True,
            )


# 2. Parameters that tensors share.


class OneScaleSumQuantizer(_Toy):
    """The second operand has the parameters of the first, named as an edge."""

    def mark(self, model: GraphModule) -> None:
        for partition in partitions_of(model, [operator.add, torch.add]):
            add = partition.output_nodes[0]
            first, second = add.args
            like_first = SharedQuantizationSpec((first, add))
            add.meta[KEY] = QuantizationAnnotation(
                input_qspec_map={first: ACTIVATION, second: like_first},
                output_qspec=ACTIVATION,
                _annotated=True,
            )


class LikeTheProducerQuantizer(_Toy):
    """The second operand of a difference has the parameters of what made the first, named as a node."""

    def mark(self, model: GraphModule) -> None:
        for partition in partitions_of(model, [operator.sub, torch.sub]):
            difference = partition.output_nodes[0]
            first, second = difference.args
            annotate_output_qspec(first, ACTIVATION)
            annotate_input_qspec_map(difference, first, SharedQuantizationSpec(first))
            annotate_input_qspec_map(difference, second, SharedQuantizationSpec(first))
            annotate_output_qspec(difference, ACTIVATION)


class OneScaleMovesQuantizer(_Toy):
    """Max pooling and concatenation give out what they take in."""

    def mark(self, model: GraphModule) -> None:
        for partition in partitions_of(model, [nn.MaxPool2d, F.max_pool2d, torch.cat]):
            move = partition.output_nodes[0]
            first, *others = move.all_input_nodes
            like_first = SharedQuantizationSpec((first, move))
            move.meta[KEY] = QuantizationAnnotation(
                input_qspec_map={first: ACTIVATION, **dict.fromkeys(others, like_first)},
                output_qspec=like_first,
                _annotated=True,
            )


# 3. Parameters known beforehand.

FIXED = {
    nn.Sigmoid: (torch.uint8, 0, 255, 1.0 / 256.0, 0),
    torch.sigmoid: (torch.uint8, 0, 255, 1.0 / 256.0, 0),
    nn.Tanh: (torch.uint8, 0, 255, 2.0 / 256.0, 128),
    torch.tanh: (torch.uint8, 0, 255, 2.0 / 256.0, 128),
    nn.Softmax: (torch.int8, -128, 127, 1.0 / 256.0, -128),
    F.softmax: (torch.int8, -128, 127, 1.0 / 256.0, -128),
}


class FixedQuantizer(_Toy):
    """Functions whose results have a known range."""

    def mark(self, model: GraphModule) -> None:
        for source, (dtype, low, high, scale, zero_point) in FIXED.items():
            fixed = FixedQParamsQuantizationSpec(
                dtype=dtype,
                quant_min=low,
                quant_max=high,
                qscheme=torch.per_tensor_affine,
                scale=scale,
                zero_point=zero_point,
            )
            for partition in partitions_of(model, [source]):
                node = partition.output_nodes[0]
                node.meta[KEY] = QuantizationAnnotation(
                    input_qspec_map={node.args[0]: ACTIVATION}, output_qspec=fixed, _annotated=True
                )


class FixedBothSidesQuantizer(_Toy):
    """A sigmoid whose operand has the parameters of its result too."""

    def mark(self, model: GraphModule) -> None:
        fixed = FixedQParamsQuantizationSpec(
            dtype=torch.uint8,
            quant_min=0,
            quant_max=255,
            qscheme=torch.per_tensor_affine,
            scale=1.0 / 256.0,
            zero_point=0,
        )
        for partition in partitions_of(model, [nn.Sigmoid, torch.sigmoid]):
            node = partition.output_nodes[0]
            node.meta[KEY] = QuantizationAnnotation(
                input_qspec_map={node.args[0]: fixed}, output_qspec=fixed, _annotated=True
            )


# 4. Parameters derived from others.


def product_of_scales(observers: list[ObserverOrFakeQuantize]) -> tuple[Tensor, Tensor]:
    """The integers of a bias are of the size that the products of the others are."""
    activation, weight = (observer.calculate_qparams()[0] for observer in observers)
    scale = (activation * weight).to(torch.float32)
    return scale, torch.zeros_like(scale, dtype=torch.int32)


class DerivedBiasQuantizer(_Toy):
    """Convolutions whose bias is int32, per tensor or per channel."""

    def __init__(self, per_channel: bool) -> None:
        super().__init__()
        self.per_channel = per_channel

    def mark(self, model: GraphModule) -> None:
        for partition in partitions_of(model, [nn.Conv2d, F.conv2d]):
            convolution = partition.output_nodes[0]
            x, weight, bias = convolution.args[:3]
            derived = DerivedQuantizationSpec(
                derived_from=[(x, convolution), (weight, convolution)],
                derive_qparams_fn=product_of_scales,
                dtype=torch.int32,
                quant_min=-(2**31),
                quant_max=2**31 - 1,
                qscheme=torch.per_channel_symmetric
                if self.per_channel
                else torch.per_tensor_symmetric,
                ch_axis=0 if self.per_channel else None,
            )
            convolution.meta[KEY] = QuantizationAnnotation(
                input_qspec_map={
                    x: ACTIVATION,
                    weight: WEIGHT if self.per_channel else WEIGHT_PER_TENSOR,
                    bias: derived,
                },
                output_qspec=ACTIVATION,
                _annotated=True,
            )
