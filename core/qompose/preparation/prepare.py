# SPDX-License-Identifier: Apache-2.0
"""`prepare_pt2e` and `prepare_qat_pt2e`: annotate, plan, insert observers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from qompose.algorithms import algorithms_of
from qompose.backend.discovery import load_backend
from qompose.backend.interface import Backend
from qompose.errors import (
    BackendNotFoundError,
    ConfigError,
    PluginError,
    UserError,
    blaming,
    warn_user,
)
from qompose.observers.auto_range import AutoRangeObserver
from qompose.observers.channel_ranges import PerChannelRangeObserver, base_observer, watching
from qompose.observers.fake_quantize import FakeQuantize, LearnableFakeQuantize
from qompose.observers.foreign_observer import Rebinding, guard
from qompose.observers.input_sums import watch_routing
from qompose.observers.make_observer import DerivedObserver, fixed_parameters, make_observer
from qompose.observers.min_max import Observer
from qompose.plan.float_operators import NOBODY, claims_elsewhere, state_bytes, survey
from qompose.plan.methods import each_method
from qompose.plan.operator_ids import earlier_regions, fingerprint, identify, isolate
from qompose.plan.plan import Group, Operator, Plan, Record, attach, rewritten_identity, subject_of
from qompose.plan.shared_qparams import notes_on_least_scales, notes_on_ranges, plan_groups
from qompose.plan.user_program import as_graph_module
from qompose.preparation.annotate import Annotated, annotate
from qompose.preparation.readers import tell_readers
from qompose.program.control_flow import body_labels, name_apart, nodes_in, run_observed_in_python
from qompose.program.graph import (
    constant_of,
    give_own_parameters,
    holds,
    is_quantizable,
    one_thread_at_a_time,
    owner_of,
    paused_collection,
    refresh,
    replace_in_place,
    value_of,
)
from qompose.program.meta import GROUP_TAG, OBSERVER_PREFIX, give_source, tag
from qompose.quantizer.annotations import write_annotations
from qompose.quantizer.base import Quantizer
from qompose.quantizer.composition import (
    QuantizerLike,
    as_composition,
    idle_members,
    installed_with,
)
from qompose.quantizer.rule_quantizer import RuleQuantizer
from qompose.reporting.build_report import log_stage, say_if_nothing_was_quantized
from qompose.spec.claim import Claim, Point, clear_annotations
from qompose.spec.quantization_spec import EdgeOrNode
from qompose.training.qat_conv_bn import norms_behind, training_form
from qompose.training.train_eval import behind_quantized, evaluation_form


@overload
def prepare_pt2e(
    model: ExportedProgram | GraphModule,
    quantizer: QuantizerLike,
    *,
    inplace: bool = False,
    strict: bool = False,
    fold_batch_norms: bool = False,
) -> GraphModule: ...


@overload
def prepare_pt2e(
    model: Mapping[str, ExportedProgram | GraphModule],
    quantizer: QuantizerLike,
    *,
    inplace: bool = False,
    strict: bool = False,
    fold_batch_norms: bool = False,
) -> dict[str, GraphModule]: ...


def prepare_pt2e(
    model: ExportedProgram | GraphModule | Mapping[str, ExportedProgram | GraphModule],
    quantizer: QuantizerLike,
    *,
    inplace: bool = False,
    strict: bool = False,
    fold_batch_norms: bool = False,
) -> GraphModule | dict[str, GraphModule]:
    """Insert observers where a quantizer wants them.

    Args:
        model: an exported program, or the GraphModule of its `.module()`. It is left unchanged; parameters
            are shared, not copied. A dict of models prepares the methods of one program: buffers of one
            name that a method writes to are shared by all.
        quantizer: a quantizer of any engine, the name of an installed backend, or a list for `compose`.
        inplace: edit `model`, a GraphModule, itself.
        strict: raise an error if nothing is quantized, or if a selector matches nothing.
        fold_batch_norms: fold batch norms in evaluation mode into the layers before them wherever that is
            exact but for rounding, as torchao does, and not only where a claim covers both. The report
            lists what was folded; a `QomposeWarning` says what was not, and why.

    Returns:
        a GraphModule with the signature and the outputs of `model`, ready to be calibrated; a dict for
        several models.

    Raises:
        NotExportedError: `model` was not exported.
        SelectorError, SharingError, AnnotationConflictError: the annotations cannot be followed.
        NothingQuantizedError: `strict`, and no operator was claimed.
        UserError: `strict`, and a selector matches nothing; `inplace` with an ExportedProgram;
            `quantizer` is not a quantizer; or methods have different buffers of one name.
        MemberError: a hook of the quantizer raised an error.
    """
    if isinstance(model, Mapping):
        return each_method(
            model,
            "prepare_pt2e",
            lambda each: _prepared(each, quantizer, inplace, strict, folds=fold_batch_norms),
        )
    return _prepared(model, quantizer, inplace, strict, folds=fold_batch_norms)


def prepare_qat_pt2e(
    model: ExportedProgram | GraphModule,
    quantizer: QuantizerLike,
    *,
    inplace: bool = False,
    strict: bool = False,
) -> GraphModule:
    """Insert fake quantizers where a quantizer wants observers, for quantization-aware training.

    Batch norms that conversion folds are kept and trained; their weights are fake-quantized as they will
    be once folded. `train()` and `eval()` of the result switch batch norms and dropouts, whatever mode
    the model was exported in. Code under `if self.training` stays as it was exported.

    Args:
        model: an exported program, in training or evaluation mode. It is left unchanged; the result has
            copies of its parameters.
        quantizer: as for `prepare_pt2e`.
        inplace: edit `model`, a GraphModule, itself, and train its parameters.
        strict: raise an error if nothing is quantized, or if a selector matches nothing.

    Returns:
        a GraphModule with the signature of `model`, in the mode in which it was exported.

    Raises:
        NotExportedError, SelectorError, SharingError, AnnotationConflictError: as for `prepare_pt2e`.
        NothingQuantizedError, UserError, MemberError: as for `prepare_pt2e`.
    """
    return _prepared(model, quantizer, inplace, strict, trains=True)


@one_thread_at_a_time
def _prepared(
    model: ExportedProgram | GraphModule,
    quantizer: QuantizerLike,
    inplace: bool,
    strict: bool,
    *,
    trains: bool = False,
    folds: bool = False,
) -> GraphModule:
    quantizer = as_composition(quantizer)
    if inplace and not isinstance(model, GraphModule):
        raise UserError("inplace=True requires a GraphModule; an ExportedProgram is never modified")
    with paused_collection():
        exported = as_graph_module(model, "prepare_qat_pt2e" if trains else "prepare_pt2e")
        identity = fingerprint(exported)
        if trains and not inplace:
            give_own_parameters(exported)
        training = evaluation_form(exported) if trains else None
        state = isolate(exported)
        quantizer = quantizer.bound(exported)
        annotated = annotate(exported, quantizer, trains=trains, fold_batch_norms=folds)
        plan = make_plan(exported, annotated, strict=strict)
        backends = backends_of(annotated)
    working = annotated.program
    say_if_nothing_was_quantized(plan, working, strict=strict)
    # What observers count with is made here: made in inference mode, it could not be added to outside.
    with paused_collection(), torch.inference_mode(False):
        clear_annotations(working)
        write_annotations(working, plan.claims)  # of the claims that stand
        quantizer.validate(working)
        plan = replace(
            plan, notes=(*plan.notes, *_observe(working, exported, plan, quantizer, trains))
        )
        identity = rewritten_identity(identity, plan.rewrites)
        record = Record(plan, "prepared", backends, state=state, fingerprint=identity)
        prepared = attach(refresh(working), record)
        if training is not None:
            prepared.train(training)
    log_stage(prepared)
    return replace_in_place(model, prepared) if inplace else prepared


def backends_of(annotated: Annotated) -> dict[str, Backend]:
    """Return by owner the backends of a program's claims, those on what was quantized before among them."""
    members = annotated.members.items()
    own = {label: m.backend for label, m in members if isinstance(m, RuleQuantizer)}
    return {**_earlier_backends(annotated.program), **own}


