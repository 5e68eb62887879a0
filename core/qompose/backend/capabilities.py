# SPDX-License-Identifier: Apache-2.0
"""What backends can do: rows generated from the rule tables that annotate and lower.

A question to the rows, `supports`, names a rule, or operators in their order:
`(nn.Conv2d, nn.BatchNorm2d, nn.ReLU)`. A rule answers where the operators of one of its patterns are these
alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, count
from typing import Any, ClassVar, Protocol, TypeAlias, overload

import torch
from torch import nn

from qompose.backend.pattern import OperatorPattern, Pattern
from qompose.backend.rule import Rule, TensorConstraint
from qompose.console import Block, Printable, Table
from qompose.errors import ConfigError, SelectorError, near_names
from qompose.observers.config import LISTED_SETTINGS, LISTED_SPEC, why_not_trained
from qompose.program.batch_norm_folding import FOLDABLE
from qompose.spec.quantization_spec import (
    QuantizationConfig,
    QuantizationSpecBase,
    describe_spec,
    granularity,
)
from qompose.spec.selectors import kind_of, names_of

Condition: TypeAlias = "tuple[str, Callable[[Capability], object]]"
"""What `filter` asked for: in words, and as a predicate."""


@dataclass(frozen=True)
class Support:
    """An answer to "can you?": true, with who and by which kernels, or false, with the reason.

    `kernels` are (target, kernel name) pairs. `notes` say what a yes depends on.
    """

    supported: bool
    reason: str = ""
    backend: str = ""
    rule: str = ""
    kernels: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.supported

    @property
    def by(self) -> str:
        """Return who can, in words: `toy, rule conv2d_relu`."""
        return f"{self.backend}, rule {self.rule}" if self.supported else ""

    def __str__(self) -> str:
        if not self.supported:
            return f"no: {self.reason}"
        kernels = ", ".join(f"{target}: {kernel}" for target, kernel in self.kernels)
        return "; ".join((f"yes: {self.by} ({kernels or 'no kernel'})", *self.notes))


@dataclass(frozen=True)
class RuleTable:
    """The rules of a backend, from which rows come, and what `filter` asked of these rows."""

    backend: str
    rules: tuple[Rule, ...]
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One pattern under one configuration of a backend.

    Attributes:
        pattern: the rule's name; `drawing` shows it in one line.
        operators: what it calls, in order, for each of its variants: names of aten operators.
        config: the configuration's name; `settings` is the configuration itself.
        activation, weight, output: what each role gets; None where the rule leaves it alone or in float.
        granularity: of the weight, else of the activation.
        kernels: (target, kernel name) pairs.
        constraints: (role, constraint) pairs: what configurations may ask for.
        shares: inputs and output have one scale and zero point.
        condition: when the rule applies, as in `Rule`.
        guarded: the rule has a guard: it also looks at each operator.
        carries: it applies only where something quantized reads its output.
        option: the word that it needs among the configuration's `options`, "" if none.
    """

    backend: str
    pattern: str
    drawing: str
    operators: tuple[tuple[str, ...], ...]
    config: str
    settings: QuantizationConfig
    mode: str
    activation: QuantizationSpecBase | None
    weight: QuantizationSpecBase | None
    output: QuantizationSpecBase | None
    granularity: str
    qat: bool
    kernels: tuple[tuple[str, str], ...]
    constraints: tuple[tuple[str, TensorConstraint], ...] = ()
    shares: bool = False
    condition: str = ""
    guarded: bool = False
    carries: bool = False
    option: str = ""

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the targets that have a kernel for this row."""
        return tuple(target for target, _ in self.kernels)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return constraints, sharing and condition in words."""
        found = [f"{role}: {constraint.describe()}" for role, constraint in self.constraints]
        found += ["output has the scale of the inputs"] if self.shares else []
        found += [_CONDITIONS.get(self.condition, self.condition)] if self.condition else []
        found += ["only where something quantized reads its output"] if self.carries else []
        found += [f"only with the option {self.option!r}"] if self.option else []
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data; of an observer of another package it has the name."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data |= {
            "operators": [list(calls) for calls in self.operators],
            "settings": LISTED_SETTINGS.write(self.settings, "row.settings"),
            "kernels": dict(self.kernels),
            "constraints": {role: constraint.to_dict() for role, constraint in self.constraints},
            "notes": list(self.notes),
        }
        specs = ("activation", "weight", "output")
        return data | {name: LISTED_SPEC.write(data[name], f"row.{name}") for name in specs}


