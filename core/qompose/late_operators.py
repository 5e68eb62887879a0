# SPDX-License-Identifier: Apache-2.0
"""Operators that stay in a graph until the compiler's own passes are through, and are replaced then.

Before, a graph is functional: it cannot say that an operator overwrites a tensor which nobody reads any more.
Behind those passes it can, and the order in which tensors are read is known.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch._inductor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes
from torch.fx import Graph

from qompose.backend import LateOperators

_PASSES: Final = "post_grad_custom_post_pass"


class LateReplacement(CustomGraphPass):
    """A graph pass of torch's compiler that replaces late operators, in the order of the graph."""

    def __init__(self, operators: LateOperators) -> None:
        self._operators = dict(operators)

    def __call__(self, graph: Graph) -> None:
        """Change a graph in place."""
        for node in list(graph.nodes):
            replace = self._operators.get(node.target)
            if replace is not None:
                replace(node)

    def uuid(self) -> Any:
        """Return what tells code that was compiled with these functions from other code."""
        parts = (
            f"{name} {function.__qualname__}\n{inspect.getsource(inspect.getmodule(function) or function)}"
            for name, function in self._operators.items()
        )
        return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def settings_with(operators: LateOperators, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the compiler that also replace operators, behind a user's own passes."""
    if not operators:
        return dict(settings)
    users = settings.get(_PASSES, getattr(torch._inductor.config, _PASSES))
    passes = (*get_custom_graph_passes(users), LateReplacement(operators))
    return {**settings, _PASSES: passes}
