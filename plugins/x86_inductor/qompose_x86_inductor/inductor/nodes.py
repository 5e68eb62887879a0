# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a lowered graph say."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call by name, defaults included, in the order of the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in schema}
