# SPDX-License-Identifier: Apache-2.0
"""Checks of a whole backend: saving, composing, selectors, imports.

The checks on one model of all rows: it is saved and loaded, and shared by quantizers of two backends.

The check that selectors mean on this backend what they mean on every one: the most specific wins.

What a backend's source may import of qompose: its public names.
"""

from __future__ import annotations

import ast
import inspect
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qompose import (
    ComposableQuantizer,
    QomposeWarning,
    QuantizationConfig,
    Quantizer,
    Report,
    RuleQuantizer,
    _submodules,
    convert_pt2e,
    load,
    lower,
    prepare_pt2e,
    report,
    save,
)
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.plan.plan import Operator, attach
from qompose.program.control_flow import nodes_in
from qompose.program.meta import META_KEY
from qompose.reporting.report_data import FLOAT_KERNEL, KERNEL
from qompose.testing.checks_kernel import matches_reference
from qompose.testing.checks_rule import annotates, converts
from qompose.testing.fixtures import (
    BEHIND,
    FRONT,
    ROW,
    Blocked,
    ContractError,
    Model,
    NotApplicable,
    Row,
    sqnr,
    surroundings,
)
from qompose.testing.suite import Suite
from qompose.testing.trial import Inputs, Trial, copies, outputs


class _AllRows(nn.Module):
    """The models of several rows, side by side, with the inputs of each in turn."""

    def __init__(self, models: Sequence[Model], counts: Sequence[int]) -> None:
        super().__init__()
        self.models, self.counts = nn.ModuleList(models), tuple(counts)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all rows."""
        results: list[Tensor] = []
        rest = inputs
        for model, count in zip(self.models, self.counts, strict=True):
            results += model(*rest[:count])
            rest = rest[count:]
        return tuple(results)


@dataclass
class Gathering:
    """The rows of a backend that fit one configuration, as one model."""

    suite: Suite
    name: str

    def __post_init__(self) -> None:
        self.trials = list(self._sound_trials())
        if not self.trials:
            raise NotApplicable(f"no row of config {self.name!r} annotates and converts")
        self.model = _AllRows(
            [trial.model for trial in self.trials],
            [len(trial.batches("calibration", 1)[0]) for trial in self.trials],
        ).eval()
        per_trial = [trial.batches("calibration") for trial in self.trials]
        self.batches: list[Inputs] = [
            tuple(x for batch in batches for x in batch) for batches in zip(*per_trial, strict=True)
        ]
        with torch.no_grad():
            self.program = torch.export.export(self.model, copies(self.batches[0]))

    def _sound_trials(self) -> Any:
        """Yield the trials of rows that work alone: what does not has a check of its own."""
        for case in self.suite.cases():
            if case.config == self.name:
                trial: Trial = self.suite.trial(case)
                try:
                    self.suite.require(annotates, trial)
                    self.suite.require(converts, trial)
                    self._require_kernel(trial)
                except NotApplicable:
                    continue
                yield trial

    def _require_kernel(self, trial: Trial) -> None:
        if TORCH_TARGET.name in trial.terms.rule.kernels and self.suite.in_process:
            self.suite.require(matches_reference, trial, TORCH_TARGET.name)

    def quantizer(self, *members: Quantizer) -> Quantizer:
        """Return the quantizers of what stands around the rows, and others behind them."""
        models = dict(enumerate(trial.model for trial in self.trials))
        around = surroundings(
            self.suite.backend.configs[self.name],
            [f"models.{i}.{FRONT}" for i, model in models.items() if model.front is not None],
            [f"models.{i}.{BEHIND}" for i, model in models.items() if model.behind is not None],
            self.suite.known_targets,
        )
        return ComposableQuantizer([*around, *members])

    def converted(self, *members: Quantizer) -> GraphModule:
        """Return the Q/DQ program that quantizers make of all rows."""
        prepared = prepare_pt2e(self.program, self.quantizer(*members))
        with torch.no_grad():
            for batch in self.batches:
                prepared(*copies(batch))
        return convert_pt2e(prepared)


def gathering(suite: Suite, name: str) -> Gathering:
    """Return the rows of a configuration as one model, made once."""
    found: Gathering = suite.keep(("gathering", name), lambda: Gathering(suite, name))
    return found


def saves(suite: Suite, name: str) -> None:
    """A converted model of all rows is saved and loaded bit for bit, and lowers again in the same way."""
    rows = gathering(suite, name)
    subject = f"backend {suite.backend.name!r}, config {name!r}, one model of all rows"
    remedy = (
        "let kernels and patterns be functions of the graph alone, and hold no state of a model"
    )
    converted, batch = rows.converted(suite.quantizer(suite.backend.configs[name])), rows.batches[0]
    loaded = _through_a_file(converted, subject)
    _expect_equal(
        subject, "the loaded model", outputs(loaded, batch), outputs(converted, batch), remedy
    )
    if not suite.in_process:
        return
    # A loaded model finds installed backends, and not what stands around the rows.
    backends = {**converted.meta[META_KEY].backends, suite.backend.name: suite.backend}
    attach(loaded, replace(loaded.meta[META_KEY], backends=backends))
    first, again = _lowered(converted), _lowered(loaded)
    kernels = [[(r.name, r.state, r.kernel) for r in report(m).rows] for m in (first, again)]
    if kernels[0] != kernels[1]:
        raise ContractError(
            subject,
            expected="the loaded model to lower to the same kernels",
            found=str(next((a, b) for a, b in zip(*kernels, strict=True) if a != b)),
            remedy=remedy,
        )
    _expect_equal(
        subject,
        "what the loaded model lowers to",
        outputs(again, batch),
        outputs(first, batch),
        remedy,
    )


def _through_a_file(converted: GraphModule, subject: str) -> GraphModule:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.qompose"
        try:
            save(converted, path)
            loaded: GraphModule = load(path)
            return loaded
        except Exception as error:
            raise ContractError(
                subject,
                expected="save and load to take the converted model",
                found=f"{type(error).__name__}: {error}",
                remedy="rewrite graphs with operators of torch and registered custom ones only",
            ) from error


def _lowered(model: GraphModule) -> Any:
    with warnings.catch_warnings():  # regions without a kernel have a check of their own
        warnings.simplefilter("ignore", QomposeWarning)
        return lower(model, "torch")


def _expect_equal(
    subject: str, what: str, actual: list[Tensor], wanted: list[Tensor], remedy: str
) -> None:
    unequal = [
        i for i, pair in enumerate(zip(actual, wanted, strict=True)) if not torch.equal(*pair)
    ]
    if unequal:
        raise ContractError(
            subject,
            expected=f"outputs of {what} that are equal bit for bit",
            found=f"other values in output {unequal[0]}",
            remedy=remedy,
        )


def composes(suite: Suite, name: str, partner: str, first: bool) -> None:
    """With another backend's quantizer, before it or behind it, all rows stay right and losers are named."""
    rows = gathering(suite, name)
    own = suite.quantizer(suite.backend.configs[name])
    other = _partner(suite, rows, partner)
    members = (own, other) if first else (other, own)
    subject = (
        f"backend {suite.backend.name!r}, config {name!r}, composed with {partner!r} "
        f"({'before' if first else 'behind'} it)"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QomposeWarning)
        converted = _tried(subject, "prepare and convert", lambda: rows.converted(*members))
        lowered = (
            _tried(subject, "lower to 'torch'", lambda: lower(converted, "torch"))
            if suite.in_process
            else converted
        )
    for stage in (converted, lowered):
        _check_quality(suite, rows, subject, stage)
    if suite.in_process:
        _check_report(subject, report(lowered), {member.name for member in members})


