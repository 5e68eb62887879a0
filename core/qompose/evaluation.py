# SPDX-License-Identifier: Apache-2.0
"""The evaluation form of a program, whatever mode it was exported in, and what training does differently."""

from __future__ import annotations

from dataclasses import dataclass
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
_NORM_FLAG = 5
_TRACKED = "num_batches_tracked"


MODE_KEY = "qompose_mode"
"""Where an operator notes what it does in training: its name changes when bodies are told apart."""


@dataclass(frozen=True)
class Switch:
    """An argument that is another one in training, by its position."""

    position: int
    in_training: Any
    in_evaluation: Any


@dataclass(frozen=True)
class Norm:
    """A batch norm with running statistics.

    `frozen` is one that was exported in evaluation, in a program that was in training. `counter` is the
    path and the value of what counts its batches. `synchronized` is one of an `nn.SyncBatchNorm`, which
    torch exports as a batch norm like any other.
    """

    momentum: float
    frozen: bool
    counter: tuple[str, Tensor] | None
    synchronized: bool = False


def mode_of(node: Node) -> Switch | Norm | None:
    """Return what an operator does in training that it does not do now."""
    found: Switch | Norm | None = node.meta.get(MODE_KEY)
    return found


def evaluation_form(program: GraphModule) -> bool:
    """Let all operators of a program be those of evaluation, in place, with a note of what they were.

    Returns:
        whether the program was exported in training, as far as its operators tell.
    """
    counters, nodes = _take_counters(program), list(nodes_in(program))
    training = any(_trains(node) for node in nodes)
    for node in nodes:
        if _has_statistics(node):
            prefix = str(getattr(node.args[3], "target", "")).rpartition(".")[0]
            momentum, frozen = cast(float, node.args[6]), training and not _trains(node)
            counter = counters.get(prefix)
            node.meta[MODE_KEY] = Norm(momentum, frozen, counter, _is_synchronized(node))
            node.args = (*node.args[:5], False, *node.args[6:])
        elif (switch := _switch_of(node)) is not None and _trains(node) is training:
            given = _filled(node, switch.position)
            node.meta[MODE_KEY] = switch
            behind = given[switch.position + 1 :]
            node.args = (*given[: switch.position], switch.in_evaluation, *behind)
    return training


def _has_statistics(node: Node) -> bool:
    return node.target is aten.batch_norm.default and node.args[3] is not None


def _is_synchronized(node: Node) -> bool:
    kinds = [str(kind) for _, kind in node.meta.get("nn_module_stack", {}).values()]
    return bool(kinds) and "SyncBatchNorm" in kinds[-1]


def _trains(node: Node) -> bool:
    """Tell whether an operator was exported in training."""
    if _has_statistics(node):
        return bool(node.args[_NORM_FLAG])
    switch = _switch_of(node)
    return switch is not None and _filled(node, switch.position)[switch.position] != (
        switch.in_evaluation
    )


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


def _switch_of(node: Node) -> Switch | None:
    """Return which argument differs in training."""
    if node.target is aten.instance_norm.default and node.args[3] is None:
        return None  # without running statistics it is the same in both
    if node.target in _FLAGS:
        return Switch(_FLAGS[node.target], True, False)
    if node.target is _ATTENTION and (probability := _filled(node, _DROPPED)[_DROPPED]):
        return Switch(_DROPPED, probability, 0.0)
    return None


def _filled(node: Node, position: int) -> tuple[Any, ...]:
    """Return positional arguments up to one that may have been left at its default."""
    schema: Any = node.target
    rest = schema._schema.arguments[len(node.args) : position + 1]
    return (*node.args, *(argument.default_value for argument in rest))
