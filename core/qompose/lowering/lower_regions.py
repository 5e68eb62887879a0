# SPDX-License-Identifier: Apache-2.0
"""`lower`: each claimed region of a converted model replaced by its owner's kernel for a target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.backend.discovery import obstacle
from qompose.backend.interface import Backend, Finished, Methods, Target
from qompose.backend.kernel import Kernel, NotLowerable, Region, Shared, readers_in
from qompose.console import staging
from qompose.errors import ConfigError, TargetError, blaming, near_names
from qompose.lowering.kernel_errors import name_failing_kernels
from qompose.lowering.layouts import allow_any, made_by_kernels
from qompose.plan.float_operators import state_bytes
from qompose.plan.methods import (
    ONLY,
    by_method,
    check_named,
    check_taken,
    in_method,
    share_constants,
    share_state,
    state_with,
    states_of,
)
from qompose.plan.operator_ids import QUANTIZED_BEFORE, UNKNOWN_QUANTIZER, restore_written
from qompose.plan.plan import UNREAD, Plan, Record, attach, objections, record_of, warn
from qompose.program import meta
from qompose.program.call_signature import CallSignature, call_signature
from qompose.program.control_flow import graphs_in, hoist_constants, nodes_in, sink_constants
from qompose.program.disk import unpack_constants
from qompose.program.graph import (
    copy_graph_module,
    describe,
    freeze,
    one_thread_at_a_time,
    owner_of,
    refresh,
    remove_dead,
    sizes_differ,
    value_of,
    without_readers,
)
from qompose.program.meta import KERNELS_TAG, MADE, hand_over, tag, tag_of
from qompose.reporting.build_report import log_stage, say_what_fell_back
from qompose.spec.claim import Claim
from qompose.spec.qdq import fold_quantized_constants


def lower(
    converted: GraphModule | Mapping[str, GraphModule],
    target: str = "torch",
    *,
    strict: bool = False,
    keep_converted: bool = True,
    progress: bool | None = None,
) -> Any:
    """Replace each quantized region with its owner's kernel for `target`.

    Regions of members that only annotate, such as quantizers of other engines, stay quantize and dequantize
    operators; a warning and the report name them.

    Args:
        converted: a converted model, or a dict of several that become the methods of one program. Tensors
            that no kernel packs are the same in the result: writing to one in place changes both.
        target: the name of a runtime: "torch", or one that a backend brings.
        strict: raise an error if a region has no kernel.
        keep_converted: let the result hold the converted program, and so its integers beside those that
            kernels packed: what `save` and `compare` need. Without it, save `converted` itself.
        progress: whether targets that take long show a progress bar; None shows it on a terminal.

    Returns:
        for "torch" a GraphModule, or a dict of several; for other targets a program of their runtime.

    Raises:
        StageError: the model was not converted.
        TargetError: a backend has no kernels for the target, all members only annotate, or the target's
            runtime is missing or does not support several methods.
        NotLoweredError: `strict`, and a region found no kernel.
        UserError: models have names that methods cannot have.
    """
    models = by_method(converted, "lower")
    with staging(progress):
        result, parts = with_kernels(converted, target)
    for name, (_, record) in parts.items():
        with in_method(name):
            if _known_targets(record)[record.target].runs_here:
                warn(tuple(objections(record)))
            say_what_fell_back(record, strict=strict)
    # A second copy, beside the one that was lowered: `compare` needs the program as it is now, and its owner
    # may go on to edit it.
    kept = {name: copy_graph_module(model) for name, model in models.items() if keep_converted}
    attach_records(
        {name: (part, replace(r, source=kept.get(name))) for name, (part, r) in parts.items()}
    )
    return result


@one_thread_at_a_time
def with_kernels(
    converted: GraphModule | Mapping[str, GraphModule], target: str
) -> tuple[Any, dict[str, tuple[Any, Record]]]:
    """Return what `lower` returns, and its methods with the records that they are to have.

    It warns of nothing, and the records have no source.
    """
    steps, models = {}, by_method(converted, "lower")
    for name, model in models.items():
        with in_method(name):
            steps[name] = _replaced(model, target)
    if len(steps) > 1:
        check_named(models, states_of(models))  # kernels give what they take over other names
        _share_state(steps)
    with naming_fallbacks(steps):
        result, finished = finish(steps)
    return result, {n: (part.model, lowered_record(steps[n], part)) for n, part in finished.items()}


def _share_state(steps: dict[str, Step]) -> None:
    """Let the methods of one program share state and equal parameters, in place."""
    models = {name: step.model for name, step in steps.items()}
    states = {name: step.record.state for name, step in steps.items()}
    check_taken(models, {name: step.taken for name, step in steps.items()})
    shared, differing = share_state(models, states), share_constants(models, states)
    note = (
        "weights that differ between methods and are stored once per method: "
        f"{_list({*differing})}. Algorithms and bias rounding depend on each method's "
        "calibration data"
    )
    for name, step in steps.items():
        plan = step.record.plan
        record = replace(
            step.record,
            state=shared[name],
            methods=tuple(steps),
            plan=replace(plan, notes=(*plan.notes, note)) if differing else plan,
        )
        steps[name] = replace(step, record=record)


def attach_records(parts: Mapping[str, tuple[Any, Record]]) -> None:
    """Let lowered models carry their records."""
    for model, record in parts.values():
        log_stage(attach(model, record))


def _replaced(converted: GraphModule, target: str) -> Step:
    """Return a copy of a converted model whose regions have their kernels, and what became of each."""
    record = record_of(
        converted,
        stages=("converted",),
        function="lower",
        remedy="Call convert_pt2e first, without use_reference_representation.",
    )
    runtime = find_target(target, record)
    model = copy_graph_module(converted)
    # The converted model and the lowered one have state of their own.
    restore_written(model, record.state)
    mark_operators(model, record.plan)
    sink_constants(model)  # a converted model has the form that torch exports: see hoist_constants
    fold_quantized_constants(model)  # those that fold_quantize=False left
    done, fallbacks, left, taken = replace_regions(
        model, record, target, reads_qdq=runtime.reads_qdq
    )
    known = {*model.graph.nodes}
    for owner, backend in sorted(_owners(record).items()):
        with blaming(f"backend {owner!r}: join_regions"):
            backend.join_regions(model, target)
    for node in model.graph.nodes:
        if node not in known:
            node.meta[MADE] = True
    hoist_constants(model)
    model = refresh(model)
    unpack_constants(model)  # those that no kernel took
    freeze(model)  # integer kernels have no gradients
    kernels = {number: _who(name, record.plan.claims[number]) for number, name in done.items()}
    for part in graphs_in(model):
        made = allow_any(part) if runtime is TORCH_TARGET else made_by_kernels(part.graph)
        _check_results(made, kernels)
    state, notes = state_with(model, record.state, taken)
    plan = replace(record.plan, notes=(*record.plan.notes, *notes))
    record = replace(record, plan=plan, state=state)
    return Step(model, record, runtime, done, fallbacks, left, taken)


@dataclass(frozen=True)
class Step:
    """A model whose regions have their kernels: its record, the target, and `replace_regions`' results.

    `taken` are the paths of the buffers that kernels took over.
    """

    model: GraphModule
    record: Record
    target: Target
    done: Mapping[int, str]
    fallbacks: Mapping[int, str]
    left: Mapping[int, str]
    taken: frozenset[str] = frozenset()


def _in_process(module: GraphModule, signature: CallSignature) -> Finished:
    """Let a lowered graph run as it stands, in place."""
    for part in graphs_in(module):
        part.recompile()
    name_failing_kernels(module)
    return Finished(module)


def _each_in_process(methods: Methods) -> tuple[Any, Mapping[str, Finished]]:
    finished = {name: _in_process(*method) for name, method in methods.items()}
    return {name: part.model for name, part in finished.items()}, finished


TORCH_TARGET = Target("torch", _in_process, finish_methods=_each_in_process, runs_here=True)
"""The process itself."""


def find_target(name: str, record: Record) -> Target:
    """Return the target that the owners of a model's claims share; those that only annotate do not count.

    Raises:
        TargetError: an owner has no kernels for it, or cannot run here; all owners only annotate; no member
            brings the runtime, or it is missing here.
        MemberError: a backend or a target fails when it is asked whether it can run here.
    """
    known = _known_targets(record)
    owners = {claim.owner for claim in record.plan.claims}
    tables = _owners(record)
    if name not in {*known}.union(*map(_targets, tables.values())):
        close = near_names(str(name), known)
        raise TargetError(
            f"No member of this composition has a target {name!r}{close}. Known targets: "
            f"{_list({*known})}. To use the runtime of another backend, add that backend to "
            "the composition."
        )
    if owners and not tables and not (name in known and known[name].reads_qdq):
        raise TargetError(
            f"This composition cannot be lowered to {name!r}: {_without_kernels(owners)}. Run or export "
            "what prepare_pt2e, calibrate and convert_pt2e make of it instead."
        )
    if name not in known or any(name not in _targets(backend) for backend in tables.values()):
        raise TargetError(_lacking(name, tables, known))
    bringers = (b.name for b in record.backends.values() if known[name] in b.targets)
    problem = obstacle(known[name], f"target {name!r} of {next(bringers, 'qompose')}")
    if problem:
        raise TargetError(f"The target {name!r} cannot be used here: {problem}")
    for owner, backend in sorted(tables.items()):
        problem = obstacle(backend, f"backend {owner!r}")
        if problem:
            raise TargetError(f"The kernels of {owner!r} cannot be used here: {problem}")
    return known[name]


def _without_kernels(owners: set[str]) -> str:
    """Say why none of the owners of claims has kernels."""
    quantizers = owners - {QUANTIZED_BEFORE}
    reasons = [UNKNOWN_QUANTIZER] if QUANTIZED_BEFORE in owners else []
    if quantizers:
        reasons = [f"{_list(quantizers)} can only annotate, so there are no kernels", *reasons]
    return "; ".join(reasons)


def _owners(record: Record) -> dict[str, Backend]:
    """Return the backends that own claims."""
    owners = {claim.owner for claim in record.plan.claims}
    return {owner: b for owner, b in record.backends.items() if owner in owners}


def _known_targets(record: Record) -> dict[str, Target]:
    """Return by name the targets that the members of a composition bring, and "torch"."""
    brought = {t.name: t for backend in record.backends.values() for t in backend.targets}
    return {TORCH_TARGET.name: TORCH_TARGET, **brought}


_ONLY_ANNOTATES = "only annotates"
_WITHOUT_KERNELS = f"its quantizer {_ONLY_ANNOTATES} and has no kernels"


def _lacking(name: str, tables: Mapping[str, Backend], known: Mapping[str, Target]) -> str:
    """Say which owners of claims have no kernels for a target, and which targets all of them share."""
    lacks = "; ".join(
        f"{owner} has kernels for {_list(_targets(backend))}"
        for owner, backend in sorted(tables.items())
        if name not in _targets(backend)
    )
    shared = set(known).intersection(*map(_targets, tables.values()))
    return (
        f"This composition cannot be lowered to {name!r}: "
        f"{lacks or f'no member provides the runtime {name!r}'}. Targets that all members "
        f"share: {_list(shared)}."
    )


def check_target(prepared: GraphModule, target: str, *, strict: bool = False) -> None:
    """Raise where `lower` of what becomes of a prepared model would, as far as that is known before data.

    Raises:
        TargetError, MemberError: the target cannot be used; see `find_target`.
        NotLoweredError: `strict`, and a member has no kernels at all.
    """
    record = record_of(prepared, stages=("prepared",), function="quantize", remedy="")
    runtime = find_target(target, record)
    if strict:
        plan = record.plan
        fallbacks = {
            number: _WITHOUT_KERNELS
            for number, claim in enumerate(plan.claims)
            if claim.owner not in record.backends and not runtime.reads_qdq
        }
        say_what_fell_back(replace(record, target=target, fallbacks=fallbacks), strict=True)


def _targets(backend: Backend) -> set[str]:
    return {target for rule in backend.rules for target in rule.kernels}


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def replace_regions(
    model: GraphModule, record: Record, target: str, *, reads_qdq: bool = False
) -> tuple[dict[int, str], dict[int, str], dict[int, str], frozenset[str]]:
    """Replace the regions of all claims, in place, as far as there are kernels; see `Target.reads_qdq`.

    Returns:
        by claim: the kernels in place; the reasons where there is none; and the kernels that the
        target's last step is expected to supply. Last, the paths of the buffers that kernels took over.
    """
    regions = _regions(model)
    shared = Shared(readers_in(regions, record.plan.claims))
    kept = {node for part in graphs_in(model) for node in without_readers(part)}
    done: dict[int, str] = {}
    fallbacks: dict[int, str] = {}
    left: dict[int, str] = {}
    for number, claim in enumerate(record.plan.claims):
        if number in record.dropped:
            continue
        if _is_dead(regions[number]):
            fallbacks[number] = UNREAD
            kept.difference_update(regions[number])
            continue
        kernel = _kernel_for(claim, record, target)
        if isinstance(kernel, str):
            (left if reads_qdq and kernel == _WITHOUT_KERNELS else fallbacks)[number] = kernel
            continue
        try:
            used, replaced = _first_that_fits(number, claim, regions[number], kernel, shared)
        except NotLowerable as reason:
            fallbacks[number] = str(reason)
            continue
        (done if replaced else left)[number] = used.name
        kept.difference_update(shared.taken.values())
        if replaced:
            # The last operator first: in-place ones write to the region's own values.
            for node in reversed(regions[number]):
                if node not in kept and not node.users:
                    node.graph.erase_node(node)
    for part in graphs_in(model):
        remove_dead(part.graph, kept)
    gone = left.keys() - _regions(model).keys()  # only regions that nothing reads read them
    fallbacks |= dict.fromkeys(gone, UNREAD)
    left = {number: name for number, name in left.items() if number not in gone}
    return done, fallbacks, left, frozenset(shared.taken)


def _kernel_for(claim: Claim, record: Record, target: str) -> Kernel | str:
    """Return the kernel of a claim's rule, or why there is none."""
    backend = record.backends.get(claim.owner)
    if claim.rule == QUANTIZED_BEFORE:
        return UNKNOWN_QUANTIZER
    if backend is None:
        return _WITHOUT_KERNELS
    rule = backend.rule(claim.rule)
    kernel = rule.kernels.get(target) if rule else None
    return kernel or f"rule {claim.rule} has no kernel for {target}"


