# SPDX-License-Identifier: Apache-2.0
"""Every admissible claim of a rule table on a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from qompose.backend.pattern import Match, OperatorIndex, OperatorPattern, Pattern
from qompose.backend.rule import STATIC, Rule
from qompose.errors import ConfigError, blaming
from qompose.program.aliasing import unsafe_values
from qompose.program.graph import constant_of, describe, is_quantizable, value_of
from qompose.quantizer.selector_matching import Assignment
from qompose.spec.claim import (
    AddedBias,
    Claim,
    Operand,
    Point,
    PointSpec,
    Product,
    Proposal,
    Rejection,
    shared_with,
)
from qompose.spec.qparams import full_blocks
from qompose.spec.quantization_spec import QuantizationConfig
from qompose.spec.selectors import Selection


def propose_rules(
    owner: str,
    rules: Iterable[Rule],
    selectors: Assignment,
    model: GraphModule,
    in_float: Mapping[OpOverload, str] = MappingProxyType({}),
) -> Proposal:
    """Return the claims of a rule table, in the order of its rows.

    Args:
        in_float: why operators that no rule speaks of are left in float.
    """
    proposal = Proposal()
    index, unsafe = OperatorIndex(model), unsafe_values(model.graph)
    rules = tuple(rules)
    for rule in rules:
        seen: set[tuple[Node, ...]] = set()
        for match in (match for pattern in rule.patterns for match in pattern.find(index)):
            if match.nodes not in seen:
                seen.add(match.nodes)
                _propose_match(owner, rule, match, selectors, unsafe, proposal)
    proposal.rejections += _near_misses(owner, rules, index, proposal)
    proposal.rejections += _left_in_float(owner, in_float, selectors, index, proposal)
    return proposal


def _left_in_float(
    owner: str,
    reasons: Mapping[OpOverload, str],
    selectors: Assignment,
    index: OperatorIndex,
    proposal: Proposal,
) -> list[Rejection]:
    """Return the operators of which a backend says why it has no rule for them, where it was to take them."""
    answered = _answered(proposal)
    found = []
    for operator, reason in reasons.items():
        for node in index.calls(operator):
            selection = selectors.select(node)
            if not selection.selected or node.name in answered:
                continue
            why = reason if selection.config else f"left in float by {selection.selector}"
            found.append(Rejection(owner, "", (node.name,), why, _NO_RULE))
    return found


def _answered(proposal: Proposal) -> set[str]:
    """Return the names of the operators that claims or rejections speak of."""
    spoken_of: list[Claim | Rejection] = [*proposal.claims, *proposal.rejections]
    return {name for found in spoken_of for name in found.nodes}


def _near_misses(
    owner: str, rules: Sequence[Rule], index: OperatorIndex, proposal: Proposal
) -> list[Rejection]:
    """Return the operators that rules speak of and no pattern fits, with what they lead to instead."""
    answered = _answered(proposal)
    candidates: dict[object, list[Rule]] = defaultdict(list)
    for rule in rules:
        for operator in _anchors(rule):
            candidates[operator].append(rule)
    return [
        Rejection(owner, near[0].name, (node.name,), _why_no_match(node, near))
        for operator, near in candidates.items()
        for node in index.calls(operator)
        if node.name not in answered
    ]


def _anchors(rule: Rule) -> list[object]:
    """Return the operators at which the patterns of a rule are anchored, or else all that they name."""
    named = [dict(p.operators) for p in rule.patterns if isinstance(p, Pattern)]
    anchors = [[n[rule.anchor]] if rule.anchor in n else list(n.values()) for n in named]
    anchors += [list(p.targets) for p in rule.patterns if isinstance(p, OperatorPattern)]
    return list(dict.fromkeys(operator for group in anchors for operator in group))


def _why_no_match(node: Node, rules: Sequence[Rule]) -> str:
    known = ", ".join(
        f"{rule.name} ({rule.drawing})" if rule.drawing not in ("", rule.name) else rule.name
        for rule in rules
    )
    users = ", ".join(dict.fromkeys(describe(user) for user in node.users)) or "nothing"
    return f"no pattern of {known} fits here, where its value goes to {users}"


_NO_RULE = 3  # distance: what a rule says tells more
_UNSELECTED = "no selector gives it a configuration (set_global gives one to all)"


def _propose_match(
    owner: str,
    rule: Rule,
    match: Match,
    selectors: Assignment,
    unsafe: frozenset[str],
    proposal: Proposal,
) -> None:
    anchor = match.node(rule.anchor)
    if anchor is None:
        raise ConfigError(
            f"{owner}, rule {rule.name}: its anchor {rule.anchor!r} is not an operator of the pattern "
            f"matched at {match.output.name}; names there: {', '.join(match.captures)}"
        )
    selection = selectors.select(anchor)
    names = tuple(node.name for node in match.nodes)
    if selection.selected:
        with blaming(
            f"{owner}: the guard of rule {rule.name}, asked about {describe(match.output)},"
        ):
            reason = _objection(rule, match, selection, selectors) or _written(match, unsafe)
    else:
        reason = f"{selection.selector} leaves it out" if selection.selector else _UNSELECTED
    if reason is not None:
        distance = _distance(rule, selection.config)
        proposal.rejections.append(Rejection(owner, rule.name, names, reason, distance))
        return
    assert selection.config is not None
    proposal.claims.append(_claim(owner, rule, match, anchor, selection, selection.config))


def _distance(rule: Rule, config: QuantizationConfig | None) -> int:
    """Return how far a rule is from following a configuration; see `Rejection`."""
    if config is None or rule.objection(config) is None:
        return 0
    return 1 if rule.mode_for(config) in rule.modes else 2


def _objection(rule: Rule, match: Match, selection: Selection, selectors: Assignment) -> str | None:
    """Return why a match cannot become a claim, None where it can."""
    config = selection.config
    if config is None:
        return f"left in float by {selection.selector}"
    for node in match.nodes:
        other = selectors.select(node)
        if other.selected and other.config != config:
            return (
                f"{other.selector} gives {node.name} {other.config or 'float'}, which blocks the "
                f"fusion with {selection.selector}"
            )
    return (
        rule.objection(config)
        or _tensor_objection(rule, match)
        or _blocks_objection(rule, match, config)
        or next(filter(None, (guard(match) for guard in rule.guards)), None)
    )


def _written(match: Match, unsafe: frozenset[str]) -> str | None:
    touched = {n.name for node in match.nodes for n in (node, *node.all_input_nodes)} & unsafe
    if touched:
        return f"{min(touched)} is written in place and read under another name"
    return None


def _tensor_objection(rule: Rule, match: Match) -> str | None:
    """Check that inputs are float tensors and the weight is a float parameter or buffer."""
    for name in rule.activations:
        tensors = match.tensors(name)
        captured = match.captures.get(name)
        wanted = len(captured) if isinstance(captured, (tuple, list)) else 1
        if len(tensors) != wanted:
            return f"{name} is a number, not a tensor"
        for tensor in tensors:
            if not is_quantizable(tensor):
                return f"{name} ({tensor.name}) is {_kind(tensor)}"
    weight = match.node(rule.weight) if rule.weight else None
    if rule.weight and (weight is None or constant_of(weight) is None):
        return f"{rule.weight} is computed, not a parameter"
    if weight is not None and not _size(weight):
        return f"{rule.weight} ({weight.name}) is empty"
    if weight is not None and not is_quantizable(weight):
        return f"{rule.weight} ({weight.name}) is {_kind(weight)}"
    return None


def _blocks_objection(rule: Rule, match: Match, config: QuantizationConfig) -> str | None:
    """Check that the blocks of the weight's specification divide it."""
    weight = match.node(rule.weight) if rule.weight else None
    blocks = getattr(rule.specs_for(config).get("weight"), "block_size", None)
    if weight is None or blocks is None:
        return None
    try:
        full_blocks(tuple(value_of(weight).shape), blocks)
    except ConfigError as error:
        return f"{rule.weight} ({weight.name}): {error}"
    return None


