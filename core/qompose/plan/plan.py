# SPDX-License-Identifier: Apache-2.0
"""The Plan: plain data that says what is quantized, how, by whom, and why the rest is not.

It is made once, travels in the `meta` of every later GraphModule, and is all that later stages read: what
the machine must have to run it, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from qompose.backend.interface import Backend, RuleUse
from qompose.errors import (
    BackendNotFoundError,
    ConfigError,
    PluginError,
    RequirementWarning,
    StageError,
    StateError,
    blaming,
    warn_user,
)
from qompose.observers.channel_ranges import Balance
from qompose.observers.min_max import Observer
from qompose.program.control_flow import nodes_in
from qompose.program.graph import module_path, operator_name
from qompose.program.meta import META_KEY
from qompose.spec.claim import Claim, Conflict, Point
from qompose.spec.qparams import CASTS, PER_CHANNEL
from qompose.spec.quantization_spec import (
    QuantizationSpecBase,
    describe_spec,
    observer_name,
    spec_to_dict,
)

Model = TypeVar("Model")


@dataclass(frozen=True)
class Group:
    """Points that have one scale and zero point, and the one specification they share.

    `depends_on` are the groups from whose observers a derived specification is computed. `balance` is
    set where channels may get factors of their own (`qompose.algorithms`).
    """

    points: tuple[Point, ...]
    spec: QuantizationSpecBase
    claims: tuple[int, ...]
    depends_on: tuple[int, ...] = ()
    balance: Balance | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the group as JSON data."""
        return {
            "points": [str(point) for point in self.points],
            "spec": spec_to_dict(self.spec),
            "claims": list(self.claims),
            "depends_on": list(self.depends_on),
        }


@dataclass(frozen=True)
class Operator:
    """One operator of the exported program, and what the plan made of it.

    `claim` is the number of the claim that covers it; where there is none, `reason` says why.
    `macs` counts multiply-accumulates for one call with the example shapes. `inputs` are the names of the
    operators whose results it reads.
    """

    name: str
    operator: str
    module: str
    macs: int
    claim: int | None
    reason: str = ""
    inputs: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the operator as JSON data."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Rewrite:
    """A rewrite: the program differs from the exported one there, if only by rounding.

    `nodes` are the operators that were removed or changed, `pieces` those that stand in their place. A
    claim holds one of them, unless a quantizer's own transform made them: that stands in any case. There
    are none where parameters alone were changed. `effect` says how much that was. `member` is the label of
    the quantizer whose own transform it is; of the engine's own rewrites, "".
    """

    name: str
    nodes: tuple[str, ...]
    pieces: tuple[str, ...]
    effect: str = ""
    member: str = ""

    @property
    def merges(self) -> bool:
        """Tell whether what stands there are some of the operators that stood there."""
        return set(self.nodes).issuperset(self.pieces)

    def __str__(self) -> str:
        if not self.member:
            effect = f"; {self.effect}" if self.effect else ""
            return f"{self.name}: {', '.join(self.nodes)}{effect}"
        made = ", ".join(self.pieces) or "nothing"
        return f"{self.name}: {', '.join(self.nodes) or 'nothing'} -> {made}"


def rewritten_identity(identity: str, rewrites: Sequence[Rewrite]) -> str:
    """Return the hash that statistics carry; it differs where the engine changed parameters in place.

    What members rewrite is not in it: the program that they were given is the same.
    """
    moved = [rewrite.nodes for rewrite in rewrites if not rewrite.pieces and not rewrite.member]
    return sha256(f"{identity} {moved}".encode()).hexdigest() if moved else identity


@dataclass(frozen=True)
class Requantized:
    """A tensor that goes on with other quantization parameters than those it was made with.

    `from_owner` quantized it as `from_spec`; `to_owner` wants `to_spec` where `readers` read it.
    """

    tensor: str
    from_owner: str
    from_spec: str
    to_owner: str
    to_spec: str
    readers: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.tensor} is requantized for {', '.join(self.readers)}: from "
            f"{self.from_spec} ({self.from_owner}) to {self.to_spec} ({self.to_owner})"
        )