def _partner(suite: Suite, rows: Gathering, partner: str) -> Quantizer:
    """Return the other quantizer; for the backend itself, one that selects half of the rows."""
    if partner != suite.backend.name:
        other = RuleQuantizer(suite.installed[partner])
        return other.set_global(suite.installed[partner].default_config)
    half = suite.bare_quantizer()
    half.set_global(None)
    for number in range(0, len(rows.trials), 2):
        half.set_module_name(f"models.{number}", suite.backend.configs[rows.name])
    return half


def _tried(subject: str, what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        raise ContractError(
            subject,
            expected=f"a composition to {what}",
            found=f"{type(error).__name__}: {error}",
            remedy="let no rule, guard, kernel or hook count on being the only quantizer",
        ) from error


def _check_quality(suite: Suite, rows: Gathering, subject: str, model: Any) -> None:
    batch = rows.batches[0]
    wanted, actual = outputs(rows.model, batch), outputs(model, batch)
    worst = min(range(len(wanted)), key=lambda i: sqnr(wanted[i], actual[i]))
    least = suite.least_sqnr(suite.backend.configs[rows.name])
    if sqnr(wanted[worst], actual[worst]) < least:
        raise ContractError(
            f"{subject}, {model.meta[META_KEY].stage}",
            expected=f"at least {least:.3g} dB on each row (min_sqnr)",
            found=f"{sqnr(wanted[worst], actual[worst]):.1f} dB in output {worst}",
            remedy="see what specifications meet there, and whether the kernel reads those of its inputs",
        )


def _check_report(subject: str, found: Report, members: set[str]) -> None:
    """Check that every operator has an owner or a reason, and that what lost is named."""
    for row in found.rows:
        owner = row.owner.partition("#")[0]
        known = owner in members or owner == "contract"
        if (row.owner and not known) or (
            row.state not in (KERNEL, FLOAT_KERNEL) and not row.reason.strip()
        ):
            raise ContractError(
                subject,
                expected="an owner, or a reason, for every operator in the report",
                found=str(row),
                remedy="let kernels and guards say why they refuse",
            )
    for conflict in found.conflicts:
        if not str(conflict).strip():
            raise ContractError(
                subject,
                expected="conflicts that name who lost what to whom",
                found=repr(conflict),
                remedy="leave the claims of other members alone",
            )


Setter = Callable[[RuleQuantizer, Any, "QuantizationConfig | None"], RuleQuantizer]
LEVELS: dict[str, Setter] = {
    "set_global": lambda q, operator, config: q.set_global(config),
    "set_module_type": lambda q, operator, config: q.set_module_type(Row, config),
    "set_operator_type": lambda q, operator, config: q.set_operator_type(operator, config),
    "set_module_name_regex": lambda q, operator, config: q.set_module_name_regex("r.w", config),
    "set_module_name": lambda q, operator, config: q.set_module_name(ROW, config),
    "set_module_name_object_type_order": lambda q, operator, config: (
        q.set_module_name_object_type_order(ROW, operator, 0, config)
    ),
}
"""What sets a configuration for a row's operator, the least specific first."""
PAIRS = [
    pair for pair in combinations(LEVELS, 2) if pair != ("set_module_type", "set_operator_type")
]
"""Pairs of a less and a more specific one. Types of modules and of operators are one level."""


def representative(suite: Suite) -> Trial:
    """Return the trial of a row of one operator that applies anywhere.

    Raises:
        NotApplicable: there is none.
    """
    blocked: Blocked | None = None
    for case in suite.rows():
        if suite.rule(case.rule).condition is not None:
            continue
        trial = suite.trial(case)
        try:
            suite.require(annotates, trial)
        except Blocked as reason:
            blocked = reason
            continue
        if trial.model.front is None and len(trial.operators) == len(trial.claims) == 1:
            return trial
    raise blocked or NotApplicable("no rule takes one operator that may stand anywhere")


def most_specific_wins(suite: Suite, lower: str, higher: str) -> None:
    """Of two selectors, the more specific one decides; None leaves the operator in float, with a reason."""
    trial = representative(suite)
    for wanted in (trial.terms.config, None):
        other = None if wanted is not None else trial.terms.config
        subject = f"backend {trial.terms.label!r}, {higher}({wanted}) over {lower}({other})"
        operator = _operator(suite, trial, {lower: other, higher: wanted}, subject)
        if (operator.claim is not None) != (wanted is not None):
            raise ContractError(
                subject,
                expected=f"{higher} to decide, which is more specific",
                found=f"{operator.name} is "
                + ("quantized" if operator.claim is not None else f"float: {operator.reason}"),
                remedy="let the quantizer's set_ methods be those of qompose.RuleQuantizer",
            )
        if wanted is None and not operator.reason.strip():
            raise ContractError(
                subject,
                expected="a reason why the operator stays in float",
                found="none",
                remedy="let the quantizer's propose be that of qompose.RuleQuantizer",
            )


def _operator(
    suite: Suite, trial: Trial, settings: dict[str, QuantizationConfig | None], subject: str
) -> Operator:
    """Return what became of the row's operator under selectors."""
    (claim,) = trial.claims
    target = next(n.target for n in nodes_in(trial.prepared) if n.name == claim.anchor)
    quantizer = suite.bare_quantizer()
    try:
        for level, config in settings.items():
            LEVELS[level](quantizer, target, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QomposeWarning)
            prepared = prepare_pt2e(trial.built.program, quantizer)
    except Exception as error:
        raise ContractError(
            subject,
            expected="prepare_pt2e to follow selectors",
            found=f"{type(error).__name__}: {error}",
            remedy="let the quantizer be a qompose.RuleQuantizer",
        ) from error
    operator: Operator
    (operator,) = prepared.meta[META_KEY].plan.operators
    return operator


PUBLIC_MODULES = (
    "qompose",
    *(f"qompose.{name}" for name in sorted(_submodules)),
    "qompose.testing",
)


def imports_public_names(suite: Suite) -> None:
    """The backend's modules use nothing of qompose but its public names."""
    for path in _files(suite):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for line, name in sorted(_private(tree)):
            raise ContractError(
                f"backend {suite.backend.name!r}, {path.name}, line {line}",
                expected="imports of public names only",
                found=name,
                remedy="use what qompose or a public submodule lists in `__all__`, or ask for more",
            )


def _files(suite: Suite) -> list[Path]:
    """Return the modules of the backend's package; of a backend that is not installed, its own one."""
    module = type(suite.backend).__module__
    if not isinstance(suite.source, str):
        file = inspect.getsourcefile(sys.modules[module])
        return [Path(file)] if file else []
    spec = find_spec(module.partition(".")[0])
    if spec is None or not spec.submodule_search_locations:
        return [Path(spec.origin)] if spec is not None and spec.origin else []
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def _private(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each use of a name of qompose that is not public."""
    faces = {module: {*import_module(module).__all__} for module in PUBLIC_MODULES}
    faces["qompose"] |= {"__version__", *(name.partition(".")[2] for name in PUBLIC_MODULES)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("qompose.") and alias.name not in faces:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.startswith("qompose.") and module not in faces:
                yield node.lineno, f"from {module} import ..."
            if module in faces:
                names = [a.name for a in node.names if a.name not in {*faces[module], "*"}]
                yield from ((node.lineno, f"from {module} import {name}") for name in names)
        elif isinstance(node, ast.Attribute):
            face = ast.unparse(node.value)
            if face in faces and node.attr not in faces[face]:
                yield node.lineno, f"{face}.{node.attr}"
