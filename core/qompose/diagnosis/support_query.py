# SPDX-License-Identifier: Apache-2.0
"""`can_quantize`: what a quantizer would take of a model, before anything is calibrated.

The answer, with the reasons of a no, comes from the stages that `prepare_pt2e` runs: it is what it would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from qompose.backend.capabilities import kernels_of
from qompose.backend.discovery import obstacle
from qompose.errors import ConfigError, first_of, near_names
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.plan.operator_ids import QUANTIZED_BEFORE, UNKNOWN_QUANTIZER, isolate
from qompose.plan.plan import Operator
from qompose.plan.user_program import as_graph_module
from qompose.preparation.annotate import annotate
from qompose.preparation.prepare import backends_of, make_plan
from qompose.program.control_flow import body_of, is_nested_call, nodes_in, references_of
from qompose.program.graph import module_path, operator_name
from qompose.program.rewrites import Candidate
from qompose.quantizer.arbitration import wanted_rewrites
from qompose.quantizer.base import Quantizer
from qompose.quantizer.composition import (
    ComposableQuantizer,
    QuantizerLike,
    as_quantizer,
    installed_with,
)
from qompose.quantizer.rule_quantizer import RuleQuantizer
from qompose.spec.claim import Claim, most_telling
from qompose.spec.quantization_spec import QuantizationConfig
from qompose.spec.selectors import Selectors


@dataclass(frozen=True, kw_only=True)
class NodeSupport:
    """The answer for one operator; it is true where the operator would be quantized.

    Attributes:
        node, operator, module: its name, what it calls, and where.
        owner, rule, config, mode, selector: who takes it, by which rule, and what gave it which
            configuration.
        nodes: the operators of the region that the rule takes.
        kernels: (target, kernel name) pairs of the rule. A kernel may still decline a region when the
            model is lowered, which the report of the lowered model says.
        unavailable: why kernels cannot be used here (a package, a processor, a runtime).
        rewrites: what is done to the operator before it is matched, such as the folding of a batch norm.
        reasons: (member, reason) pairs of a no: what each member of the composition says.
    """

    node: str
    operator: str
    module: str
    supported: bool
    owner: str = ""
    rule: str = ""
    config: str = ""
    mode: str = ""
    selector: str = ""
    nodes: tuple[str, ...] = ()
    kernels: tuple[tuple[str, str], ...] = ()
    unavailable: tuple[str, ...] = ()
    rewrites: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self.supported

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON data."""
        return {**asdict(self), "kernels": dict(self.kernels)}

    @property
    def reason(self) -> str:
        """Return why not, in one line; nothing where the answer is yes."""
        return "; ".join(f"{member}: {reason}" for member, reason in self.reasons)

    def __str__(self) -> str:
        where = f"{self.node} ({self.operator}{f' in {self.module}' if self.module else ''})"
        if not self.supported:
            return "; ".join((f"{where}: no: {self.reason}", *self.rewrites))
        kernels = ", ".join(f"{target}: {kernel}" for target, kernel in self.kernels)
        by = f"{self.owner}, rule {self.rule}, config {self.config} ({kernels or 'no kernel'})"
        return "; ".join((f"{where}: yes: {by}", *self.rewrites, *self.unavailable))


def can_quantize(
    program: ExportedProgram | GraphModule,
    node: str | Node,
    quantizer: QuantizerLike,
    config: QuantizationConfig | str | None = None,
) -> NodeSupport:
    """Return whether an operator of a program would be quantized, and how or why not.

    Args:
        program: an exported program; it is left unchanged.
        node: the operator, or its name in the graph or in reports.
        quantizer: the name of an installed backend, a quantizer of any engine, a sequence of these in
            order of priority, or a composition.
        config: a configuration, or the name that each backend has for one, to use instead of the
            quantizer's selectors.

    Raises:
        ConfigError: the program has no such node, or `config` is not a configuration.
        SelectorError, SharingError: `prepare_pt2e` would raise the same.
    """
    if config is not None and not isinstance(config, (QuantizationConfig, str)):
        raise ConfigError(
            f"config must be a QuantizationConfig or a configuration name, got {config!r}"
        )
    exported = as_graph_module(program, "can_quantize")
    isolate(exported)
    name = _name_of(node, program, exported)
    asked, refusals = _configured(as_quantizer(quantizer), config)
    if asked is None:
        found = _described(exported, name)
        return NodeSupport(**found, supported=False, reasons=tuple(refusals.items()))
    return _Inquiry(exported, asked, refusals).answer(name)