def _size(parameter: Node) -> int:
    constant = constant_of(parameter)
    return 0 if constant is None else constant.numel()


def _kind(node: Node) -> str:
    return str(getattr(value_of(node), "dtype", "no tensor")).removeprefix("torch.")


def _claim(
    owner: str,
    rule: Rule,
    match: Match,
    anchor: Node,
    selection: Selection,
    config: QuantizationConfig,
) -> Claim:
    roles = [*rule.activations, *([rule.weight] if rule.weight else [])]
    operands = tuple(operand for role in roles for operand in match.operands(role))
    return Claim(
        owner=owner,
        rule=rule.name,
        anchor=anchor.name,
        nodes=tuple(node.name for node in match.nodes),
        output=match.output.name,
        specs=tuple(_bounded(rule, match, spec) for spec in _specs(rule, match, operands, config)),
        operands=operands,
        captures=tuple((k, v.name) for k, v in match.captures.items() if isinstance(v, Node)),
        config=str(config),
        selector=selection.selector,
        mode=config.mode,
        needs_quantized=_needs(rule, match, config),
        needs_all=rule.condition != "any",
        needs_reader=rule.carries,
        product=_product(rule, match, config),
        bias=_added_bias(rule, match, operands, config),
        repairs=config.repairs if rule.weight else (),
    )


