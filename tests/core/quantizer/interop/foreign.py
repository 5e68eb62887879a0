# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that qompose knows by shape alone, and quantizers with no base class that write in it.

Nothing here comes from qompose: classes of specifications and annotations are their own, observers are
torch.ao's, and a quantizer is whatever has the methods of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver
from torch.fx import GraphModule, Node

aten = torch.ops.aten
KEY = "quantization_annotation"


@dataclass(frozen=True)
class Spec:
    """A plain specification."""

    dtype: torch.dtype
    observer_or_fake_quant_ctr: Any
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False


@dataclass(frozen=True)
class Fixed:
    """A tensor whose parameters are known."""

    dtype: torch.dtype
    scale: float
    zero_point: int
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None


@dataclass(frozen=True)
class Shared:
    """A tensor with the parameters of another."""

    edge_or_node: Any


@dataclass(frozen=True)
class Derived:
    """A tensor with parameters computed from those of others."""

    derived_from: Any
    derive_qparams_fn: Callable[[list[Any]], Any]
    dtype: torch.dtype
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None


@dataclass
class Annotation:
    """What is asked of one node."""

    input_qspec_map: dict[Any, Any] = field(default_factory=dict)
    output_qspec: Any = None
    allow_implicit_sharing: bool = True
    _annotated: bool = False


INT8 = Spec(torch.int8, MinMaxObserver.with_args(eps=2**-12), -128, 127, torch.per_tensor_affine)
UINT8 = Spec(torch.uint8, MinMaxObserver.with_args(eps=2**-12), 0, 255, torch.per_tensor_affine)
WEIGHT = Spec(
    torch.int8, PerChannelMinMaxObserver.with_args(eps=2**-12), -127, 127,
    torch.per_channel_symmetric, ch_axis=0,
)  # fmt: skip
FIXED = Fixed(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)


def bias_scale(observers: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the scales of what is multiplied, and zero."""
    (first, _), (second, _) = (observer.calculate_qparams() for observer in observers)
    return first * second, torch.zeros_like(second, dtype=torch.int32)


def derived_bias(
    node: Node, kind: Any = Derived, sequence: Any = list, per_channel: bool = True
) -> Any:
    """A 32 bit bias of a linear layer, with scales computed from those of what is multiplied."""
    x, weight = node.args[:2]
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    return kind(
        sequence([(x, node), (weight, node)]), bias_scale, torch.int32,
        -(2**31), 2**31 - 1, scheme, ch_axis=0 if per_channel else None,
    )  # fmt: skip


class Foreign:
    """A quantizer by its methods: it annotates the operators of `targets`, whatever is there."""

    targets: tuple[Any, ...] = (aten.linear.default,)
    spec: Any = INT8
    annotation: type = Annotation

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        return model

    def annotate(self, model: GraphModule) -> Any:
        for node in self.wanted(model):
            node.meta[KEY] = self.asked(node)
        return model

    def validate(self, model: GraphModule) -> Any:
        return None

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        return None

    def wanted(self, model: GraphModule) -> list[Node]:
        return calls(model, *self.targets)

    def asked(self, node: Node) -> Any:
        return self.annotation(edges(node, self.spec), self.spec, True, True)


class By(Foreign):
    """Annotates by a function."""

    def __init__(self, write: Callable[[GraphModule], None]) -> None:
        self.write = write

    def annotate(self, model: GraphModule) -> None:
        self.write(model)


class Tanhs(Foreign):
    """Takes other operators."""

    targets = (aten.tanh.default,)


def arrangements(member: Any) -> list[list[Any]]:
    """Alone, first and second: where it stands makes no difference to what it is told."""
    return [[member], [member, Tanhs()], [Tanhs(), member]]


def acting(hook: str, act: Callable[..., Any], **facts: Any) -> Any:
    """A quantizer that does something in one hook, before what it does there otherwise."""

    def hooked(self: Any, model: GraphModule, *others: Any) -> Any:
        answer = act(model, *others)
        return getattr(Foreign, hook)(self, model, *others) or answer

    return type("Acting", (Foreign,), {**facts, hook: hooked})()


def calls(model: GraphModule, *targets: Any) -> list[Node]:
    """The nodes that call operators, in graph order; of the given targets, if there are any."""
    found = [node for node in model.graph.nodes if node.op == "call_function"]
    return [node for node in found if node.target in targets] if targets else found


def edges(node: Node, spec: Any) -> dict[Node, Any]:
    """A specification for every tensor that an operator reads: parameters per channel, biases None."""
    if node.target is aten.linear.default:
        x, weight, *bias = node.args
        return {x: spec, weight: WEIGHT, **dict.fromkeys(bias)}  # type: ignore[dict-item, list-item]
    return dict.fromkeys(node.all_input_nodes, spec)


def annotation_of(node: Node) -> Any:
    return node.meta.get(KEY)


def replace(model: GraphModule, node: Node, build: Callable[[], Node]) -> None:
    """Put what `build` makes before a node in its place."""
    with model.graph.inserting_before(node):
        made = build()
    node.replace_all_uses_with(made)
    model.graph.erase_node(node)


def like(node: Node, target: Any, *args: Any) -> Node:
    """A call in place of another, with its provenance."""
    made = node.graph.call_function(target, args)
    made.meta = dict(node.meta)
    return made


def silu_in_pieces(model: GraphModule) -> None:
    """Decompose every silu."""
    for node in calls(model, aten.silu.default):
        x = node.args[0]
        replace(
            model, node,
            lambda node=node, x=x: like(node, aten.mul.Tensor, x, like(node, aten.sigmoid.default, x)),
        )  # fmt: skip
    model.recompile()


def rebuilt(model: GraphModule) -> GraphModule:
    """The same program in a new module: no node, no name and no path of a parameter survives."""
    graph, made = torch.fx.Graph(), {}
    holder = torch.nn.Module()
    for number, node in enumerate(model.graph.nodes):
        copied = graph.node_copy(node, made.__getitem__)
        if node.op == "get_attr":
            copied.target = f"_param_constant{number}"
            value: Any = model
            for part in str(node.target).split("."):
                value = getattr(value, part)
            setattr(holder, copied.target, value)
        if node.op not in ("placeholder", "output"):
            copied._rename(f"renamed_{number}")
        made[node] = copied
    graph._codegen = model.graph._codegen
    return GraphModule(holder, graph)


def names(nodes: Iterable[Node]) -> list[str]:
    return [node.name for node in nodes]


def put(node: Node, inputs: dict[Any, Any] | None = None, output: Any = None) -> None:
    node.meta[KEY] = Annotation(inputs or {}, output, True, True)


def named(model: GraphModule, name: str) -> Node:
    return next(node for node in model.graph.nodes if node.name == name)