def _is_dead(region: Sequence[Node]) -> bool:
    """Tell whether nothing reads what a region computes."""
    inside = set(region)
    return not any(node.is_impure() or not inside.issuperset(node.users) for node in region)


def _first_that_fits(
    number: int, claim: Claim, nodes: Sequence[Node], kernel: Kernel, shared: Shared
) -> tuple[Kernel, bool]:
    """Return the first kernel of a chain that fits a region, and whether it replaced it; see `_replace`.

    Raises:
        NotLowerable: none does; the reason is that of the first.
    """
    reasons: list[NotLowerable] = []
    for candidate in kernel.chain:
        try:
            return candidate, _replace(number, claim, nodes, candidate, shared)
        except NotLowerable as reason:
            reasons.append(reason)
    raise reasons[0]


def _replace(
    number: int, claim: Claim, nodes: Sequence[Node], kernel: Kernel, shared: Shared
) -> bool:
    """Put a kernel in the place of a region; return False where it leaves that to the target.

    The node that stands for the region then says so, beside those it stood for before.
    """
    if kernel.emit is None:
        return False
    region = Region(
        owner_of(nodes[0]), claim, nodes, float_output=kernel.float_output, shared=shared
    )
    who = _who(kernel.name, claim)
    with blaming(who, NotLowerable):
        emitted = kernel.emit(region)
    if emitted is None:
        return False
    if not isinstance(emitted, Node) or emitted.graph is not nodes[0].graph:
        raise ConfigError(f"{who} must return a node that it inserted, got {emitted!r}")
    value, wanted = value_of(emitted), value_of(region.output_node)
    _check_integers(who, region, value)
    _check_shape(who, region.output_node, value, wanted)
    gone = [] if region.output is None else list(region.output_node.users)
    before = [n for node in (emitted, *gone) for n in tag_of(node, KERNELS_TAG) or ()]
    for node in region.inserted:
        node.meta[meta.MADE] = True
    if isinstance(value, Tensor) and isinstance(wanted, Tensor) and value.shape == wanted.shape:
        emitted.meta["val"] = wanted.to(value.dtype)  # as it was exported: see `allow_any`
    region.replace(emitted)
    grid = None if region.output is None else region.output.qparams[:4]
    hand_over(region.output_node, emitted, grid)
    tag(emitted, **{KERNELS_TAG: [*before, number]})
    return True


