# SPDX-License-Identifier: Apache-2.0
"""Settings of a quantizer as JSON data, and back::

    [{"select": "global", "config": "static per-channel"},
     {"select": "object type", "module type": "torch.nn.Linear", "config": null},
     {"select": "object type", "operator": "aten.add.Tensor", "config": null},
     {"select": "module name", "name": "head", "config": {"weight": {...}, ...}}]

A configuration is a name that its backend gives it, or spelt out (`qompose.configs`), or null for float.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qompose.configs import config_from_json, config_to_json
from qompose.errors import ConfigError, SelectorError, near_names
from qompose.selectors import (
    CALL,
    FILTER,
    GLOBAL,
    NAME,
    REGEX,
    SUBGRAPH,
    TYPE,
    Kind,
    Selectors,
    Setting,
    for_call,
    for_everything,
    for_kind,
    for_name,
    for_regex,
    for_subgraph,
    kind_of,
)
from qompose.specs import QuantizationConfig

Named = Mapping[str, QuantizationConfig]
Config = QuantizationConfig | None


@dataclass(frozen=True)
class _Form:
    """How the key of one level is written: as which entries, and what makes a setting of them.

    With `kind`, one more entry is a module type or an operator.
    """

    write: Callable[[Any], dict[str, Any]]
    read: Callable[..., Setting]
    keys: Mapping[str, type]
    kind: bool = False


_MODULE, _OPERATOR = "module type", "operator"


def _type_of(kind: Kind) -> dict[str, str | list[str]]:
    names = sorted(kind.modules | kind.operators)
    return {_MODULE if kind.modules else _OPERATOR: names[0] if len(names) == 1 else names}


def _operators(written: object) -> Kind:
    """Return what the names of operators stand for: `aten.linear`, or a list of such."""
    listed = written if isinstance(written, list) else [written]
    names = [name for name in listed if isinstance(name, str)]
    if not names or len(names) < len(listed):
        raise SelectorError(f"{_OPERATOR}={written!r} is neither a name nor a list of names")
    unknown = [name for name in names if not _operator(name)]
    if unknown:
        raise SelectorError(
            f"there is no operator {' or '.join(map(repr, unknown))} in this process; one of another package "
            "is there once that is imported"
        )
    return Kind(operators=frozenset(names))


def _operator(name: str) -> bool:
    """Tell whether a name is that of an operator in this process: `aten.add` or `aten.add.Tensor`."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return not overload or hasattr(packet, overload)


def _module(written: object) -> Kind:
    """Return a module type by a name under which it can be found, without importing anything.

    A class of a module that is not imported yet is known by its full name alone; whether the model has it
    is said when the model is prepared.
    """
    path = written.split(".") if isinstance(written, str) else []
    if len(path) < 2 or not all(part.isidentifier() or part == "<locals>" for part in path):
        raise SelectorError(f"{_MODULE}={written!r} is no name such as 'torch.nn.Linear'")
    home = max((n for n in range(1, len(path)) if ".".join(path[:n]) in sys.modules), default=0)
    found: Any = sys.modules[".".join(path[:home])] if home else None
    for part in path[home:]:
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and issubclass(found, nn.Module):
        return kind_of(found)
    if home == len(path) - 1:
        known = [
            n for n, v in vars(sys.modules[".".join(path[:home])]).items() if isinstance(v, type)
        ]
        raise SelectorError(f"{written!r} is no module type{near_names(path[-1], known)}")
    return Kind(modules=frozenset({".".join(path)}))


_KINDS: dict[str, Callable[[object], Kind]] = {_MODULE: _module, _OPERATOR: _operators}


_FORMS: dict[str, _Form] = {
    GLOBAL: _Form(lambda key: {}, for_everything, {}),
    TYPE: _Form(_type_of, for_kind, {}, kind=True),
    REGEX: _Form(lambda key: {"regex": key}, for_regex, {"regex": str}),
    NAME: _Form(lambda key: {"name": key}, for_name, {"name": str}),
    SUBGRAPH: _Form(
        lambda key: {"inputs": list(key.inputs), "outputs": list(key.outputs)},
        lambda inputs, outputs, config: for_subgraph(tuple(inputs), tuple(outputs), config),
        {"inputs": list, "outputs": list},
    ),
    CALL: _Form(
        lambda key: {"name": key.module, **_type_of(key.kind), "index": key.index},
        lambda name, kind, index, config: for_call(name, kind, index, config),
        {"name": str, "index": int},
        kind=True,
    ),
}


