# SPDX-License-Identifier: Apache-2.0
"""`compose` and ComposableQuantizer: several quantizers as one, in order of priority."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.fx import GraphModule, Node

from qompose.backend.capabilities import Capabilities
from qompose.backend.discovery import load_backend, loadable_backends
from qompose.backend.pattern_question import question_of
from qompose.errors import ConfigError, PluginError, UserError, blaming, near_names
from qompose.quantizer.base import Quantizer
from qompose.quantizer.interop.foreign_quantizer import adapt
from qompose.quantizer.interop.hook_guard import HookGuard, forbid_observer_edits
from qompose.quantizer.interop.torchao_engine import annotate_for_torchao, name_observers
from qompose.quantizer.rule_quantizer import RuleQuantizer, check_keys, selectors_from_data
from qompose.spec.claim import (
    POLICIES,
    PRIORITY,
    Claim,
    Composition,
    Proposal,
    is_loss,
    most_telling,
)
from qompose.spec.quantization_spec import EdgeOrNode, QuantizationSpec

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


class ComposableQuantizer(Quantizer):
    """Several quantizers as one, in order of priority.

    Args:
        quantizers: the members, of this engine or another. A nested composition is replaced by its members,
            in their order, which then follow this composition's `on_conflict`.
        on_conflict: what happens if several members want the same operators. "priority": the first member
            that can quantize them does, and the report lists the claims that lost; if an annotating
            quantizer changes an earlier member's annotation, AnnotationConflictError is raised. "first":
            the same, but such a change is undone and listed. "error": contested operators raise
            ContestedRegionError, and such a change AnnotationConflictError, when a program is prepared.

    Raises:
        UserError: there are no members, or one is not a quantizer.
        ConfigError: a nested composition has a different `on_conflict`.
    """

    def __init__(self, quantizers: Sequence[Any], on_conflict: str = PRIORITY) -> None:
        super().__init__()
        if on_conflict not in POLICIES:
            known = ", ".join(map(repr, POLICIES))
            raise ConfigError(
                f"on_conflict must be one of {known}, got {on_conflict!r}"
                f"{near_names(str(on_conflict), POLICIES)}"
            )
        if not quantizers:
            raise UserError(
                "A composition requires at least one quantizer or the name of an installed "
                "backend. `qompose backends` lists the installed ones."
            )
        self.quantizers = tuple(adapt(quantizer) for quantizer in quantizers)
        for quantizer in self.quantizers:
            nested = isinstance(quantizer, ComposableQuantizer)
            if nested and quantizer.on_conflict != on_conflict:
                raise ConfigError(
                    f"{quantizer.name} is a composition with "
                    f"on_conflict={quantizer.on_conflict!r} inside one with "
                    f"on_conflict={on_conflict!r}. Use the same value for both."
                )
        self.on_conflict = on_conflict

    @property
    def members(self) -> tuple[Quantizer, ...]:
        return tuple(member for quantizer in self.quantizers for member in quantizer.members)

    @property
    def name(self) -> str:
        return "+".join(member.name for member in self.members)

    def bound(self, exported: GraphModule) -> Self:
        copied = copy.copy(self)
        once: dict[int, Quantizer] = {}  # a member that occurs again asks its predicates once
        for member in self.quantizers:
            if id(member) not in once:
                once[id(member)] = member.bound(exported)
        copied.quantizers = tuple(once[id(member)] for member in self.quantizers)
        copied._is_bound = True
        return copied

    def check_program(self, exported: GraphModule) -> list[str]:
        return [note for member in self.quantizers for note in member.check_program(exported)]

    def _owner(self, claim: Claim) -> Quantizer:
        return dict(self.labelled_members)[claim.owner]

    def objection_to_rewrite(self, claim: Claim, nodes: Sequence[Node]) -> str | None:
        return self._owner(claim).objection_to_rewrite(claim, nodes)

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        return self._owner(claim).objection_to_spec(claim, spec)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Apply the members' rewrites to `model`, in order, and return it.

        Raises:
            UserError: a member did not return a GraphModule.
            MemberError: a member raised an error.
        """
        model = super().transform_for_annotation(model)
        for member in self.quantizers:
            if type(member).transform_for_annotation is Quantizer.transform_for_annotation:
                continue  # its rewrites are made: those of all members at once
            with blaming(f"{member.name}: transform_for_annotation"):
                model = member.transform_for_annotation(model)
            if not isinstance(model, GraphModule):
                raise UserError(
                    f"{member.name}: transform_for_annotation returned {model!r}, not a GraphModule"
                )
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        return annotate_for_torchao(model, self)

    def validate(self, model: GraphModule) -> None:
        for member in self.quantizers:
            with HookGuard(member.name, model).forbid_changes("validate"):
                member.validate(model)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        for member in self.quantizers:
            with forbid_observer_edits(member.name, model, edge_or_node_to_obs_or_fq):
                member.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)
        name_observers(edge_or_node_to_obs_or_fq)

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = PRIORITY
    ) -> Proposal:
        """Raise: the members make the claims.

        Raises:
            UserError: always.
        """
        raise UserError("a composition has no claims of its own; call propose on its members")

    def to_dict(self) -> dict[str, Any]:
        if type(self) is not ComposableQuantizer:
            return super().to_dict()
        return {
            "on_conflict": self.on_conflict,
            "members": [quantizer.to_dict() for quantizer in self.quantizers],
        }

    def quantization_capabilities(self) -> Capabilities:
        result = Capabilities(())
        for member in self.members:
            result += member.quantization_capabilities()
        return result


