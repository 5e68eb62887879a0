# SPDX-License-Identifier: Apache-2.0
"""What users call: the stages, one after the other, and the one call that runs them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from qompose.aliases import written_buffers
from qompose.annotations import clear_annotations, write_annotations
from qompose.arbitration import compose_claims
from qompose.backend import Backend
from qompose.calibration import calibrate
from qompose.claims import Claim, Composition
from qompose.conversion import convert_observers
from qompose.errors import (
    NothingQuantizedError,
    NotLoweredError,
    QomposeWarning,
    UserError,
)
from qompose.graph import (
    as_graph_module,
    copy_graph_module,
    freeze,
    get_attribute,
    refresh,
    set_attribute,
)
from qompose.interop import adapt
from qompose.lowering import find_target, replace_regions, settle
from qompose.plan import Plan, Record, Rewrite, attach, record_of
from qompose.planning import plan_groups
from qompose.plugins import load_backend
from qompose.preparation import insert_observers
from qompose.quantizer import ComposableQuantizer, Quantizer, RuleQuantizer, labelled
from qompose.reporting import Report, report
from qompose.rewrites import FOLD_BATCH_NORM, Candidate, apply_rewrites, find_rewrites
from qompose.signature import call_signature
from qompose.survey import state_bytes, survey


def compose(*members: str | Quantizer, on_conflict: str = "error") -> ComposableQuantizer:
    """Compose quantizers, in order of priority. A string is an installed backend with its default config.

    Raises:
        BackendNotFoundError: no such backend is installed.
        PluginError: it is, and cannot be loaded.
        UserError: no members.
    """
    return ComposableQuantizer([_as_quantizer(member) for member in members], on_conflict)


def _as_quantizer(member: str | Quantizer) -> Quantizer:
    if not isinstance(member, str):
        return adapt(member)
    backend = load_backend(member)
    make: Callable[[], Any] = backend.quantizer_class or (lambda: RuleQuantizer(backend))
    quantizer = make()
    if isinstance(quantizer, RuleQuantizer):
        quantizer.set_global(backend.default_config)
    assert isinstance(quantizer, Quantizer)
    return quantizer


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
    """
    quantizer = adapt(quantizer)
    exported = copy_graph_module(as_graph_module(model, "prepare_pt2e"))
    state = {p: get_attribute(exported, p).clone() for p in written_buffers(exported.graph)}
    _restore(exported, state)
    unmatched = quantizer.check_program(exported)
    if strict and unmatched:
        raise UserError("strict=True:\n" + "\n".join(f"  - {note}" for note in unmatched))
    working, composition, rewrites = _annotate(exported, quantizer)
    claims = tuple(composition.chosen)
    plan = Plan(
        claims=claims,
        groups=plan_groups(working, claims),
        operators=survey(exported, composition, rewrites),
        conflicts=tuple(composition.conflicts),
        rewrites=rewrites,
        notes=(*unmatched, *composition.notes),
        float_bytes=state_bytes(exported),
    )
    _say_what_is_missing(plan, strict)
    clear_annotations(working.graph)
    write_annotations(working, claims)
    quantizer.validate(working)
    insert_observers(working, claims, plan.groups, quantizer.prepare_obs_or_fq_callback)
    prepared = refresh(working)
    attach(prepared, Record(plan, "prepared", _backends(quantizer), state=state))
    return _into(model, prepared) if inplace else prepared


def _restore(model: GraphModule, state: Mapping[str, Tensor]) -> None:
    """Give buffers that the program writes to their exported values, in copies of the model's own.

    So neither the caller's model nor a converted one keeps what calibration wrote.
    """
    for path, value in state.items():
        set_attribute(model, path, value.clone())