def _who(kernel: str, claim: Claim) -> str:
    return f"kernel {kernel!r} of {claim.owner}, rule {claim.rule}, at {claim.anchor}"


def _check_integers(who: str, region: Region, value: object) -> None:
    """Refuse floats that would be taken for the integers that their readers want.

    Raises:
        ConfigError: a kernel gives such.
    """
    if region.output is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return
    if value.dtype != region.output.dtype:
        raise ConfigError(
            f"{who} gives {value.dtype} where all readers want {region.output.dtype}. If it always gives "
            "floats, pass float_output=True to Kernel; otherwise give the integers of "
            "region.quantized('output'), and their dtype= to region.call"
        )


def _check_results(made: Mapping[Node, Any], kernels: Mapping[int, str]) -> None:
    """Refuse kernels whose results have another shape or type than what they replace.

    `Region.call` takes it that a call gives what it is told. `made` are the results of examples; `kernels`
    says by claim who made them.
    """
    for node, value in made.items():
        whose = [kernels[number] for number in tag_of(node, KERNELS_TAG) or () if number in kernels]
        if whose:
            who, wanted = " and ".join(whose), value_of(node)
            _check_shape(who, node, value, wanted)
            _check_dtype(who, node, value, wanted)


def _check_dtype(who: str, node: Node, value: object, wanted: object) -> None:
    """Refuse a result of another type than the kernel's last call was said to give.

    Raises:
        ConfigError: the types differ.
    """
    if not (isinstance(value, Tensor) and isinstance(wanted, Tensor)):
        return
    if value.dtype is not wanted.dtype:
        raise ConfigError(
            f"{who} calls {node.target}, which gives {value.dtype}, as one that gives {wanted.dtype}: "
            f"{describe(node)}. dtype= of region.call must be the type of its result, by default the "
            "region's float type; correct it, or the operator and its register_fake"
        )


