# SPDX-License-Identifier: Apache-2.0
"""Training: a prepared program to be trained, out of one to be calibrated, and back before it is converted.

A program is prepared in the form it has in evaluation, with batch norms folded, so every rule that
quantizes a model also trains it. Then each fold is taken apart again: the weight is scaled by its batch norm
before it is fake-quantized, and the batch norm stands behind the product. Nothing else differs, and
conversion goes the same way back with the parameters that were learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.evaluation import Modes
from qompose.fake_quantize import FakeQuantize
from qompose.graph import (
    constant_of,
    describe,
    free_attribute,
    get_attribute,
    holds,
    owner_of,
    read_attribute,
    set_attribute,
)
from qompose.guarding import guard_of
from qompose.modes import (
    BatchNorm,
    FoldedBias,
    FusedBatchNorm,
    ScaledWeight,
    SwitchedOperator,
    channel_factor,
    folded_bias,
)
from qompose.nested import nodes_in
from qompose.numerics import along
from qompose.observing import DerivedObserver, observer_nodes
from qompose.plan import Rewrite
from qompose.rewrites import FOLD_BATCH_NORM, TRANSPOSED

aten = torch.ops.aten


def training_form(
    prepared: GraphModule, exported: GraphModule, rewrites: Iterable[Rewrite], modes: Modes
) -> list[str]:
    """Take folded batch norms apart and let operators follow `train()` and `eval()`, in place.

    Args:
        exported: the program before it was rewritten, in its evaluation form.
        rewrites: what was made of it.

    Returns:
        a line for each operator that differs in training, and does not now.
    """
    original = {node.name: node for node in nodes_in(exported)}
    here = {node.name: node for node in nodes_in(prepared)}
    for rewrite in rewrites:
        if rewrite.name == FOLD_BATCH_NORM:
            producer, norm = rewrite.nodes
            _unfold(here[producer], original[producer], original[norm], modes)
    here = {node.name: node for node in nodes_in(prepared)}
    for name, switch in modes.switches.items():
        if name in here:
            _replace(here[name], *_switched(here[name], *switch))
    for name, momentum in modes.momentum.items():
        if name in here:
            kept = here[name]
            eps: Any = kept.args[7]
            operands = (*kept.args[:5], _counter_before(kept, kept, modes))
            _replace(kept, BatchNorm(momentum, eps), operands)
    return [
        *_not_simulated(prepared),
        *(
            f"{name} is the same in training as in evaluation: it was rewritten, and its pieces drop nothing"
            for name in modes.switches
            if name not in here
        ),
        *(
            f"{describe(original[name])} keeps its running statistics in training: it was exported with a "
            "momentum of 0, as one with momentum=None is in evaluation"
            for name, momentum in modes.momentum.items()
            if momentum == 0.0
        ),
    ]


def _not_simulated(prepared: GraphModule) -> Iterator[str]:
    """Name the tensors whose observers are of other packages, and round nothing."""
    for node, _ in observer_nodes(prepared):
        observer = get_attribute(owner_of(node), str(node.target))
        if isinstance(observer, (FakeQuantize, DerivedObserver)) or hasattr(
            observer, "fake_quant_enabled"
        ):
            continue
        guard = guard_of(observer)
        yield (
            f"{node.args[0] if guard is None else guard.subject} is not fake-quantized in training: its "
            f"{type(observer).__name__} is an observer of another package"
        )


def _switched(
    node: Node, position: int, in_training: Any, in_evaluation: Any
) -> tuple[nn.Module, tuple[Any, ...]]:
    module = SwitchedOperator(node.target, position, in_training, in_evaluation)
    return module, (*node.args[:position], *node.args[position + 1 :])


def _counter_before(value: Node, norm: Node, modes: Modes) -> Node | None:
    """Read what counts a batch norm's batches in front of a node, None where nothing does."""
    if norm.name not in modes.counters:
        return None
    path, counter = modes.counters[norm.name]
    if not holds(owner_of(value), path):
        set_attribute(owner_of(value), path, counter)
    with value.graph.inserting_before(value):
        return read_attribute(owner_of(value), path, value)


def _read_before(value: Node, argument: Any) -> Node | None:
    """Read a parameter of another graph, or of this one, in front of a node."""
    if not isinstance(argument, Node):
        return None
    if argument.graph is value.graph:
        return argument
    constant = constant_of(argument)
    assert constant is not None
    owner, path = owner_of(value), str(argument.target)
    set_attribute(owner, path, constant)
    with value.graph.inserting_before(value):
        return read_attribute(owner, path, value)