@dataclass(frozen=True)
class Plan:
    """Who takes which region, which tensors share parameters, and what happened to every operator.

    `idle_owners` are the members of the composition that claim nothing; `notes` say why.
    """

    claims: tuple[Claim, ...]
    groups: tuple[Group, ...]
    operators: tuple[Operator, ...]
    conflicts: tuple[Conflict, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    notes: tuple[str, ...] = ()
    float_bytes: int = 0
    idle_owners: tuple[str, ...] = ()

    @cached_property
    def group_of(self) -> dict[Point, int]:
        """Return by point the number of its group."""
        return {point: i for i, group in enumerate(self.groups) for point in group.points}

    def requantizations(self, dropped: Collection[int] = ()) -> tuple[Requantized, ...]:
        """Return the quantized outputs that go on with other quantization parameters, one per new group.

        In a converted graph each is a quantize operator behind a dequantize operator.

        Args:
            dropped: claims that were not followed.
        """
        owner_of = {
            spec.point: claim.owner
            for number, claim in reversed(list(enumerate(self.claims)))
            if number not in dropped
            for spec in claim.specs
        }
        group_of = self.group_of
        meetings: dict[tuple[Point, int], list[Point]] = {}
        for point in owner_of:
            output = Point(point.source)
            apart = point.user is not None and group_of.get(output) != group_of[point]
            if apart and output in owner_of:
                meetings.setdefault((output, group_of[point]), []).append(point)
        return tuple(
            self._requantized(output, self.groups[number], sorted(points), owner_of)
            for (output, number), points in sorted(meetings.items())
            if not {self._dtype(group_of[output]), self._dtype(number)} & CASTS
        )

    def _dtype(self, group: int) -> object:
        return getattr(self.groups[group].spec, "dtype", None)

    def _requantized(
        self, output: Point, group: Group, readers: list[Point], owner_of: Mapping[Point, str]
    ) -> Requantized:
        (before,) = (g.spec for g in self.groups if output in g.points)
        one, other = describe_spec(before), describe_spec(group.spec)
        if one == other:  # one of them may not share, and they differ in what was seen
            one, other = (
                f"{text}, range by {observer_name(spec)},"
                for text, spec in ((one, before), (other, group.spec))
            )
        return Requantized(
            tensor=output.source,
            from_owner=owner_of[output],
            from_spec=one,
            to_owner=", ".join(dict.fromkeys(owner_of[point] for point in readers)),
            to_spec=other,
            readers=tuple(str(point.user) for point in readers),
        )

    def __str__(self) -> str:
        group_of = self.group_of
        module_of = {operator.name: operator.module for operator in self.operators}
        lines = []
        for claim in self.claims:
            where = module_of.get(claim.anchor)
            lines.append(
                f"{claim.owner}, rule {claim.rule}: {' -> '.join(claim.nodes)}"
                f"{f' in {where}' if where else ''}, {claim.mode}"
            )
            for spec in claim.specs:
                shared = f"as {spec.references[0]}" if spec.shared else describe_spec(spec.spec)
                lines.append(f"    {spec.point}: {shared}, group {group_of[spec.point]}")
        lines += [
            f"float: {o.name} ({o.operator}{f' in {o.module}' if o.module else ''}): {o.reason}"
            for o in self.operators
            if o.claim is None
        ]
        lines += [f"rewritten by {rewrite}" for rewrite in self.rewrites]
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "claims": [{key: getattr(claim, key) for key in _OF_CLAIMS} for claim in self.claims],
            "groups": [group.to_dict() for group in self.groups],
            "operators": [operator.to_dict() for operator in self.operators],
            "conflicts": [dict(conflict.__dict__) for conflict in self.conflicts],
            "rewrites": [dict(rewrite.__dict__) for rewrite in self.rewrites],
            "notes": list(self.notes),
            "float_bytes": self.float_bytes,
            "idle_owners": list(self.idle_owners),
        }


