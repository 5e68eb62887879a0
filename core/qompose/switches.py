# SPDX-License-Identifier: Apache-2.0
"""Where a converted program reads what was quantized, and what it would read in float."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Switch:
    """A node that gives one reader a tensor as quantization leaves it.

    Whoever gives that reader the value of `source` instead has switched the tensor's quantization off.

    Attributes:
        node: what is read.
        source: what was quantized: a parameter, or a value that stands before `node`. It is there in a model
            that keeps its float parameters.
        claims: numbers of the claims for whose sake it is read.
        tensor: name of the value in the prepared program.
    """

    node: Node
    source: Node
    claims: frozenset[int]
    tensor: str