def _configured(
    quantizer: Quantizer, config: QuantizationConfig | str | None
) -> tuple[Quantizer | None, dict[str, str]]:
    """Return the quantizer with a configuration in place of its selectors, and which members refuse it."""
    if config is None:
        return quantizer, {}
    members: list[Quantizer] = []
    refusals: dict[str, str] = {}
    for label, member in quantizer.labelled_members:
        if not isinstance(member, RuleQuantizer):
            refusals[label] = "it has no rule table, so it does not accept a configuration"
            continue
        try:
            members.append(member.with_selectors(Selectors()).set_global(config))
        except ConfigError as error:
            refusals[label] = str(error)
    if not members:
        return None, refusals
    return ComposableQuantizer(members, quantizer.on_conflict), refusals


def _name_of(
    node: str | Node, program: ExportedProgram | GraphModule, exported: GraphModule
) -> str:
    """Return the name that a node of the caller's program has in reports."""
    known = {found.name for found in nodes_in(exported)}
    if isinstance(node, str):
        base = node.partition("/")[0]  # reports name the pieces of an operator behind it
        if base in known:
            return node
        found = _places(program, lambda other: other.name == node)
        if not found:
            return node  # a quantizer's own transform may make it
        said = repr(node)
    else:
        found = _places(program, lambda other: other is node)
        said = f"node {getattr(node, 'name', node)!r}"
    placed, found = found, [name for name in found if name in known]
    if placed and not found:
        raise ConfigError(
            f"{said} is a parameter or input of a graph, not an operator. Ask about an "
            "operator that reads it"
        )
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{said} occurs in several subgraphs; pass one of {', '.join(found)}")
    raise ConfigError(f"the program has no {said}")


def _places(program: ExportedProgram | GraphModule, wanted: Callable[[Node], bool]) -> list[str]:
    """Return the names that reports give to nodes: those in bodies have the paths of the bodies in front."""
    root = program.graph_module if isinstance(program, ExportedProgram) else program
    found: list[str] = []

    def walk(part: GraphModule, prefix: str) -> None:
        for node in part.graph.nodes:
            name = node.name if node.name.startswith(prefix) else f"{prefix}{node.name}"
            found.extend([name] if wanted(node) else [])
            for reference in references_of(node):
                walk(body_of(reference), f"{prefix}{str(reference.target).replace('.', '_')}_")

    walk(root, "")
    return found


def _described(
    exported: GraphModule, name: str, operators: Sequence[Operator] = ()
) -> dict[str, Any]:
    nodes, made = {n.name: n for n in nodes_in(exported)}, {op.name: op for op in operators}
    node = nodes.get(name.partition("/")[0])
    if node is None:
        if name not in made:
            raise ConfigError(f"there is no node {name!r}{near_names(name, {*nodes, *made})}")
        return {"node": name, "operator": made[name].operator, "module": made[name].module}
    called = operator_name(node.target) if node.op == "call_function" else node.op
    return {"node": name, "operator": called, "module": module_path(node)}