_OF_CLAIMS = ("owner", "rule", "anchor", "nodes", "output", "config", "selector", "mode")
"""What the JSON data of a plan has of each claim."""


@dataclass(frozen=True)
class Record:
    """What a GraphModule of any stage carries: the plan, how far it got, and what happened since.

    `dropped` are claims that calibration showed to be impossible, with the reason; `kernels` and
    `fallbacks` are by claim, once lowered; `balanced` describes the tensors whose channels got factors,
    `findings` those whose statistics look wrong.
    `requirements` is what owners ask of the machine that is to run the model.
    `bytes` and `file_bytes` are those of all parameters and buffers, in memory and in a file.
    `state` has the exported values of the buffers that the program, or another method of it, writes to.
    `methods` are the names of the methods that a lowered model was lowered with, where it is one of several.
    `fingerprint` is of the exported program's parameters (`qompose.plan.operator_ids`).
    `backends` are live objects, by the owners of claims.
    `source` is what a lowered model was made of, if `lower` made it here: the converted program as it was
    then. It shares the tensors that kernels take as they are.
    """

    plan: Plan
    stage: str
    backends: Mapping[str, Backend] = field(default_factory=dict)
    dropped: Mapping[int, str] = field(default_factory=dict)
    kernels: Mapping[int, str] = field(default_factory=dict)
    fallbacks: Mapping[int, str] = field(default_factory=dict)
    balanced: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    requirements: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    target: str = ""
    bytes: int = 0
    file_bytes: int = 0
    state: Mapping[str, Tensor] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    fingerprint: str = ""
    source: GraphModule | None = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        """Return the record itself: nothing in it changes."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of a pickle the live backends, which are loaded by name when needed, and the source."""
        return {**self.__dict__, "backends": {}, "source": None}


def record_of(module: object, *, stages: tuple[str, ...], function: str, remedy: str) -> Record:
    """Return the record in `module.meta`, checking that the module comes from one of `stages`.

    Raises:
        StageError: it does not.
    """
    record = getattr(module, "meta", {}).get(META_KEY)
    if not isinstance(record, Record) or record.stage not in stages:
        found = (
            f"a {record.stage} model" if isinstance(record, Record) else repr(type(module).__name__)
        )
        if record is None and _was_quantized(module):
            remedy = f"{remedy} {_NO_PICKLES}"
        raise StageError(f"{function} expects a {' or '.join(stages)} model, got {found}. {remedy}")
    return record


_NO_PICKLES = (
    "A model that was saved as a whole with torch.save or pickle has lost its record. Save "
    "the state_dict() instead and load it into a model prepared the same way; save a "
    "converted model with qompose.save"
)


def _was_quantized(module: object) -> bool:
    """Tell whether a graph holds observers, or quantizes."""
    if not isinstance(module, GraphModule):
        return False
    if any(isinstance(part, Observer) for part in module.modules()):
        return True
    return any("quantize_per" in str(node.target) for node in module.graph.nodes)


def attach(module: Model, record: Record) -> Model:
    """Put a record into a module's meta and return the module."""
    holder: Any = module
    holder.meta = {**getattr(module, "meta", {}), META_KEY: record}
    if isinstance(module, GraphModule):
        _bind_state(module, record)
    return module


_ENTRY = "qompose_scales"
_REMEDY = (
    "A state dict has no scales of activations, which are part of the code. Use qompose.save and "
    "qompose.load for the whole model, or load float parameters before prepare_pt2e"
)
_OTHER_SCALES = (
    "Calibration with other data or settings gives other scales, and so do lowering to other kernels "
    "(another CPU, native code or none) and, by rounding, calibration on another machine. "
)
_FUNCTIONS = frozenset({"torch", "operator", "_operator", "math", "builtins"})
"""Packages of plain functions that programs call on sizes."""


