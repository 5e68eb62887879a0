# SPDX-License-Identifier: Apache-2.0
"""The checks of a backend as such: how it loads, what it is called, and what its configurations are."""

from __future__ import annotations

from collections import Counter

from qompose import API_VERSION, Backend, QuantizationConfig
from qompose.rules import ACTIVATION_ONLY
from qompose.testing.failures import ContractError
from qompose.testing.suite import Suite


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