def _earlier_backends(program: GraphModule) -> dict[str, Backend]:
    """Return by owner the backends of what was quantized before; where one is missing, it has no kernels."""
    wanted = {claim.owner: name for claim, name in earlier_regions(program) if name}
    found = {}
    for owner, name in wanted.items():
        try:
            found[owner] = load_backend(name)
        except (BackendNotFoundError, PluginError) as error:
            warn_user(
                f"{owner} quantized parts of this program before it was exported; they stay "
                f"simulated: {error}"
            )
    return found


def make_plan(exported: GraphModule, annotated: Annotated, *, strict: bool = False) -> Plan:
    """Return what is going to be done to a program: from the claims alone, before anything is inserted.

    Values of the annotated program get their ids, in place: rewrites made new ones.

    Args:
        exported: the program as it was before rewrites.
        strict: selectors that match nothing are errors.

    Raises:
        SharingError: specifications cannot be followed together.
        UserError: `strict`, and a selector matches nothing.
    """
    working, composition = annotated.program, annotated.composition
    identify(working)
    members = annotated.members.values()
    unmatched = [note for member in members for note in member.check_program(exported)]
    if strict and unmatched:
        raise UserError("\n  - ".join(["strict=True forbids unused selectors:", *unmatched]))
    claims = tuple(composition.chosen)
    planned = plan_groups(working, claims)
    groups, refused = algorithms_of(claims).with_channels(working, claims, planned)
    operators = survey(exported, working, composition, annotated.rewrites)
    idle = idle_members(annotated.members, composition)
    return Plan(
        claims=claims,
        groups=groups,
        operators=operators,
        conflicts=tuple(composition.conflicts),
        rewrites=annotated.rewrites,
        notes=(
            *unmatched,
            *composition.notes,
            *claims_elsewhere(claims, operators),
            *(*notes_on_ranges(claims, groups), *notes_on_least_scales(claims), *refused),
            *(f"{label} claims no operator: {reason}" for label, reason in idle.items()),
            *_offers(working, operators, annotated.members.values()),
        ),
        float_bytes=state_bytes(exported),
        idle_owners=tuple(idle),
    )


