# SPDX-License-Identifier: Apache-2.0
"""The checks of a backend as a whole: loading, configurations, saving, composition, selectors, imports."""

from __future__ import annotations

import ast
import inspect
import sys
import tempfile
import warnings
from collections import Counter
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
from qompose.backend import API_VERSION, Backend
from qompose.backend.rule import ACTIVATION_ONLY
from qompose.errors import RequirementWarning
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.plan.plan import Operator, attach
from qompose.program.control_flow import nodes_in
from qompose.program.meta import META_KEY
from qompose.reporting.report_data import FLOAT_KERNEL, KERNEL, UNVERIFIED
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
    expect_equal,
    expecting,
    sqnr,
    surroundings,
)
from qompose.testing.suite import Case, Suite
from qompose.testing.trial import Inputs, Trial, copies, outputs


def is_listed(suite: Suite, case: Case) -> None:
    """The capability table has the row."""
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
            expected="one row in the capability table with a drawing, and `supports` returns yes",
            found=f"{len(rows)} rows, and {answer.reason or 'yes'}",
            remedy="give each rule a unique name and a drawing",
        )
    unknown = set(rule.kernels) - set(suite.known_targets)
    if unknown or not rule.kernels:
        raise ContractError(
            subject,
            expected=f"kernels only for the targets {', '.join(sorted(suite.known_targets))}",
            found=f"kernels for {', '.join(sorted(rule.kernels)) or 'no target'}",
            remedy='use a target of an installed backend, or "torch"',
        )


def loads(suite: Suite) -> None:
    """The backend loads by its name, with the current version of the interface."""
    backend = suite.backend
    if not backend.name or not isinstance(backend.name, str):
        raise ContractError(
            f"backend {type(backend).__qualname__}",
            expected="the name of its entry point",
            found=repr(backend.name),
            remedy="set the attribute `name`",
        )
    if backend.api_version != API_VERSION:
        raise ContractError(
            _subject(backend),
            expected=f"api_version = {API_VERSION}, the version of this qompose release",
            found=f"api_version = {backend.api_version!r}",
            remedy="set api_version to that number; the changelog lists the changes",
        )
    if suite.no_quantizer is not None:
        raise ContractError(
            _subject(backend),
            expected="quantizer_class returns a qompose.Quantizer",
            found=suite.no_quantizer,
            remedy="use a subclass of qompose.RuleQuantizer, or remove quantizer_class",
        )


def says_availability(suite: Suite) -> None:
    """`availability` returns None, or a reason."""
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
                expected="None if it can be used here, otherwise a reason as a string",
                found=repr(answer),
                remedy='return None or a sentence such as "the package x is not installed; pip install x"',
            )


def has_rules(suite: Suite) -> None:
    """Rules have unique names."""
    backend = suite.backend
    counts = Counter(rule.name for rule in backend.rules)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice or not counts or "" in counts:
        raise ContractError(
            _subject(backend),
            expected="rules with unique names",
            found=f"several rules have the same name: {', '.join(twice)}"
            if twice
            else f"rules {[*counts]}",
            remedy="give each rule a unique name, which reports and capability tables refer to",
        )


def has_configs(suite: Suite) -> None:
    """Every named configuration fits a rule; the first is the default."""
    backend = suite.backend
    if not backend.configs or backend.default_config is not next(iter(backend.configs.values())):
        raise ContractError(
            _subject(backend),
            expected="named configurations, the first of which is the default",
            found=f"{len(backend.configs)} configurations, with the default {backend.default_config}",
            remedy="set the attribute `configs`, and do not override default_config",
        )
    for name, config in backend.configs.items():
        subject = f"{_subject(backend)}, config {name!r}"
        if not isinstance(config, QuantizationConfig):
            raise ContractError(
                subject,
                expected="a qompose.QuantizationConfig",
                found=repr(config),
                remedy="pass the configuration itself, not a function that returns it",
            )
        objections = [rule.objection(config) for rule in backend.rules]
        if all(objections):
            raise ContractError(
                subject,
                expected="a rule that supports it",
                found="; ".join(dict.fromkeys(map(str, objections))),
                remedy="remove the configuration, or add a rule that supports it",
            )
        with expecting(
            subject,
            "set_global accepts it",
            "make the rules with a weight support it, or remove it",
        ):
            suite.quantizer(config)
    for rule in backend.rules:
        tried = {backend.configs[name].mode for name in suite.fitting(rule)}
        if tried and rule.own.keys() >= {*rule.roles}:
            continue  # all its specifications are its own, the same in every mode
        if rule.modes - tried - {ACTIVATION_ONLY}:
            lacking = ", ".join(sorted(rule.modes - tried - {ACTIVATION_ONLY}))
            raise ContractError(
                f"{_subject(backend)}, rule {rule.name!r}",
                expected=f"a named configuration for each mode of the rule, including {lacking}",
                found=f"configurations for the rule: {', '.join(suite.fitting(rule)) or 'none'}",
                remedy=(
                    "add such a configuration so that the mode is tested, or remove the mode "
                    "from the rule"
                ),
            )


