# SPDX-License-Identifier: Apache-2.0
"""The rules of attention whose queries and keys are int8: of the operator, and of the products written out.

OpenVINO makes one operator of attention, which multiplies queries and keys as integers where both are int8
with a zero point of 0. Values and what the softmax gives stay in float there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from qompose.backend import Kernel, Match, OperatorPattern, Rule, TensorConstraint, kit
from qompose.observers import activation_spec
from torch import Tensor
from torch.fx import Node

from qompose_onnx.attention_graph import OPERATOR, PRODUCT, up_to_softmax
from qompose_onnx.names import ATTENTION, OPENVINO, OPENVINO_INT8

_HEADS: Final = ((2, 2, 5, 8),) * 3
_INTEGERS: Final = replace(
    activation_spec(torch.int8, -128, 127), qscheme=torch.per_tensor_symmetric
)
_SYMMETRIC: Final = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_tensor_symmetric}),
    zero_point_exact_match=0,
)


def _plain(match: Match) -> str | None:
    """Require what `qompose_onnx.translations` writes as two products: a boolean mask, or none."""
    asked = {"dropout_p": "dropout", "is_causal": "is_causal", "enable_gqa": "enable_gqa"}
    found = [name for key, name in asked.items() if match.argument("output", key)]
    if found:
        return f"it uses {found[0]}"
    mask = match.argument("output", "attn_mask")
    is_boolean = isinstance(mask, Node) and mask.meta["val"].dtype is torch.bool
    return None if mask is None or is_boolean else "its mask is not boolean"


def _forms() -> Iterator[OperatorPattern]:
    def mask() -> Tensor:
        return torch.ones(5, 5, dtype=torch.bool).tril()

    yield OperatorPattern(
        (OPERATOR,), lambda query, key, value: OPERATOR(query, key, value), _HEADS
    )
    yield OperatorPattern(
        (OPERATOR,), lambda query, key, value, attn_mask: OPERATOR(query, key, value, attn_mask),
        (*_HEADS, mask),
    )  # fmt: skip


def _scores_keys(match: Match) -> str | None:
    """Require that the products are those of queries and keys."""
    scored = up_to_softmax(match.output)
    return None if scored else "no softmax over keys reads it, so it is not attention"


def _scores() -> OperatorPattern:
    def scores(self: Tensor, other: Tensor) -> Tensor:
        return torch.softmax(torch.matmul(self, other) * 0.5, -1)

    return OperatorPattern((PRODUCT,), scores, ((2, 2, 5, 8), (2, 2, 8, 5)))


_WHOLE: Final = Rule(
    name="attention",
    drawing="scaled_dot_product_attention",
    patterns=tuple(_forms()),
    activations=("query", "key"),
    output=False,
    option=ATTENTION,
    own={"activation": _INTEGERS},
    accepts={"activation": _SYMMETRIC},
    guard=(kit.float32, _plain),
    kernels={
        **dict.fromkeys(("onnx", "onnxruntime"), Kernel("MatMulIntegerToFloat", float_output=True)),
        OPENVINO: Kernel(OPENVINO_INT8, float_output=True),
    },
)
RULES: Final = (
    _WHOLE,
    replace(
        _WHOLE,
        name="attention_scores",
        drawing="matmul -> softmax",
        patterns=(_scores(),),
        activations=("self", "other"),
        guard=(kit.float32, _scores_keys),
    ),
)