def _offers(
    working: GraphModule, operators: Sequence[Operator], members: Collection[Quantizer]
) -> list[str]:
    """Name installed backends that have rules for operators with parameters which no member speaks of."""
    reading = {
        node.name
        for node in nodes_in(working)
        if any(is_quantizable(n) and constant_of(n) is not None for n in node.all_input_nodes)
    }
    left: dict[str, list[str]] = defaultdict(list)
    for operator in operators:
        if operator.claim is None and operator.reason == NOBODY and operator.name in reading:
            left[operator.operator].append(operator.name)
    return [
        f"left in float: {', '.join(left[operator])} ({operator}); installed backends that are not "
        f"members have a rule for it: {', '.join(offering)}"
        for operator, offering in installed_with(left, members).items()
    ]


def _observe(
    working: GraphModule, exported: GraphModule, plan: Plan, quantizer: Quantizer, trains: bool
) -> list[str]:
    """Insert observers, in place, or fake quantizers and what is trained with them; return notes on it."""
    groups = plan.groups
    if trains:  # factors would be decided once and for all, and weights find their own way
        groups = tuple(replace(group, balance=None) for group in groups)
    notes = []
    if trains and (stopped := behind_quantized(working)):
        notes.append(
            f"{', '.join(stopped)} cannot be trained: quantize operators of parts that were quantized "
            "before this program was exported stop or distort their gradients. Train before quantizing those"
        )
        warn_user(notes[0])
    insert_observers(working, plan.claims, groups, quantizer, simulate=trains)
    notes += training_form(working, exported, plan.rewrites) if trains else []
    if trains:  # modules stand where annotated operators and parameters were
        clear_annotations(working)
        write_annotations(working, plan.claims, norms_behind(working))
    run_observed_in_python(working)
    name_apart(working)  # observers were added, in bodies too
    return notes