@dataclass(frozen=True)
class Capabilities(Printable, Sequence[Capability]):
    """Rows, with the tables they come from. An immutable sequence.

    `silent` names quantizers that have no rule table, and so no rows.
    """

    rows: tuple[Capability, ...]
    sources: tuple[RuleTable, ...] = field(default=(), compare=False, repr=False)
    silent: tuple[str, ...] = ()
    _columns: ClassVar[int] = 110

    @overload
    def __getitem__(self, index: int) -> Capability: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Capability]: ...
    def __getitem__(self, index: int | slice) -> Capability | Sequence[Capability]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Capability]:
        return iter(self.rows)

    def __add__(self, other: Capabilities) -> Capabilities:
        """Return the rows of both; what both have is there once."""
        return Capabilities(
            (*self.rows, *(row for row in other.rows if row not in self.rows)),
            (*self.sources, *(source for source in other.sources if source not in self.sources)),
            tuple(dict.fromkeys((*self.silent, *other.silent))),
        )

    def filter(
        self, predicate: Callable[[Capability], object] | None = None, **facts: Any
    ) -> Capabilities:
        """Return the rows for which `predicate` is true and whose fields have the given values.

        Args:
            facts: fields of `Capability` by name, such as `mode="dynamic"`; `target="torch"` asks for a
                kernel there. `supports` then answers for such rows alone.

        Raises:
            ConfigError: rows have no such field.
        """
        added = [_condition(name, value) for name, value in facts.items()]
        added += [] if predicate is None else [("the predicate of filter", predicate)]
        return Capabilities(
            tuple(row for row in self.rows if all(check(row) for _, check in added)),
            tuple(replace(s, conditions=(*s.conditions, *added)) for s in self.sources),
            self.silent,
        )

    def supports(self, pattern: object, config: QuantizationConfig) -> Support:
        """Answer whether a rule takes a pattern and can follow `config` with it.

        Args:
            pattern: a rule's name; a drawing, `"conv2d -> relu"`; an aten operator; a function or module
                type of torch; or a tuple of operators, functions and module types in their order, such as
                `(nn.Conv2d, nn.BatchNorm2d, nn.ReLU)`.

        Raises:
            ConfigError: `pattern` is nothing that one can ask about, or `config` no configuration.
        """
        if not isinstance(config, QuantizationConfig):
            raise ConfigError(f"expected a QuantizationConfig, got {config!r}")
        try:
            question = question_of(pattern)
        except SelectorError as error:
            return Support(False, str(error))
        return self._answer(question, config)

    def _answer(self, question: Question, config: QuantizationConfig) -> Support:
        question, found, notes = self._rules_for(question)
        if not found:
            tables = [(source.backend, source.rules) for source in self.sources]
            reasons = [what_is_missing(question, tables)]
        else:
            reasons = []
        for source, rule in found:
            reason = rule.objection(config) or self._excluded(source, rule, config)
            if reason is None:
                if rule.guards or rule.condition:
                    notes = (*notes, _LOOKS_AT_EACH)
                return Support(True, "", source.backend, rule.name, kernels_of(rule), notes)
            reasons.append(f"{source.backend}: {reason}")
        return Support(False, "; ".join((*dict.fromkeys(reasons), *notes, *self._about_silent())))

    def _rules_for(
        self, question: Question
    ) -> tuple[Question, list[tuple[RuleTable, Rule]], tuple[str, ...]]:
        """Return the rules that answer a question, or else those that do once batch norms are folded."""
        found = [(s, rule) for s in self.sources for rule in s.rules if question.is_about(rule)]
        folded = question.without_batch_norm()
        if found or folded == question:
            return question, found, ()
        note = (
            "batch norms are folded into what they follow, unless that is read or shared elsewhere, "
            f"which leaves {folded.label}"
        )
        found = [(s, rule) for s in self.sources for rule in s.rules if folded.is_about(rule)]
        return folded, found, (note,)

    def _excluded(self, source: RuleTable, rule: Rule, config: QuantizationConfig) -> str | None:
        """Return which condition of `filter` the rule's row under this configuration would not meet."""
        if not source.conditions:
            return None
        names = [
            r.config for r in self.rows if r.backend == source.backend and r.settings == config
        ]
        row = row_of(source.backend, rule, names[0] if names else str(config), config)
        failed = [words for words, check in source.conditions if not check(row)]
        return f"rule {rule.name} is excluded by {failed[0]}" if failed else None

    def _about_silent(self) -> tuple[str, ...]:
        if not self.silent:
            return ()
        names = ", ".join(self.silent)
        return (f"{names} lists nothing: qompose.can_quantize asks about an operator of a program",)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows as JSON data."""
        return [row.to_dict() for row in self.rows]

    def to_json(self) -> str:
        """Return the rows as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def _blocks(self) -> list[Block]:
        """Return the rows as tables: for each backend its configurations, and its patterns."""
        result: list[Block] = []
        for backend in dict.fromkeys(row.backend for row in self.rows):
            rows = [row for row in self.rows if row.backend == backend]
            result += [backend, _configurations(rows), _patterns(rows)]
        return [*result, *self._about_silent()]


