# SPDX-License-Identifier: Apache-2.0
"""The checks of one rule: it annotates, converts, lowers, shares scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose import report
from qompose.backend.kit.reference import reference
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.plan.plan import Operator
from qompose.program.aliasing import written_buffers
from qompose.program.control_flow import nodes_in
from qompose.program.graph import operator_name, value_of
from qompose.reporting.report_data import FLOAT_KERNEL, KERNEL, UNVERIFIED
from qompose.testing.fixtures import ROW, Blocked, ContractError, expecting, kinds_of, sqnr
from qompose.testing.suite import Suite
from qompose.testing.trial import Inputs, Trial, outputs


def annotates(suite: Suite, trial: Trial) -> None:
    """The rule claims the operators of its own pattern."""
    example = trial.terms.example
    if example.problem:
        raise ContractError(
            str(trial),
            expected="an example for each operator of the rule",
            found="none",
            remedy=example.problem,
        )
    with expecting(
        str(trial),
        "the rule claims the operators of its own pattern",
        "make sure that the example runs and can be exported (set other shapes), and that "
        "neither the rule nor its guard raises",
    ):
        operators = trial.operators
    called = [operator for operator in operators if operator.operator in _wanted(trial)]
    if not called:
        raise ContractError(
            str(trial),
            expected=f"an example that calls {', '.join(sorted(_wanted(trial)))}",
            found=f"it calls {', '.join(o.operator for o in operators) or 'no operator'}",
            remedy="call the operator of the pattern in the example",
        )
    _check_claims(trial, called if not example.alone else operators)


def _wanted(trial: Trial) -> set[str]:
    return {operator_name(operator) for operator in trial.terms.example.operators}


def _check_claims(trial: Trial, operators: Sequence[Operator]) -> None:
    rule, label = trial.terms.rule.name, trial.terms.label
    claims = trial.record.plan.claims
    for operator in operators:
        claim = claims[operator.claim] if operator.claim is not None else None
        if claim is None:
            raise ContractError(
                str(trial),
                expected=f"the rule claims {operator.name} ({operator.operator})",
                found=f"it stays in float: {operator.reason or 'no reason given'}",
                remedy=(
                    "fix the pattern or the guard that rejects its own example, or use an "
                    "example that the guard accepts"
                ),
            )
        if (claim.owner, claim.rule) != (label, rule):
            raise ContractError(
                str(trial),
                expected=f"the rule claims {operator.name} ({operator.operator})",
                found=f"rule {claim.rule!r} of {claim.owner!r} claims it, so this row never applies",
                remedy=(
                    f"put {rule!r} before {claim.rule!r} in the table (longest fusion first), "
                    "narrow the other pattern, or remove the row"
                ),
            )


def converts(suite: Suite, trial: Trial) -> None:
    """The Q/DQ model is close to the float model (`min_sqnr`)."""
    suite.require(annotates, trial)
    remedy = "make sure that the specifications of the rule work with the data of its example"
    with expecting(str(trial), "convert_pt2e returns a Q/DQ model", remedy):
        converted = trial.converted
    _check_kept(trial, trial.batches("evaluation", 1)[0], converted)
    found, least = _quality(trial, converted), suite.least_sqnr(trial.terms.config)
    if found < least:
        raise ContractError(
            str(trial),
            expected=f"at least {least:.3g} dB between the float and the Q/DQ model (min_sqnr)",
            found=f"{found:.1f} dB",
            remedy=(
                "check which role has too few integers, the wrong observer or the wrong axis; a "
                "rule that shares scales must not change the magnitude of values"
            ),
        )


def _check_kept(trial: Trial, batch: Inputs, model: GraphModule) -> None:
    wanted = outputs(trial.model, batch)
    actual = outputs(model, batch)
    if kinds_of(actual) != kinds_of(wanted):
        raise ContractError(
            str(trial),
            expected=f"outputs like those of the float model: {kinds_of(wanted)}",
            found=str(kinds_of(actual)),
            remedy="preserve the shape and dtype of the region's output",
        )


def _quality(trial: Trial, model: GraphModule) -> float:
    """Return the least signal to noise ratio of the outputs, on the calibration data."""
    batches = trial.batches("calibration")
    return min(
        sqnr(wanted, actual)
        for batch in batches
        for wanted, actual in zip(
            outputs(trial.model, batch),
            outputs(model, batch),
            strict=True,
        )
    )


def lowers(suite: Suite, trial: Trial, target: str) -> None:
    """The region becomes the kernel that the rule names, without a warning."""
    suite.require(annotates, trial)
    kernel = trial.terms.rule.kernels[target]
    try:
        trial.converted  # noqa: B018 - test_converts reports why there is none
    except Exception as error:
        raise Blocked("test_converts", str(trial)) from error
    promise = f"kernel {kernel.promise!r} on {target!r}"
    wanted = {
        k.name: UNVERIFIED if k.unverified else FLOAT_KERNEL if k.float_arithmetic else KERNEL
        for k in kernel.chain
    }
    remedy = "fix the kernel's emit, or the final step of the target"
    with expecting(trial.on(target), promise, remedy):
        lowered = trial.lowered(target)
    row_of = (trial.terms.label, trial.terms.rule.name)
    rows = [row for row in report(lowered).rows if (row.owner, row.rule) == row_of]
    left = [row for row in rows if row.state != wanted.get(row.kernel)]
    if left or not rows:
        row = left[0] if left else None
        raise ContractError(
            trial.on(target),
            expected=promise,
            found=f"{row.name}: {row.state} {row.kernel or row.reason}" if row else "no such row",
            remedy=(
                "make the kernel support what the row's specifications and guard allow, reject "
                "the rest in the guard or in `accepts`, or declare no kernel for the target"
            ),
        )
    if trial.warned[f"lower {target}"]:
        raise ContractError(
            trial.on(target),
            expected="lower does not warn",
            found="; ".join(trial.warned[f"lower {target}"]),
            remedy="do what the warning says",
        )
    # The integer reference keeps exact integers in float64, and is what other kernels are compared with.
    trusted = {k.name for k in kernel.chain if k.emit is reference}
    in_process = target == TORCH_TARGET.name and kernel.emit is not None
    if in_process and not all(row.kernel in trusted for row in rows):
        _check_no_float(trial, lowered, target)
    if not callable(lowered):
        raise ContractError(
            trial.on(target),
            expected="a callable model",
            found=repr(lowered),
            remedy="add __call__ to the model that the target's final step returns",
        )


def _reads_state(node: Node, name: str) -> bool:
    """Tell whether an operator reads the buffer of the example, not what a kernel has in its place."""
    return any(read.target == f"{ROW}.own_{name}" for read in node.all_input_nodes)


def _check_no_float(trial: Trial, lowered: GraphModule, target: str) -> None:
    """Check that the operators of the region are gone, or run on integers."""
    names = {name for claim in trial.claims for name in claim.nodes}
    before = {node.name: node.target for node in nodes_in(trial.converted)}
    were = {before[name] for name in names & before.keys()}
    left = [
        node
        for node in nodes_in(lowered)
        if node.target in were
        and _is_float(node)
        and (trial.terms.rule.state is None or _reads_state(node, trial.terms.rule.state))
        and (node.name in names or (node.name not in before and _computes(node)))
    ]
    if left:
        raise ContractError(
            trial.on(target),
            expected="no float operator of the region remains next to the kernel",
            found=", ".join(f"{node.name} ({operator_name(node.target)})" for node in left),
            remedy="compute with the integers of Region.quantized, not with the dequantized floats",
        )


def _is_float(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.is_floating_point()


def _computes(node: Node) -> bool:
    """Tell whether a node reads floats other than constants, such as scales by row."""
    return any(_is_float(n) and n.op != "get_attr" for n in node.all_input_nodes)


def keeps_parameters(suite: Suite, trial: Trial, target: str) -> None:
    """The lowered model leaves its parameters as they are."""
    suite.require(lowers, trial, target)
    lowered, batch = trial.lowered(target), trial.batches("evaluation", 1)[0]
    if not isinstance(lowered, nn.Module):
        return
    written = written_buffers(lowered.graph) if isinstance(lowered, GraphModule) else ()
    before = {k: value.clone() for k, value in lowered.state_dict().items() if k not in written}
    try:
        outputs(lowered, batch)
    except Exception:
        return  # another check reports that it does not run
    after = lowered.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    if changed:
        raise ContractError(
            trial.on(target),
            expected="parameters are unchanged after the model ran",
            found=f"different values in {', '.join(changed)}",
            remedy="do not write to the arguments of the kernel; copy them first",
        )


def shares(suite: Suite, trial: Trial) -> None:
    """If the rule shares, inputs and output have one scale."""
    suite.require(annotates, trial)
    plan = trial.record.plan
    group_of = {str(point): i for i, group in enumerate(plan.groups) for point in group.points}
    for claim in trial.claims:
        points = [str(spec.point) for spec in claim.specs]
        groups = {group_of.get(point) for point in points}
        if len(groups) != 1 or not any(spec.point.user is None for spec in claim.specs):
            raise ContractError(
                str(trial),
                expected="one scale and zero point for inputs and output",
                found=f"{len(groups)} groups of quantization parameters for {', '.join(points)}",
                remedy=(
                    "use `Rule(shares=True)` for sharing, or give the rule a separate output "
                    "specification"
                ),
            )