def _subject(backend: Backend) -> str:
    return f"backend {backend.name!r}"


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
            raise NotApplicable(f"no row of config {self.name!r} works on its own")
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
        """Yield the trials of rows that work alone; other checks report those that do not."""
        for case in self.suite.cases():
            if case.config == self.name:
                trial: Trial = self.suite.trial(case)
                try:
                    self.suite.require(converts, trial)
                    if TORCH_TARGET.name in trial.terms.rule.kernels and self.suite.in_process:
                        self.suite.require(matches_reference, trial, TORCH_TARGET.name)
                except NotApplicable:
                    continue
                yield trial

    def quantizer(self, *members: Quantizer) -> Quantizer:
        """Return the quantizers of the copies around the rows, followed by others."""
        models = dict(enumerate(trial.model for trial in self.trials))
        around = surroundings(
            self.suite.backend.configs[self.name],
            [f"models.{i}.{FRONT}" for i, model in models.items() if model.front is not None],
            [f"models.{i}.{BEHIND}" for i, model in models.items() if model.behind is not None],
            self.suite.known_targets,
        )
        return ComposableQuantizer([*around, *members])

    def converted(self, *members: Quantizer) -> GraphModule:
        """Return the Q/DQ program of all rows under quantizers."""
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
    """A converted model of all rows is saved, loaded and lowered again."""
    rows = gathering(suite, name)
    subject = f"backend {suite.backend.name!r}, config {name!r}, one model of all rows"
    remedy = (
        "make kernels and patterns depend only on the graph, and do not keep a model's state "
        "in them"
    )
    converted, batch = rows.converted(suite.quantizer(suite.backend.configs[name])), rows.batches[0]
    about_files = "rewrite graphs only with torch operators and registered custom operators"
    loaded = through_a_file(converted, subject, about_files)
    wanted = outputs(converted, batch)
    expected = "the loaded model returns bit-identical outputs"
    expect_equal(subject, expected, outputs(loaded, batch), wanted, remedy)
    if not suite.in_process:
        return
    # A loaded model finds installed backends, but not that of the copies around the rows.
    backends = {**converted.meta[META_KEY].backends, suite.backend.name: suite.backend}
    attach(loaded, replace(loaded.meta[META_KEY], backends=backends))
    first, again = _lowered(converted), _lowered(loaded)
    kernels = [[(r.name, r.state, r.kernel) for r in report(m).rows] for m in (first, again)]
    if kernels[0] != kernels[1]:
        raise ContractError(
            subject,
            expected="the loaded model lowers to the same kernels",
            found=str(next((a, b) for a, b in zip(*kernels, strict=True) if a != b)),
            remedy=remedy,
        )
    wanted = outputs(first, batch)
    expected = "the lowered loaded model returns bit-identical outputs"
    expect_equal(subject, expected, outputs(again, batch), wanted, remedy)


def through_a_file(converted: GraphModule, subject: str, remedy: str) -> GraphModule:
    """Return the model as it is once it is saved and loaded.

    It may ask for a machine other than this one, which `load` refuses; that is no fault of its backend.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        expecting(subject, "qompose.save and qompose.load support the model", remedy),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RequirementWarning)
        path = Path(folder, "model.qompose")
        save(converted, path)
        loaded: GraphModule = load(path, allow_mismatch=True)
        return loaded


def _lowered(model: GraphModule) -> Any:
    with warnings.catch_warnings():  # regions without a kernel have a check of their own
        warnings.simplefilter("ignore", QomposeWarning)
        return lower(model, "torch")


_ALONE = "rules, guards, kernels and hooks must also work next to other quantizers"


def composes(suite: Suite, name: str, partner: str, first: bool) -> None:
    """All rows stay right beside another backend's quantizer."""
    rows = gathering(suite, name)
    own = suite.quantizer(suite.backend.configs[name])
    other = _partner(suite, rows, partner)
    members = (own, other) if first else (other, own)
    subject = (
        f"backend {suite.backend.name!r}, config {name!r}, composed with {partner!r} "
        f"({'before' if first else 'after'} it)"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QomposeWarning)
        with expecting(subject, "the composition can be prepared and converted", _ALONE):
            converted = rows.converted(*members)
        lowered: Any = converted
        in_process = _all_in_process(suite, converted)
        if in_process:
            with expecting(subject, "the composition can be lowered to 'torch'", _ALONE):
                lowered = lower(converted, "torch")
    for stage in (converted, lowered):
        _check_quality(suite, rows, subject, stage)
    if in_process:
        _check_report(subject, report(lowered), {member.name for member in members})