QuantizerLike: TypeAlias = "str | Quantizer | Sequence[str | Quantizer] | Any"
"""A quantizer of any engine; an installed backend, `"name"` or `"name:configuration"`; or a list of these."""


def compose(*members: QuantizerLike, on_conflict: str = PRIORITY) -> ComposableQuantizer:
    """Compose quantizers in order of priority: contested operators go to the first that can quantize them.

    Args:
        members: quantizers of any engine; installed backends by name, with the default configuration
            (`"mine"`) or another (`"mine:dynamic"`); and lists of these.
        on_conflict: "priority"; "error" to refuse contested operators; or "first" to undo changes to
            another member's annotations instead of raising. See `ComposableQuantizer`.

    Raises:
        BackendNotFoundError: no such backend is installed.
        PluginError: it is installed and cannot be loaded.
        ConfigError: it has no such configuration.
        UserError: there are no members.
    """
    return ComposableQuantizer([_member(member) for member in _flat(members)], on_conflict)


def _flat(members: Sequence[Any]) -> Iterator[Any]:
    for member in members:
        yield from _flat(member) if isinstance(member, (list, tuple)) else (member,)


def _member(member: Any) -> Quantizer:
    return quantizer_of(member) if isinstance(member, str) else adapt(member)


def as_quantizer(quantizer: QuantizerLike) -> Quantizer:
    """Return a quantizer as it is, one of another engine adapted, names and lists composed.

    Raises:
        UserError: it is none of these; and its kinds, as `compose` raises them.
    """
    return compose(quantizer) if isinstance(quantizer, (str, list, tuple)) else adapt(quantizer)


def as_composition(quantizer: QuantizerLike) -> ComposableQuantizer:
    """Return a quantizer, also one of another engine, as a composition; any other one is its only member.

    A composition calls the hooks of its members, and says whose it is where one does what it may not.

    Raises:
        UserError: it is not a quantizer; and its kinds, as `compose` raises them.
    """
    adapted = as_quantizer(quantizer)
    if type(adapted) is ComposableQuantizer:
        return adapted
    return ComposableQuantizer([adapted], adapted.on_conflict)


def quantizer_of(name: str) -> Quantizer:
    """Return the quantizer of an installed backend, to which selectors can be added.

    Args:
        name: of the backend, with its default configuration, or `"name:configuration"`.

    Raises:
        BackendNotFoundError: no such backend is installed.
        PluginError: it is installed and cannot be loaded.
        ConfigError: it has no such configuration.
    """
    name, colon, chosen = name.partition(":")
    quantizer = _default_of(name)
    if not colon:
        return quantizer
    if not isinstance(quantizer, RuleQuantizer):
        raise ConfigError(
            f"the quantizer of {name!r} does not accept a configuration; remove ':{chosen}'"
        )
    return quantizer.set_global(chosen)


def _default_of(name: str) -> Quantizer:
    """Return the quantizer of an installed backend with its default configuration."""
    backend = load_backend(name)
    make: Callable[[], Any] = backend.quantizer_class or (lambda: RuleQuantizer(backend))
    quantizer = make()
    if isinstance(quantizer, RuleQuantizer):
        quantizer.set_global(backend.default_config)
    if not isinstance(quantizer, Quantizer):
        reason = f"quantizer_class must return a qompose.Quantizer, got {quantizer!r}"
        raise PluginError(name, type(backend).__module__, reason)
    return quantizer


