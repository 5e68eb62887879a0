# SPDX-License-Identifier: Apache-2.0
"""What stays behind in a converted model beside its integers."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule

from qompose.nested import nodes_in


def kept_in_float(model: GraphModule, quantized: Mapping[str, str]) -> list[str]:
    """Name the parameters that are stored as floats beside their integers, and who reads those.

    Args:
        quantized: the parameters that have integers, each with a reader of these.
    """
    return [
        f"{node.target} stays in float beside its integers ({quantized[str(node.target)]} "
        f"reads those): {', '.join(user.name for user in node.users)} "
        f"{'is' if len(node.users) == 1 else 'are'} not quantized"
        for node in nodes_in(model)
        if node.op == "get_attr" and node.users and str(node.target) in quantized
    ]
