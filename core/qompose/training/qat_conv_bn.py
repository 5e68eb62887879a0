# SPDX-License-Identifier: Apache-2.0
"""The form of convolution and batch norm that QAT trains, and the way back to the folded one.

A program is prepared in the form it has in evaluation, with batch norms folded, so every rule that
quantizes a model also trains it. Then each fold is taken apart again: the weight is scaled by its batch norm
before it is fake-quantized, and the batch norm stands behind the product. Nothing else differs, and
conversion goes the same way back with the parameters that were learned. The modules that differ in training
have no state: parameters and buffers stay where the model has them and come as arguments, so a state
dict has the model's own names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.observers.fake_quantize import FakeQuantize
from qompose.observers.foreign_observer import guard_of
from qompose.observers.make_observer import DerivedObserver, observer_nodes
from qompose.plan.plan import Rewrite
from qompose.program.batch_norm_folding import TRANSPOSED
from qompose.program.control_flow import nodes_in
from qompose.program.graph import (
    arguments_of,
    behind_modules,
    call,
    constant_of,
    copy_graph_module,
    describe,
    free_attribute,
    get_attribute,
    holds,
    owner_of,
    read_attribute,
    set_attribute,
    value_of,
)
from qompose.program.meta import hand_over
from qompose.program.rewrites import FOLD_BATCH_NORM
from qompose.spec.claim import Claim, Point, PointSpec, Proposal, shared_with
from qompose.spec.qparams import along
from qompose.spec.quantization_spec import DerivedQuantizationSpec
from qompose.training.train_eval import BatchNorm, ModeArgument, Norm, SwitchedOperator, mode_of

aten = torch.ops.aten
Kind = TypeVar("Kind", bound=BatchNorm)


def training_form(
    prepared: GraphModule, exported: GraphModule, rewrites: Iterable[Rewrite]
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
            _unfold(here[producer], original[producer], original[norm])
    for node in list(nodes_in(prepared)):
        mode = mode_of(node)
        if isinstance(mode, ModeArgument):
            rest = (*node.args[: mode.position], *node.args[mode.position + 1 :])
            _replace(node, SwitchedOperator(node.target, **vars(mode)), rest)
        elif isinstance(mode, Norm):
            _replace(node, _norm(BatchNorm, node), (*node.args[:5], _counter_before(node, node)))
        elif node.target is aten.copy_.default:
            _cut(node)
    return [*_not_simulated(prepared), *_lost(original.values(), here)]


def _cut(write: Node) -> None:
    """Let a buffer take values without gradients, in place: else the next step would go back to this one."""
    buffer, value, *rest = write.args
    if isinstance(buffer, Node) and buffer.op == "get_attr" and isinstance(value, Node):
        with write.graph.inserting_before(write):
            cut = call(write.graph, aten.detach.default, (value,), value, value_of(value))
        write.args = (buffer, cut, *rest)


def _lost(original: Iterable[Node], here: Collection[str]) -> Iterator[str]:
    """Name the operators that differ in training, and do not now."""
    for node in original:
        mode = mode_of(node)
        if isinstance(mode, ModeArgument) and node.name not in here:
            yield (
                f"{describe(node)} behaves the same in training as in evaluation: it was "
                "rewritten without dropout"
            )
        elif isinstance(mode, Norm) and mode.frozen:
            yield (
                f"{describe(node)} keeps its running statistics in training, because it was "
                "exported in eval mode and other operators in train mode. Use "
                "qompose.training.unfreeze_batch_norm to change that"
            )
        elif isinstance(mode, Norm) and mode.momentum == 0.0:
            yield (
                f"{describe(node)} keeps its running statistics in training, because it was "
                "exported with a momentum of 0 (like momentum=None in evaluation)"
            )


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
            f"{node.args[0] if guard is None else guard.subject} is not fake-quantized in "
            f"training: its observer {type(observer).__name__} comes from another package"
        )


def _norm(kind: type[Kind], norm: Node) -> Kind:
    """Return the module of a batch norm."""
    mode: Any = mode_of(norm)
    eps: Any = norm.args[7]
    made = kind(mode.momentum, eps, mode.synchronized)
    made.frozen = mode.frozen
    return made


def _counter_before(value: Node, norm: Node) -> Node | None:
    """Read what counts a batch norm's batches in front of a node, None where nothing does."""
    mode = mode_of(norm)
    if not isinstance(mode, Norm) or mode.counter is None:
        return None
    path, counter = mode.counter
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