def _added_bias(
    rule: Rule, match: Match, operands: Sequence[Operand], config: QuantizationConfig
) -> AddedBias | None:
    """Return the bias that the rule's kernel adds as an integer, if it is a parameter."""
    bias = match.captures.get(rule.bias) if rule.bias and rule.integer_bias else None
    if config.mode != STATIC or not isinstance(bias, Node) or constant_of(bias) is None:
        return None
    roles = (rule.activations[0], rule.weight)
    edges = [next(_edge(match, o) for o in operands if o.role == role) for role in roles]
    return AddedBias(bias.name, *edges)


def _product(rule: Rule, match: Match, config: QuantizationConfig) -> Product | None:
    """Return what factors of channels need to know, where any are wanted and weights can absorb them."""
    weight = match.node(rule.weight) if rule.weight else None
    bias = match.captures.get(rule.bias) if rule.bias else None
    source = match.node(rule.activations[0]) if rule.activations else None
    wanted = config.balance or config.repairs
    if not wanted or rule.channels is None or weight is None or source is None:
        return None
    if isinstance(bias, Node) and constant_of(bias) is None:
        return None
    name = bias.name if isinstance(bias, Node) else ""
    one, other = (
        dim % value_of(node).dim()
        for dim, node in zip(rule.channels, (source, match.output), strict=True)
    )
    return Product(weight.name, name, one, other, config.balance)


def _needs(rule: Rule, match: Match, config: QuantizationConfig) -> tuple[str, ...]:
    """Return the producers whose values must be quantized for the claim to stand."""
    if rule.condition is None or config.mode != STATIC:
        return ()
    inputs = [tensor for name in rule.activations for tensor in match.tensors(name)]
    if rule.condition == "no_float":
        inputs = [node for node in inputs if node.op not in ("placeholder", "get_attr")]
    return tuple(node.name for node in inputs)


def _specs(
    rule: Rule, match: Match, operands: Sequence[Operand], config: QuantizationConfig
) -> list[PointSpec]:
    edges = {
        role: list(
            dict.fromkeys(_edge(match, operand) for operand in operands if operand.role == role)
        )
        for role in dict.fromkeys(operand.role for operand in operands)
    }
    everywhere = [edge for role in rule.activations for edge in edges.get(role, [])]
    activations = list(dict.fromkeys(everywhere))  # one tensor may have two roles
    specs, result = rule.specs_for(config), []
    if "activation" in specs and activations:
        first, *others = activations
        result.append(PointSpec(first, specs["activation"]))
        shared = [*others, Point(match.output.name)] if rule.shares else []
        result += [shared_with(point, first) for point in shared]
        result += [] if rule.shares else [PointSpec(p, specs["activation"]) for p in others]
    if rule.weight and "weight" in specs:
        result += [PointSpec(edge, specs["weight"]) for edge in edges[rule.weight]]
    if "output" in specs:
        result.append(PointSpec(Point(match.output.name), specs["output"]))
    return result


def _bounded(rule: Rule, match: Match, spec: PointSpec) -> PointSpec:
    """Return a specification with what the rule's kernel asks of scale and zero point there."""
    weight = match.node(rule.weight) if rule.weight else None
    of_weight = weight is not None and spec.point.source == weight.name
    edge = "weight" if of_weight else "activation"
    return replace(spec, bounds=rule.bounds_for(edge if spec.point.user else "output"))


def _edge(match: Match, operand: Operand) -> Point:
    user = next(node for node in match.nodes if node.name == operand.user)
    return Point(operand.read_by(user).name, user.name)
