# SPDX-License-Identifier: Apache-2.0
"""Models to be trained, and a quantizer of every product in them."""

from __future__ import annotations

from typing import Any

import qompose
import torch
from qompose import QuantizationSpec
from qompose.observers import FakeQuantize
from qompose.observers.min_max import PerChannelMinMaxObserver
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.toy import Annotator, annotate

aten = torch.ops.aten

ACTIVATION = QuantizationSpec(
    torch.int8, FakeQuantize.with_args(averaging_constant=0.1),
    -128, 127, torch.per_tensor_affine,
)  # fmt: skip


def weight_spec(axis: int, bits: int = 8) -> QuantizationSpec:
    """Symmetric integers with a scale for each channel along a dimension."""
    most = 2 ** (bits - 1) - 1
    factory = FakeQuantize.with_args(observer=PerChannelMinMaxObserver)
    return QuantizationSpec(
        torch.int8, factory, -most, most, torch.per_channel_symmetric, ch_axis=axis
    )


PRODUCTS = {
    "linear": (nn.Linear, nn.BatchNorm1d, (16, 6)),
    "conv1d": (nn.Conv1d, nn.BatchNorm1d, (8, 6, 9)),
    "conv2d": (nn.Conv2d, nn.BatchNorm2d, (8, 6, 7, 7)),
    "conv3d": (nn.Conv3d, nn.BatchNorm3d, (4, 6, 5, 5, 5)),
    "conv_transpose1d": (nn.ConvTranspose1d, nn.BatchNorm1d, (8, 6, 9)),
    "conv_transpose2d": (nn.ConvTranspose2d, nn.BatchNorm2d, (8, 6, 7, 7)),
    "conv_transpose3d": (nn.ConvTranspose3d, nn.BatchNorm3d, (4, 6, 4, 4, 4)),
}
TAILS = {"alone": nn.Identity, "relu": nn.ReLU, "relu6": nn.ReLU6, "hardtanh": nn.Hardtanh}
_NAMES = {*PRODUCTS}


def product_model(kind: str, tail: str, *, bias: bool, norm: bool = True) -> nn.Module:
    """Two products with batch norms of unusual eps and momentum, and dropout between them."""
    product, batch_norm, _ = PRODUCTS[kind]
    size: dict[str, Any] = {} if kind == "linear" else {"kernel_size": 3, "padding": 1}

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        norms = [batch_norm(outputs, eps=1e-2, momentum=0.37)] if norm else []
        return [product(inputs, outputs, bias=bias, **size), *norms, TAILS[tail]()]

    torch.manual_seed(0)
    return nn.Sequential(*block(6, 10), nn.Dropout(0.5), *block(10, 4))


def batch_for(kind: str, seed: int = 0) -> Tensor:
    """A batch with channels of different size."""
    shape = PRODUCTS[kind][2]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sizes = torch.linspace(0.5, 2.0, shape[1])
    return x * sizes.reshape([1, -1, *[1] * (len(shape) - 2)]) + 0.3


def product_quantizer(activation: Any = ACTIVATION, bits: int = 8) -> Annotator:
    """Quantizes each product and what follows it."""

    def annotate_node(node: Node) -> None:
        name = str(node.target).partition(".")[2].partition(".")[0]
        if node.op == "call_function" and name in _NAMES:
            x, weight = node.args[:2]
            assert isinstance(x, Node) and isinstance(weight, Node)
            axis = 1 if "transpose" in name else 0
            user = next(iter(node.users))
            tails = {aten.relu.default, aten.relu6.default, aten.hardtanh.default}
            fused = len(node.users) == 1 and user.target in tails
            annotate(
                node,
                {x: activation, weight: weight_spec(axis, bits)},
                None if fused else activation,
            )
            if fused:
                annotate(user, {}, activation)

    return Annotator(annotate_node)


def prepared_for(model: nn.Module, x: Tensor, quantizer: Any = None) -> GraphModule:
    """Export a model in the mode that it is in, and prepare it to be trained."""
    program = torch.export.export(model, (x,))
    return qompose.prepare_qat_pt2e(program, quantizer or product_quantizer())


def batch_norms_in(model: GraphModule) -> list[str]:
    return [n.name for n in model.graph.nodes if "norm" in f"{n.target}" and n.op != "get_attr"]