def _unfold(producer: Node, before: Node, norm: Node) -> None:
    """Take one fold apart: `before` and `norm` are what it was made of.

    Products that share a weight share what is computed of it and of their bias.
    """
    scaled, bias = _behind(producer.args[1], ScaledWeight), producer.args[2]
    at = scaled or behind_modules(producer.args[1])
    raw_bias = _read_before(at, arguments_of(before)["bias"])
    scale, shift, mean, variance = (_read_before(at, argument) for argument in norm.args[1:5])
    counted, eps = _counter_before(at, norm), norm.args[7]
    assert isinstance(bias, Node) and isinstance(eps, float)
    if scaled is None:
        raw = _read_before(at, before.args[1])
        with at.graph.inserting_before(at):
            factor: Any = _call(at, ChannelFactor(eps), (scale, variance), at)
        _replace(at, ScaledWeight(1 if producer.target in TRANSPOSED else 0), (raw, factor))
    else:
        factor = scaled.args[1]
    observed = bias if bias.op == "call_module" else None
    if observed is not None and _behind(observed, FoldedBias) is None:
        _replace(behind_modules(observed), FoldedBias(), (raw_bias, factor, shift, mean))
    producer.args = (*producer.args[:2], None, *producer.args[3:])
    with producer.graph.inserting_after(producer):
        behind = _call(producer, _norm(FusedBatchNorm, norm), (), producer)
    producer.replace_all_uses_with(behind)
    operands = (producer, factor, raw_bias, scale, shift, mean, variance, counted, observed)
    behind.args = operands


def norms_behind(model: GraphModule) -> dict[Node, Node]:
    """Return the products whose batch norms are taken apart, each with the call of its batch norm."""
    return {
        node.all_input_nodes[0]: node
        for node in nodes_in(model)
        if node.op == "call_module"
        and isinstance(get_attribute(owner_of(node), str(node.target)), FusedBatchNorm)
    }


class Unfolded:
    """A program as engines that fold in training alone show it to quantizers: each batch norm in its place.

    Args:
        original: the nodes of the program before it was rewritten, by name.
        folds: names of operators, and of the batch norms that were folded into them.
    """

    def __init__(self, original: Mapping[str, Node], folds: Mapping[str, str]) -> None:
        self._original, self._norm_of = original, folds
        self._producer_of = {norm: producer for producer, norm in folds.items()}

    def view(self, model: GraphModule) -> GraphModule | None:
        """Return a copy of a program, or of a body, with its batch norms; None where it had none."""
        if self._norm_of.keys().isdisjoint(node.name for node in model.graph.nodes):
            return None
        shown = copy_graph_module(model)
        for node in list(shown.graph.nodes):
            if node.name in self._norm_of:
                self._put_back(node)
        return shown

    def _put_back(self, producer: Node) -> None:
        norm = self._original[self._norm_of[producer.name]]
        mode: Any = mode_of(norm)
        parameters = [_read_before(producer, argument) for argument in norm.args[1:5]]
        args = (producer, *parameters, not mode.frozen, *norm.args[6:])
        with producer.graph.inserting_after(producer):
            shown = producer.graph.create_node("call_function", norm.target, args, {}, norm.name)
        shown.meta = dict(norm.meta)
        producer.replace_all_uses_with(shown, lambda user: user is not shown)
        if arguments_of(self._original[producer.name])["bias"] is None:
            producer.args = (*producer.args[:2], None, *producer.args[3:])

    def proposal(self, made: Proposal, model: GraphModule) -> Proposal:
        """Return what was proposed of the view as something of `model`, where the batch norms are folded.

        What is said of a batch norm's output is of its producer's; nothing can be said of what lies between.
        """
        names = {node.name for node in model.graph.nodes}
        moved, notes = [], list(made.notes)
        for claim in made.claims:
            specs: dict[Point, PointSpec] = {}
            for spec in claim.specs:
                place = self._moved(spec)
                if place.point.source in names and place.point.user != place.point.source:
                    specs[place.point] = place
                else:
                    why = "it is inside the region that the batch norm is folded into"
                    notes.append(f"ignored the annotation of {spec.point} by {claim.owner}: {why}")
            if specs:
                moved.append(self._moved_claim(claim, tuple(specs.values())))
        marks: dict[str, Mapping[str, Any]] = {}
        for name, entries in made.marks.items():
            marks[self._place(name)] = {**entries, **marks.get(self._place(name), {})}
        return replace(made, claims=_joined(moved), notes=notes, marks=marks)

    def joined_by(self, answer: object) -> bool:
        """Tell whether a proposal claims a batch norm, and leaves the tensor before that one alone."""
        claims = answer.claims if isinstance(answer, Proposal) else []
        between = {spec.point.source for claim in claims for spec in claim.specs}
        claimed = {name for claim in claims for name in claim.nodes}
        return any(
            norm in claimed and producer not in between
            for norm, producer in self._producer_of.items()
        )

    def _place(self, name: str) -> str:
        return self._producer_of.get(name, name)

    def _point(self, point: Point) -> Point:
        user = None if point.user is None else self._place(point.user)
        return Point(self._place(point.source), user)

    def _moved(self, spec: PointSpec) -> PointSpec:
        """Return a specification at its place in the folded program, and what it refers to too."""
        point, references = self._point(spec.point), tuple(map(self._point, spec.references))
        if spec.shared:
            return shared_with(point, references[0], implicit=spec.allow_implicit_sharing)
        moved = replace(spec, point=point, references=references)
        if isinstance(spec.spec, DerivedQuantizationSpec):
            places: Any = list(references)
            moved = replace(moved, spec=replace(spec.spec, derived_from=places))
        return moved

    def _moved_claim(self, claim: Claim, specs: tuple[PointSpec, ...]) -> Claim:
        return replace(
            claim,
            specs=specs,
            anchor=self._place(claim.anchor),
            nodes=tuple(dict.fromkeys(map(self._place, claim.nodes))),
            output=self._place(claim.output),
            operands=tuple(replace(o, user=self._place(o.user)) for o in claim.operands),
        )


