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
from typing import Any, Protocol, TypeAlias, overload

from qompose.backend.pattern_question import (
    Part,
    Question,
    Variants,
    question_of,
    what_is_missing,
)
from qompose.backend.rule import Rule, TensorConstraint
from qompose.console import Block, Printable, Table, counted
from qompose.errors import ConfigError, SelectorError, near_names
from qompose.observers.config import LISTED_SETTINGS, LISTED_SPEC, why_not_trained
from qompose.program.decompositions import DECOMPOSITIONS
from qompose.spec.quantization_spec import (
    QuantizationConfig,
    QuantizationSpecBase,
    describe_spec,
    granularity,
)

SCHEMA = 1
"""The version of the form of `Capabilities.to_dict` and of what `--json` prints."""
Condition: TypeAlias = "tuple[str, Callable[[Capability], object]]"
"""What `filter` asked for: in words, and as a predicate."""


@dataclass(frozen=True)
class Support:
    """An answer to "can you?": true, with who and by which kernels, or false, with the reason.

    `rule` is the one that applies under the first of `configs`: the configurations that were asked about and
    under which any rule of the backend takes the pattern. `kernels` are (target, kernel name) pairs of the
    rule. `notes` say what a yes depends on.
    """

    supported: bool
    reason: str = ""
    backend: str = ""
    rule: str = ""
    kernels: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()

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
        under = f" under {', '.join(self.configs)}" if len(self.configs) > 1 else ""
        return "; ".join((f"yes: {self.by}{under} ({kernels or 'no kernel'})", *self.notes))


