# SPDX-License-Identifier: Apache-2.0
"""Checks that a rule annotates, converts, lowers and is listed.

The checks of a row: it annotates, converts, lowers to the kernel it promises, and is right.

The checks of a backend as such: how it loads, what it is called, and what its configurations are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose import QuantizationConfig, report
from qompose.backend import API_VERSION, Backend
from qompose.backend.rule import ACTIVATION_ONLY
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.plan.plan import Operator
from qompose.program.control_flow import nodes_in
from qompose.program.graph import operator_name, value_of
from qompose.reporting import Row
from qompose.reporting.report_data import FLOAT_KERNEL, KERNEL
from qompose.testing.fixtures import Blocked, ContractError, NotApplicable, sqnr
from qompose.testing.suite import Case, Suite
from qompose.testing.trial import Inputs, Trial, outputs


def annotates(suite: Suite, trial: Trial) -> None:
    """The rule claims the operators of its own example."""
    terms, expected = trial.terms, "rule to claim the operators of its own pattern"
    example = terms.example
    if example.problem:
        raise ContractError(
            str(trial),
            expected="an example for each operator of the rule",
            found="none",
            remedy=example.problem,
        )
    try:
        operators = trial.operators
    except NotApplicable:
        raise
    except Exception as error:
        raise ContractError(
            str(trial),
            expected=f"the {expected}",
            found=f"{type(error).__name__}: {error}",
            remedy="make the example run and export (give other shapes), and see that neither the rule nor "
            "its guard raises",
        ) from error
    called = [operator for operator in operators if operator.operator in _wanted(trial)]
    if not called:
        raise ContractError(
            str(trial),
            expected=f"an example that calls {', '.join(sorted(_wanted(trial)))}",
            found=f"it calls {', '.join(o.operator for o in operators) or 'no operator'}",
            remedy="let the example call the operator of the pattern",
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
                expected=f"the rule to claim {operator.name} ({operator.operator})",
                found=f"it stays in float: {operator.reason or 'no reason is given'}",
                remedy="mend the pattern or the guard that refuses its own example, or give an example that "
                "the guard takes",
            )
        if (claim.owner, claim.rule) != (label, rule):
            raise ContractError(
                str(trial),
                expected=f"the rule to claim {operator.name} ({operator.operator})",
                found=f"rule {claim.rule!r} of {claim.owner!r} takes it, so this row never applies",
                remedy=f"put {rule!r} before {claim.rule!r} in the table (longest fusion first), narrow the "
                "other's pattern, or drop the row",
            )


def converts(suite: Suite, trial: Trial) -> None:
    """The Q/DQ model is close to the float model, and keeps shapes and dtypes."""
    suite.require(annotates, trial)
    try:
        converted = trial.converted
    except Exception as error:
        raise ContractError(
            str(trial),
            expected="convert_pt2e to make a Q/DQ model",
            found=f"{type(error).__name__}: {error}",
            remedy="see that the specifications of the rule can be followed with the data of its example",
        ) from error
    _check_kept(trial, trial.batches("evaluation", 1)[0], converted)
    found, least = _quality(trial, converted), suite.least_sqnr(trial.terms.config)
    if found < least:
        raise ContractError(
            str(trial),
            expected=f"at least {least:.3g} dB between the float and the Q/DQ model (min_sqnr)",
            found=f"{found:.1f} dB",
            remedy="see which role has too few integers, the wrong observer or the wrong axis; a rule that "
            "shares scales must not change the size of values",
        )


def _check_kept(trial: Trial, batch: Inputs, model: GraphModule) -> None:
    wanted = outputs(trial.model, batch)
    actual = outputs(model, batch)
    kinds = [[(tuple(x.shape), x.dtype) for x in outputs] for outputs in (wanted, actual)]
    if kinds[0] != kinds[1]:
        raise ContractError(
            str(trial),
            expected=f"outputs like the float model's: {kinds[0]}",
            found=str(kinds[1]),
            remedy="keep shape and dtype of the region's output",
        )


def _quality(trial: Trial, model: GraphModule) -> float:
    """Return the least of the outputs' signal to noise ratios, on the data of calibration."""
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
    """The region becomes the kernel that the row promises, without a warning."""
    suite.require(annotates, trial)
    kernel = trial.terms.rule.kernels[target]
    try:
        trial.converted  # noqa: B018 - another check says why there is none
    except Exception as error:
        raise Blocked("test_converts", str(trial)) from error
    promise = f"kernel {kernel.promise!r} on {target!r}"
    wanted = {k.name: FLOAT_KERNEL if k.float_arithmetic else KERNEL for k in kernel.chain}
    try:
        lowered = trial.lowered(target)
    except Exception as error:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected=promise,
            found=f"{type(error).__name__}: {error}",
            remedy="mend the kernel's emit, or the last step of the target",
        ) from error
    rows = [row for row in report(lowered).rows if _is_of(trial, row)]
    left = [row for row in rows if row.state != wanted.get(row.kernel)]
    if left or not rows:
        row = left[0] if left else None
        raise ContractError(
            f"{trial}, target {target!r}",
            expected=promise,
            found=f"{row.name}: {row.state} {row.kernel or row.reason}" if row else "no such row",
            remedy="let the kernel take what the row's specifications and guard admit, refuse in the guard "
            "or in `accepts` what it cannot, or promise no kernel for the target",
        )
    if trial.warned[f"lower {target}"]:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected="lower to say nothing",
            found="; ".join(trial.warned[f"lower {target}"]),
            remedy="do what the warning says",
        )
    if target == TORCH_TARGET.name and kernel.emit is not None:
        _check_no_float(trial, lowered, target)
    if not callable(lowered):
        raise ContractError(
            f"{trial}, target {target!r}",
            expected="a model that can be called",
            found=repr(lowered),
            remedy="give what the target's last step makes a __call__",
        )