def _joined(claims: Iterable[Claim]) -> list[Claim]:
    """Join claims that were of an operator and of its batch norm; what the later says of a tensor counts."""
    joined: list[Claim] = []
    for claim in claims:
        for number, other in enumerate(joined):
            if not {*other.nodes}.isdisjoint(claim.nodes):
                specs = {spec.point: spec for spec in (*other.specs, *claim.specs)}
                joined[number] = replace(
                    other,
                    nodes=tuple(dict.fromkeys((*other.nodes, *claim.nodes))),
                    output=claim.output,
                    specs=tuple(specs.values()),
                    operands=(*other.operands, *claim.operands),
                )
                break
        else:
            joined.append(claim)
    return joined


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
    sharing: dict[Any, list[Node]] = defaultdict(list)  # a weight's factor, by which it was scaled
    for node, module in calls.items():
        if isinstance(module, FusedBatchNorm):
            sharing[node.args[1]].append(node)
    with torch.no_grad():
        for factor, behind in sharing.items():
            _fold(behind, calls[behind[0]].eps)
            factor.graph.erase_node(factor)  # nothing reads it any more
        for node, module in calls.items():
            if isinstance(module, SwitchedOperator):
                at = module.position
                args = (*node.args[:at], module.in_evaluation, *node.args[at:])
                _restore(node, module.operator, args)
            elif type(module) is BatchNorm:
                args = (*node.args[:5], False, module.momentum, module.eps, False)
                _restore(node, aten.batch_norm.default, args)