def _unfold(producer: Node, before: Node, norm: Node, modes: Modes) -> None:
    """Take one fold apart: `before` and `norm` are what it was made of."""
    weight, bias = (_behind_observers(argument) for argument in producer.args[1:3])
    raw_bias = _read_before(weight, before.args[2] if len(before.args) > 2 else None)
    scale, shift, mean, variance = (_read_before(weight, argument) for argument in norm.args[1:5])
    raw = _read_before(weight, before.args[1])
    eps: Any = norm.args[7]
    axis = 1 if producer.target in TRANSPOSED else 0
    observed = None if producer.args[2] is bias else producer.args[2]
    if observed is not None:
        _replace(bias, FoldedBias(eps), (raw_bias, scale, shift, mean, variance))
    counted = _counter_before(weight, norm, modes)
    _replace(weight, ScaledWeight(eps, axis), (raw, scale, variance))
    producer.args = (*producer.args[:2], None, *producer.args[3:])
    with producer.graph.inserting_after(producer):
        behind = _call(producer, FusedBatchNorm(modes.momentum[norm.name], eps), (), producer)
    producer.replace_all_uses_with(behind)
    behind.args = (producer, raw_bias, scale, shift, mean, variance, counted, observed)


def _behind_observers(argument: Any) -> Node:
    node: Node = argument
    while node.op == "call_module":
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _call(at: Node, module: nn.Module, args: tuple[Any, ...], like: Node) -> Node:
    """Call a module at the insertion point of a node's graph."""
    owner = owner_of(at)
    path = free_attribute(owner, "training_0")
    owner.add_module(path, module)
    called = at.graph.create_node("call_module", path, args)
    called.meta = dict(like.meta)
    return called


def _replace(node: Node, module: nn.Module, args: tuple[Any, ...]) -> Node:
    """Put the call of a module in a node's place, under its name."""
    with node.graph.inserting_before(node):
        called = _call(node, module, args, node)
    return _take_place(node, called)


def _take_place(node: Node, other: Node) -> Node:
    name = node.name
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
    other.name = name
    return other


def deployment_form(model: GraphModule) -> None:
    """Undo `training_form` with the parameters as they are now, in place; other programs stay as they are."""
    calls: Mapping[Node, Any] = {
        node: get_attribute(owner_of(node), str(node.target))
        for node in nodes_in(model)
        if node.op == "call_module"
    }
    with torch.no_grad():
        for node, module in calls.items():
            if isinstance(module, FusedBatchNorm):
                _fold(node, module)
        for node, module in calls.items():
            if isinstance(module, SwitchedOperator):
                args = (
                    *node.args[: module.position],
                    module.in_evaluation,
                    *node.args[module.position :],
                )
                _restore(node, module.operator, args)
            elif type(module) is BatchNorm:
                args = (*node.args[:5], False, module.momentum, module.eps, False)
                _restore(node, aten.batch_norm.default, args)


def _restore(node: Node, operator: Any, args: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        called = node.graph.call_function(operator, args, node.kwargs)
    called.meta = dict(node.meta)
    _take_place(node, called)


def _fold(behind: Node, module: FusedBatchNorm) -> None:
    """Fold a batch norm into the product before it."""
    producer: Any = behind.args[0]
    values = [constant_of(a) if isinstance(a, Node) else None for a in behind.args[1:6]]
    bias, scale, shift, mean, variance = values
    assert mean is not None and variance is not None
    factor = channel_factor(scale, variance, module.eps)
    scaled = _until(producer.args[1], ScaledWeight)
    raw: Any = scaled.args[0]
    weight = constant_of(raw)
    assert weight is not None
    axis = 1 if producer.target in TRANSPOSED else 0
    folded = weight * along(factor, axis, weight.dim())
    path = str(raw.target)
    scaled = _stored(scaled, path, folded)
    left, observed = folded_bias(bias, shift, mean, factor), behind.args[7]
    path = free_attribute(owner_of(producer), f"{path.rpartition('.')[0]}.bias".lstrip("."))
    if isinstance(observed, Node):
        _stored(_until(observed, FoldedBias), path, left)
    else:
        set_attribute(owner_of(producer), path, left)
        with producer.graph.inserting_before(scaled):
            observed = read_attribute(owner_of(producer), path, scaled)
    producer.args = (*producer.args[:2], observed, *producer.args[3:])
    behind.replace_all_uses_with(producer)
    behind.graph.erase_node(behind)


def _until(argument: Any, kind: type[nn.Module]) -> Node:
    """Return the node that calls a module of a kind, behind observers."""
    node: Node = argument
    while not isinstance(get_attribute(owner_of(node), str(node.target)), kind):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _stored(node: Node, path: str, value: Tensor) -> Node:
    """Store a tensor and read it in a node's place, under its name."""
    set_attribute(owner_of(node), path, value)
    with node.graph.inserting_before(node):
        read = read_attribute(owner_of(node), path, node)
    return _take_place(node, read)
