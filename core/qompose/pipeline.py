# SPDX-License-Identifier: Apache-2.0
"""What users call: the stages, one after the other."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.annotating import annotate_program
from qompose.annotations import clear_annotations, write_annotations
from qompose.announcing import (
    log_stage,
    say_if_all_was_dropped,
    say_if_modes_were_lost,
    say_if_nothing_was_quantized,
    say_what_fell_back,
)
from qompose.backend import Backend
from qompose.conversion import Conversion, convert_observers, fold_quantized_constants
from qompose.errors import UserError, blaming
from qompose.evaluation import evaluation_form
from qompose.exported import as_graph_module
from qompose.fingerprints import fingerprint
from qompose.graph import (
    copy_graph_module,
    freeze,
    give_own_parameters,
    refresh,
)
from qompose.interop import adapt
from qompose.isolation import isolate, restore_written
from qompose.lowering import (
    ONLY,
    TORCH_TARGET,
    Step,
    check_methods,
    find_target,
    finish,
    in_method,
    lowered_record,
    mark_operators,
    naming_fallbacks,
    replace_regions,
)
from qompose.membership import notes_on_members
from qompose.nested import (
    hoist_constants,
    name_apart,
    run_as_exported,
    run_observed_in_python,
    sink_constants,
)
from qompose.plan import META_KEY, Plan, Record, attach, record_of
from qompose.planning import notes_on_ranges, plan_groups
from qompose.preparation import insert_observers
from qompose.quantizer import Quantizer, labelled
from qompose.repairs.equalization import equalized_identity
from qompose.repairs.smoothing import smoothed
from qompose.representation import Representation, represent
from qompose.requirements import objections, requirements_of, warn
from qompose.rule_quantizer import RuleQuantizer
from qompose.sites import identify
from qompose.survey import claims_elsewhere, state_bytes, survey
from qompose.training import deployment_form, is_trained, training_form


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python's cycle collector from walking a growing graph over and over: a third of all time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def prepare_pt2e(
    model: ExportedProgram | GraphModule,
    quantizer: Quantizer,
    *,
    inplace: bool = False,
    strict: bool = False,
) -> GraphModule:
    """Insert observers where a quantizer wants them.

    Args:
        model: what torch.export made. It is left alone; parameters are shared, not copied.
        inplace: edit `model`, a GraphModule, itself.
        strict: make "nothing was quantized" and selectors that match nothing errors.

    Returns:
        a GraphModule with the signature of `model`, and the same outputs, to be calibrated.

    Raises:
        NotExportedError: `model` was not exported.
        SelectorError, SharingError, AnnotationConflictError: the annotations cannot be followed.
        NothingQuantizedError: `strict`, and no operator was claimed.
        UserError: `strict`, and a selector matches nothing; `inplace` with an ExportedProgram; or
            `quantizer` is none.
        MemberError: a hook of the quantizer raised an error of its own.
    """
    return _prepared(model, quantizer, inplace, strict, trains=False)


def prepare_qat_pt2e(
    model: ExportedProgram | GraphModule,
    quantizer: Quantizer,
    *,
    inplace: bool = False,
    strict: bool = False,
) -> GraphModule:
    """Insert fake-quantizers where a quantizer wants observers, to train a model as it will be quantized.

    Batch norms that conversion folds stay and are trained; their weights are fake-quantized as they will be
    once folded. `train()` and `eval()` switch batch norms and dropouts, wherever the model was exported in.
    What the model's own code does in training alone stays as it was exported.

    Args:
        model: what torch.export made, in training or in evaluation. It is left alone; the result has
            copies of its parameters.
        inplace: edit `model`, a GraphModule, itself, and train its own parameters.
        strict: make "nothing was quantized" and selectors that match nothing errors.

    Returns:
        a GraphModule with the signature of `model`, in the mode in which that was exported, to be trained.

    Raises:
        NotExportedError, SelectorError, SharingError, AnnotationConflictError: as for `prepare_pt2e`.
        NothingQuantizedError, UserError, MemberError: so too.
    """
    return _prepared(model, quantizer, inplace, strict, trains=True)


def _prepared(
    model: ExportedProgram | GraphModule,
    quantizer: Quantizer,
    inplace: bool,
    strict: bool,
    *,
    trains: bool,
) -> GraphModule:
    quantizer = adapt(quantizer)
    if inplace and not isinstance(model, GraphModule):
        raise UserError("inplace=True needs a GraphModule: an ExportedProgram is never edited")
    with _without_collection():
        exported = as_graph_module(model, "prepare_qat_pt2e" if trains else "prepare_pt2e")
        identity = fingerprint(exported)
        if trains and not inplace:
            give_own_parameters(exported)
        training = evaluation_form(exported) if trains else None
        state = isolate(exported)
        quantizer = quantizer.bound(exported)
        working, record = _planned(exported, quantizer, strict, trains)
    say_if_nothing_was_quantized(record.plan, working, strict=strict)
    with _without_collection():
        clear_annotations(working)
        write_annotations(working, record.plan.claims)
        with blaming(f"{quantizer.name}: validate"):
            quantizer.validate(working)
        identity = equalized_identity(identity, record.plan.rewrites)
        record = replace(record, state=state, fingerprint=identity)
        notes = _observe(working, exported, record, quantizer, trains=trains)
        plan = replace(record.plan, notes=(*record.plan.notes, *notes))
        prepared = attach(refresh(working), replace(record, plan=plan))
        if training is not None:
            prepared.train(training)
    log_stage(prepared)
    return _into(model, prepared) if inplace else prepared


def _observe(
    working: GraphModule,
    exported: GraphModule,
    record: Record,
    quantizer: Quantizer,
    *,
    trains: bool,
) -> list[str]:
    """Insert observers, in place, or fake-quantizers and what is trained with them; return notes on it."""
    plan, callback = record.plan, quantizer.prepare_obs_or_fq_callback
    groups = plan.groups
    if trains:  # factors would be decided once and for all, and weights find their own way
        groups = tuple(replace(group, balance=None) for group in groups)
    insert_observers(working, plan.claims, groups, callback, simulate=trains)
    notes = training_form(working, exported, plan.rewrites) if trains else []
    run_observed_in_python(working)
    name_apart(working)
    return notes


def _planned(
    exported: GraphModule, quantizer: Quantizer, strict: bool, trains: bool
) -> tuple[GraphModule, Record]:
    """Return the program with its rewrites, and the record of what is going to be done to it."""
    working, composition, rewrites = annotate_program(exported, quantizer, trains=trains)
    identify(working)
    unmatched = quantizer.check_program(exported)
    if strict and unmatched:
        raise UserError("strict=True:\n" + "\n".join(f"  - {note}" for note in unmatched))
    claims = tuple(composition.chosen)
    groups, unsmoothed = smoothed(working, claims, plan_groups(working, claims))
    operators = survey(exported, working, composition, rewrites)
    plan = Plan(
        claims=claims,
        groups=groups,
        operators=operators,
        conflicts=tuple(composition.conflicts),
        rewrites=rewrites,
        notes=(
            *unmatched,
            *composition.notes,
            *claims_elsewhere(claims, operators),
            *(*notes_on_ranges(claims, groups), *unsmoothed),
            *notes_on_members(quantizer, composition),
        ),
        float_bytes=state_bytes(exported),
    )
    return working, Record(plan, "prepared", _backends(quantizer))


def _backends(quantizer: Quantizer) -> dict[str, Backend]:
    labels = [label for label, _ in labelled(quantizer)]
    members = zip(labels, quantizer.members, strict=True)
    return {label: m.backend for label, m in members if isinstance(m, RuleQuantizer)}


def _into(model: Any, result: GraphModule) -> GraphModule:
    """Make `model` itself the result, for `inplace=True`."""
    model.__dict__ = result.__dict__
    model.__class__ = result.__class__
    same: GraphModule = model
    return same


def convert_pt2e(
    model: GraphModule,
    use_reference_representation: bool = False,
    fold_quantize: bool = True,
    *,
    inplace: bool = False,
    allow_uncalibrated: bool = False,
) -> GraphModule:
    """Replace observers by quantize and dequantize operators, and parameters by integers.

    Args:
        model: what `prepare_pt2e` returned, calibrated, or `prepare_qat_pt2e`, trained. It is left alone.
        use_reference_representation: spell out the integer arithmetic of every operator that has a
            reference, in aten operators (`qompose.representation`). Such a model is not for `lower`.
        fold_quantize: store the integers of parameters; False keeps floats and a quantize operator.
        inplace: turn `model` itself into the result. Float parameters are let go of one by one as they are
            quantized, so that both forms are never held at once.
        allow_uncalibrated: leave regions in float whose observers saw nothing, rather than raise.

    Raises:
        StageError: the model was not prepared.
        UncalibratedError: observers saw no data; the message lists their tensors.
        CalibrationError: a tensor's statistics give no usable scale.
    """
    record = record_of(
        model,
        stages=("prepared",),
        function="convert_pt2e",
        remedy="Call prepare_pt2e, which returns a new model, and calibrate that first.",
    )
    say_if_modes_were_lost(model)
    with _without_collection():
        # One that was trained is folded first, which must not be left behind if anything fails.
        working = model if inplace and not is_trained(model) else copy_graph_module(model)
        deployment_form(working)
        conversion = convert_observers(
            working, record.plan, allow_uncalibrated=allow_uncalibrated, fold_quantize=fold_quantize
        )
        converted = _finished(working, record, conversion, reference=use_reference_representation)
    say_if_all_was_dropped(converted.meta[META_KEY])
    log_stage(converted)
    return _into(model, converted) if inplace else converted


def _finished(
    model: GraphModule, record: Record, conversion: Conversion, *, reference: bool
) -> GraphModule:
    """Return a module of a graph whose observers are gone, with its record."""
    clear_annotations(model)  # they refer to nodes of the prepared graph
    run_as_exported(model)
    represented = Representation({}, {})
    if reference:
        fold_quantized_constants(model)
        represented = represent(model)
    hoist_constants(model)
    name_apart(model)
    converted = refresh(model)
    restore_written(converted, record.state)
    done = replace(
        record,
        stage="reference" if reference else "converted",
        dropped=conversion.dropped,
        balanced=tuple(conversion.balanced),
        findings=tuple(conversion.findings),
        requirements=requirements_of(record.plan, record.backends, conversion.dropped),
        kernels=_by_claim(record.plan, represented.replaced),
        fallbacks=_by_claim(record.plan, represented.left),
        bytes=state_bytes(converted),
    )
    return attach(converted, done)


def _by_claim(plan: Plan, facts: Mapping[str, str]) -> dict[int, str]:
    """Return what is known of the operators that claims are named after, by the claims' numbers."""
    anchors = {number: claim.anchor for number, claim in enumerate(plan.claims)}
    return {number: facts[name] for number, name in anchors.items() if name in facts}


