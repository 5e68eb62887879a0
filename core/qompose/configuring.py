# SPDX-License-Identifier: Apache-2.0
"""Settings of a quantizer as JSON data, and back::

    [{"select": "global", "config": "static per-channel"},
     {"select": "object type", "type": "torch.nn.Linear", "config": null},
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
    """How the key of one level is written: as which entries, and what makes a setting of them."""

    write: Callable[[Any], dict[str, Any]]
    read: Callable[..., Setting]
    keys: Mapping[str, type]


def _type_of(kind: Kind) -> str | list[str]:
    names = sorted(kind.modules | kind.operators)
    return names[0] if len(names) == 1 else names


def _kind(written: str | list[str]) -> Kind:
    """Return what names stand for: of modules (`torch.nn.Linear`), or of operators (`aten.linear`)."""
    names = written if isinstance(written, list) else [written]
    if not names or not all(isinstance(name, str) for name in names):
        raise SelectorError(f"type={written!r} is neither a name nor a list of names")
    if len(names) == 1 and not names[0].startswith("aten.") and not _operator(names[0]):
        return _module_kind(names[0])
    unknown = [name for name in names if not _operator(name)]
    if unknown:
        raise SelectorError(f"there is no operator {' or '.join(map(repr, unknown))}")
    return Kind(operators=frozenset(names))


def _operator(name: str) -> bool:
    """Tell whether a name is that of an operator in this process: `aten.add` or `aten.add.Tensor`."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return not overload or hasattr(packet, overload)


def _module_kind(name: str) -> Kind:
    """Return a module type by a name under which it can be found, without importing anything.

    A class that is not imported yet is known by its full name alone; whether the model has it is said
    when the model is prepared.
    """
    path = name.split(".")
    for length in range(len(path) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(path[:length]))
        for part in path[length:]:
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return kind_of(found)
    if len(path) < 2 or not all(part.isidentifier() or part == "<locals>" for part in path):
        raise SelectorError(
            f"{name!r} is neither an operator such as 'aten.linear' nor a module type such as "
            "'torch.nn.Linear'"
        )
    return Kind(modules=frozenset({name}))


_FORMS: dict[str, _Form] = {
    GLOBAL: _Form(lambda key: {}, for_everything, {}),
    TYPE: _Form(
        lambda key: {"type": _type_of(key)},
        lambda type, config: for_kind(_kind(type), config),
        {"type": object},
    ),
    REGEX: _Form(lambda key: {"regex": key}, for_regex, {"regex": str}),
    NAME: _Form(lambda key: {"name": key}, for_name, {"name": str}),
    SUBGRAPH: _Form(
        lambda key: {"inputs": list(key.inputs), "outputs": list(key.outputs)},
        lambda inputs, outputs, config: for_subgraph(tuple(inputs), tuple(outputs), config),
        {"inputs": list, "outputs": list},
    ),
    CALL: _Form(
        lambda key: {"name": key.module, "type": _type_of(key.kind), "index": key.index},
        lambda name, type, index, config: for_call(name, _kind(type), index, config),
        {"name": str, "type": object, "index": int},
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
    if level not in _FORMS:
        raise ConfigError(
            f"select={level!r} is none of {', '.join(_FORMS)}{near_names(str(level), _FORMS)}"
        )
    form = _FORMS[level]
    check_keys(entry, ("select", *form.keys, "config"))
    for key, kind in form.keys.items():
        if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
            raise ConfigError(f"{key}={entry[key]!r} is no {kind.__name__}")
    config = _config_from_data(entry["config"], named)
    return form.read(**{key: entry[key] for key in form.keys}, config=config)


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
