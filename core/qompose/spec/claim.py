# SPDX-License-Identifier: Apache-2.0
"""A quantizer's claim on a region of the program, and the annotations of nodes that say the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.fx import GraphModule, Node

from qompose.program.control_flow import nodes_in
from qompose.program.graph import module_stack
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec.algorithm_choice import AlgorithmChoice
from qompose.spec.qparams import Bounds
from qompose.spec.quantization_spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)


@dataclass(frozen=True)
class Point:
    """A place where a tensor is quantized: the output of `source`, or its edge into `user`."""

    source: str
    user: str | None = None

    @property
    def holder(self) -> str:
        """Return the node whose annotation says how the tensor is quantized there."""
        return self.user or self.source

    def __lt__(self, other: Point) -> bool:
        """Order by names; an output comes before the edges."""
        return (self.source, self.user or "") < (other.source, other.user or "")

    def __str__(self) -> str:
        return f"output of {self.source}" if self.user is None else f"{self.source} -> {self.user}"


@dataclass(frozen=True)
class PointSpec:
    """A specification at a point. References of shared and derived specifications are points too.

    `bounds` is what the claim's kernel asks of scale and zero point, once they are known.
    """

    point: Point
    spec: QuantizationSpecBase
    references: tuple[Point, ...] = ()
    allow_implicit_sharing: bool = True
    bounds: Bounds | None = None

    @property
    def shared(self) -> bool:
        """Tell whether the specification is that of another point."""
        return isinstance(self.spec, SharedQuantizationSpec)

    @property
    def derived(self) -> bool:
        """Tell whether the parameters are computed from those of other points."""
        return isinstance(self.spec, DerivedQuantizationSpec)


def shared_with(point: Point, other: Point, *, implicit: bool = True) -> PointSpec:
    """Return the specification of a point that has the parameters of another. It holds no nodes."""
    return PointSpec(point, SharedQuantizationSpec(other), (other,), implicit)  # type: ignore[arg-type]


def reasons_of_dependents(
    specs: Iterable[PointSpec], reasons: Mapping[Point, str]
) -> dict[Point, str]:
    """Return why points cannot be quantized, with those whose parameters are taken from such points."""
    found = dict(reasons)
    dependents: dict[Point, list[PointSpec]] = defaultdict(list)
    for spec in specs:
        for reference in spec.references:
            dependents[reference].append(spec)
    waiting = list(found)
    while waiting:
        reference = waiting.pop(0)
        for spec in dependents[reference]:
            if spec.point not in found:
                how = "shares the parameters of" if spec.shared else "is derived from"
                found[spec.point] = f"it {how} {reference}: {found[reference]}"
                waiting.append(spec.point)
    return found


@dataclass(frozen=True)
class Operand:
    """Where a region reads a captured tensor: the argument of `user` at `position`.

    The first item of `position` is an argument's index or keyword; the rest index nested lists.
    """

    role: str
    user: str
    position: tuple[int | str, ...]

    def read_by(self, user: Node) -> Node:
        """Return the tensor that the node `user` reads there."""
        first, *rest = self.position
        found: Any = user.args[first] if isinstance(first, int) else user.kwargs[first]
        for index in rest:
            found = found[index]
        assert isinstance(found, Node)
        return found


@dataclass(frozen=True)
class AddedBias:
    """A bias that a kernel adds as an integer: its name, and the edges whose scales make up its step."""

    name: str
    input: Point
    weight: Point


@dataclass(frozen=True)
class Product:
    """The parameters of a claimed product, and which dimensions of its tensors its channels are.

    `balanced` tells whether its configuration lets them be balanced (`qompose.algorithms.smooth_quant`).
    """

    weight: str
    bias: str
    input_dim: int
    output_dim: int
    balanced: bool = True


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One admissible annotation of one region, and who asks for it.

    `nodes` are the operators of the region in graph order, `output` the one whose value leaves it.
    `needs_quantized` names producers: the claim stands only where every one of them (`needs_all`), or at
    least one, gives a tensor that is quantized already. With `needs_reader` it stands only where another
    claim reads its output as integers; with `needs_neighbor`, where one next to it, or behind others of the
    kind, gives or takes integers for a reason of its own. `mode` is "static", "dynamic" or "weight-only".
    `product` is set where the claim's configuration lets its channels have factors, `bias` where its kernel
    adds a bias as an integer. `algorithms` are those that the configuration asks for, of a rule with a
    weight; `unasked` are the words of those that are made where they help, since it says nothing of them.
    """

    owner: str
    rule: str
    anchor: str
    nodes: tuple[str, ...]
    output: str
    specs: tuple[PointSpec, ...]
    operands: tuple[Operand, ...] = ()
    captures: tuple[tuple[str, str], ...] = ()
    config: str = ""
    selector: str = ""
    mode: str = "static"
    needs_quantized: tuple[str, ...] = ()
    needs_all: bool = True
    needs_reader: bool = False
    needs_neighbor: bool = False
    product: Product | None = None
    bias: AddedBias | None = None
    algorithms: tuple[AlgorithmChoice, ...] = ()
    unasked: tuple[str, ...] = ()


