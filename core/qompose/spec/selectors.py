# SPDX-License-Identifier: Apache-2.0
"""Selectors: which configuration goes to which module, type, name or call.

===========================  ==========================================================================
level (least specific first)  picks
===========================  ==========================================================================
``global``                   every operator
``object type``              what a module type computes (any module around the operator), an aten
                             operator, or what a function of torch is exported as
``module name regex``        what is inside a module whose path the expression matches, from its start up
                             to the end of a module's name
``filter``                   the operators for which a predicate is true
``module name``              what is inside one module
``subgraph``                 what lies between some operators or modules and others, these included
``call``                     one of a module's calls of an operator or of modules of a type
===========================  ==========================================================================

Within a level the later setting wins, with two exceptions: the longest path wins among module names, and
the first one set among regular expressions, as in FX's QConfigMapping. So nothing depends on the order in
which settings of different levels are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import Node

from qompose.errors import SelectorError
from qompose.program.aten_operators import aten_operators, is_torch_function
from qompose.spec.quantization_spec import QuantizationConfig

GLOBAL, TYPE, REGEX, FILTER = "global", "object type", "module name regex", "filter"
NAME, SUBGRAPH, CALL = "module name", "subgraph", "call"
LEVELS = (GLOBAL, TYPE, REGEX, FILTER, NAME, SUBGRAPH, CALL)
ObjectType: TypeAlias = (
    "type[nn.Module] | torch._ops.OpOverload | torch._ops.OpOverloadPacket | Callable[..., Any]"
)
"""What a selector by type takes: a module type, an aten operator, or a function of torch."""

ConfigChoice: TypeAlias = "QuantizationConfig | str | None"
"""What a selector gives: a configuration, the name of one of the backend's, a mode, or None for float."""


@dataclass(frozen=True)
class Kind:
    """A module type, or operators, by names: `torch.nn.modules.linear.Linear`; `aten.relu`, `aten.relu_`.

    `called` is how reports call it where that is not the first of the names.
    """

    modules: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()
    called: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """Return how reports call it."""
        return self.called or min(self.modules | self.operators).removesuffix(".default")

    def is_call(self, node: Node) -> bool:
        """Tell whether a node calls one of the operators."""
        return not self.operators.isdisjoint(names_of(str(node.target)))


def names_of(target: str) -> tuple[str, str]:
    """Return the names of an operator with its overload and without: `aten.add.Tensor`, `aten.add`."""
    return target, target.rpartition(".")[0]


