# SPDX-License-Identifier: Apache-2.0
"""What a pattern of the kit finds in a small program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from qompose.backend import OperatorPattern, Pattern
from qompose.backend.pattern import Match, OperatorIndex
from torch import Tensor
from torch.fx import GraphModule

from tests.core.toy import Model, export


def matches(
    patterns: Sequence[Pattern | OperatorPattern],
    function: Callable[[Any, Tensor], Tensor],
    x: Tensor,
    **parts: Any,
) -> list[Match]:
    """Every match of the patterns in a function of an input, which may use `parts`."""
    with torch.no_grad():
        module = export(Model(function, **parts).eval(), x).module()
    assert isinstance(module, GraphModule)
    index = OperatorIndex(module)
    return [match for pattern in patterns for match in pattern.find(index)]