def _check_shape(who: str, node: Node, value: object, wanted: object) -> None:
    """Compare shapes, of several tensors too, as far as they are known.

    Raises:
        ConfigError: a kernel gives others than the region that it replaces.
    """
    given, expected = _shapes(value), _shapes(wanted)
    if given is None or expected is None:
        return
    if len(given) != len(expected) or any(map(sizes_differ, given, expected)):
        raise ConfigError(
            f"{who} gives {_listed(given)} where the region gives {_listed(expected)}: {describe(node)}. The "
            "kernel must compute all that the operators do: read their arguments, such as padding, with "
            "region.argument, or raise NotLowerable; compute open sizes from those of its inputs. If only "
            "the operator's register_fake is wrong, correct that"
        )


def _shapes(value: object) -> list[torch.Size] | None:
    leaves = pytree.tree_leaves(value)
    return [x.shape for x in leaves] if all(isinstance(x, Tensor) for x in leaves) else None


def _listed(shapes: Iterable[torch.Size]) -> str:
    return ", ".join(str([*shape]) for shape in shapes) or "nothing"


def _regions(model: GraphModule) -> dict[int, list[Node]]:
    regions: dict[int, list[Node]] = defaultdict(list)
    for node in nodes_in(model):
        claim = tag_of(node, "claim")
        if claim is not None:
            regions[claim].append(node)
    return regions