def quantizer_from_dict(data: Mapping[str, Any]) -> Quantizer:
    """Return the quantizer that the data of `Quantizer.to_dict` stands for.

    Args:
        data: `{"backend": name, "selectors": [...]}`, or `{"members": [...], "on_conflict": "priority"}`.

    Raises:
        ConfigError, SelectorError: the data is malformed, has unknown keys, or asks for what the backend
            cannot do; the message says where.
        BackendNotFoundError, PluginError: a backend that it names cannot be had.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"expected a dict with 'members', or with 'backend' and 'selectors', got {data!r}"
        )
    if "members" in data:
        check_keys({"on_conflict": PRIORITY, **data}, ("members", "on_conflict"))
        if not isinstance(data["members"], list):
            raise ConfigError(f"members must be a list, got {data['members']!r}")
        members = [quantizer_from_dict(member) for member in data["members"]]
        return ComposableQuantizer(members, data.get("on_conflict", PRIORITY))
    check_keys(data, ("backend", "selectors"))
    if not isinstance(data["backend"], str):
        raise ConfigError(f"backend must be a string, got {data['backend']!r}")
    quantizer = _default_of(data["backend"])
    if not isinstance(quantizer, RuleQuantizer):
        raise ConfigError(f"the quantizer of {data['backend']!r} does not support selectors")
    named, owner = quantizer.backend.configs, quantizer.name
    return quantizer.with_selectors(selectors_from_data(data["selectors"], named, owner))


def quantizer_from_json(text: str) -> Quantizer:
    """Return the quantizer that the text of `Quantizer.to_json` stands for; see `quantizer_from_dict`.

    Raises:
        ConfigError: the text is not valid JSON, or the data in it is malformed.
        BackendNotFoundError, PluginError: a backend that it names cannot be had.
    """
    try:
        data = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"invalid JSON: {error}") from None
    return quantizer_from_dict(data)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; a key that stands twice would silently lose its first value."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key!r}")
        found[key] = value
    return found


def installed_with(
    operators: Collection[str], members: Iterable[Quantizer]
) -> dict[str, list[str]]:
    """Return the installed backends, other than those of members, with a rule for an operator alone.

    Args:
        operators: as reports name them: `aten.embedding`.

    Returns:
        names of backends by operator, for those operators that any has a rule for.
    """
    known = {member.backend.name for member in members if isinstance(member, RuleQuantizer)}
    others = loadable_backends(but=known) if operators else []
    found = {}
    for operator in operators:
        question = question_of(operator)
        found[operator] = [b.name for b in others if any(map(question.is_about, b.rules))]
    return {operator: names for operator, names in found.items() if names}


def idle_members(members: Mapping[str, Quantizer], composition: Composition) -> dict[str, str]:
    """Return why members of a composition have no claim, by their labels.

    Of a quantizer with rules that is alone, the operators of the report say all that there is to say.
    """
    if len(members) == 1 and all(isinstance(m, RuleQuantizer) for m in members.values()):
        return {}
    claiming = {claim.owner for claim in composition.chosen}
    return {label: _why(label, members, composition) for label in members if label not in claiming}


def _why(label: str, members: Mapping[str, Quantizer], composition: Composition) -> str:
    reasons = [*_losses(label, composition), *_refusals(label, composition)]
    twin = _twin(label, members)
    if twin is not None:
        reasons.append(
            f"it has the same settings as {twin}, which has priority, so it can never claim "
            "anything"
        )
    if reasons:
        return "; ".join(reasons)
    if isinstance(members[label], RuleQuantizer):
        return "the program has no operator that its rules match"
    return "it annotates nothing in this program"


def _losses(label: str, composition: Composition) -> Iterator[str]:
    """Say to whom the regions went that a member wanted."""
    wanted = {(r.rule, r.nodes) for r in composition.rejections if r.owner == label and is_loss(r)}
    if wanted:
        winners = dict.fromkeys(c.winner for c in composition.conflicts if c.loser == label)
        regions = "the only region" if len(wanted) == 1 else f"all {len(wanted)} regions"
        yield f"lost {regions} it matched to {', '.join(winners)}"


def _refusals(label: str, composition: Composition) -> Iterator[str]:
    """Say why regions that a member's rules match became no claims, the commonest reason first."""
    reasons = Counter(
        r.reason
        for r in dict.fromkeys(most_telling(composition.rejections))
        if r.owner == label and not is_loss(r)
    ).most_common()
    for reason, number in reasons[:_MOST]:
        yield f"{number} region{'s' * (number != 1)}: {reason}"
    if rest := reasons[_MOST:]:
        yield f"and {len(rest)} other reasons, listed with the operators"


_MOST = 3


def _twin(label: str, members: Mapping[str, Quantizer]) -> str | None:
    """Return an earlier member with the same rules and settings, None where there is none."""
    for earlier, other in members.items():
        if earlier == label:
            return None
        if _settings(other) is not None and _settings(other) == _settings(members[label]):
            return earlier
    return None


def _settings(member: Quantizer) -> object | None:
    """Return what a member is set to as data, None where it cannot be compared."""
    if not isinstance(member, RuleQuantizer):
        return None
    try:
        return member.to_dict()
    except ConfigError:  # a function decides, and functions cannot be compared
        return None