def kind_of(object_type: object) -> Kind:
    """Return what a module type, an aten operator or a function of torch stands for.

    Raises:
        SelectorError: it is not one of these.
    """
    if isinstance(object_type, type) and issubclass(object_type, nn.Module):
        name = f"{object_type.__module__}.{object_type.__qualname__}"
        return Kind(modules=frozenset({name}))
    if isinstance(object_type, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return Kind(operators=frozenset({str(object_type)}))
    if callable(object_type) and not isinstance(object_type, type):
        names = frozenset(map(str, aten_operators(object_type)))
        own = f"aten.{getattr(object_type, '__name__', '').rstrip('_')}"
        return Kind(operators=names, called=own if own in names else "")
    raise SelectorError(
        "expected a torch.nn.Module type, an aten operator such as "
        "torch.ops.aten.linear.default, or a function such as torch.nn.functional.linear, "
        f"got {object_type!r}"
    )


@dataclass(frozen=True)
class Subgraph:
    """What lies on a path from one of `inputs` to one of `outputs`: names of operators or of modules."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """The call number `index` (from 0) that a module makes of an operator, or of modules of a type."""

    module: str
    kind: Kind
    index: int


@dataclass(frozen=True)
class Setting:
    """One selector and the configuration it gives. `key` says what it picks, in the terms of its level."""

    level: str
    key: Any
    config: QuantizationConfig | None
    label: str


@dataclass(frozen=True)
class Selection:
    """The configuration that applies to an operator, and the selector that gave it.

    `selected` is False where no selector speaks of the operator; a `config` of None means float.
    """

    config: QuantizationConfig | None
    selector: str
    selected: bool = True


NOTHING = Selection(None, "", selected=False)


@dataclass
class Selectors:
    """The settings of one quantizer, in the order in which they were made."""

    settings: list[Setting] = field(default_factory=list)
    filter_function: Callable[[Node], bool] | None = None

    def set(self, setting: Setting) -> None:
        """Add a setting, in place of one with the same key; a regular expression keeps its rank."""
        same = [s for s in self.settings if (s.level, s.key) == (setting.level, setting.key)]
        if same and setting.level == REGEX:
            self.settings[self.settings.index(same[0])] = setting
            return
        self.settings = [s for s in self.settings if s not in same] + [setting]

    def configs(self) -> list[QuantizationConfig]:
        """Return the configurations that are given to anything, each once."""
        result: list[QuantizationConfig] = []
        for setting in self.settings:
            if setting.config is not None and setting.config not in result:
                result.append(setting.config)
        return result

    def by_precedence(self) -> Iterator[Setting]:
        """Yield the settings so that each one wins over those before it."""
        for level in LEVELS:
            found = [setting for setting in self.settings if setting.level == level]
            if level == REGEX:
                found.reverse()
            elif level == NAME:
                found.sort(key=lambda setting: setting.key.count("."))
            yield from found

    def copy(self) -> Selectors:
        """Return settings of their own; the configurations in them are values and are shared."""
        return replace(self, settings=list(self.settings))


def for_everything(config: QuantizationConfig | None) -> Setting:
    """Return the setting of every operator that no other one speaks of."""
    return Setting(GLOBAL, None, config, GLOBAL)


def for_kind(kind: Kind, config: QuantizationConfig | None) -> Setting:
    """Return the setting of a module type or operator."""
    return Setting(TYPE, kind, config, f"type {kind.label}")


def for_regex(regex: object, config: QuantizationConfig | None) -> Setting:
    """Return the setting of the modules whose path an expression matches (`compiled`).

    Raises:
        SelectorError: it does not compile.
    """
    if not isinstance(regex, str):
        raise SelectorError(f"regex must be a string, got {regex!r}")
    compiled(regex)
    return Setting(REGEX, regex, config, f"module name regex {regex}")


_FLAGS = re.compile(r"\(\?[aiLmsux]+\)")


def compiled(regex: str) -> re.Pattern[str]:
    r"""Return what `regex` matches of a module path: from its start up to the end of a module's name.

    So `layers\.1` matches `layers.1` and all inside it, and not `layers.10`; what looks ahead sees the
    whole path of the innermost module.

    Raises:
        SelectorError: it does not compile.
    """
    flags = _FLAGS.match(regex)
    start = flags.end() if flags else 0
    try:
        re.compile(regex)
        return re.compile(f"{regex[:start]}(?:{regex[start:]})(?:(?<=\\.)|(?=\\.)|\\Z)")
    except re.error as error:
        raise SelectorError(f"{regex!r} is not a valid regular expression: {error}") from error


def for_filter(function: Callable[[Node], bool], config: QuantizationConfig | None) -> Setting:
    """Return the setting of the operators for which a predicate is true.

    Raises:
        SelectorError: it cannot be called.
    """
    check_predicate(function)
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if name == "<lambda>" and code is not None:
        name = f"<lambda> at {PurePath(code.co_filename).name}:{code.co_firstlineno}"
    return Setting(FILTER, function, config, f"filter {name}")


def check_predicate(function: object) -> None:
    """Raise SelectorError unless `function` can be called."""
    if not callable(function):
        raise SelectorError(f"expected a function that takes a node, got {function!r}")


def for_name(name: str, config: QuantizationConfig | None) -> Setting:
    """Return the setting of one module and all inside it.

    Raises:
        SelectorError: it is not a path.
    """
    if not isinstance(name, str) or not name:
        raise SelectorError(
            f"expected a module path such as 'encoder.layer.0', got {name!r}; use set_global "
            "for the whole model"
        )
    return Setting(NAME, name, config, f"module name {name}")


def for_subgraph(
    inputs: str | Sequence[str], outputs: str | Sequence[str], config: QuantizationConfig | None
) -> Setting:
    """Return the setting of what lies between operators or modules.

    Raises:
        SelectorError: the names are not strings.
    """
    ends = [(end,) if isinstance(end, str) else _names(end) for end in (inputs, outputs)]
    if not all(end and all(isinstance(name, str) and name for name in end) for end in ends):
        raise SelectorError(
            "inputs and outputs must be non-empty lists of operator or module names, got "
            f"inputs={inputs!r} and outputs={outputs!r}"
        )
    key = Subgraph(*ends)
    label = f"subgraph from {', '.join(key.inputs)} to {', '.join(key.outputs)}"
    return Setting(SUBGRAPH, key, config, label)


def setting_of(entry: object, config: QuantizationConfig | None) -> Setting:
    """Return the setting that one entry of a list of selectors stands for, by its type.

    Args:
        entry: the path of a module, a compiled regular expression of such paths, a module type, an aten
            operator, a function of torch, or any other function as a predicate of a node.

    Raises:
        SelectorError: it is none of these.
    """
    if isinstance(entry, str):
        return for_name(entry, config)
    if isinstance(entry, re.Pattern):
        return for_regex(_with_flags(entry), config)
    if callable(entry) and not isinstance(entry, type) and not is_torch_function(entry):
        return for_filter(entry, config)
    return for_kind(kind_of(entry), config)


def _with_flags(pattern: re.Pattern[Any]) -> object:
    """Return the text of a compiled expression, with its flags in front."""
    text = pattern.pattern
    if not isinstance(text, str):
        return text
    letters = "".join(letter for letter in "aimsx" if pattern.flags & re.RegexFlag[letter.upper()])
    written = _FLAGS.match(text)
    return f"(?{letters}){text[written.end() if written else 0 :]}" if letters else text


def _names(names: object) -> tuple[Any, ...]:
    return tuple(names) if isinstance(names, (list, tuple, set, frozenset)) else ()


def for_call(module: str, kind: Kind, index: int, config: QuantizationConfig | None) -> Setting:
    """Return the setting of one of a module's calls.

    Raises:
        SelectorError: the index is not 0, 1, 2, ..., or the module no path ("" is the whole model).
    """
    if not isinstance(module, str):
        raise SelectorError(f"expected a module path, got {module!r}")
    if type(index) is not int or index < 0:
        raise SelectorError(f"index must be a non-negative integer, got {index!r}")
    label = f"call {index} of {kind.label} in {module or 'the model'}"
    return Setting(CALL, Call(module, kind, index), config, label)