def lower(
    converted: GraphModule | Mapping[str, GraphModule],
    target: str = "torch",
    *,
    strict: bool = False,
) -> Any:
    """Replace each quantized region by its owner's kernel for `target`, and take the target's last step.

    Args:
        converted: a converted model; or several, by name, that become the methods of one program.
        target: the name of a runtime: "torch", or one that a backend brings.
        strict: make an error of a region that stays without a kernel.

    Returns:
        for "torch" a GraphModule, and of several models a dict; for other targets what their runtime runs.

    Raises:
        StageError: the model was not converted.
        TargetError: a member has no kernels for the target, or its runtime is missing, or has no programs
            of several methods.
        NotLoweredError: `strict`, and a region found no kernel.
        UserError: models have names that methods cannot have.
    """
    result, parts = with_kernels(converted, target)
    for name, (_, record) in parts.items():
        with in_method(name):
            if record.target == TORCH_TARGET.name:  # other runtimes may be on other machines
                warn(tuple(objections(record)), stacklevel=2)
            say_what_fell_back(record, strict=strict)
    attach_records(parts)
    return result


def with_kernels(
    converted: GraphModule | Mapping[str, GraphModule], target: str
) -> tuple[Any, dict[str, tuple[Any, Record]]]:
    """Return what `lower` returns, and its methods with the records that they are to have; say nothing."""
    several = isinstance(converted, Mapping)
    models: Mapping[str, Any] = converted if several else {ONLY: converted}  # type: ignore[assignment]
    if several:
        check_methods(models)
    steps = {}
    for name, model in models.items():
        with in_method(name):
            steps[name] = _with_kernels(model, target)
    with naming_fallbacks(steps):
        result, finished = finish(steps)
    parts = {}
    for name, part in finished.items():
        record = lowered_record(steps[name], part)
        parts[name] = part.model, replace(record, source=copy_graph_module(models[name]))
    return result, parts


def attach_records(parts: Mapping[str, tuple[Any, Record]]) -> None:
    """Let lowered models carry their records."""
    for model, record in parts.values():
        log_stage(attach(model, record))


def _with_kernels(converted: GraphModule, target: str) -> Step:
    """Return a copy of a converted model whose regions have their kernels, and what became of each."""
    record = record_of(
        converted,
        stages=("converted",),
        function="lower",
        remedy="Call convert_pt2e first, without use_reference_representation.",
    )
    runtime = find_target(target, record)
    model = copy_graph_module(converted)
    if runtime is not TORCH_TARGET:  # in the process, nobody asks
        mark_operators(model, record.plan)
    sink_constants(model)
    fold_quantized_constants(model)
    done, fallbacks, left = replace_regions(model, record, target)
    hoist_constants(model)
    model = refresh(model)
    freeze(model)  # integer kernels have no gradients
    return Step(model, record, runtime, done, fallbacks, left)