class HasRules(Protocol):
    """A backend, as far as its capabilities go."""

    name: str
    rules: tuple[Rule, ...]
    configs: Mapping[str, QuantizationConfig]


def capability_rows(backend: HasRules, configs: Iterable[QuantizationConfig] = ()) -> Capabilities:
    """Return a row for each rule of a backend under each configuration that fits it.

    Args:
        configs: some besides those that the backend names.

    Raises:
        ConfigError: a configuration has another name than the backend's for it.
    """
    fault = naming_fault(backend.configs)
    if fault is not None:
        raise ConfigError(f"Backend {backend.name!r}: {fault}")
    named = list(backend.configs.items())
    for config in configs:
        if all(config != known for _, known in named):
            named.append((_free_name(str(config), {name for name, _ in named}), config))
    rows = tuple(
        row_of(backend.name, rule, name, config)
        for rule in backend.rules
        for name, config in named
        if rule.objection(config) is None
    )
    return Capabilities(rows, (RuleTable(backend.name, tuple(backend.rules)),))


def naming_fault(configs: Mapping[str, QuantizationConfig]) -> str | None:
    """Return what is wrong with the names of a backend's configurations: rows and reports need one each."""
    for key, config in configs.items():
        if str(config) != key:
            return (
                f"its configs list {key!r}, which calls itself {str(config)!r} in reports: make it "
                f"QuantizationConfig(..., name={key!r})"
            )
    return None


def _free_name(name: str, taken: set[str]) -> str:
    numbered = (f"{name} ({number})" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in taken)


def _condition(name: str, value: Any) -> Condition:
    known = (*(f.name for f in fields(Capability)), "target")
    if name not in known:
        hint = near_names(name, known)
        raise ConfigError(f"rows have no {name!r}{hint}; they have {', '.join(known)}")
    if name == "target":
        return f"target={value!r}", lambda row: value in row.targets
    return f"{name}={value!r}", lambda row: getattr(row, name) == value


_LOOKS_AT_EACH = "the rule also looks at each operator: qompose.can_quantize asks about one"


def _configurations(rows: Sequence[Capability]) -> Table:
    by_name: dict[str, list[Capability]] = {}
    for row in rows:
        by_name.setdefault(row.config, []).append(row)

    def role(name: str, rows: list[Capability]) -> str:
        specs = dict.fromkeys(getattr(row, name) for row in rows if getattr(row, name) is not None)
        return ", ".join(dict.fromkeys(map(describe_spec, specs))) or "float"

    cells = tuple(
        (name, found[0].mode, *(role(r, found) for r in ("activation", "weight", "output")))
        for name, found in by_name.items()
    )
    return Table(("configuration", "mode", "activation", "weight", "output"), cells)


