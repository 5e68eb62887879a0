# SPDX-License-Identifier: Apache-2.0
"""The rule table for lookups and bags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from qompose.backend import Kernel, OperatorPattern, Region, Rule, TensorConstraint
from torch import Tensor
from torch.fx import Node

from qompose_embedding import executorch_kernels, onnx_kernels, torch_kernels
from qompose_embedding.bag_operators import MEAN

aten = torch.ops.aten

TABLE: Final = TensorConstraint(
    dtypes=frozenset({torch.uint8, torch.int8}),
    qschemes=frozenset(
        {
            torch.per_channel_affine_float_qparams,
            torch.per_channel_affine,
            torch.per_channel_symmetric,
        }
    ),
    ch_axis=0,
    blocks=True,
)


ROWS, WIDTH, LENGTH = 8, 64, 3
"""Of the examples: wide enough for groups of 32."""


def _indices() -> Tensor:
    return torch.randint(ROWS, (2, LENGTH))


def _bags(overload: Any, *others: Any) -> OperatorPattern:
    """Return the pattern of one of the operators for bags."""

    def example(weight: Tensor, indices: Tensor) -> Tensor:
        offsets = torch.arange(0, indices.numel(), LENGTH)
        bags: Tensor = overload(weight, indices.reshape(-1), offsets, *others)[0]
        return bags

    return OperatorPattern((overload,), example, ((ROWS, WIDTH), _indices), result=0)


def _kernel(name: str, emit: Callable[[Region], Node], otherwise: Kernel | None = None) -> Kernel:
    """Return a kernel that gives floats: what a lookup returns is not quantized."""
    return Kernel(name, emit, float_output=True, float_arithmetic=True, otherwise=otherwise)


def _on_onnx(name: str, emit: Callable[[Region], Node]) -> dict[str, Kernel]:
    """Return a kernel for every target that runs ONNX."""
    return dict.fromkeys(("onnx", "onnxruntime", "openvino"), _kernel(name, emit))


def _rule(name: str, patterns: tuple[OperatorPattern, ...], anchor: str, **targets: Kernel) -> Rule:
    """Return a rule whose only quantized tensor is the table."""
    return Rule(
        name=name,
        drawing=name,
        patterns=patterns,
        anchor=anchor,
        activations=(),
        weight="weight",
        output=False,
        modes=frozenset({"weight-only"}),
        accepts={"weight": TABLE},
        kernels=targets,
    )


RULES: Final = (
    _rule(
        "embedding",
        (OperatorPattern((aten.embedding.default,), shapes=((ROWS, WIDTH), _indices)),),
        "output",
        torch=_kernel(
            "gather packed rows, unpack",
            torch_kernels.packed_lookup,
            _kernel("gather rows, dequantize", torch_kernels.plain_lookup),
        ),
        executorch=_kernel("quantized_decomposed.embedding", executorch_kernels.lookup),
        **_on_onnx("Gather, dequantize", onnx_kernels.lookup),
    ),
    _rule(
        "embedding_bag",
        (
            _bags(aten.embedding_bag.padding_idx, False, MEAN, False, None, False, None),
            _bags(aten.embedding_bag.default),
            _bags(aten._embedding_bag.default),
            _bags(aten._embedding_bag_forward_only.default),
        ),
        "op",
        torch=_kernel(
            "bag of packed rows",
            torch_kernels.packed_bag,
            _kernel("gather rows, dequantize, bag", torch_kernels.plain_bag),
        ),
        executorch=_kernel("quantized_decomposed.embedding, reduced", executorch_kernels.bag),
        **_on_onnx("Gather, dequantize, reduce", onnx_kernels.bag),
    ),
)
