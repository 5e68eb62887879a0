# SPDX-License-Identifier: Apache-2.0
"""The evaluation form of a program, whatever mode it was exported in, and what training does differently."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.graph import constant_of
from qompose.nested import nodes_in

aten = torch.ops.aten

_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_FLAGS: dict[Any, int] = {
    **{getattr(aten, name).default: 2 for name in _DROPOUTS},
    **{getattr(aten, f"{name}_").default: 2 for name in _DROPOUTS},
    aten.rrelu.default: 3,
    aten.rrelu_.default: 3,
    aten.instance_norm.default: 5,
    **{getattr(aten, name).input: 6 for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{getattr(aten, name).data: 7 for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
"""The operators that are told whether they are in training, and by which argument."""
_ATTENTION, _DROPPED = aten.scaled_dot_product_attention.default, 4
_NORM, _NORM_FLAG = aten.batch_norm.default, 5
_TRACKED = "num_batches_tracked"


@dataclass
class Modes:
    """What differed between training and evaluation in a program that has its evaluation form now.

    Attributes:
        training: whether it was exported in training.
        switches: by operator, the position of an argument, and what it is in training and evaluation.
        counters: by batch norm, the path and the value of what counts its batches.
        momentum: by batch norm, that of its running statistics.
    """

    training: bool = False
    switches: dict[str, tuple[int, Any, Any]] = field(default_factory=dict)
    counters: dict[str, tuple[str, Tensor]] = field(default_factory=dict)
    momentum: dict[str, float] = field(default_factory=dict)


def evaluation_form(program: GraphModule) -> Modes:
    """Let all operators of a program be those of evaluation, in place, and return what was changed."""
    modes, counters = Modes(), _take_counters(program)
    for node in list(nodes_in(program)):
        if node.target is _NORM and node.args[3] is not None:
            modes.training |= bool(node.args[_NORM_FLAG])
            modes.momentum[node.name] = cast(float, node.args[6])
            prefix = str(getattr(node.args[3], "target", "")).rpartition(".")[0]
            if prefix in counters:
                modes.counters[node.name] = counters[prefix]
            node.args = (*node.args[:5], False, *node.args[6:])
        elif (switch := _switch_of(node)) is not None:
            modes.switches[node.name] = switch
            position, _, in_evaluation = switch
            given = _filled(node, position)
            modes.training |= given[position] != in_evaluation
            node.args = (*given[:position], in_evaluation, *given[position + 1 :])
    return modes


def _take_counters(program: GraphModule) -> dict[str, tuple[str, Tensor]]:
    """Remove what counts the batches of batch norms, and return path and value by the module's path."""
    found = {}
    for node in list(nodes_in(program)):
        if node.target is aten.add_.Tensor and not node.users and isinstance(node.args[0], Node):
            counter = constant_of(node.args[0])
            prefix, _, name = str(node.args[0].target).rpartition(".")
            if counter is not None and name == _TRACKED:
                found[prefix] = (str(node.args[0].target), counter)
                node.graph.erase_node(node)
    return found


def _switch_of(node: Node) -> tuple[int, Any, Any] | None:
    """Return the position of an argument that differs in training, and both its values."""
    if node.target is aten.instance_norm.default and node.args[3] is None:
        return None  # without running statistics it is the same in both
    if node.target in _FLAGS:
        return _FLAGS[node.target], True, False
    if node.target is _ATTENTION and (probability := _filled(node, _DROPPED)[_DROPPED]):
        return _DROPPED, probability, 0.0
    return None


def _filled(node: Node, position: int) -> tuple[Any, ...]:
    """Return positional arguments up to one that may have been left at its default."""
    schema: Any = node.target
    rest = schema._schema.arguments[len(node.args) : position + 1]
    return (*node.args, *(argument.default_value for argument in rest))