def _annotate(
    exported: GraphModule, quantizer: Quantizer
) -> tuple[GraphModule, Composition, tuple[Rewrite, ...]]:
    """Propose and compose on a copy with all rewrites, then with those that turned out to be covered.

    Rewrites that no claim covers are left out of the next round; their number only shrinks.
    """
    wanted = {FOLD_BATCH_NORM}.union(*(member.rewrites for member in quantizer.members))
    nodes = {node.name: node for node in exported.graph.nodes}
    found = [_with_objection(c, nodes, quantizer) for c in find_rewrites(exported, wanted)]
    candidates = [candidate for candidate in found if candidate.obstacle is None]
    while True:
        working = copy_graph_module(exported)
        apply_rewrites(working, candidates)
        working = quantizer.transform_for_annotation(refresh(working))
        composition = compose_claims(working, labelled(quantizer), quantizer.on_conflict)
        claimed = {name for claim in composition.chosen for name in claim.nodes}
        covered = [candidate for candidate in candidates if candidate.into in claimed]
        if covered == candidates:
            break
        candidates = covered
    composition.notes += [_obstacle(c) for c in found if c.obstacle is not None]
    return working, composition, tuple(Rewrite(c.rewrite, c.nodes, c.into) for c in candidates)


def _with_objection(
    candidate: Candidate, nodes: Mapping[str, Node], quantizer: Quantizer
) -> Candidate:
    """Refuse a rewrite that joins operators which a member's selectors treat differently."""
    objection = quantizer.objection_to_rewrite([nodes[name] for name in candidate.nodes])
    return candidate if objection is None else replace(candidate, obstacle=objection)


def _obstacle(candidate: Candidate) -> str:
    return f"{candidate.rewrite} of {', '.join(candidate.nodes)} was not made: {candidate.obstacle}"


def _say_what_is_missing(plan: Plan, strict: bool) -> None:
    if plan.claims:
        return
    reasons = {
        f"{o.name} ({o.operator}{f' in {o.module}' if o.module else ''}): {o.reason}"
        for o in plan.operators
    }
    listed = "\n".join(f"  - {line}" for line in sorted(reasons)[:20])
    message = f"Nothing was quantized: no quantizer claims any of {len(plan.operators)} operators.\n{listed}"
    if strict:
        raise NothingQuantizedError(message)
    warnings.warn(message, QomposeWarning, stacklevel=3)


def _backends(quantizer: Quantizer) -> dict[str, Backend]:
    labels = [label for label, _ in labelled(quantizer)]
    return {
        label: member.backend
        for label, member in zip(labels, quantizer.members, strict=True)
        if isinstance(member, RuleQuantizer)
    }


def _into(model: object, result: GraphModule) -> GraphModule:
    """Make `model` itself the result, for `inplace=True`."""
    if not isinstance(model, GraphModule):
        raise UserError("inplace=True needs a GraphModule: an ExportedProgram is never edited")
    model.__dict__ = result.__dict__
    model.__class__ = result.__class__
    return model


def convert_pt2e(
    prepared: GraphModule, *, inplace: bool = False, allow_uncalibrated: bool = False
) -> GraphModule:
    """Replace observers by quantize and dequantize operators, and parameters by integers.

    Args:
        allow_uncalibrated: leave regions in float whose observers saw nothing, rather than raise.

    Raises:
        StageError: the model was not prepared.
        UncalibratedError: observers saw no data; the message lists their tensors.
    """
    record = record_of(
        prepared,
        stages=("prepared",),
        function="convert_pt2e",
        remedy="Call prepare_pt2e and calibrate first.",
    )
    model = copy_graph_module(prepared)
    clear_annotations(model.graph)  # they refer to nodes of the prepared graph
    conversion = convert_observers(model, record.plan, allow_uncalibrated=allow_uncalibrated)
    converted = refresh(model)
    _restore(converted, record.state)
    done = replace(
        record,
        stage="converted",
        dropped=conversion.dropped,
        balanced=tuple(conversion.balanced),
        bytes=state_bytes(converted),
    )
    attach(converted, done)
    return _into(prepared, converted) if inplace else converted