@contextmanager
def naming_fallbacks(steps: Mapping[str, Step]) -> Iterator[None]:
    """Append the regions without a kernel to a target's error: they may be what it cannot handle."""
    try:
        yield
    except TargetError as error:
        lines = "".join(
            f"\n- {claim.anchor} ({claim.owner}, rule {claim.rule}): {step.fallbacks[number]}"
            for step in steps.values()
            for number, claim in enumerate(step.record.plan.claims)
            if number in step.fallbacks and step.fallbacks[number] != UNREAD
        )
        if lines:
            error.args = ((f"{error}\nThese regions have no kernel and were not replaced:{lines}"),)
        raise


def mark_operators(model: GraphModule, plan: Plan) -> None:
    """Let every node say which operator of the report it is, in place."""
    names = {operator.name for operator in plan.operators}
    pieces = {piece: name for name in names for piece in _piece_names(name)}
    for node in nodes_in(model):
        name = node.name if node.name in names else pieces.get(node.name)
        if name is not None:
            tag(node, operator=name)


def _piece_names(name: str) -> tuple[str, ...]:
    """Return what the node may be called that a report lists as a piece of another: `sdpa/matmul`."""
    whole, _, piece = name.partition("/")
    return (f"{whole}_{piece}", piece) if piece else ()