def _in_modes(configs: Iterable[str], modes: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield the names of configurations; where those of a mode are all there, and several, that once."""
    left = dict.fromkeys(configs)
    for mode, known in modes.items():
        of_mode = dict.fromkeys(known)
        if len(of_mode) > 1 and of_mode.keys() <= left.keys():
            yield f"all {mode}"
            left = {name: None for name in left if name not in of_mode}
    yield from left


def _patterns(rows: Sequence[Capability]) -> Table:
    """Return a row for each pattern; the configurations are named where not all of them apply."""
    by_pattern: dict[str, list[Capability]] = {}
    for row in rows:
        by_pattern.setdefault(row.pattern, []).append(row)
    modes: dict[str, list[str]] = {}
    for row in rows:
        modes.setdefault(row.mode, []).append(row.config)
    targets = tuple(dict.fromkeys(target for row in rows for target in row.targets))

    def cells(found: list[Capability]) -> tuple[str, ...]:
        configs, kernels = dict.fromkeys(row.config for row in found), dict(found[0].kernels)
        named = (
            "all"
            if configs.keys() == {r.config for r in rows}
            else ", ".join(_in_modes(configs, modes))
        )
        return (found[0].drawing, named, *(kernels.get(target, "") for target in targets))

    header = ("pattern", "configurations", *(f"kernel on {target}" for target in targets))
    return Table(header, tuple(map(cells, by_pattern.values())))


_CONDITIONS = {
    "all": "only where all inputs are quantized",
    "any": "only where an input is quantized",
    "no_float": "only where no input comes from a float operator",
}


def row_of(backend: str, rule: Rule, name: str, config: QuantizationConfig) -> Capability:
    """Return the row of a rule of a backend under a configuration that fits it."""
    specs = rule.specs_for(config)
    return Capability(
        backend=backend,
        pattern=rule.name,
        drawing=rule.drawing or rule.name,
        operators=sequences(rule),
        config=name,
        settings=config,
        mode=config.mode,
        activation=specs.get("activation"),
        weight=specs.get("weight"),
        output=specs.get("output"),
        granularity=granularity(specs.get("weight", specs.get("activation"))),
        qat=why_not_trained(config) is None,
        kernels=kernels_of(rule),
        constraints=tuple((r, c) for r, c in rule.accepts.items() if r in rule.roles),
        shares=rule.shares,
        condition=rule.condition or "",
        guarded=bool(rule.guards),
        carries=rule.carries,
        option=rule.option,
    )


def kernels_of(rule: Rule) -> tuple[tuple[str, str], ...]:
    """Return the (target, kernel name) pairs of a rule."""
    return tuple((target, kernel.promise) for target, kernel in rule.kernels.items())


_BATCH_NORM = "aten.batch_norm"
_OF_MODULES: dict[str, str] = {
    "Linear": "linear", "Bilinear": "bilinear", "Embedding": "embedding",
    "Conv1d": "conv1d", "Conv2d": "conv2d", "Conv3d": "conv3d",
    "ConvTranspose1d": "conv_transpose1d", "ConvTranspose2d": "conv_transpose2d",
    "ConvTranspose3d": "conv_transpose3d",
    "BatchNorm1d": "batch_norm", "BatchNorm2d": "batch_norm", "BatchNorm3d": "batch_norm",
    "LayerNorm": "layer_norm", "GroupNorm": "group_norm", "RMSNorm": "rms_norm",
    "InstanceNorm1d": "instance_norm", "InstanceNorm2d": "instance_norm",
    "InstanceNorm3d": "instance_norm",
    "ReLU": "relu", "ReLU6": "hardtanh", "Hardtanh": "hardtanh", "Hardswish": "hardswish",
    "Hardsigmoid": "hardsigmoid", "SiLU": "silu", "GELU": "gelu", "Sigmoid": "sigmoid",
    "Tanh": "tanh", "ELU": "elu", "CELU": "celu", "SELU": "selu", "LeakyReLU": "leaky_relu",
    "PReLU": "prelu", "Mish": "mish", "Softplus": "softplus", "Softmax": "softmax",
    "LogSoftmax": "log_softmax", "LogSigmoid": "log_sigmoid", "GLU": "glu",
    "Threshold": "threshold", "Softshrink": "softshrink", "Hardshrink": "hardshrink",
    "MaxPool1d": "max_pool1d", "MaxPool2d": "max_pool2d", "MaxPool3d": "max_pool3d",
    "AvgPool1d": "avg_pool1d", "AvgPool2d": "avg_pool2d", "AvgPool3d": "avg_pool3d",
    "AdaptiveAvgPool1d": "adaptive_avg_pool1d", "AdaptiveAvgPool2d": "adaptive_avg_pool2d",
    "AdaptiveAvgPool3d": "adaptive_avg_pool3d", "Dropout": "dropout",
    "Flatten": "flatten", "Unflatten": "unflatten", "PixelShuffle": "pixel_shuffle",
    "PixelUnshuffle": "pixel_unshuffle", "ChannelShuffle": "channel_shuffle",
    "ZeroPad2d": "pad", "ConstantPad2d": "pad", "ReflectionPad2d": "pad",
    "ReplicationPad2d": "pad", "UpsamplingNearest2d": "upsample_nearest2d",
    "UpsamplingBilinear2d": "upsample_bilinear2d", "Unfold": "im2col", "Fold": "col2im",
}  # fmt: skip
MODULES: dict[type[nn.Module], str] = {
    getattr(nn, module): f"aten.{operator}" for module, operator in _OF_MODULES.items()
}
"""The modules of torch.nn that are exported as one operator, and which."""


@dataclass(frozen=True)
class Part:
    """One operator of a question: the names it may have, with overloads or without, and what it is called.

    A batch norm that is a module type has `after`: the operators whose results have its dimensions.
    """

    operators: frozenset[str]
    label: str
    after: frozenset[str] | None = None

    def is_one_of(self, operators: Iterable[str]) -> bool:
        """Return whether any of some operators (names without overloads) is meant."""
        return not self.operators.isdisjoint(operators)

    def folds_into(self, earlier: Part | None) -> bool:
        """Return whether this is a batch norm that can be folded into the operator before it."""
        if earlier is None or not self.is_one_of((_BATCH_NORM,)):
            return False
        return earlier.is_one_of(_FOLDABLE if self.after is None else self.after & _FOLDABLE)

    def takes(self, target: str) -> bool:
        """Return whether an operator of a pattern, `aten.relu.default`, is meant."""
        return self.is_one_of(names_of(target))


@dataclass(frozen=True)
class Question:
    """What `supports` is asked about: a rule by its name or drawing, or operators in their order."""

    text: str
    parts: tuple[Part, ...] = ()

    @property
    def label(self) -> str:
        """Return the question in one line."""
        return " -> ".join(part.label for part in self.parts) or repr(self.text)

    def is_about(self, rule: Rule) -> bool:
        """Return whether a rule is meant: by its name, its drawing, or the operators of a variant."""
        if self.text and self.text in (rule.name, rule.drawing):
            return True
        return any(
            len(calls) == len(self.parts) and all(map(Part.takes, self.parts, calls))
            for calls in sequences(rule)
        )

    def without_batch_norm(self) -> Question:
        """Return the question as it is once batch norms are folded into the operators before them.

        One that follows another batch norm stays: there is nothing left that it could be folded into.
        """
        before = (None, *self.parts)
        kept = [
            part
            for part, earlier in zip(self.parts, before, strict=False)
            if not part.folds_into(earlier)
        ]
        return Question(self.text, tuple(kept))


_FOLDABLE = frozenset(str(target.overloadpacket) for target in FOLDABLE)
_AFTER: dict[type[nn.Module], frozenset[str]] = {
    norm: frozenset(f"aten.{name}" for name in (f"conv{n}d", f"conv_transpose{n}d", *others))
    for n, norm, others in (
        (1, nn.BatchNorm1d, ("linear",)),
        (2, nn.BatchNorm2d, ()),
        (3, nn.BatchNorm3d, ()),
    )
}
"""By type of batch norm: the operators that give what it takes."""


def question_of(pattern: object) -> Question:
    """Return what is asked about: see `Capabilities.supports`.

    Raises:
        SelectorError: a module or function that is more than one operator, or none that is known.
        ConfigError: `pattern` is nothing that one can ask about.
    """
    if isinstance(pattern, str):
        text = " ".join(pattern.split())
        names = [name.strip() for name in text.split("->")]
        if not all(names):
            raise ConfigError(f"expected the name or the drawing of a rule, got {pattern!r}")
        return Question(text, tuple(map(_by_name, names)))
    items: Sequence[Any] = pattern if isinstance(pattern, (tuple, list)) else (pattern,)
    if not items:
        raise ConfigError("expected a pattern, got an empty one")
    return Question("", tuple(map(_part, items)))


def _part(item: object) -> Part:
    if isinstance(item, str):
        return _by_name(item)
    if isinstance(item, type) and issubclass(item, nn.Module):
        if item not in MODULES:
            raise SelectorError(
                f"{item.__qualname__} is not a module of torch.nn that is exported as one operator"
                f"{near_names(item.__qualname__, _OF_MODULES)}: ask about the operators that it calls"
            )
        return Part(_with_in_place(MODULES[item]), item.__qualname__, _AFTER.get(item))
    if isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return Part(frozenset({str(item)}), str(item))
    if not callable(item) or isinstance(item, type):
        raise ConfigError(
            "expected the name or drawing of a rule, or an operator, function or module of torch, got "
            f"{item!r}"
        )
    return Part(kind_of(item).operators, getattr(item, "__name__", str(item)))


def _by_name(name: str) -> Part:
    base = name.removeprefix("aten.")
    return Part(_with_in_place(f"aten.{base}"), name)


def _with_in_place(operator: str) -> frozenset[str]:
    return frozenset({operator, f"{operator}_"})


def sequences(rule: Rule) -> tuple[tuple[str, ...], ...]:
    """Return the operators that a rule's patterns call, in their order, for each variant."""
    found = (calls for pattern in rule.patterns for calls in _calls(pattern))
    return tuple(dict.fromkeys(tuple(map(str, calls)) for calls in found))


def _calls(pattern: Pattern | OperatorPattern) -> Sequence[Sequence[object]]:
    if isinstance(pattern, OperatorPattern):
        return [(target,) for target in pattern.targets]
    return [pattern.calls()]


_MOST = 3
"""How many rules a reason names for each operator."""


def what_is_missing(question: Question, tables: Iterable[tuple[str, Sequence[Rule]]]) -> str:
    """Say why no rule answers a question: which of its operators have rules, and which have none."""
    tables = list(tables)
    if question.text and len(question.parts) == 1:
        known = sorted({rule.name for _, rules in tables for rule in rules})
        return (
            f"no backend has a rule {question.text!r}{near_names(question.text, known)}; "
            f"known: {', '.join(known) or 'none'}"
        )
    found = {part.label: _rules_with(part, tables) for part in question.parts}
    without = [label for label, rules in found.items() if not rules]
    reasons = [f"no rule takes {question.label}{' as one' if len(question.parts) > 1 else ''}"]
    if without:
        reasons.append(f"no rule has {' or '.join(without)}")
    inside = dict.fromkeys(rule for rules in found.values() for rule in rules[:_MOST])
    if inside:
        reasons.append(f"a part of it is in {', '.join(inside)}")
    return "; ".join(reasons)


def _rules_with(part: Part, tables: Iterable[tuple[str, Sequence[Rule]]]) -> list[str]:
    """Return the rules that have an operator, those of the shortest patterns first."""
    lengths: dict[str, int] = {}
    for backend, rules in tables:
        for rule in rules:
            having = [calls for calls in sequences(rule) if any(map(part.takes, calls))]
            if having:
                lengths[f"{rule.name} of {backend}"] = min(map(len, having))
    return sorted(lengths, key=lambda name: lengths[name])