def lower(converted: GraphModule, target: str = "torch", *, strict: bool = False) -> Any:
    """Replace each quantized region by its owner's kernel for `target`, and take the target's last step.

    Returns:
        for "torch" a GraphModule; for other targets what their runtime runs. Both can be called.

    Raises:
        StageError: the model was not converted.
        TargetError: a member has no kernels for the target, or its runtime is missing.
        NotLoweredError: `strict`, and a region found no kernel.
    """
    record = record_of(
        converted,
        stages=("converted",),
        function="lower",
        remedy="Call convert_pt2e first.",
    )
    runtime = find_target(target, record)
    model = copy_graph_module(converted)
    done, fallbacks, left = replace_regions(model, record, target)
    model = refresh(model)
    freeze(model)  # integer kernels have no gradients
    finished = runtime.finish(model, call_signature(model))
    kernels, fallbacks = settle(finished, done, fallbacks, left)
    _say_what_fell_back(record.plan.claims, fallbacks, target, strict)
    lowered = replace(
        record,
        stage="lowered",
        target=target,
        kernels=kernels,
        fallbacks=fallbacks,
        bytes=_bytes_of(finished.model),
    )
    return attach(finished.model, lowered)


def _bytes_of(model: Any) -> int:
    return state_bytes(model) if isinstance(model, nn.Module) else int(getattr(model, "nbytes", 0))


def _say_what_fell_back(
    claims: Sequence[Claim], fallbacks: Mapping[int, str], target: str, strict: bool
) -> None:
    if not fallbacks:
        return
    lines = [
        f"  - {claims[n].anchor} ({claims[n].owner}, rule {claims[n].rule}): {reason}"
        for n, reason in sorted(fallbacks.items())
    ]
    message = f"{len(lines)} quantized regions have no int8 kernel on {target}:\n" + "\n".join(
        lines
    )
    if strict:
        raise NotLoweredError(message)
    warnings.warn(message, QomposeWarning, stacklevel=3)


@dataclass(frozen=True)
class QuantizedModel:
    """What `quantize` made: the float program, the Q/DQ model, and the one that runs integer kernels."""

    exported: ExportedProgram
    converted: GraphModule
    model: Any
    quantizer: Quantizer

    @property
    def report(self) -> Report:
        """Return what happened to every float operator."""
        return report(self.model)


def quantize(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | None = None,
    *,
    backends: str | Quantizer | Sequence[str | Quantizer],
    calibration: Iterable[Any] | None = None,
    target: str = "torch",
    dynamic_shapes: Any = None,
    transform: Callable[[Any], Any] | None = None,
    progress: bool | None = None,
    strict: bool = False,
) -> QuantizedModel:
    """Export, prepare, calibrate, convert and lower a model, in one call.

    Args:
        model: a module, which is exported in eval mode with `example_inputs` and `dynamic_shapes`; or an
            ExportedProgram.
        backends: names of installed backends or quantizers, in order of priority; or just one.
        calibration: batches for `calibrate`; not needed where nothing is quantized statically.

    Raises:
        UserError: `example_inputs` are missing; and whatever the stages raise.
    """
    single = isinstance(backends, (str, Quantizer))
    quantizer = compose(*([backends] if single else backends))  # type: ignore[misc]
    exported = (
        model
        if isinstance(model, ExportedProgram)
        else _export(model, example_inputs, dynamic_shapes)
    )
    prepared = prepare_pt2e(exported, quantizer, strict=strict)
    if calibration is not None:
        calibrate(prepared, calibration, transform=transform, progress=progress)
    converted = convert_pt2e(prepared)
    return QuantizedModel(exported, converted, lower(converted, target, strict=strict), quantizer)


def _export(model: nn.Module, example_inputs: Any, dynamic_shapes: Any) -> ExportedProgram:
    if isinstance(model, GraphModule) or not isinstance(model, nn.Module):
        raise UserError(
            "quantize takes a torch.nn.Module or an ExportedProgram; for a GraphModule call "
            "prepare_pt2e, calibrate, convert_pt2e and lower"
        )
    if not isinstance(example_inputs, tuple):
        raise UserError(
            "quantize needs example_inputs, a tuple of positional arguments, to export the model"
        )
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            return torch.export.export(model.eval(), example_inputs, dynamic_shapes=dynamic_shapes)
    finally:
        for module, mode in training.items():
            module.training = mode