class _Inquiry:
    """A program that was annotated, and what its composition says of each operator."""

    def __init__(
        self, exported: GraphModule, quantizer: Quantizer, refusals: Mapping[str, str]
    ) -> None:
        self.exported, self.refusals = exported, refusals
        annotated = annotate(exported, quantizer.bound(exported))
        self.composition, self.rewrites = annotated.composition, annotated.rewrites
        self.operators = make_plan(exported, annotated).operators
        self.members, self.backends = annotated.members, backends_of(annotated)

    def answer(self, name: str) -> NodeSupport:
        """Answer for an operator by its name; for one that was taken apart, for its pieces together."""
        facts = _described(self.exported, name, self.operators)
        rows = [op for op in self.operators if op.name == name or op.name.startswith(f"{name}/")]
        numbers = dict.fromkeys(row.claim for row in rows if row.claim is not None)
        claims = [self.composition.chosen[number] for number in numbers]
        left = [row for row in rows if row.claim is None]
        if not rows:
            reasons = [("program", self._no_operator(name))]
        else:
            reasons = [reason for row in left for reason in self._reasons(row, len(rows) > 1)]
        return NodeSupport(
            **facts,
            supported=bool(claims),
            **{
                key: ", ".join(dict.fromkeys(getattr(claim, key) for claim in claims))
                for key in ("owner", "rule", "config", "mode", "selector")
            },
            nodes=tuple(dict.fromkeys(node for claim in claims for node in claim.nodes)),
            kernels=tuple(dict.fromkeys(pair for claim in claims for pair in self._kernels(claim))),
            unavailable=tuple(dict.fromkeys(p for claim in claims for p in self._problems(claim))),
            rewrites=tuple(self._rewritten(name)),
            reasons=tuple(dict.fromkeys(reasons)),
        )

    def _no_operator(self, name: str) -> str:
        own = next((r for r in self.rewrites if r.member and name in r.nodes), None)
        if own is not None:
            made = [piece for piece in own.pieces if piece in {op.name for op in self.operators}]
            return _gone(own.member, made)
        node = next((n for n in nodes_in(self.exported) if n.name == name), None)
        if node is None:
            base, _, piece = name.partition("/")
            known = [op.name for op in self.operators if op.name.startswith(f"{base}/")]
            raise ConfigError(f"{base} was not rewritten into {piece!r}{near_names(name, known)}")
        if is_nested_call(node):
            return "it calls subgraphs; ask about the operators in them, by their names in reports"
        return "it computes no floats, or it is an input, parameter or output of the program"

    def _kernels(self, claim: Claim) -> tuple[tuple[str, str], ...]:
        backend = self.backends.get(claim.owner)
        rule = backend.rule(claim.rule) if backend else None
        return kernels_of(rule) if rule else ()

    def _problems(self, claim: Claim) -> Iterator[str]:
        """Say why the kernels of a claim cannot be used here."""
        backend = self.backends.get(claim.owner)
        if claim.rule == QUANTIZED_BEFORE:
            yield UNKNOWN_QUANTIZER
            return
        if backend is None:
            yield f"{claim.owner} only annotates and has no kernels here"
            return
        if not self._kernels(claim):
            yield f"{claim.owner} has no kernel for rule {claim.rule}, so its regions are simulated"
        problem = obstacle(backend, f"backend {claim.owner!r}")
        if problem:
            yield f"{claim.owner}: {problem}"
        others = self.backends.values()
        brought = {target.name: target for other in others for target in other.targets}
        brought[TORCH_TARGET.name] = TORCH_TARGET
        for target, _ in self._kernels(claim):
            missing = "no member provides this runtime"
            known = brought.get(target)
            problem = obstacle(known, f"target {target!r}") if known else missing
            if problem:
                yield f"target {target}: {problem}"

    def _rewritten(self, name: str) -> Iterator[str]:
        for rewrite in self.rewrites:
            of_member = bool(rewrite.member) and name in rewrite.pieces
            if of_member or name.partition("/")[0] in rewrite.nodes:
                if rewrite.member:
                    yield f"rewritten by {rewrite}"
                    continue
                into = "" if rewrite.merges else f" into {', '.join(rewrite.pieces)}"
                yield f"rewritten by {rewrite.name}: {', '.join(rewrite.nodes)}{into}"

    def _reasons(self, row: Operator, prefix: bool) -> Iterator[tuple[str, str]]:
        """Yield what each member says of an operator that nobody takes."""
        where = f"{row.name}: " if prefix else ""
        candidates = [c for c in self._candidates() if row.name.partition("/")[0] in c.nodes]
        base, _, piece = row.name.partition("/")
        nodes = {f"{base}_{piece}" if piece else base}
        for label in self.members:
            said = [
                f"rule {r.rule}: {r.reason}" if r.rule else r.reason
                for r in most_telling(self.composition.rejections)
                if r.owner == label and not nodes.isdisjoint(r.nodes)
            ]
            for reason in dict.fromkeys(said) or [self._silence(label, row)]:
                yield label, where + reason
        for label, reason in self.refusals.items():
            yield label, where + reason
        spoken_of = {name for r in self.composition.rejections for name in r.nodes}
        if nodes.isdisjoint(spoken_of):
            rivals = installed_with([row.operator], self.members.values())
            for name in rivals.get(row.operator, ()):
                yield (
                    name,
                    f"{where}it is installed but not a member, and has a rule for {row.operator}",
                )
        for candidate in candidates:
            others = ", ".join(n for n in candidate.nodes if n != base)
            obstacle = candidate.obstacle or f"no rule claims {others or base}"
            yield "program", f"{where}{candidate.rewrite} was not applied: {obstacle}"

    def _silence(self, label: str, row: Operator) -> str:
        if isinstance(self.members[label], RuleQuantizer):
            return f"none of its rules matches {row.operator} here"
        return "it does not annotate it"

    def _candidates(self) -> list[Candidate]:
        """Return the rewrites that were not made."""
        made = {(rewrite.name, rewrite.nodes) for rewrite in self.rewrites}
        obstacles = self.composition.obstacles
        return [
            replace(candidate, obstacle=obstacles.get((candidate.rewrite, candidate.nodes)))
            for candidate in wanted_rewrites(self.exported, self.members.values())
            if (candidate.rewrite, candidate.nodes) not in made
        ]


def _gone(member: str, made: Sequence[str]) -> str:
    """Say of an operator that a quantizer rewrote it, and what to ask about instead."""
    instead = (
        f"ask about the operators that replaced it: {first_of(made, _MOST)}"
        if made
        else "it was removed"
    )
    return f"{member} rewrote it in transform_for_annotation; {instead}"


_MOST = 8
