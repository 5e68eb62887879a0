# SPDX-License-Identifier: Apache-2.0
"""Compose: names of installed backends, quantizers of any engine, or data in; one quantizer out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from qompose.composition import ComposableQuantizer
from qompose.configuring import check_keys, selectors_from_data
from qompose.errors import ConfigError, PluginError
from qompose.interop import adapt
from qompose.plugins import load_backend
from qompose.quantizer import Quantizer
from qompose.rule_quantizer import RuleQuantizer


def compose(*members: str | Quantizer, on_conflict: str = "error") -> ComposableQuantizer:
    """Compose quantizers, in order of priority. A string is an installed backend with its default config.

    Raises:
        BackendNotFoundError: no such backend is installed.
        PluginError: it is, and cannot be loaded.
        UserError: no members.
    """
    return ComposableQuantizer([_as_quantizer(member) for member in members], on_conflict)


def _as_quantizer(member: str | Quantizer) -> Quantizer:
    return quantizer_of(member) if isinstance(member, str) else adapt(member)


def quantizer_of(name: str) -> Quantizer:
    """Return the quantizer of an installed backend, with its default configuration, to be given selectors.

    Raises:
        BackendNotFoundError: no such backend is installed.
        PluginError: it is, and cannot be loaded.
    """
    backend = load_backend(name)
    make: Callable[[], Any] = backend.quantizer_class or (lambda: RuleQuantizer(backend))
    quantizer = make()
    if isinstance(quantizer, RuleQuantizer):
        quantizer.set_global(backend.default_config)
    if not isinstance(quantizer, Quantizer):
        reason = f"its quantizer_class made {quantizer!r}, which is no qompose.Quantizer"
        raise PluginError(name, type(backend).__module__, reason)
    return quantizer


def quantizer_from_dict(data: Mapping[str, Any]) -> Quantizer:
    """Return the quantizer that the data of `Quantizer.to_dict` stands for.

    Args:
        data: `{"backend": name, "selectors": [...]}`, or `{"members": [...], "on_conflict": "error"}`.

    Raises:
        ConfigError, SelectorError: the data is malformed, has unknown keys, or asks for what the backend
            cannot do; the message says where.
        BackendNotFoundError, PluginError: a backend that it names cannot be had.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{data!r} is no object with the keys backend and selectors, or members")
    if "members" in data:
        check_keys({"on_conflict": "error", **data}, ("members", "on_conflict"))
        if not isinstance(data["members"], list):
            raise ConfigError(f"members={data['members']!r} is no list")
        members = [quantizer_from_dict(member) for member in data["members"]]
        return ComposableQuantizer(members, data.get("on_conflict", "error"))
    check_keys(data, ("backend", "selectors"))
    if not isinstance(data["backend"], str):
        raise ConfigError(f"backend={data['backend']!r} is no name")
    quantizer = quantizer_of(data["backend"])
    if not isinstance(quantizer, RuleQuantizer):
        raise ConfigError(f"the quantizer of {data['backend']!r} has no selectors to be set")
    named, owner = quantizer.backend.configs, quantizer.name
    return quantizer.with_selectors(selectors_from_data(data["selectors"], named, owner))


def quantizer_from_json(text: str) -> Quantizer:
    """Return the quantizer that the text of `Quantizer.to_json` stands for; see `quantizer_from_dict`.

    Raises:
        ConfigError: the text is no JSON, or the data in it is malformed.
        BackendNotFoundError, PluginError: a backend that it names cannot be had.
    """
    try:
        data = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"this is no JSON: {error}") from None
    return quantizer_from_dict(data)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; a key that stands twice would silently lose its first value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ConfigError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")
    return found