@dataclass(frozen=True)
class _StateBinding:
    """Marks the state dicts of one quantized program, and checks those that are loaded into it.

    Scales of activations are literals of the code, which a state dict does not have: with another model's
    integers a program would compute noise. The mark is in torch's metadata of the state dict, which
    `torch.save` keeps, and adds no key. It is the same in every process.

    Copies made by `copy.copy` and `copy.deepcopy` are bound, too. What torch makes anew of the graph, such
    as the module of another `torch.export.export`, is not.
    """

    stage: str
    literals: str

    def mark(self, _module: Any, _state: Any, _prefix: str, metadata: dict[str, Any]) -> None:
        """Write stage and literals; a hook of torch's `state_dict`."""
        metadata[_ENTRY] = f"{self.stage} {self.literals}"

    def check(
        self, state: dict[str, Tensor], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Compare marks before anything of the program is loaded; a hook of torch's `load_state_dict`.

        Of a larger module that it is part of, torch has loaded by then what stands before it.

        Raises:
            StateError: the state dict is that of a program with other literals.
        """
        if not any(name.startswith(prefix) for name in state):
            return
        path = prefix.removesuffix(".")
        where = f"load_state_dict{f' of {path}' if path else ''}"
        stage, _gap, literals = str(metadata.get(_ENTRY, "")).partition(" ")
        if not literals:
            warn_user(
                f"{where}: the state dict does not say for which scales it was made, and this "
                f"{self.stage} model keeps its own. {_REMEDY}"
            )
        elif literals != self.literals:
            others = _OTHER_SCALES if stage == self.stage else ""
            before = (
                " What stands before it in the larger module is loaded already." if path else ""
            )
            raise StateError(
                f"{where}: the state dict is that of a {stage} model with other scales than this "
                f"{self.stage} model. {others}{_REMEDY}.{before}",
                path,
                (stage, self.stage),
            )


def _bind_state(module: GraphModule, record: Record) -> None:
    """Bind state dicts to a program that has scales in its code, in place; unbind those of any other."""
    hooked: Any = module  # untyped in torch
    for table in (hooked._state_dict_hooks, hooked._load_state_dict_pre_hooks):
        for key in [k for k, hook in table.items() if _is_ours(hook)]:
            del table[key]
    if record.stage in _QUANTIZED and _has_scales_in_code(record):
        binding = _StateBinding(record.stage, _literals_of(module))
        hooked._register_state_dict_hook(binding.mark)
        hooked._register_load_state_dict_pre_hook(binding.check)
        _bind_copies(module)


def _bind_copies(module: GraphModule) -> None:
    """Have copies of a program bound: `copy.deepcopy` takes its hooks along, and `copy.copy` none.

    Each graph module has a class of its own, on which torch puts its code.
    """
    own: Any = type(module)
    own.__copy__ = _bound_copy
    if _bind_copies not in module._deepcopy_hooks:
        module._register_deepcopy_hook(_bind_copies)


def _bound_copy(module: GraphModule) -> GraphModule:
    copied = GraphModule.__copy__(module)
    record = copied.meta.get(META_KEY)
    if record is not None:
        _bind_state(copied, record)
    return copied


_QUANTIZED = frozenset({"converted", "reference", "lowered"})


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps those that are called before loading
    return isinstance(getattr(function, "__self__", None), _StateBinding)


def _has_scales_in_code(record: Record) -> bool:
    """Tell whether any tensor has one scale that calibration chose: a state dict has all others.

    Those of channels and blocks are buffers, and dynamic ones are computed when the program runs.
    """
    return any(
        not getattr(group.spec, "is_dynamic", False)
        and getattr(group.spec, "dtype", None) not in CASTS
        and getattr(group.spec, "qscheme", None) not in PER_CHANNEL
        for group in record.plan.groups
        if not record.dropped.keys() >= {*group.claims}
    )


def _literals_of(module: GraphModule) -> str:
    """Return a name of the numbers in the code that may be scales or zero points.

    Integers of torch's own operators are sizes and axes.
    """
    found = []
    for node in nodes_in(module):
        if node.op == "call_function":
            kinds = (float,) if _is_torchs(node.target) else (float, int)
            numbers = [a for a in _flat((node.args, node.kwargs)) if isinstance(a, kinds)]
            found += [(operator_name(node.target), *map(repr, numbers))] if numbers else []
    return sha256(repr(found).encode()).hexdigest()


def _is_torchs(target: Any) -> bool:
    if (namespace := getattr(target, "namespace", None)) is None:
        return str(target.__module__).partition(".")[0] in _FUNCTIONS
    return namespace in ("aten", "prims", "higher_order")


def _flat(arguments: Any) -> list[Any]:
    flat: list[Any] = torch.utils._pytree.tree_leaves(arguments)
    return flat


def subject_of(
    group: Group, claims: Sequence[Claim], nodes: Mapping[str, Node], bodies: Mapping[Graph, str]
) -> str:
    """Name a group's first tensor, its module and body, and who wants it.

    Args:
        nodes: those of the program and its bodies, by name.
        bodies: what messages call each body.
    """
    claim = claims[group.claims[0]]
    anchor = nodes[claim.anchor]
    places = [module_path(anchor), bodies.get(anchor.graph, "")]
    where = "".join(f" in {place}" for place in places if place)
    return f"{group.points[0]}{where} ({claim.owner}, rule {claim.rule})"


UNREAD = "it is removed because nothing reads its output"
"""Why a region has no kernel that needs none."""


def requirements_of(
    plan: Plan, backends: Mapping[str, Backend], dropped: Collection[int]
) -> dict[str, dict[str, str]]:
    """Return by owner what the claims that were followed ask of a machine, if they ask anything.

    Raises:
        MemberError: a backend fails when it is asked.
        ConfigError: it answers with anything but texts.
    """
    specs = {point: group.spec for group in plan.groups for point in group.points}
    uses: dict[str, list[RuleUse]] = defaultdict(list)
    for number, claim in enumerate(plan.claims):
        if number not in dropped and claim.owner in backends:
            uses[claim.owner].append(RuleUse(claim.rule, claim.mode, _by_role(claim, specs)))
    found = {}
    for owner, used in uses.items():
        who = f"backend {owner!r}: requirements"
        with blaming(who):
            asked = backends[owner].requirements(tuple(used))
        if not isinstance(asked, Mapping) or not all(
            isinstance(text, str) for item in asked.items() for text in item
        ):
            raise ConfigError(f"{who} must return a mapping from strings to strings, got {asked!r}")
        if asked:
            found[owner] = dict(asked)
    return found


def _by_role(
    claim: Claim, specs: Mapping[Point, QuantizationSpecBase]
) -> dict[str, QuantizationSpecBase]:
    captures = dict(claim.captures)
    roles = {Point(captures.get(o.role, ""), o.user): o.role for o in claim.operands}
    roles[Point(claim.output)] = "output"
    return {
        roles[spec.point]: specs.get(spec.point, spec.spec)
        for spec in claim.specs
        if spec.point in roles
    }


def objections(record: Record) -> Iterator[str]:
    """Yield who asks for what, and why this machine does not have it.

    A backend that cannot be loaded is not asked: `lower` says so when it needs it.

    Raises:
        MemberError: a backend fails when it is asked.
    """
    for owner, asked in record.requirements.items():
        try:
            backend = record.backends.get(owner)
        except (BackendNotFoundError, PluginError):
            continue
        if backend is None:
            continue
        with blaming(f"backend {owner!r}: objection"):
            reason = backend.objection(asked)
        if reason:
            yield f"{owner} requires {listed(asked)}: {reason}"


def listed(asked: Mapping[str, str]) -> str:
    """Return requirements in one line."""
    return ", ".join(f"{name} {value}" for name, value in asked.items())


def notes_on(record: Record) -> tuple[str, ...]:
    """Return what reports say: a line per owner that asks anything."""
    return tuple(f"{owner} requires {listed(a)}" for owner, a in record.requirements.items())


def warn(found: Collection[str]) -> None:
    """Warn that a model runs on a machine that it was not made for."""
    if found:
        lines = "".join(f"\n  - {line}" for line in found)
        message = f"This model was made for a different machine:{lines}"
        warn_user(message, RequirementWarning)
