# SPDX-License-Identifier: Apache-2.0
"""Dataclasses to JSON and back, with errors that name the field.

What is malformed is a ConfigError that names its place in the data: `config.weight.quant_min`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from qompose.errors import ConfigError, near_names


@dataclass(frozen=True)
class Codec:
    """How the value of one key is written and read; each takes it and its place in the data."""

    write: Callable[[Any, str], Any]
    read: Callable[[Any, str], Any]


def plain(words: str, accepts: Callable[[Any], bool]) -> Codec:
    """Return the codec of values that JSON has itself. `words` say what `accepts` asks for."""

    def check(value: Any, path: str) -> Any:
        if not accepts(value):
            raise ConfigError(f"{path} is {value!r}, and has to be {words}")
        return value

    return Codec(check, check)


def is_integer(value: Any) -> bool:
    """Tell whether a value is a whole number; a flag is none."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number; a flag is none."""
    return type(value) in (int, float) and math.isfinite(value)


def jsonable(value: Any) -> Any:
    """Return data in the form that JSON reads back: text for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


INTEGER = plain("a whole number", is_integer)
NUMBER = plain("a finite number", is_number)
BOOLEAN = plain("true or false", lambda value: isinstance(value, bool))
TEXT = plain("a text", lambda value: isinstance(value, str))


def named(values: Iterable[Any], words: str) -> Codec:
    """Return the codec of torch constants: their names without the `torch.`."""
    by_name = {str(value).removeprefix("torch."): value for value in values}

    def write(value: Any, path: str) -> str:
        name = str(value).removeprefix("torch.")
        if by_name.get(name) is not value:
            raise ConfigError(f"{path} is {value!r}, which is none of {', '.join(by_name)}")
        return name

    def read(name: Any, path: str) -> Any:
        if not isinstance(name, str) or name not in by_name:
            hint = near_names(str(name), by_name)
            raise ConfigError(
                f"{path} is {name!r}, and has to be {words}{hint}: {', '.join(by_name)}"
            )
        return by_name[name]

    return Codec(write, read)


def optional(codec: Codec) -> Codec:
    """Return the codec of values that may be None as well."""
    return Codec(
        lambda value, path: None if value is None else codec.write(value, path),
        lambda data, path: None if data is None else codec.read(data, path),
    )


def sequence(codec: Codec, kind: Any = tuple) -> Codec:
    """Return the codec of a tuple or another `kind`; a frozenset is written in order of its data."""

    def write(values: Any, path: str) -> list[Any]:
        if not isinstance(values, kind):
            raise ConfigError(f"{path} is {values!r}, and has to be a {kind.__name__}")
        data = [codec.write(value, f"{path}[{i}]") for i, value in enumerate(values)]
        return sorted(data, key=str) if kind is frozenset else data

    def read(data: Any, path: str) -> Any:
        if not isinstance(data, list):
            raise ConfigError(f"{path} is {data!r}, and has to be a list")
        return kind(codec.read(item, f"{path}[{i}]") for i, item in enumerate(data))

    return Codec(write, read)


def record(kind: Any, codecs: Mapping[str, Codec]) -> Codec:
    """Return the codec of a dataclass; fields that have their default values are not written."""
    return Codec(
        lambda value, path: write_fields(value, kind, codecs, path),
        lambda data, path: read_fields(data, kind, codecs, path),
    )


def write_fields(value: Any, kind: Any, codecs: Mapping[str, Codec], path: str) -> dict[str, Any]:
    """Return the fields of a dataclass as data.

    Raises:
        ConfigError: `value` is none of `kind`, or a field holds what data cannot.
    """
    if type(value) is not kind:
        raise ConfigError(f"{path} is {value!r}, which is no {kind.__name__}")
    standard = {field.name: field.default for field in fields(kind)}
    found = {}
    for name, codec in codecs.items():
        key, held = _SHORT.get(name, name), getattr(value, name)
        data = codec.write(held, f"{path}.{key}")
        if standard[name] is MISSING or held != standard[name]:
            found[key] = data
    return found


def read_fields(data: Any, kind: Any, codecs: Mapping[str, Codec], path: str) -> Any:
    """Return the dataclass that data stands for.

    Raises:
        ConfigError: a key is unknown or missing, or a value is malformed.
    """
    check_mapping(data, path)
    keys = {_SHORT.get(name, name): name for name in codecs}
    check_keys(data, keys, path)
    needed = {_SHORT.get(f.name, f.name) for f in fields(kind) if f.default is MISSING}
    missing = [key for key in keys if key in needed - set(data)]
    if missing:
        raise ConfigError(f"{path} needs {' and '.join(missing)}")
    values = {
        keys[key]: codecs[keys[key]].read(item, f"{path}.{key}") for key, item in data.items()
    }
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


_SHORT = {"observer_or_fake_quant_ctr": "observer"}
"""Keys of fields whose names are longer than what they say."""


def check_mapping(data: object, path: str) -> None:
    """Raise ConfigError unless data is an object with keys."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} is {data!r}, and has to be an object with keys")


def check_keys(data: Mapping[Any, Any], known: Iterable[str], path: str) -> None:
    """Raise ConfigError where a key is unknown."""
    known = tuple(known)
    for key in data:
        if key not in known:
            hint = near_names(str(key), known)
            raise ConfigError(
                f"{path} has the unknown key {key!r}{hint}; known: {', '.join(known)}"
            )


QSCHEMES = (
    *(torch.per_tensor_affine, torch.per_tensor_symmetric),
    *(torch.per_channel_affine, torch.per_channel_symmetric),
    torch.per_channel_affine_float_qparams,
)