def finish(steps: Mapping[str, Step]) -> tuple[Any, Mapping[str, Finished]]:
    """Take the last step of the target that models share; return what it makes, and of each what became.

    Raises:
        TargetError: the target has no programs of several methods, or methods have different targets.
        ConfigError: the target did not finish the methods that it was given.
    """
    target = next(iter(steps.values())).target
    if set(steps) == {ONLY}:
        model = steps[ONLY].model
        finished = target.finish(model, call_signature(model))
        return finished.model, {ONLY: finished}
    other = next((name for name, step in steps.items() if step.target != target), None)
    if other is not None:
        raise TargetError(
            f"method {other!r} and method {next(iter(steps))!r} use the target "
            f"{target.name!r} from different backends; a program can only have one runtime"
        )
    if target.finish_methods is None:
        raise TargetError(
            f"The target {target.name!r} does not support programs with named methods, got "
            f"{', '.join(steps)}. Lower each model separately, without a dict."
        )
    program, parts = target.finish_methods(
        {name: (step.model, call_signature(step.model)) for name, step in steps.items()}
    )
    if set(parts) != set(steps):
        raise ConfigError(
            f"target {target.name!r} returned the methods {sorted(parts)}, expected {sorted(steps)}"
        )
    return program, parts


def lowered_record(step: Step, finished: Finished) -> Record:
    """Return the record of a lowered model.

    Raises:
        ConfigError: the target remarks on an operator that the program does not have.
    """
    record, remarks = step.record, finished.remarks
    unknown = set(remarks) - {operator.name for operator in record.plan.operators}
    if unknown:
        raise ConfigError(
            f"target {step.target.name!r} returned remarks on {_list(unknown)}, which the program "
            "does not contain"
        )
    kernels, fallbacks = _settled(step, finished)
    model = finished.model
    held = state_bytes(model) if isinstance(model, nn.Module) else getattr(model, "nbytes", 0)
    operators = tuple(
        replace(o, reason=_joined(o.reason, remarks.get(o.name, ""))) if o.claim is None else o
        for o in record.plan.operators
    )
    notes = (*record.plan.notes, *finished.notes)
    return replace(
        record,
        plan=replace(record.plan, operators=operators, notes=notes),
        stage="lowered",
        target=step.target.name,
        dropped={
            number: _joined(reason, _remark(number, record.plan, remarks))
            for number, reason in record.dropped.items()
        },
        kernels=kernels,
        fallbacks=fallbacks,
        bytes=int(held),
    )


def _settled(step: Step, finished: Finished) -> tuple[dict[int, str], dict[int, str]]:
    """Combine what kernels replaced with what the target's last step says of the rest."""
    done = step.done
    kernels = {**done, **{n: k for n, k in finished.kernels.items() if n not in done}}
    reasons = {
        number: finished.fallbacks.get(number)
        or _remark(number, step.record.plan, finished.remarks)
        or (name if name == _WITHOUT_KERNELS else _not_replaced(name))
        for number, name in step.left.items()
    }
    both = {**step.fallbacks, **reasons}
    return kernels, {number: reason for number, reason in both.items() if number not in kernels}


def _not_replaced(kernel: str) -> str:
    """Return why a region is left whose kernel added nothing to the program."""
    return f"the kernel {kernel} emitted nothing, and the target did not report that it runs it"


def _remark(claim: int, plan: Plan, remarks: Mapping[str, str]) -> str:
    """Return what a target remarks on the operators of a claim."""
    names = [operator.name for operator in plan.operators if operator.claim == claim]
    return "; ".join(dict.fromkeys(remarks[name] for name in names if name in remarks))


def _joined(reason: str, remark: str) -> str:
    return "; ".join(part for part in (reason, remark) if part)
