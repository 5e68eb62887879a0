# SPDX-License-Identifier: Apache-2.0
"""Every admissible claim of a rule table on a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from qompose.backend.pattern import Match, OperatorIndex, OperatorPattern, Pattern
from qompose.backend.rule import STATIC, Rule, naming
from qompose.errors import ConfigError, blaming
from qompose.program.aliasing import Memory, buffers_written_by, unsafe_values, why_not_alone
from qompose.program.aten_operators import macs
from qompose.program.graph import (
    constant_of,
    describe,
    is_quantizable,
    operator_name,
    value_of,
)
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
from qompose.spec.selectors import GLOBAL, Selection


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
    return _Table(owner, tuple(rules), selectors, model).proposal(in_float)


class _Table:
    """The rules of a quantizer on a program, and what they propose."""

    def __init__(
        self, owner: str, rules: Sequence[Rule], selectors: Assignment, model: GraphModule
    ) -> None:
        self.owner, self.rules, self.selectors = owner, rules, selectors
        self.index, self.unsafe = OperatorIndex(model), unsafe_values(model.graph)
        self._model = model
        self.result = Proposal()
        self._weighted: dict[tuple[str, str], list[bool]] = defaultdict(list)
        """By selector and the algorithms it asks for, whether the rules of what it claims have weights."""

    @cached_property
    def numbers(self) -> int:
        """How many numbers the program holds; counting them takes as long as there are parameters."""
        held = self._model.parameters(), self._model.buffers()
        return sum(tensor.numel() for tensor in chain(*held))

    def proposal(self, in_float: Mapping[OpOverload, str]) -> Proposal:
        """Return what the rules claim, and why they do not claim more."""
        for rule in self.rules:
            seen: set[tuple[Node, ...]] = set()
            for match in self._matches(rule):
                if match.nodes not in seen:
                    seen.add(match.nodes)
                    self._propose(rule, match)
        if not self._answered():
            self._check_few_patterns()
        self.result.rejections += self._near_misses()
        self.result.rejections += self._state_in_float()
        self.result.rejections += self._left_in_float(in_float)
        self.result.notes += self._without_weights()
        return self.result

    def _check_few_patterns(self) -> None:
        """Capture the patterns of a small table that matches nothing, for errors that explain it.

        A pattern is otherwise captured only where a program has all the operators that it names; one that
        names an operator which its function never calls would go unnoticed.
        """
        patterns = [
            (rule, p) for rule in self.rules for p in rule.patterns if isinstance(p, Pattern)
        ]
        for rule, pattern in patterns if len(patterns) <= _FEW else ():
            with naming(rule):
                pattern.calls()

    def _without_weights(self) -> Iterator[str]:
        """Yield what asks for algorithms and claims nothing that they could change."""
        for (selector, words), weighted in self._weighted.items():
            if words and not any(weighted):
                yield (
                    f"{self.owner}: {selector} has no effect for {words}: no operator it "
                    "claims has a weight"
                )

    def _matches(self, rule: Rule) -> Iterator[Match]:
        with naming(rule):
            names = frozenset().union(*(pattern.any_names for pattern in rule.patterns))
            found = [
                replace(match, names=names)
                for pattern in rule.patterns
                for match in pattern.find(self.index)
            ]
        yield from found

    def _propose(self, rule: Rule, match: Match) -> None:
        anchor = match.node(rule.anchor)
        if anchor is None:
            raise ConfigError(
                f"{self.owner}, rule {rule.name}: its anchor {rule.anchor!r} is not an "
                f"operator of the pattern matched at {match.output.name}. Names: "
                f"{', '.join(match.captures)}"
            )
        selection = self.selectors.select(anchor)
        config, fit = selection.config, None
        reason: str | None
        if not selection.selected:
            reason = f"excluded by {selection.selector}" if selection.selector else _UNSELECTED
        elif config is None:
            reason = f"left in float by {selection.selector}"
        else:
            fit = _Fit(rule, match, config, self)
            asked = f"the guard of rule {rule.name} (called on {describe(match.output)})"
            with naming(rule), blaming(f"{self.owner}: {asked}"):
                others = _otherwise_selected(match, selection, self.selectors)
                reason = (
                    others
                    or self._state_objection(rule, match)
                    or fit.objection()
                    or _written(match, self.unsafe - fit.state)
                )
        if reason is None:
            assert fit is not None and config is not None
            words = ", ".join(map(str, config.algorithms or ()))
            self._weighted[selection.selector, words].append(bool(rule.weight))
            self.result.claims.append(fit.claim(self.owner, anchor, selection.selector))
            return
        names, distance = tuple(node.name for node in match.nodes), _distance(rule, config)
        self.result.rejections.append(Rejection(self.owner, rule.name, names, reason, distance))

    def _answered(self) -> set[str]:
        """Return the names of the operators that claims or rejections speak of."""
        spoken_of: list[Claim | Rejection] = [*self.result.claims, *self.result.rejections]
        return {name for found in spoken_of for name in found.nodes}

    def _near_misses(self) -> list[Rejection]:
        """Return the operators that rules speak of and no pattern fits, with what they lead to instead."""
        answered = self._answered()
        candidates: dict[object, list[Rule]] = defaultdict(list)
        for rule in self.rules:
            for operator in _anchors(rule):
                candidates[operator].append(rule)
        return [
            Rejection(self.owner, near[0].name, (node.name,), _why_no_match(node, near))
            for operator, rules in candidates.items()
            for node in self.index.calls(operator)
            if node.name not in answered and (near := self._asked_for(rules, node))
        ]

    def _asked_for(self, rules: Sequence[Rule], node: Node) -> list[Rule]:
        """Return the rules that need no option, or one that the operator's configuration has."""
        config = self.selectors.select(node).config
        options = ("", *(config.options if config is not None else ()))
        return [rule for rule in rules if rule.option in options]

    @cached_property
    def _memory(self) -> Memory:
        """Return what shares memory: looked at once, since programs may write to many buffers."""
        return Memory(self.index.module.graph)

    def _state_objection(self, rule: Rule, match: Match) -> str | None:
        """Check that an operation alone writes to its buffer, of floats, before all that read it."""
        if not rule.state:
            return None
        buffer = match.node(rule.state)
        if buffer is None or constant_of(buffer) is None:
            return f"{rule.state} is not a buffer of the program"
        if not is_quantizable(buffer):
            return f"{rule.state} ({buffer.name}) is {_kind(buffer)}"
        return why_not_alone(match.output, buffer, self._memory)

    def _state_in_float(self) -> list[Rejection]:
        """Return the operators that write to buffers which are to be integers, and that no rule takes."""
        rules = [rule for rule in self.rules if rule.state]
        answered = self._answered() if rules else set()
        known = ", ".join(operator_name(o) for o in dict.fromkeys(chain(*map(_anchors, rules))))
        found = []
        for node, path in buffers_written_by(self.index.module.graph).items() if rules else ():
            config = self.selectors.select(node).config
            asked = config is not None and any(rule.option in config.options for rule in rules)
            if asked and node.name not in answered:
                why = f"it writes to the buffer {path}, which is kept as integers only if {known} does"
                found.append(Rejection(self.owner, "", (node.name,), why))
        return found

    def _left_in_float(self, reasons: Mapping[OpOverload, str]) -> list[Rejection]:
        """Return the operators of which a backend says why it has no rule, where it was to take them."""
        answered = self._answered()
        found = []
        for operator, reason in reasons.items():
            for node in self.index.calls(operator):
                selection = self.selectors.select(node)
                if selection.selected and node.name not in answered:
                    why = reason if selection.config else f"left in float by {selection.selector}"
                    found.append(Rejection(self.owner, "", (node.name,), why, _NO_RULE))
        return found


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
    return f"no pattern of {known} matches here, where its output goes to {users}"