def _restore(node: Node, operator: Any, args: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        called = node.graph.call_function(operator, args, node.kwargs)
    called.meta = dict(node.meta)
    _take_place(node, called)


def _fold(calls: Sequence[Node], eps: float) -> None:
    """Fold the batch norm behind products of one weight into it, and into their bias."""
    first: Any = calls[0].args[0]
    values = [constant_of(a) if isinstance(a, Node) else None for a in calls[0].args[2:7]]
    bias, scale, shift, mean, variance = values
    assert mean is not None and variance is not None
    factor = channel_factor(scale, variance, eps)
    scaled = _behind(first.args[1], ScaledWeight)
    assert scaled is not None
    raw: Any = scaled.args[0]
    weight = constant_of(raw)
    assert weight is not None
    axis = 1 if first.target in TRANSPOSED else 0
    path = str(raw.target)
    scaled = _stored(scaled, path, weight * along(factor, axis, weight.dim()))
    path = free_attribute(owner_of(first), f"{path.rpartition('.')[0]}.bias".lstrip("."))
    left = _stored_bias(calls, path, folded_bias(bias, shift, mean, factor), scaled)
    for behind in calls:
        producer: Any = behind.args[0]
        observed = behind.args[8] if isinstance(behind.args[8], Node) else left
        producer.args = (*producer.args[:2], observed, *producer.args[3:])
        behind.replace_all_uses_with(producer)
        hand_over(behind, producer)
        behind.graph.erase_node(behind)


def _stored_bias(calls: Iterable[Node], path: str, value: Tensor, at: Node) -> Node:
    """Store what batch norms leave of a bias and read it, where observers do or in front of a node."""
    found = (_behind(call.args[8], FoldedBias) for call in calls)
    observed = next(filter(None, found), None)
    if observed is not None:
        return _stored(observed, path, value)
    set_attribute(owner_of(at), path, value)
    with at.graph.inserting_before(at):
        return read_attribute(owner_of(at), path, at)


def _behind(argument: Any, kind: type[nn.Module]) -> Node | None:
    """Return the node that calls a module of a kind, behind observers; None where none does."""
    node = argument
    while isinstance(node, Node) and node.op == "call_module":
        if isinstance(get_attribute(owner_of(node), str(node.target)), kind):
            return node
        node = node.args[0]
    return None


def _stored(node: Node, path: str, value: Tensor) -> Node:
    """Store a tensor and read it in a node's place, under its name."""
    set_attribute(owner_of(node), path, value)
    with node.graph.inserting_before(node):
        read = read_attribute(owner_of(node), path, node)
    hand_over(node, read)
    return _take_place(node, read)


_VANISHING = 2.0**-12
"""A factor below it leaves nothing of a channel, neither here nor in integers: it is taken for 1 instead."""


class ChannelFactor(nn.Module):
    """What a batch norm multiplies each channel by; computed once, since its variance changes on the way.

    Args:
        eps: of the batch norm.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, scale: Tensor | None, variance: Tensor) -> Tensor:
        """Return `scale / sqrt(variance + eps)`, shape `(C,)`."""
        return channel_factor(scale, variance, self.eps)


class ScaledWeight(nn.Module):
    """The weight that the batch norm behind makes of it once it is folded: what is quantized.

    Args:
        axis: the dimension of the weight's output channels.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return the weight times the factor, along its output channels."""
        kept = _kept_from_zero(factor)
        return weight * along(kept, self.axis, weight.dim()).to(weight.dtype)


class FusedBatchNorm(BatchNorm):
    """The batch norm behind a product with a scaled weight.

    With batch statistics the product is divided by the factor again, so that they are those of the float
    model's; with running ones what is left of the batch norm is its bias, as once it is folded. The
    formula is that of B. Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2018, with one product for their two.
    """

    operator_name = None

    def forward(  # type: ignore[override]
        self,
        product: Tensor,
        true: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        tracked: Tensor | None,
        observed: Tensor | None = None,
    ) -> Tensor:
        """Normalise `product + bias`, shape `(N, C, ...)`, whose weight was scaled by `true`.

        `observed` is the folded bias as its observer returns it, where it has one.
        """
        factor = _kept_from_zero(true)
        if not self.training or self.frozen:
            left = folded_bias(bias, shift, mean, true) if observed is None else observed
            rest = true / factor  # 1 but for channels that vanish
            rest, left = (along(v, 1, product.dim()).to(product.dtype) for v in (rest, left))
            return product * rest + left
        plain = product / along(factor, 1, product.dim()).to(product.dtype)
        if bias is not None:
            plain = plain + along(bias, 1, plain.dim()).to(plain.dtype)
        return super().forward(plain, scale, shift, mean, variance, tracked)


class FoldedBias(nn.Module):
    """The bias that is left of a batch norm once it is folded, for an observer to look at."""

    def forward(
        self, bias: Tensor | None, factor: Tensor, shift: Tensor | None, mean: Tensor
    ) -> Tensor:
        """Return `shift + (bias - mean) * factor`, shape `(C,)`."""
        return folded_bias(bias, shift, mean, factor)


def channel_factor(scale: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    """Return `scale / sqrt(variance + eps)`, shape `(C,)`."""
    factor = torch.rsqrt(variance + eps)
    return factor if scale is None else factor * scale


def _kept_from_zero(factor: Tensor) -> Tensor:
    """Return 1 where a factor vanishes, and the factor elsewhere.

    A channel whose scale starts at zero, as that of the last batch norm of a residual block often does,
    could not be divided by it again, and would never learn another scale.
    """
    return torch.where(factor.abs() < _VANISHING, 1.0, factor)


def folded_bias(bias: Tensor | None, shift: Tensor | None, mean: Tensor, factor: Tensor) -> Tensor:
    """Return `shift + (bias - mean) * factor`, shape `(C,)`."""
    centred = -mean if bias is None else bias - mean
    return centred * factor if shift is None else centred * factor + shift