@dataclass(frozen=True)
class RuleTable:
    """The rules of a backend, from which rows come, and what `filter` asked of these rows.

    Attributes:
        configs: those of the rows, by name.
        rewrites: the backend's, which may take apart what no rule takes.
        in_float: names of operators, each with why no rule takes it.
    """

    backend: str
    rules: tuple[Rule, ...]
    conditions: tuple[Condition, ...] = ()
    configs: tuple[tuple[str, QuantizationConfig], ...] = ()
    rewrites: tuple[str, ...] = ()
    in_float: tuple[tuple[str, str], ...] = ()

    def chosen(
        self, config: QuantizationConfig | str | None
    ) -> list[tuple[str, QuantizationConfig]]:
        """Return configurations by name: all; that of a name, else the first of a mode; or the given one."""
        if config is None:
            return list(self.configs)
        if isinstance(config, str):
            named = [pair for pair in self.configs if pair[0] == config]
            return named or [pair for pair in self.configs if pair[1].mode == config][:1]
        names = [name for name, known in self.configs if known == config]
        return [(names[0] if names else str(config), config)]


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One pattern under one configuration of a backend.

    Attributes:
        pattern: the rule's name; `drawing` shows it in one line.
        operators: what it calls, in order, for each of its variants: names of aten operators. Patterns are
            captured when this is first read, and one that cannot be is a ConfigError then.
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
    operators: Sequence[tuple[str, ...]]
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
    def rule(self) -> str:
        """Return the rule's name, as reports have it."""
        return self.pattern

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
        found += ["only if a quantized operator reads its output"] if self.carries else []
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
    """What backends can quantize: an immutable sequence of `Capability` rows.

    `silent` names the quantizers that have no rule table and therefore no rows.
    """

    rows: tuple[Capability, ...]
    sources: tuple[RuleTable, ...] = field(default=(), compare=False, repr=False)
    silent: tuple[str, ...] = ()

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
        """Return the rows whose fields have the given values and for which `predicate` is true.

        Args:
            facts: fields of `Capability` by name, such as `mode="dynamic"`; `rule=` and `config=` take the
                names that reports print; `target="torch"` keeps rows with a kernel for that target, and
                `operator=nn.Conv2d` (or a name such as "conv2d") those whose pattern has the operator.
                `supports` of the result considers only these rows.

        Raises:
            ConfigError: rows have no such field, or `operator` is not an operator.
            SelectorError: `operator` is a module of more than one operator.
        """
        added = [_condition(name, value) for name, value in facts.items()]
        added += [] if predicate is None else [("the filter predicate", predicate)]
        return Capabilities(
            tuple(row for row in self.rows if all(check(row) for _, check in added)),
            tuple(replace(s, conditions=(*s.conditions, *added)) for s in self.sources),
            self.silent,
        )

    def supports(self, pattern: object, config: QuantizationConfig | str | None = None) -> Support:
        """Return whether a rule matches a pattern and supports a configuration for it.

        Args:
            pattern: a rule's name; a drawing, `"conv2d -> relu"`; an aten operator; a function or module
                type of torch; or a tuple of operators, functions and module types in their order, such as
                `(nn.Conv2d, nn.BatchNorm2d, nn.ReLU)`.
            config: a configuration; the name of one, or a mode; None asks for any that has rows.

        Raises:
            ConfigError: `pattern` has none of these forms, `config` is not a configuration, or no row has
                a configuration of that name.
        """
        self._check_config(config)
        try:
            question = question_of(pattern)
        except SelectorError as error:
            return Support(False, str(error))
        return self._answer(question, config)

    def _check_config(self, config: object) -> None:
        if isinstance(config, str):
            if not any(source.chosen(config) for source in self.sources):
                known = list(dict.fromkeys(name for s in self.sources for name, _ in s.configs))
                raise ConfigError(
                    f"no capability row has configuration {config!r}{near_names(config, known)}. "
                    f"Available: {', '.join(map(repr, known)) or 'none'}"
                )
        elif config is not None and not isinstance(config, QuantizationConfig):
            raise ConfigError(
                f"config must be a QuantizationConfig or a configuration name, got {config!r}"
            )

    def _answer(self, question: Question, config: QuantizationConfig | str | None) -> Support:
        asked, found, notes = self._rules_for(question)
        answers = [(s, self._answer_of(s, rule, config, notes)) for s, rule in found]
        yes = [(source, answer) for source, answer in answers if answer]
        if yes:
            return _of_first_backend(yes)
        reasons = [answer.reason for _, answer in answers]
        if not found:
            reasons, by_parts = self._without_rule(asked, config)
            if by_parts is not None:
                return by_parts
        return Support(False, "; ".join((*dict.fromkeys(reasons), *notes, *self._about_silent())))

    def _answer_of(
        self,
        source: RuleTable,
        rule: Rule,
        config: QuantizationConfig | str | None,
        notes: tuple[str, ...],
    ) -> Support:
        """Answer for one rule, with the configurations that it follows, or what it objects to."""
        reasons: list[str] = []
        names: list[str] = []
        for name, one in source.chosen(config):
            reason = rule.objection(one) or self._excluded(source, rule, name, one)
            (reasons if reason else names).append(reason or name)
        if names:
            if rule.guards or rule.condition:
                notes = (*notes, _LOOKS_AT_EACH)
            kernels = kernels_of(rule)
            return Support(True, "", source.backend, rule.name, kernels, notes, tuple(names))
        none = f"it has no configuration{f' {config!r}' if isinstance(config, str) else ''}"
        return Support(False, f"{source.backend}: {'; '.join(dict.fromkeys(reasons)) or none}")

    def _without_rule(
        self, question: Question, config: QuantizationConfig | str | None
    ) -> tuple[list[str], Support | None]:
        """Answer where no rule takes a pattern: by what it is taken apart into, or with backends' reasons."""
        alone = question.parts if len(question.parts) == 1 else ()
        for source in self.sources:
            for rewrite, product in (found for part in alone for found in _products(source, part)):
                pieces = replace(self, sources=(source,))._answer(question_of(product), config)
                if pieces:
                    note = (
                        f"{rewrite} decomposes {question.label}, and the rule matches the "
                        "resulting operators; qompose.can_quantize lists them for a program"
                    )
                    return [], replace(pieces, notes=(*pieces.notes, note))
        tables = [(source.backend, source.rules) for source in self.sources]
        own = [
            f"{source.backend}: {reason}"
            for source in self.sources
            for name, reason in source.in_float
            if any(asked.takes(name) for asked in question.parts)
        ]
        return [what_is_missing(question, tables), *own], None

    def _rules_for(
        self, question: Question
    ) -> tuple[Question, list[tuple[RuleTable, Rule]], tuple[str, ...]]:
        """Return the rules that answer a question, or else those that do once batch norms are folded."""
        found = [(s, rule) for s in self.sources for rule in s.rules if question.is_about(rule)]
        folded = question.without_batch_norm()
        if found or folded == question:
            return question, found, ()
        note = (
            "batch norms are folded into the layer before them, unless its output or parameters "
            f"are used elsewhere; this leaves {folded.label}"
        )
        found = [(s, rule) for s in self.sources for rule in s.rules if folded.is_about(rule)]
        return folded, found, (note,)

    def _excluded(
        self, source: RuleTable, rule: Rule, name: str, config: QuantizationConfig
    ) -> str | None:
        """Return which condition of `filter` the rule's row under this configuration would not meet."""
        if not source.conditions:
            return None
        row = row_of(source.backend, rule, name, config)
        failed = [words for words, check in source.conditions if not check(row)]
        return f"rule {rule.name} is excluded by {failed[0]}" if failed else None

    def _about_silent(self) -> tuple[str, ...]:
        if not self.silent:
            return ()
        names = ", ".join(self.silent)
        return (
            f"{names} list no rows; use qompose.can_quantize to ask about an operator of a program",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return `{"schema": 1, "rows": [...]}` as JSON data; the number is raised when the form changes."""
        return {"schema": SCHEMA, "rows": [row.to_dict() for row in self.rows]}

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def _blocks(self) -> list[Block]:
        """Return for each backend its configurations, its patterns by kernel, and conditions of a few."""
        result: list[Block] = []
        for source in self.sources:
            rows = [row for row in self.rows if row.backend == source.backend]
            if rows:
                result += [_sum_of(rows), _configurations(rows), _patterns(rows), *_remarks(rows)]
        return [*result, *self._about_silent()]


def _of_first_backend(answers: Sequence[tuple[RuleTable, Support]]) -> Support:
    """Return one yes for all of the first backend's: the rule is that of the earliest configuration."""
    source = answers[0][0]
    known = [name for name, _ in source.configs]
    position = {name: i for i, name in enumerate(known)}
    own = [answer for of, answer in answers if of is source]
    names = dict.fromkeys(name for answer in own for name in answer.configs)
    first = min(own, key=lambda answer: position.get(answer.configs[0], len(known)))
    ordered = sorted(names, key=lambda name: position.get(name, len(known)))
    return replace(first, configs=tuple(ordered))


class HasRules(Protocol):
    """A backend, as far as its capabilities go."""

    name: str
    rules: tuple[Rule, ...]
    configs: Mapping[str, QuantizationConfig]
    rewrites: tuple[str, ...]
    left_in_float: Mapping[Any, str]


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
    table = RuleTable(
        backend.name,
        tuple(backend.rules),
        configs=tuple(named),
        rewrites=tuple(backend.rewrites),
        in_float=tuple((str(target), why) for target, why in backend.left_in_float.items()),
    )
    return Capabilities(rows, (table,))


def _products(source: RuleTable, part: Part) -> Iterator[tuple[str, str]]:
    """Yield the rewrites of a backend that take an operator apart, each with a product that it leaves."""
    for rewrite in source.rewrites:
        for target, row in DECOMPOSITIONS.get(rewrite, {}).items():
            if row.product is not None and part.takes(str(target)):
                yield rewrite, str(row.product)


def naming_fault(configs: Mapping[str, QuantizationConfig]) -> str | None:
    """Return what is wrong with the names of a backend's configurations: rows and reports need one each."""
    for key, config in configs.items():
        if str(config) != key:
            return (
                f"configs[{key!r}] is named {str(config)!r} in reports; set "
                f"QuantizationConfig(..., name={key!r})"
            )
    return None


def _free_name(name: str, taken: set[str]) -> str:
    numbered = (f"{name} ({number})" for number in count(2))
    return next(free for free in chain([name], numbered) if free not in taken)


def _condition(name: str, value: Any) -> Condition:
    known = (*(f.name for f in fields(Capability)), "target", "rule", "operator")
    if name not in known:
        hint = near_names(name, known)
        raise ConfigError(f"rows have no field {name!r}{hint}. Available: {', '.join(known)}")
    if name == "target":
        return f"target={value!r}", lambda row: value in row.targets
    if name == "operator":
        parts = question_of(value).parts
        if len(parts) != 1:
            raise ConfigError(f"operator must be a single operator, got {value!r}")
        return f"operator={value!r}", lambda row: any(
            parts[0].takes(call) for calls in row.operators for call in calls
        )
    return f"{name}={value!r}", lambda row: getattr(row, name) == value


_LOOKS_AT_EACH = (
    "the rule also checks each operator; use qompose.can_quantize for an operator of a program"
)


def _sum_of(rows: Sequence[Capability]) -> str:
    rules = counted(len({row.rule for row in rows}), "rule")
    configs = counted(len({row.config for row in rows}), "configuration")
    targets = ", ".join(_targets(rows)) or "no target"
    return f"{rows[0].backend}: {rules} under {configs}, with kernels for {targets}"


def _targets(rows: Iterable[Capability]) -> list[str]:
    return list(dict.fromkeys(target for row in rows for target in row.targets))


def _configurations(rows: Sequence[Capability]) -> Table:
    by_name: dict[str, list[Capability]] = {}
    for row in rows:
        by_name.setdefault(row.config, []).append(row)

    def role(name: str, rows: list[Capability]) -> str:
        specs = dict.fromkeys(getattr(row, name) for row in rows if getattr(row, name) is not None)
        return ", ".join(dict.fromkeys(map(_brief, specs))) or "float"

    cells = tuple(
        (name, found[0].mode, *(role(r, found) for r in ("activation", "weight", "output")))
        for name, found in by_name.items()
    )
    return Table(("configuration", "mode", "activation", "weight", "output"), cells)


def _brief(spec: QuantizationSpecBase) -> str:
    """Return a specification without its bounds and axis: `int4 symmetric per-block (32,)`."""
    low, high = getattr(spec, "quant_min", None), getattr(spec, "quant_max", None)
    name = describe_spec(spec).partition(" ")[0]
    if low is not None and high is not None:
        name = f"{name.rstrip('0123456789')}{(high - low).bit_length()}"
    words = [name, "symmetric" * ("symmetric" in str(getattr(spec, "qscheme", "")))]
    words += [granularity(spec), "dynamic" * bool(getattr(spec, "is_dynamic", False))]
    return " ".join(filter(None, words))


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
    """Return a row for each pattern, under its kernels; configurations are named where not all apply."""
    by_pattern: dict[str, list[Capability]] = {}
    for row in rows:
        by_pattern.setdefault(row.pattern, []).append(row)
    modes: dict[str, list[str]] = {}
    for row in rows:
        modes.setdefault(row.mode, []).append(row.config)
    by_kernels: dict[str, list[tuple[str, str]]] = {}
    for found in by_pattern.values():
        configs = dict.fromkeys(row.config for row in found)
        every = configs.keys() == {row.config for row in rows}
        named = "all" if every else ", ".join(_in_modes(configs, modes))
        by_kernels.setdefault(_kernels_of(found[0]), []).append((f"  {_drawn(found[0])}", named))
    cells = [row for kernels, own in by_kernels.items() for row in ((kernels,), *own)]
    return Table(("kernels, and their patterns", "configurations"), tuple(cells))


def _kernels_of(row: Capability) -> str:
    """Return the kernels of a row with their targets; targets that have the same one are listed together."""
    by_kernel: dict[str, list[str]] = {}
    for target, kernel in row.kernels:
        by_kernel.setdefault(kernel, []).append(target)
    named = (f"{', '.join(targets)}: {kernel}" for kernel, targets in by_kernel.items())
    return "; ".join(named) or "no kernel"


_FEW, _NAMED = 30, 2
"""Of so many rules the conditions are listed, and so many are named with one."""


def _remarks(rows: Sequence[Capability]) -> list[str]:
    """Return what the rules ask for, each line once, with the rules or the modes in which it holds."""
    every = {row.rule for row in rows}
    if len(every) > _FEW:
        return []
    holding: dict[str, list[Capability]] = {}
    for row in rows:
        for note in row.notes:
            holding.setdefault(note, []).append(row)
    found = []
    for note, own in holding.items():
        rules = dict.fromkeys(row.rule for row in own)
        whose = rules if len(rules) <= _NAMED else dict.fromkeys(row.mode for row in own)
        found.append(f"- {note}" if rules.keys() == every else f"- {note} ({', '.join(whose)})")
    return [*found, *([f"- {_LOOKS_AT_EACH}"] if any(row.guarded for row in rows) else [])]


def _drawn(row: Capability) -> str:
    """Return a row's drawing, with the rule's name, as reports have it, where that is not the same words."""
    same = row.drawing.replace(" -> ", "_") == row.rule
    return row.drawing if same else f"{row.drawing} ({row.rule})"


_CONDITIONS = {
    "all": "only if all inputs are quantized",
    "any": "only if an input is quantized",
    "no_float": "only if no input comes from a float operator",
}


def row_of(backend: str, rule: Rule, name: str, config: QuantizationConfig) -> Capability:
    """Return the row of a rule of a backend under a configuration that fits it."""
    specs = rule.specs_for(config)
    return Capability(
        backend=backend,
        pattern=rule.name,
        drawing=rule.drawing or rule.name,
        operators=Variants(rule),
        config=name,
        settings=config,
        mode=config.mode,
        activation=specs.get("activation"),
        weight=specs.get("weight"),
        output=specs.get("output"),
        granularity=granularity(specs.get("weight", specs.get("activation"))),
        qat=rule.trains and why_not_trained(config) is None,
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
