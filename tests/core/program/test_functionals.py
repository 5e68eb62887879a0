# SPDX-License-Identifier: Apache-2.0
"""Functionals: what a function of torch is exported as is what selectors take it for."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qompose.errors import SelectorError
from qompose.program.aten_operators import aten_operators
from qompose.program.graph import module_path
from torch import Tensor, nn

from tests.core.toy import Call, Model, export

IMAGE, ROWS, SEQUENCE = torch.randn(1, 4, 8, 8), torch.randn(2, 8), torch.randn(2, 3, 8)

# (the function, a call of it, the input)
CALLS: list[tuple[Callable[..., Any], Callable[[Tensor], Any], Tensor]] = [
    (F.linear, lambda x: F.linear(x, torch.ones(3, 8)), ROWS),
    (F.conv2d, lambda x: F.conv2d(x, torch.ones(3, 4, 1, 1)), IMAGE),
    (torch.conv2d, lambda x: F.conv2d(x, torch.ones(3, 4, 1, 1), padding="same"), IMAGE),
    (F.relu, F.relu, ROWS),
    (F.relu, lambda x: F.relu(x + 1, inplace=True), ROWS),
    (F.relu_, F.relu, ROWS),
    (F.relu6, F.relu6, ROWS),
    (F.hardtanh, F.hardtanh, ROWS),
    (F.gelu, F.gelu, ROWS),
    (F.softmax, lambda x: F.softmax(x, -1), ROWS),
    (F.max_pool2d, lambda x: F.max_pool2d(x, 2), IMAGE),
    (F.adaptive_avg_pool2d, lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
    (F.interpolate, lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    (F.interpolate, lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGE),
    (F.interpolate, lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), IMAGE),
    (F.pad, lambda x: F.pad(x, (1, 1)), IMAGE),
    (F.unfold, lambda x: F.unfold(x, 2), IMAGE),
    (F.fold, lambda x: F.fold(x, (4, 2), (2, 1)), torch.randn(1, 8, 6)),
    (torch.Tensor.unfold, lambda x: x.unfold(1, 2, 2), ROWS),
    (F.layer_norm, lambda x: F.layer_norm(x, (8,)), ROWS),
    (F.dropout2d, F.dropout2d, IMAGE),
    (F.embedding, lambda x: F.embedding(torch.zeros(2, dtype=torch.int64), x), ROWS),
    (F.scaled_dot_product_attention, lambda x: F.scaled_dot_product_attention(x, x, x), SEQUENCE),
    (F.grid_sample, lambda x: F.grid_sample(x, torch.zeros(1, 3, 3, 2), align_corners=False), IMAGE),
    (F.cross_entropy, lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.int64)), ROWS),
    (operator.add, lambda x: x + x, ROWS),
    (operator.iadd, lambda x: operator.iadd(x + 1, x), ROWS),
    (operator.truediv, lambda x: x / 3, ROWS),
    (operator.matmul, lambda x: x @ x.T, ROWS),
    (operator.neg, lambda x: -x, ROWS),
    (torch.Tensor.__radd__, lambda x: 2 + x, ROWS),
    (torch.Tensor.add_, lambda x: (x + 1).add_(x), ROWS),
    (torch.Tensor.view, lambda x: x.view(-1), ROWS),
    (torch.cat, lambda x: torch.cat([x, x]), ROWS),
    (torch.bmm, lambda x: torch.bmm(x, x.transpose(1, 2)), SEQUENCE),
    (operator.sub, lambda x: 1 - x, ROWS),
    (F.threshold, lambda x: F.threshold(x, 0.1, 0.0), ROWS),
    (torch.sigmoid, lambda x: x.sigmoid(), ROWS),
]  # fmt: skip


def test_a_function_stands_for_what_it_is_exported_as() -> None:
    each = Model(
        lambda m, *inputs: [part(x) for part, x in zip(m.parts, inputs, strict=True)],
        parts=nn.ModuleList(Call(call) for _, call, _ in CALLS),
    )
    program = export(each, *(x for _, _, x in CALLS))
    called = defaultdict(set)
    for node in program.graph.nodes:
        called[module_path(node)].add(getattr(node.target, "overloadpacket", None))
    for number, (function, _, _) in enumerate(CALLS):
        assert called[f"parts.{number}"] & aten_operators(function), function


def linear(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("function", [linear, len, F.normalize, F.multi_head_attention_forward])
def test_what_stands_for_no_operator(function: Any) -> None:
    with pytest.raises(SelectorError, match=function.__name__):
        aten_operators(function)