_LEAST, _SHARE = 1024, 0.01  # of a table's numbers, as of positions, and among all of the model
_FEW = 16  # patterns: capturing one takes up to 0.2 s
_NO_RULE = 3  # distance: what a rule says tells more
_UNSELECTED = "no selector gives it a configuration (set_global applies to all operators)"


def _distance(rule: Rule, config: QuantizationConfig | None) -> int:
    """Return how far a rule is from following a configuration; see `Rejection`."""
    if config is None or rule.objection(config) is None:
        return 0
    if rule.option and rule.option not in config.options:
        return 3  # few ask for it: what another rule objects to says more
    return 1 if rule.mode_for(config) in rule.modes else 2


def _otherwise_selected(match: Match, selection: Selection, selectors: Assignment) -> str | None:
    """Return which selector gives an operator of a match another configuration, None where none does."""
    for node in match.nodes:
        other = selectors.select(node)
        if other.selected and other.config != selection.config:
            return (
                f"{other.selector} gives {node.name} {other.config or 'float'}, which blocks the "
                f"fusion with {selection.selector}"
            )
    return None


def _written(match: Match, unsafe: frozenset[str]) -> str | None:
    touched = {n.name for node in match.nodes for n in (node, *node.all_input_nodes)} & unsafe
    if touched:
        return f"{min(touched)} is written in place and also read under another name"
    return None