def insert_observers(
    model: GraphModule,
    claims: Sequence[Claim],
    groups: Sequence[Group],
    quantizer: Quantizer,
    *,
    simulate: bool = False,
) -> None:
    """Insert the observers of all groups, in place, and tag the nodes of claims with their numbers.

    `quantizer` sees {edge or node: observer} first, and may replace observers. With `simulate`, they are
    fake quantizers.
    """
    nodes = {node.name: node for node in nodes_in(model)}
    for number, claim in enumerate(claims):
        for name in claim.nodes:
            tag(nodes[name], claim=number)
    bodies = body_labels(model)
    subjects = [subject_of(group, claims, nodes, bodies) for group in groups]
    observers = _observers(model, claims, groups, subjects, nodes, quantizer, simulate)
    values: dict[str, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for number, group in enumerate(groups):
        for point in group.points:
            values[point.source][number].append(point)
    inserter = _Inserter(nodes, observers)
    for name, wanted in values.items():
        inserter.observe_value(nodes[name], wanted)
    if not simulate:
        algorithms_of(claims).insert_observers(claims, nodes)
        watch_routing((nodes[n], bool(c.algorithms)) for c in claims for n in c.nodes)


def _observers(
    model: GraphModule,
    claims: Sequence[Claim],
    groups: Sequence[Group],
    subjects: Sequence[str],
    nodes: dict[str, Node],
    quantizer: Quantizer,
    simulate: bool,
) -> list[nn.Module]:
    rebind = Rebinding(model, nodes)
    named = zip(groups, subjects, strict=True)
    made = [_observer(group, subject, nodes, rebind, simulate) for group, subject in named]
    places: dict[EdgeOrNode, nn.Module] = {}
    numbers: dict[EdgeOrNode, int] = {}
    for number, group in enumerate(groups):
        for point in group.points:
            place: EdgeOrNode = nodes[point.source]
            if point.user is not None:
                place = (nodes[point.source], nodes[point.user])
            places[place], numbers[place] = made[number], number
    original = dict(places)
    quantizer.prepare_obs_or_fq_callback(model, places)
    if places.keys() != numbers.keys():
        odd = ", ".join(str(place) for place in places.keys() ^ numbers.keys())
        raise ConfigError(f"prepare_obs_or_fq_callback added or removed observers at {odd}")
    for place, observer in places.items():
        if observer is not original[place]:
            number = numbers[place]
            _check_replacement(observer, groups[number], subjects[number])
            made[number] = observer
    for observer, group, subject in zip(made, groups, subjects, strict=True):
        _set_subject(observer, subject)
        _tell(observer, group, claims, nodes)
        if isinstance(observer, DerivedObserver):
            observer.derive_from([made[number] for number in group.depends_on])
    return made


def _tell(
    observer: nn.Module, group: Group, claims: Sequence[Claim], nodes: Mapping[str, Node]
) -> None:
    """Tell an observer what it has to know of the tensors of its group."""
    if isinstance(observer, Observer):
        observer.shared = len({point.source for point in group.points}) > 1
    if isinstance(known := base_observer(observer), AutoRangeObserver):
        tell_readers(known, group, claims, nodes)
    _place(observer, nodes[group.points[0].source])


def _place(observer: nn.Module, value: Node) -> None:
    """Let an observer of another engine, and parameters, be where their tensor is, and of its size."""
    example = constant_of(value) if value_of(value) is None else value_of(value)
    if not isinstance(example, Tensor):
        return
    if isinstance(observer, LearnableFakeQuantize):
        observer.size_for(example.shape)
    if isinstance(observer, FakeQuantize) or not isinstance(observer, Observer):
        observer.to(example.device)


def _check_replacement(observer: object, group: Group, subject: str) -> None:
    """Check that an observer that a callback put in estimates what the group's specification says."""
    where = f"prepare_obs_or_fq_callback replaced the observer of {subject}"
    if not isinstance(observer, nn.Module) or not hasattr(observer, "calculate_qparams"):
        raise ConfigError(f"{where} with {observer!r}, not a module with calculate_qparams")
    for name in ("dtype", "quant_min", "quant_max", "qscheme"):
        wanted, found = getattr(group.spec, name, None), getattr(observer, name, None)
        if wanted is not None and found is not None and wanted != found:
            raise ConfigError(f"{where}, but the new observer's {name} is {found}, not {wanted}")


def _observer(
    group: Group, subject: str, nodes: dict[str, Node], rebind: Rebinding, simulate: bool
) -> nn.Module:
    blocks = getattr(group.spec, "block_size", None)
    if blocks is not None and not getattr(group.spec, "is_dynamic", False):
        computed = [p for p in group.points if constant_of(nodes[p.source]) is None]
        if computed:
            raise ConfigError(
                f"{computed[0]} has block_size={blocks}, but activations support blocks only "
                "with is_dynamic=True"
            )
    try:
        with blaming(f"the observer factory of {subject}"):
            observer = make_observer(group.spec, rebind, simulate=simulate)
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from error
    if group.balance is None or fixed_parameters(observer) is not None:
        return observer
    inner = watching(observer) if getattr(group.spec, "is_dynamic", False) else observer
    watched = PerChannelRangeObserver(inner, group.balance.dim)
    watched.asked = bool(group.balance.algorithm) and not group.balance.unasked
    return watched


def _set_subject(observer: nn.Module, subject: str) -> None:
    """Tell an observer which tensor it observes; those of other engines are guarded from masks."""
    if isinstance(observer, PerChannelRangeObserver):
        observer.channel_observer.subject = subject
        _set_subject(observer.tensor_observer, subject)
    elif isinstance(observer, Observer):
        observer.subject = subject
    else:
        guard(observer, subject)


class _Inserter:
    """Puts observers into a graph, each as a call of a module of the call's own name.

    Observers of other engines look for one another by that name. One that observes several values has
    several names.
    """

    def __init__(self, nodes: dict[str, Node], observers: Sequence[nn.Module]) -> None:
        self.nodes, self.observers = nodes, observers
        self._next: dict[Graph, int] = defaultdict(lambda: len(observers))

    def observe_value(self, value: Node, wanted: dict[int, list[Point]]) -> None:
        """Insert the observer of a value's output first, then those of edges that want another one."""
        users = list(value.users)
        observed = value
        output = next((g for g, points in wanted.items() if Point(value.name) in points), None)
        if output is not None:
            observed = self._insert(output, value, after=value)
            for user in users:
                user.replace_input_with(value, observed)
        after = observed
        for number, points in wanted.items():
            if number == output:
                continue
            after = self._insert(number, observed, after=after)
            for point in points:
                assert point.user is not None
                self.nodes[point.user].replace_input_with(observed, after)

    def _insert(self, number: int, value: Node, after: Node) -> Node:
        graph, observer = value.graph, self.observers[number]
        place = after
        if value.op == "placeholder" and after is value:
            place = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(place):
            node = self._call(number, value)
        owner_of(value).add_module(node.name, observer)
        node.meta["val"] = value_of(value)
        node.meta["nn_module_stack"] = value.meta.get("nn_module_stack", {})
        give_source(value, node)
        tag(node, **{GROUP_TAG: number})
        if constant_of(value) is not None and isinstance(observer, Observer):
            observer.constant = True
        return node

    def _call(self, number: int, value: Node) -> Node:
        """Insert a call whose name is free in graph and module: with the group's number, if that one is."""
        graph, name = value.graph, f"{OBSERVER_PREFIX}{number}"
        while True:
            if not holds(owner_of(value), name):
                node = graph.create_node("call_module", name, (value,), {}, name)
                if node.name == name:
                    return node
                graph.erase_node(node)
            name = f"{OBSERVER_PREFIX}{self._next[graph]}"
            self._next[graph] += 1