def _all_in_process(suite: Suite, converted: GraphModule) -> bool:
    """Tell whether all backends whose claims stand have kernels for this process."""
    record = converted.meta[META_KEY]
    owners = {claim.owner for claim in record.plan.claims}
    tables = [backend.rules for owner, backend in record.backends.items() if owner in owners]
    return suite.in_process and all(
        any(TORCH_TARGET.name in rule.kernels for rule in rules) for rules in tables
    )


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
            remedy=(
                "compare the specifications of adjacent operators, and check that the kernel "
                "uses those of its inputs"
            ),
        )


def _check_report(subject: str, found: Report, members: set[str]) -> None:
    """Check that every operator has an owner or a reason."""
    for row in found.rows:
        owner = row.owner.partition("#")[0]
        known = owner in members or owner == "contract"
        if (row.owner and not known) or (
            row.state not in (KERNEL, FLOAT_KERNEL, UNVERIFIED) and not row.reason.strip()
        ):
            raise ContractError(
                subject,
                expected="an owner or a reason for every operator in the report",
                found=str(row),
                remedy="return a reason from kernels and guards when they reject an operator",
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
"""The setters of a configuration for a row's operator, the least specific first."""
PAIRS = [
    pair for pair in combinations(LEVELS, 2) if pair != ("set_module_type", "set_operator_type")
]
"""Pairs of a less and a more specific setter. Types of modules and of operators are one level."""


def representative(suite: Suite) -> Trial:
    """Return the trial of a row of one operator that applies anywhere.

    Raises:
        NotApplicable: there is no such row.
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
    raise blocked or NotApplicable(
        "no rule matches a single operator without conditions on its surroundings"
    )


def most_specific_wins(suite: Suite, lower: str, higher: str) -> None:
    """Selectors of all levels work, and the more specific one decides."""
    trial = representative(suite)
    for wanted in (trial.terms.config, None):
        other = None if wanted is not None else trial.terms.config
        subject = f"backend {trial.terms.label!r}, {higher}({wanted}) over {lower}({other})"
        operator = _operator(suite, trial, {lower: other, higher: wanted}, subject)
        if (operator.claim is not None) != (wanted is not None):
            raise ContractError(
                subject,
                expected=f"{higher} decides, because it is more specific",
                found=f"{operator.name} is "
                + ("quantized" if operator.claim is not None else f"float: {operator.reason}"),
                remedy="do not override the set_ methods of qompose.RuleQuantizer",
            )


def _operator(
    suite: Suite, trial: Trial, settings: dict[str, QuantizationConfig | None], subject: str
) -> Operator:
    """Return what became of the row's operator under selectors."""
    (claim,) = trial.claims
    target = next(n.target for n in nodes_in(trial.prepared) if n.name == claim.anchor)
    quantizer = suite.bare_quantizer()
    remedy = "derive the quantizer from qompose.RuleQuantizer"
    with (
        expecting(subject, "prepare_pt2e follows selectors", remedy),
        warnings.catch_warnings(),
    ):
        for level, config in settings.items():
            LEVELS[level](quantizer, target, config)
        warnings.simplefilter("ignore", QomposeWarning)
        prepared = prepare_pt2e(trial.built.program, quantizer)
    operator: Operator
    (operator,) = prepared.meta[META_KEY].plan.operators
    return operator


PUBLIC_MODULES = (
    "qompose",
    *(f"qompose.{name}" for name in sorted(_submodules)),
    "qompose.backend.kit",
    "qompose.testing",
)


def imports_public_names(suite: Suite) -> None:
    """The backend's source uses only public names of qompose."""
    for path in _files(suite):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for line, name in sorted(_private(tree)):
            raise ContractError(
                f"backend {suite.backend.name!r}, {path.name}, line {line}",
                expected="only public names are imported",
                found=name,
                remedy=(
                    "use names in `__all__` of qompose or of a public submodule, or open an "
                    "issue to request one"
                ),
            )


def _files(suite: Suite) -> list[Path]:
    """Return the modules of the backend's package, or its own module if it is not installed."""
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
    """Yield line and name for each use of a name of qompose that is not public."""
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