class Kind(Enum):
    """What became of a match that is not a claim: refused, admissible without its condition, or lost."""

    REFUSED = "refused"
    WAITED = "waited"
    LOST = "lost"


@dataclass(frozen=True)
class Rejection:
    """A match that could not become a claim, and why.

    `distance` is 0 where the rule takes the configuration, 1 where it does not, 2 where it takes none of
    that mode: what nearer rules say tells more. It is 3 where there is no rule, and `rule` is empty.
    """

    owner: str
    rule: str
    nodes: tuple[str, ...]
    reason: str
    distance: int = 0
    kind: Kind = Kind.REFUSED


PRIORITY, ERROR, FIRST = "priority", "error", "first"
POLICIES = (PRIORITY, ERROR, FIRST)
"""What a composition does where members want the same: see `ComposableQuantizer`."""


@dataclass(frozen=True)
class Conflict:
    """A claim that lost nodes to another one.

    `reason` says why, where the winner's member comes later in the composition.
    """

    winner: str
    winner_rule: str
    loser: str
    loser_rule: str
    nodes: tuple[str, ...]
    reason: str = ""


@dataclass
class Proposal:
    """All that one quantizer says of one program.

    `marks` are entries of nodes' meta that the quantizer wrote for later tools, by node; they go with its
    claims. `withdrawn` are claims that it may not make; others of its claims may refer to them.
    """

    claims: list[Claim] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    marks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    withdrawn: Sequence[Claim] = ()


@dataclass
class Composition:
    """The claims that were chosen, in order of priority, and what became of the others.

    `obstacles` says why rewrites were not made, by their name and operators; `blocked`, by operators that
    only a rewrite brings to a rule, what the rule says of them with it.
    """

    chosen: list[Claim] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    obstacles: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)


def node_annotation(node: Node) -> Any:
    """Return a node's annotation, ours or one of the same shape, or None."""
    return node.meta.get(ANNOTATION_KEY)


def clear_annotations(model: GraphModule) -> None:
    """Remove the annotations of all nodes, those in bodies included."""
    for node in nodes_in(model):
        node.meta.pop(ANNOTATION_KEY, None)


_OF_ENGINES = frozenset(vars(QuantizationAnnotation()))
ANNOTATION_FACTS = "quantization_annotation_facts"
"""Key in `node.meta` of what a quantizer's own kind of annotation says beyond the common one."""


def annotation_facts(annotation: Any) -> dict[str, Any]:
    """Return the flags, numbers and texts that an annotation has beyond the common ones, by name."""
    known = getattr(annotation, "__dict__", {})
    return {k: v for k, v in known.items() if k not in _OF_ENGINES and _is_flag(v)}


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def forget_specifications(model: GraphModule) -> None:
    """Leave of annotations that nodes were annotated, and the facts about it, in place.

    The specifications refer to nodes of the prepared graph.
    """
    for node in nodes_in(model):
        annotation = node_annotation(node)
        if annotation is not None:
            kept = QuantizationAnnotation(_annotated=annotation._annotated)
            vars(kept).update(annotation_facts(annotation))
            node.meta[ANNOTATION_KEY] = kept