def _is_of(trial: Trial, row: Row) -> bool:
    return (row.owner, row.rule) == (trial.terms.label, trial.terms.rule.name)


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
        and (node.name in names or (node.name not in before and _computes(node)))
    ]
    if left:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected="no float operator of the region beside the kernel",
            found=", ".join(f"{node.name} ({operator_name(node.target)})" for node in left),
            remedy="compute with the integers of Region.quantized, not with the dequantized floats",
        )


def _is_float(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.is_floating_point()


def _computes(node: Node) -> bool:
    """Tell whether a node reads floats that are no constants, such as scales by row."""
    return any(_is_float(n) and n.op != "get_attr" for n in node.all_input_nodes)


def keeps_parameters(suite: Suite, trial: Trial, target: str) -> None:
    """The kernel does not write to its weights, which other models may share."""
    suite.require(lowers, trial, target)
    lowered, batch = trial.lowered(target), trial.batches("evaluation", 1)[0]
    if not isinstance(lowered, nn.Module):
        return
    before = {name: value.clone() for name, value in lowered.state_dict().items()}
    try:
        outputs(lowered, batch)
    except Exception:
        return  # that it does not run has a check of its own
    after = lowered.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    if changed:
        raise ContractError(
            f"{trial}, target {target!r}",
            expected="parameters as they were before the model ran",
            found=f"other values in {', '.join(changed)}",
            remedy="write to nothing that the kernel is given; copy first",
        )


def shares(suite: Suite, trial: Trial) -> None:
    """The inputs and the output of a rule that shares have one scale and zero point."""
    suite.require(annotates, trial)
    plan = trial.record.plan
    group_of = {str(point): i for i, group in enumerate(plan.groups) for point in group.points}
    for claim in trial.claims:
        points = [str(spec.point) for spec in claim.specs]
        groups = {group_of.get(point) for point in points}
        if len(groups) != 1 or not any(spec.point.user is None for spec in claim.specs):
            raise ContractError(
                str(trial),
                expected="one scale and zero point for the inputs and the output",
                found=f"{len(groups)} groups of parameters for {', '.join(points)}",
                remedy="leave sharing to `Rule(shares=True)`, or let the rule have an output of its own",
            )


def is_listed(suite: Suite, case: Case) -> None:
    """The capability table has the row, says yes to it, and its kernels are for targets that exist."""
    backend, rule = suite.backend, suite.rule(case.rule)
    subject = f"backend {backend.name!r}, rule {case.rule!r}, config {case.config!r}"
    try:
        has_rules(suite)
    except ContractError as error:
        raise Blocked("test_has_rules", subject) from error
    table = suite.bare_quantizer().quantization_capabilities()
    rows = [row for row in table if (row.pattern, row.config) == (case.rule, case.config)]
    answer = table.supports(case.rule, backend.configs[case.config])
    if len(rows) != 1 or not answer or not rows[0].drawing:
        raise ContractError(
            subject,
            expected="one row in the capability table, with a drawing, and `supports` to say yes",
            found=f"{len(rows)} rows, and {answer.reason or 'yes'}",
            remedy="give each rule a name of its own and a drawing",
        )
    unknown = set(rule.kernels) - set(suite.known_targets)
    if unknown or not rule.kernels:
        raise ContractError(
            subject,
            expected=f"kernels for targets among {', '.join(sorted(suite.known_targets))}",
            found=f"kernels for {', '.join(sorted(rule.kernels)) or 'no target'}",
            remedy='name a target that an installed backend brings, or "torch"',
        )


def loads(suite: Suite) -> None:
    """The backend loads by its name, and speaks the version of the interface that core has."""
    backend = suite.backend
    if not backend.name or not isinstance(backend.name, str):
        raise ContractError(
            f"backend {type(backend).__qualname__}",
            expected="a name, that of its entry point",
            found=repr(backend.name),
            remedy="set the attribute `name`",
        )
    if backend.api_version != API_VERSION:
        raise ContractError(
            _subject(backend),
            expected=f"api_version = {API_VERSION}, which this release of qompose speaks",
            found=f"api_version = {backend.api_version!r}",
            remedy="write the number into the class, and see the changelog for what changed",
        )
    if suite.no_quantizer is not None:
        raise ContractError(
            _subject(backend),
            expected="quantizer_class to make a qompose.Quantizer",
            found=suite.no_quantizer,
            remedy="name a subclass of qompose.RuleQuantizer, or leave quantizer_class out",
        )


def says_availability(suite: Suite) -> None:
    """`availability` returns None, or the reason as text; so do the targets."""
    backend = suite.backend
    questions = {"availability()": backend.availability}
    questions |= {f"target {t.name!r}, availability()": t.availability for t in backend.targets}
    for name, ask in questions.items():
        try:
            answer: object = ask()
        except Exception as error:
            answer = error
        if answer is not None and not (isinstance(answer, str) and answer.strip()):
            raise ContractError(
                f"{_subject(backend)}, {name}",
                expected="None where it can be used here, else the reason as text",
                found=repr(answer),
                remedy='return None or a sentence such as "the package x is missing: pip install x"',
            )


def has_rules(suite: Suite) -> None:
    """Rules have names of their own, and something to say in tables."""
    backend = suite.backend
    counts = Counter(rule.name for rule in backend.rules)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice or not counts or "" in counts:
        raise ContractError(
            _subject(backend),
            expected="rules, each with a name of its own",
            found=f"several rules of one name: {', '.join(twice)}"
            if twice
            else f"rules {[*counts]}",
            remedy="give each rule another name: reports and capability tables know rules by it",
        )


def has_configs(suite: Suite) -> None:
    """Every named configuration fits a rule and can be set; there is a default, the first of them."""
    backend = suite.backend
    if not backend.configs or backend.default_config is not next(iter(backend.configs.values())):
        raise ContractError(
            _subject(backend),
            expected="named configurations, the first of which is the default",
            found=f"{len(backend.configs)} configurations, and the default {backend.default_config}",
            remedy="set the attribute `configs`, and leave default_config as it is",
        )
    for name, config in backend.configs.items():
        subject = f"{_subject(backend)}, config {name!r}"
        if not isinstance(config, QuantizationConfig):
            raise ContractError(
                subject,
                expected="a qompose.QuantizationConfig",
                found=repr(config),
                remedy="give the configuration itself, not what makes it",
            )
        objections = [rule.objection(config) for rule in backend.rules]
        if all(objections):
            raise ContractError(
                subject,
                expected="a rule that can follow it",
                found="; ".join(dict.fromkeys(map(str, objections))),
                remedy="drop the configuration, or let a rule take it",
            )
        try:
            suite.quantizer(config)
        except Exception as error:
            raise ContractError(
                subject,
                expected="set_global to take it",
                found=f"{type(error).__name__}: {error}",
                remedy="let the rules with a weight take it, or drop it",
            ) from error
    for rule in backend.rules:
        tried = {backend.configs[name].mode for name in suite.fitting(rule)}
        if rule.modes - tried - {ACTIVATION_ONLY}:
            lacking = ", ".join(sorted(rule.modes - tried - {ACTIVATION_ONLY}))
            raise ContractError(
                f"{_subject(backend)}, rule {rule.name!r}",
                expected=f"a named configuration that the rule follows for each of its modes: {lacking}",
                found=f"it follows {', '.join(suite.fitting(rule)) or 'none'}",
                remedy="name such a configuration, so that the mode is tried, or drop the mode of the rule",
            )


def _subject(backend: Backend) -> str:
    return f"backend {backend.name!r}"