def selectors_to_data(selectors: Selectors, named: Named) -> list[dict[str, Any]]:
    """Return settings as JSON data, in the order in which they were made.

    Raises:
        ConfigError: a setting is a function, or a configuration holds what data cannot name.
    """
    if selectors.filter_function is not None:
        raise ConfigError("a filter function is code, which cannot be written as data")
    return [_setting_to_data(setting, named) for setting in selectors.settings]


def _setting_to_data(setting: Setting, named: Named) -> dict[str, Any]:
    if setting.level == FILTER:
        raise ConfigError(
            f"{setting.label} is code, which cannot be written as data: name the operators by a subgraph, "
            "module names or calls"
        )
    key = _FORMS[setting.level].write(setting.key)
    return {"select": setting.level, **key, "config": _config_to_data(setting.config, named)}


def _config_to_data(config: Config, named: Named) -> Any:
    names = (name for name, known in named.items() if _same(known, config))
    return next(names, None) or config_to_json(config)


def _same(known: QuantizationConfig, config: Config) -> bool:
    """Tell whether two configurations are equal and reports call them by one name."""
    return known == config and known.name == getattr(config, "name", None)


def selectors_from_data(data: Any, named: Named, owner: str) -> Selectors:
    """Return the settings that JSON data stands for.

    Args:
        named: the backend's own configurations.
        owner: whose settings they are, for messages.

    Raises:
        ConfigError, SelectorError: the data is malformed; the message says which entry.
    """
    if not isinstance(data, list):
        raise ConfigError(f"{owner}: selectors are a list of settings, not {data!r}")
    selectors = Selectors()
    for number, entry in enumerate(data):
        where = f"{owner}, selector {number}"
        try:
            selectors.set(_setting_from_data(entry, named))
        except (ConfigError, SelectorError) as error:
            raise type(error)(f"{where}: {error}") from None
    return selectors


def _setting_from_data(entry: Any, named: Named) -> Setting:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{entry!r} is not an object with the keys select and config")
    level = entry.get("select")
    if not isinstance(level, str) or level not in _FORMS:
        raise ConfigError(
            f"select={level!r} is none of {', '.join(_FORMS)}{near_names(str(level), _FORMS)}"
        )
    form = _FORMS[level]
    which = _which_kind(entry) if form.kind else ()
    check_keys(entry, ("select", *form.keys, *which, "config"))
    for key, kind in form.keys.items():
        if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
            raise ConfigError(f"{key}={entry[key]!r} is no {kind.__name__}")
    values = {key: entry[key] for key in form.keys}
    for key in which:
        values["kind"] = _KINDS[key](entry[key])
    return form.read(**values, config=_config_from_data(entry["config"], named))


def _which_kind(entry: Mapping[str, Any]) -> tuple[str]:
    given = [key for key in _KINDS if key in entry]
    if len(given) != 1:
        raise ConfigError(f"one of the keys {' and '.join(map(repr, _KINDS))} says what is meant")
    return (given[0],)


def check_keys(data: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raise ConfigError unless data has exactly these keys."""
    unknown = [f"{key!r}{near_names(str(key), keys)}" for key in data if key not in keys]
    missing = [repr(key) for key in keys if key not in data]
    if unknown:
        raise ConfigError(f"unknown keys {', '.join(unknown)}; there are {', '.join(keys)}")
    if missing:
        raise ConfigError(f"missing keys {', '.join(missing)}")


def _config_from_data(data: Any, named: Named) -> Config:
    if isinstance(data, str):
        if data not in named:
            raise ConfigError(
                f"no configuration of this backend is called {data!r}{near_names(data, named)}; there are "
                f"{', '.join(map(repr, named))}"
            )
        return named[data]
    return config_from_json(data)
