# SPDX-License-Identifier: Apache-2.0
"""The cases of a backend under test, from its rule table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from qompose import QomposeError, QuantizationConfig, Quantizer, RuleQuantizer
from qompose.backend import Backend, Rule, Target, load_backend
from qompose.backend.discovery import loadable_backends
from qompose.backend.rule import DYNAMIC
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.spec.qparams import CASTS, quantized_range
from qompose.testing.fixtures import Blocked, ContractError, expecting
from qompose.testing.trial import Example, Terms, Trial, covering_forms, examples_of

BackendSource: TypeAlias = "str | Backend | Callable[[], Backend]"
"""The name of an installed backend, a backend, or a function that returns one."""


@dataclass(frozen=True)
class Case:
    """A row of the capability table in one of the forms of its pattern."""

    rule: str
    number: int
    label: str
    config: str

    def __str__(self) -> str:
        return f"{self.rule}-{self.label}-{self.config}".replace(" ", "_")


@dataclass
class Suite:
    """A backend under test, and the trials of its rows.

    Args:
        min_sqnr: least signal to quantization noise ratio of a row, in decibels; see `least_sqnr`.
        max_float_error: how far float outputs may be off, as a part of the largest value.
    """

    source: BackendSource
    min_sqnr: float = 20.0
    max_float_error: float = 1e-4
    _trials: dict[Any, Trial] = field(default_factory=dict)
    _cases_of: dict[int, Case] = field(default_factory=dict)
    _kept: dict[Any, Any] = field(default_factory=dict)
    _verdicts: dict[Any, ContractError | None] = field(default_factory=dict)

    @cached_property
    def backend(self) -> Backend:
        """The backend.

        Raises:
            ContractError: there is none.
        """
        remedy = "fix its module, or the entry point in the group 'qompose' of its pyproject.toml"
        with expecting(f"backend {self.source!r}", "it is installed and can be loaded", remedy):
            found = load_backend(self.source) if isinstance(self.source, str) else self.source
            made = found if isinstance(found, Backend) else found()
        if not isinstance(made, Backend):
            raise ContractError(
                f"backend {self.source!r}",
                expected="a qompose.backend.Backend",
                found=repr(made),
                remedy=("set `backend` to an entry point name, a Backend or a function that returns "
                    "one"),
            )  # fmt: skip
        return made

    def load(self) -> None:
        """Load the backend.

        Raises:
            ContractError: there is none.
        """
        self.backend  # noqa: B018

    @cached_property
    def examples(self) -> dict[str, list[Example]]:
        """By rule, the forms of its patterns."""
        return {rule.name: examples_of(rule) for rule in reversed(self.backend.rules)}

    def rule(self, name: str) -> Rule:
        """Return a rule; of several with one name, the first."""
        return next(rule for rule in self.backend.rules if rule.name == name)

    def cases(self) -> list[Case]:
        """Return the first form of every rule under all configurations that fit, the others under one."""
        return list(self._cases)

    @cached_property
    def _cases(self) -> dict[Case, None]:
        found: dict[Case, None] = {}
        for rule in self.backend.rules:
            fitting = self.fitting(rule)
            for number, example in enumerate(self.examples[rule.name]):
                for name in fitting if number == 0 else fitting[:1]:
                    found[Case(rule.name, number, example.label, name)] = None
        return found

    def covering(self) -> list[Case]:
        """Return few of `cases`: of a rule's other forms, as many as cover the operators in any of them."""
        chosen = {
            rule.name: covering_forms(self.examples[rule.name]) for rule in self.backend.rules
        }
        return [case for case in self.cases() if case.number in chosen[case.rule]]

    def fitting(self, rule: Rule) -> list[str]:
        """Return the names of the configurations that a rule can follow.

        One with options differs from one without for the rules of these options alone.
        """
        return [
            name
            for name, config in self.configs.items()
            if rule.objection(config) is None and (rule.option or not self._is_repeated(config))
        ]

    def _is_repeated(self, config: QuantizationConfig) -> bool:
        """Return whether another configuration is this one without its options."""
        plain = replace(config, options=())
        return bool(config.options) and plain in self.configs.values()

    @property
    def configs(self) -> dict[str, QuantizationConfig]:
        """Return the named configurations, without what is none: `has_configs` reports that."""
        named = self.backend.configs.items()
        return {name: config for name, config in named if isinstance(config, QuantizationConfig)}

    def least_sqnr(self, config: QuantizationConfig) -> float:
        """Return the least ratio of a row under a configuration: `min_sqnr`, or what its weights allow.

        Weights of few bits are a choice; few steps of activations are a mistake, which the bound finds. A
        uniform quantizer of b bits over three standard deviations of a normal distribution, either side,
        reaches 6.02 b + 4.77 - 20 log10(3) dB.
        """
        spec = config.weight
        if spec is None or spec.dtype in CASTS:
            return self.min_sqnr
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        return min(self.min_sqnr, 6.02 * math.log2(high - low + 1) + 4.77 - 20 * math.log10(3))

    def rows(self) -> list[Case]:
        """Return the first form of every rule under all configurations that fit."""
        return [case for case in self.cases() if case.number == 0]

    def modes(self) -> list[Case]:
        """Return the first form of every rule under one configuration of each mode that fits."""
        firsts = {(c.rule, self.backend.configs[c.config].mode): c for c in reversed(self.rows())}
        return [case for case in self.rows() if case in firsts.values()]

    def trial(self, case: Case, **facts: Any) -> Trial:
        """Return the trial of a case, the same one each time. `facts` are those of `Terms`."""
        key = (case, tuple(sorted((k, str(v)) for k, v in facts.items())))
        if key not in self._trials:
            self._trials[key] = Trial(self.terms(case, **facts))
            self._cases_of[id(self._trials[key])] = case
        return self._trials[key]

    def plain(self, trial: Trial) -> Trial:
        """Return the trial of the same row with default terms."""
        return self.trial(self._cases_of[id(trial)])

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for the first call with a key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def terms(self, case: Case, **facts: Any) -> Terms:
        """Return what a trial of a case is about."""
        rule = self.rule(case.rule)
        named = {"name": case.config, "config": self.backend.configs.get(case.config), **facts}
        return Terms(
            rule=rule,
            example=self.examples[rule.name][case.number],
            subject=self.quantizer,
            label=self.backend.name,
            others=self.carriers(rule),
            targets=tuple(self.known_targets),
            **named,
        )

    def quantizer(self, config: QuantizationConfig | None) -> Quantizer:
        """Return the backend's quantizer, with a configuration for everything."""
        return self.bare_quantizer().set_global(config)

    def bare_quantizer(self) -> RuleQuantizer:
        """Return the backend's quantizer as its users make it."""
        make = self.backend.quantizer_class
        made = make() if make is not None else None
        return made if isinstance(made, RuleQuantizer) else RuleQuantizer(self.backend)

    @cached_property
    def no_quantizer(self) -> str | None:
        """Why `quantizer_class` of the backend makes no quantizer, None if it does."""
        make: Any = self.backend.quantizer_class or (lambda: RuleQuantizer(self.backend))
        try:
            made = make()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if isinstance(made, Quantizer) else f"it returned {made!r}"

    @cached_property
    def installed(self) -> dict[str, Backend]:
        """The other installed backends that can be used here, by name."""
        found = {}
        for other in loadable_backends(but=[self.backend.name]):
            try:
                usable = other.availability() is None
            except QomposeError:
                continue  # its own suite reports what is wrong with it
            if usable:
                found[other.name] = other
        return found

    @cached_property
    def known_targets(self) -> dict[str, Target]:
        """Targets by name: core's own, this backend's, and those of the other installed ones."""
        found = {TORCH_TARGET.name: TORCH_TARGET}
        for backend in (*self.installed.values(), self.backend):
            found.update({target.name: target for target in backend.targets})
        return found

    def carriers(self, rule: Rule) -> tuple[Quantizer, ...]:
        """Return quantizers of other backends that claim nothing, and bring targets of a rule."""
        own = {TORCH_TARGET.name, *(target.name for target in self.backend.targets)}
        lacking = set(rule.kernels) - own
        return tuple(
            RuleQuantizer(backend)
            for backend in self.installed.values()
            if lacking & {target.name for target in backend.targets}
        )

    def why_not(self, target: str) -> str | None:
        """Return why a target cannot be used here, None if it can."""
        if target not in self.known_targets:
            return f"no installed backend provides the target {target!r}"
        for ask in (self.backend.availability, self.known_targets[target].availability):
            try:
                reason: object = ask()
            except Exception as error:
                reason = error
            if reason is not None and not (isinstance(reason, str) and reason):
                return "test_says_availability fails; fix it first"
            if reason is not None:
                return str(reason)
        return None

    def tolerance(self, trial: Trial) -> float:
        """Return how far float outputs of a trial may be off, as a part of the largest value.

        Where quantization parameters are chosen at run time, an input between two integers may become either.
        """
        return self.max_float_error if trial.terms.config.mode != DYNAMIC else 1e-2

    @property
    def in_process(self) -> bool:
        """Whether the backend has kernels for this process, and can be used in it."""
        torch_target = TORCH_TARGET.name
        has_kernels = any(torch_target in rule.kernels for rule in self.backend.rules)
        return has_kernels and self.why_not(torch_target) is None

    def judge(self, check: Callable[..., None], trial: Trial, *rest: Any) -> None:
        """Run a check of a trial once, and raise its failure in each call."""
        key = (check.__name__, id(trial), rest)
        if key not in self._verdicts:
            try:
                check(self, trial, *rest)
                self._verdicts[key] = None
            except ContractError as failure:
                self._verdicts[key] = failure
        verdict = self._verdicts[key]
        if verdict is not None:
            raise verdict

    def require(self, check: Callable[..., None], trial: Trial, *rest: Any) -> None:
        """Raise `Blocked` if a check that another one depends on fails."""
        try:
            self.judge(check, trial, *rest)
        except ContractError as failure:
            raise Blocked(f"test_{check.__name__}", str(trial)) from failure
