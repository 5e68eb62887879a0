# SPDX-License-Identifier: Apache-2.0
"""Capability rows, generated from rule tables.

Capabilities: what backends can do, as rows generated from the table that annotates and lowers.

A row of capabilities: one pattern under one configuration of a backend, as a value and as data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeAlias, TypeVar, overload

from rich.console import Console, ConsoleOptions, RenderResult

from qompose.backend.capability_query import Question, question, sequences, what_is_missing
from qompose.backend.constraints import CONSTRAINT, TensorConstraint
from qompose.backend.rule import Rule
from qompose.console import Block, Table, as_rich, as_text
from qompose.errors import ConfigError, SelectorError, near_names
from qompose.json_codec import (
    BOOLEAN,
    TEXT,
    Codec,
    check_mapping,
    pairs,
    read_fields,
    record,
    sequence,
)
from qompose.observers.config_json import SETTINGS, SPEC, with_stand_ins
from qompose.observers.default_specs import why_not_trained
from qompose.spec.quantization_spec import (
    QuantizationConfig,
    QuantizationSpecBase,
    describe_spec,
    granularity,
)

Condition: TypeAlias = "tuple[str, Callable[[Capability], object]]"
"""What `filter` asked for: in words, and as a predicate."""
_WIDTH = 110
_Found = TypeVar("_Found")


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
class Source:
    """The rule table that rows come from, and what `filter` asked of its rows."""

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
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data; of an observer of another package it has the name."""
        data: dict[str, Any] = _ROW.write(self, "row")
        return {**data, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Capability:
        """Return the row that data stands for, equal to the one it was written from.

        Raises:
            ConfigError: the data is malformed; the message says where.
        """
        check_mapping(data, "row")
        known = {
            key: value for key, value in data.items() if key != "notes"
        }  # follows from the rest
        row: Capability = read_fields(known, cls, _FIELDS, "row")
        return row


@dataclass(frozen=True)
class Capabilities(Sequence[Capability]):
    """Rows, with the tables they come from. An immutable sequence.

    Rows that were read from data have no `sources`. `silent` names quantizers that have no rule table, and
    so no rows.
    """

    rows: tuple[Capability, ...]
    sources: tuple[Source, ...] = field(default=(), compare=False, repr=False)
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
            raise ConfigError(f"{config!r} is no QuantizationConfig")
        try:
            asked = question(pattern)
        except SelectorError as error:
            return Support(False, str(error))
        known_by_rows_alone = bool(self.rows) and not self.sources
        return (
            self._from_rows(asked, config)
            if known_by_rows_alone
            else self._from_rules(asked, config)
        )

    def _from_rules(self, asked: Question, config: QuantizationConfig) -> Support:
        def find(asked: Question) -> list[tuple[Source, Rule]]:
            return [(s, rule) for s in self.sources for rule in s.rules if _is_rule(asked, rule)]

        asked, found, notes = _unfolded(asked, config, find)
        if not found:
            tables = [(source.backend, source.rules) for source in self.sources]
            reasons = [what_is_missing(asked, tables)]
        else:
            reasons = []
        for source, rule in found:
            reason = rule.objection(config) or self._excluded(source, rule, config)
            if reason is None:
                told = (*notes, *_doubts(rule.guards or rule.condition))
                return Support(True, "", source.backend, rule.name, kernels_of(rule), told)
            reasons.append(f"{source.backend}: {reason}")
        return Support(False, "; ".join((*dict.fromkeys(reasons), *notes, *self._about_silent())))

    def _excluded(self, source: Source, rule: Rule, config: QuantizationConfig) -> str | None:
        """Return which condition of `filter` the rule's row under this configuration would not meet."""
        if not source.conditions:
            return None
        names = [
            r.config for r in self.rows if r.backend == source.backend and r.settings == config
        ]
        row = row_of(source.backend, rule, names[0] if names else str(config), config)
        failed = [words for words, check in source.conditions if not check(row)]
        return f"rule {rule.name} is excluded by {failed[0]}" if failed else None

    def _from_rows(self, asked: Question, config: QuantizationConfig) -> Support:
        def find(asked: Question) -> list[Capability]:
            return [r for r in self.rows if asked.is_about(r.pattern, r.drawing, r.operators)]

        asked, found, notes = _unfolded(asked, config, find)
        written = with_stand_ins(
            config
        )  # as in the data; balancing and repairs are no matter of support
        for row in found:
            theirs = row.settings
            if theirs == replace(written, balance=theirs.balance, repairs=theirs.repairs):
                told = (*notes, *_doubts(row.guarded or row.condition))
                return Support(True, "", row.backend, row.pattern, row.kernels, told)
        listed = ", ".join(dict.fromkeys(row.config for row in found))
        what = f"{asked.label} is there under {listed}" if found else f"none has {asked.label}"
        reason = f"these rows were read from data, which has no rules to ask: {what}"
        return Support(False, "; ".join((reason, *notes)))

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

    @classmethod
    def from_dict(cls, data: Iterable[Mapping[str, Any]]) -> Capabilities:
        """Return the rows that data stands for.

        Raises:
            ConfigError: the data is malformed; the message says where.
        """
        if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
            raise ConfigError(f"the data of capabilities is a list of rows, and not {data!r:.80}")
        return cls(tuple(Capability.from_dict(row) for row in data))

    @classmethod
    def from_json(cls, text: str) -> Capabilities:
        """Return the rows of a JSON text; see `from_dict`.

        Raises:
            ConfigError: the text is no JSON, or the data in it is malformed.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the text is no JSON: {error}") from None
        return cls.from_dict(data)

    def blocks(self) -> list[Block]:
        """Return the rows as tables: for each backend its configurations, and its patterns."""
        result: list[Block] = []
        for backend in dict.fromkeys(row.backend for row in self.rows):
            rows = [row for row in self.rows if row.backend == backend]
            result += [backend, _configurations(rows), _patterns(rows)]
        return [*result, *self._about_silent()]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from as_rich(self.blocks())

    def __str__(self) -> str:
        return as_text(self.blocks(), _WIDTH)


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
    return Capabilities(rows, (Source(backend.name, tuple(backend.rules)),))


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
    number = 1
    while (f"{name} ({number})" if number > 1 else name) in taken:
        number += 1
    return f"{name} ({number})" if number > 1 else name


def _condition(name: str, value: Any) -> Condition:
    known = (*(f.name for f in fields(Capability)), "target")
    if name not in known:
        hint = near_names(name, known)
        raise ConfigError(f"rows have no {name!r}{hint}; they have {', '.join(known)}")
    if name == "target":
        return f"target={value!r}", lambda row: value in row.targets
    return f"{name}={value!r}", lambda row: getattr(row, name) == value


def _is_rule(asked: Question, rule: Rule) -> bool:
    return asked.is_about(rule.name, rule.drawing, sequences(rule))


def _unfolded(
    asked: Question, config: QuantizationConfig, find: Callable[[Question], list[_Found]]
) -> tuple[Question, list[_Found], tuple[str, ...]]:
    """Return what answers a question; where nothing does, what answers it once batch norms are folded."""
    found = find(asked)
    folded = asked.without_batch_norm()
    if found or folded == asked:
        return asked, found, ()
    note = (
        "batch norms are folded into what they follow, unless that is read or shared elsewhere, which "
        f"leaves {folded.label}"
    )
    return folded, find(folded), (note,)


def _doubts(depends: object) -> tuple[str, ...]:
    if not depends:
        return ()
    return ("the rule also looks at each operator: qompose.can_quantize asks about one",)


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


def _with_stand_ins(codec: Codec) -> Codec:
    """Return the codec of what may hold observers of other packages: of those, the names are written."""
    return Codec(lambda value, path: codec.write(with_stand_ins(value), path), codec.read)


_FIELDS: dict[str, Codec] = {
    **dict.fromkeys(("backend", "pattern", "drawing"), TEXT),
    "operators": sequence(sequence(TEXT)),
    "config": TEXT,
    "settings": _with_stand_ins(SETTINGS),
    "mode": TEXT,
    **dict.fromkeys(("activation", "weight", "output"), _with_stand_ins(SPEC)),
    "granularity": TEXT,
    "qat": BOOLEAN,
    "kernels": pairs(TEXT),
    "constraints": pairs(CONSTRAINT),
    "shares": BOOLEAN,
    "condition": TEXT,
    "guarded": BOOLEAN,
    "carries": BOOLEAN,
}
_ROW = record(Capability, _FIELDS, defaults=True)


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
    )


def kernels_of(rule: Rule) -> tuple[tuple[str, str], ...]:
    """Return the (target, kernel name) pairs of a rule."""
    return tuple((target, kernel.promise) for target, kernel in rule.kernels.items())