def is_loss(rejection: Rejection) -> bool:
    """Tell whether a claim was admissible, and another member had taken its nodes."""
    return rejection.kind is Kind.LOST


def most_telling(rejections: Iterable[Rejection]) -> list[Rejection]:
    """Leave out what a member's rules refuse at once where another of them got further with the same nodes.

    What that one waited for, or lost, is what is missing there. What rules for other configurations say
    comes last.
    """
    listed = sorted(rejections, key=lambda rejection: rejection.distance)
    further = {(r.owner, r.nodes) for r in listed if r.kind is not Kind.REFUSED}
    return [r for r in listed if r.kind is not Kind.REFUSED or (r.owner, r.nodes) not in further]


RoleSpec: TypeAlias = "QuantizationSpec | FixedQParamsQuantizationSpec | None"
"""What a configuration gives to a role; None leaves it in float."""
OperatorPatternType: TypeAlias = list[Callable[..., Any]]
"""Module types and functions that are quantized together, such as `[nn.Conv2d, nn.ReLU]`."""
ObserverOrFakeQuantize: TypeAlias = nn.Module
"""What `derive_qparams_fn` gets of each tensor: a module that has `calculate_qparams`."""


class OperatorConfig(NamedTuple):
    """A configuration, and the patterns that a quantizer supports with it."""

    config: QuantizationConfig
    operators: list[OperatorPatternType]


def get_input_act_qspec(quantization_config: QuantizationConfig | None) -> RoleSpec:
    """Return how a configuration quantizes inputs that are activations; None: not at all."""
    return None if quantization_config is None else quantization_config.input_activation


def get_output_act_qspec(quantization_config: QuantizationConfig | None) -> RoleSpec:
    """Return how a configuration quantizes outputs; None: not at all."""
    return None if quantization_config is None else quantization_config.output_activation


def get_weight_qspec(quantization_config: QuantizationConfig | None) -> RoleSpec:
    """Return how a configuration quantizes weights; None: not at all."""
    return None if quantization_config is None else quantization_config.weight


def get_bias_qspec(quantization_config: QuantizationConfig | None) -> RoleSpec:
    """Return how a configuration quantizes biases; None: not at all."""
    return None if quantization_config is None else quantization_config.bias


def get_module_name_filter(module_name: str) -> Callable[[Node], bool]:
    """Return a predicate: whether an operator is in the module at a path, or in one inside it.

    A parameter is where an operator reads it. `get_source_partitions` takes the predicate as `filter_fn`.
    """

    def is_in_module(node: Node) -> bool:
        if node.op == "get_attr":
            return any(is_in_module(user) for user in node.users)
        paths = (path for path, _ in module_stack(node))
        return any(path == module_name or path.startswith(f"{module_name}.") for path in paths)

    return is_in_module


def is_valid_annotation(annotation: QuantizationAnnotation | None) -> bool:
    """Tell whether an annotation asks for anything."""
    if annotation is None:
        return False
    return bool(annotation.input_qspec_map) or annotation.output_qspec is not None


def annotate_input_qspec_map(
    node: Node, input_node: Node, qspec: QuantizationSpecBase | None
) -> None:
    """Add one edge's specification to a node's annotation, making the annotation where there is none."""
    annotation = node.meta.setdefault(ANNOTATION_KEY, QuantizationAnnotation())
    annotation.input_qspec_map[input_node] = qspec


def annotate_output_qspec(node: Node, qspec: QuantizationSpecBase | None) -> None:
    """Set the output specification of a node's annotation, making the annotation where there is none."""
    node.meta.setdefault(ANNOTATION_KEY, QuantizationAnnotation()).output_qspec = qspec