def _kind(node: Node) -> str:
    return str(getattr(value_of(node), "dtype", "not a tensor")).removeprefix("torch.")


@dataclass(frozen=True)
class _Fit:
    """A place that a rule may claim under a configuration."""

    rule: Rule
    match: Match
    config: QuantizationConfig
    table: _Table

    @cached_property
    def weights(self) -> tuple[Node, ...]:
        """The weight of the rule's product, or the matrices of its list of parameters."""
        found = self.match.tensors(self.rule.weight or "")
        return found if len(found) < 2 else tuple(n for n in found if value_of(n).dim() > 1)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """What the kernel reads, in the order of the rule."""
        read = [o for role in self.rule.activations for o in self.match.operands(role)]
        nodes = {node.name: node for node in self.match.nodes}
        listed = self.match.operands(self.rule.weight) if self.rule.weight else []
        return (*read, *(o for o in listed if o.read_by(nodes[o.user]) in self.weights))

    def objection(self) -> str | None:
        """Return why it cannot become a claim, None where it can."""
        return (
            self.rule.objection(self.config)
            or self._tensor_objection()
            or self._blocks_objection()
            or next(filter(None, map(self._guarded, self.rule.guards)), None)
        )

    def _guarded(self, guard: Callable[[Match], object]) -> str | None:
        reason = guard(self.match)
        if reason is not None and not isinstance(reason, str):
            raise ConfigError(
                f"the guard returned {reason!r}; return why the match cannot be taken, or None"
            )
        return reason

    def _tensor_objection(self) -> str | None:
        """Check that inputs are float tensors and the weight is a float parameter or buffer."""
        for name in self.rule.activations:
            tensors = self.match.tensors(name)
            captured = self.match.captures.get(name)
            wanted = len(captured) if isinstance(captured, (tuple, list)) else 1
            if len(tensors) != wanted:
                return f"{name} is a number, not a tensor"
            for tensor in tensors:
                if not is_quantizable(tensor):
                    return f"{name} ({tensor.name}) is {_kind(tensor)}"
        role = self.rule.weight
        constants = [constant_of(weight) for weight in self.weights]
        if role and not (constants and all(constant is not None for constant in constants)):
            return f"{role} is not a parameter"
        for weight, constant in zip(self.weights, constants, strict=True):
            if constant is None or not constant.numel():
                return f"{role} ({weight.name}) is empty"
            if not is_quantizable(weight):
                return f"{role} ({weight.name}) is {_kind(weight)}"
        return None

    def _blocks_objection(self) -> str | None:
        """Check that the blocks of the weight's specification divide it."""
        spec: Any = self.rule.specs_for(self.config).get("weight")
        blocks: Any = getattr(spec, "block_size", None)
        for weight in self.weights if blocks is not None else ():
            try:
                full_blocks(tuple(value_of(weight).shape), blocks)
            except ConfigError as error:
                return f"{self.rule.weight} ({weight.name}): {error}"
        return None

    @property
    def state(self) -> frozenset[str]:
        """The names of what the rule's operation writes to, and of its result, which is the same memory."""
        buffer = self.match.node(self.rule.state or "")
        return frozenset() if buffer is None else frozenset({buffer.name, self.match.output.name})

    def claim(self, owner: str, anchor: Node, selector: str) -> Claim:
        """Return the claim of a quantizer, by the selector that chose the operator at the anchor."""
        rule, match, config = self.rule, self.match, self.config
        return Claim(
            owner=owner,
            rule=rule.name,
            anchor=anchor.name,
            nodes=tuple(node.name for node in match.nodes),
            output=match.output.name,
            specs=tuple(map(self._bounded, self._specs())),
            operands=self.operands,
            captures=tuple((k, v.name) for k, v in match.captures.items() if isinstance(v, Node)),
            config=str(config),
            selector=selector,
            mode=rule.mode_of_claims(config),
            needs_quantized=self._needs(),
            needs_all=rule.condition != "any",
            needs_reader=rule.carries,
            needs_neighbor=selector == GLOBAL and not self._gains_alone(),
            product=self._product(),
            bias=self._added_bias(),
            algorithms=(config.algorithms or ()) if rule.weight else (),
            unasked=config.unasked if rule.weight else (),
        )

    def _gains_alone(self) -> bool:
        """Tell whether integers are of use here though all around is in float: to multiply, or to hold."""
        rule, mode = self.rule, self.rule.mode_of_claims(self.config)
        if mode != STATIC or rule.weight or rule.state or any(map(macs, self.match.nodes)):
            return True
        read = [node for name in rule.activations for node in self.match.tensors(name)]
        constants = {id(c): c.numel() for c in map(constant_of, read) if c is not None}
        size = sum(constants.values())
        return size > _LEAST and size > _SHARE * self.table.numbers

    def _added_bias(self) -> AddedBias | None:
        """Return the bias that the rule's kernel adds as an integer, if it is a parameter."""
        bias = self.match.node(self.rule.bias or "") if self.rule.integer_bias else None
        if self.config.mode != STATIC or bias is None or constant_of(bias) is None:
            return None
        roles, edges = (self.rule.activations[0], self.rule.weight or ""), self._edges()
        return AddedBias(bias.name, *(edges[role][0] for role in roles))

    def _product(self) -> Product | None:
        """Return what factors of channels need to know, where any are wanted and weights can absorb them."""
        rule, config, weight = self.rule, self.config, next(iter(self.weights), None)
        bias = self.match.node(rule.bias or "")
        source = self.match.node(rule.activations[0]) if rule.activations else None
        wanted = config.balance or config.algorithms or config.unasked
        if not wanted or rule.channels is None or weight is None or source is None:
            return None
        if bias is not None and constant_of(bias) is None:
            return None
        one, other = map(self._dimension, rule.channels, (source, self.match.output))
        return Product(weight.name, bias.name if bias else "", one, other, config.balance)

    def _dimension(self, dim: int, node: Node) -> int:
        """Return a dimension of the rule's channels, counted from the first.

        Raises:
            ConfigError: the tensor has fewer.
        """
        rank: int = value_of(node).dim()
        if not -rank <= dim < rank:
            raise ConfigError(
                f"rule {self.rule.name}: channels={self.rule.channels} has dimension {dim}, but "
                f"{describe(node)} has {rank}; count from the end where ranks differ, as in (-1, -1)"
            )
        return dim % rank

    def _needs(self) -> tuple[str, ...]:
        """Return the producers whose values must be quantized for the claim to stand."""
        if self.rule.condition is None or self.config.mode != STATIC:
            return ()
        inputs = [node for name in self.rule.activations for node in self.match.tensors(name)]
        if self.rule.condition == "no_float":
            inputs = [node for node in inputs if node.op not in ("placeholder", "get_attr")]
        return tuple(node.name for node in inputs)

    def _edges(self) -> dict[str, list[Point]]:
        """Return what is read, by role."""
        nodes = {node.name: node for node in self.match.nodes}
        edges: dict[str, dict[Point, None]] = defaultdict(dict)
        for operand in self.operands:
            source = operand.read_by(nodes[operand.user])
            edges[operand.role][Point(source.name, operand.user)] = None
        return {role: list(points) for role, points in edges.items()}

    def _specs(self) -> list[PointSpec]:
        rule, edges, output = self.rule, self._edges(), Point(self.match.output.name)
        everywhere = [edge for role in rule.activations for edge in edges.get(role, [])]
        activations = list(dict.fromkeys(everywhere))  # one tensor may have two roles
        specs, result = rule.specs_for(self.config), []
        if "activation" in specs and activations:
            first, *others = activations
            result.append(PointSpec(first, specs["activation"]))
            shared = [*others, output] if rule.shares else []
            result += [shared_with(point, first) for point in shared]
            result += [] if rule.shares else [PointSpec(p, specs["activation"]) for p in others]
        if rule.weight and "weight" in specs:
            result += [PointSpec(edge, specs["weight"]) for edge in edges[rule.weight]]
        if "output" in specs:
            result.append(PointSpec(output, specs["output"]))
        return result

    def _bounded(self, spec: PointSpec) -> PointSpec:
        """Return a specification with what the rule's kernel asks of scale and zero point there."""
        of_weight = spec.point.source in [weight.name for weight in self.weights]
        edge = "weight" if of_weight else "activation"
        bounds = self.rule.bounds_for(edge if spec.point.user else "output")
        return replace(spec, bounds=bounds)
