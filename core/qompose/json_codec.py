# SPDX-License-Identifier: Apache-2.0
"""Dataclasses as JSON, with errors that name the field.

What is malformed is a ConfigError that names its place in the data: `config.weight.quant_min`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

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
            raise ConfigError(f"{path} must be {words}, got {value!r}")
        return value

    return Codec(check, check)


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer; a bool is not one."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; a bool is not one."""
    return type(value) in (int, float) and math.isfinite(value)


def jsonable(value: Any) -> Any:
    """Return data in the form that JSON reads back: text for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


INTEGER = plain("an integer", is_integer)
NUMBER = plain("a finite number", is_number)
BOOLEAN = plain("true or false", lambda value: isinstance(value, bool))
TEXT = plain("a string", lambda value: isinstance(value, str))


FLOAT = Codec(
    lambda value, path: NUMBER.write(value, path) if math.isfinite(value) else str(value),
    lambda data, path: float(data) if isinstance(data, str) else NUMBER.read(data, path),
)
"""Any number: those that JSON does not have, infinities and NaN, are strings."""


def named(values: Iterable[Any], words: str) -> Codec:
    """Return the codec of torch constants: their names without the `torch.`."""
    by_name = {str(value).removeprefix("torch."): value for value in values}

    def write(value: Any, path: str) -> str:
        name = str(value).removeprefix("torch.")
        if by_name.get(name) is not value:
            raise ConfigError(f"{path} must be one of {', '.join(by_name)}, got {value!r}")
        return name

    def read(name: Any, path: str) -> Any:
        if not isinstance(name, str) or name not in by_name:
            hint = near_names(str(name), by_name)
            raise ConfigError(f"{path} must be {words} ({', '.join(by_name)}), got {name!r}{hint}")
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
            raise ConfigError(f"{path} must be a {kind.__name__}, got {values!r}")
        data = [codec.write(value, f"{path}[{i}]") for i, value in enumerate(values)]
        return sorted(data, key=str) if kind is frozenset else data

    def read(data: Any, path: str) -> Any:
        if not isinstance(data, list):
            raise ConfigError(f"{path} must be a list, got {data!r}")
        return kind(codec.read(item, f"{path}[{i}]") for i, item in enumerate(data))

    return Codec(write, read)


def record(kind: Any, codecs: Mapping[str, Codec], *, defaults: bool = False) -> Codec:
    """Return the codec of a dataclass; `defaults` writes the fields that have their default values too."""
    return Codec(
        lambda value, path: write_fields(value, kind, codecs, path, defaults=defaults),
        lambda data, path: read_fields(data, kind, codecs, path),
    )


def write_fields(
    value: Any, kind: Any, codecs: Mapping[str, Codec], path: str, *, defaults: bool = False
) -> dict[str, Any]:
    """Return the fields of a dataclass as data.

    Raises:
        ConfigError: `value` is not of `kind`, or a field holds what data cannot.
    """
    if type(value) is not kind:
        raise ConfigError(f"{path} must be of type {kind.__name__}, got {value!r}")
    standard = {field.name: field.default for field in fields(kind)}
    found = {}
    for name, codec in codecs.items():
        key, held = _SHORT.get(name, name), getattr(value, name)
        data = codec.write(held, f"{path}.{key}")
        if defaults or standard[name] is MISSING or held != standard[name]:
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
        raise ConfigError(f"{path} is missing {' and '.join(missing)}")
    values = {
        keys[key]: codecs[keys[key]].read(item, f"{path}.{key}") for key, item in data.items()
    }
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


_SHORT = {"observer_or_fake_quant_ctr": "observer"}
"""Keys of fields whose names are longer than what they say."""


_JSON: dict[Any, Codec] = {int: INTEGER, float: NUMBER, bool: BOOLEAN, str: TEXT}
"""Of the types that JSON has itself."""


def of_type(hint: Any, others: Mapping[Any, Codec], *, defaults: bool = False) -> Codec:
    """Return the codec of what a field of a dataclass is declared to hold.

    Args:
        hint: a type in `others`, one of JSON's own, or a dataclass; a tuple, list, frozenset or mapping
            of these; or one of them or None.
        others: codecs by type.
        defaults: write the fields that have their default values too.
    """
    origin, parts = get_origin(hint), get_args(hint)
    inner = partial(of_type, others=others, defaults=defaults)
    for kind in (hint, origin):
        if kind in others:
            return others[kind]
    if origin in (Union, types.UnionType):
        (rest,) = (part for part in parts if part is not types.NoneType)
        return optional(inner(rest))
    if origin is tuple and parts[-1] is not ...:
        return _fixed([inner(part) for part in parts])
    if origin in (tuple, list, frozenset):
        return sequence(inner(parts[0]), origin)
    if origin is not None and issubclass(origin, Mapping):
        return mapping(parts[0], inner(parts[1]))
    if not is_dataclass(hint):
        return _JSON[hint]
    return record(hint, codecs_of(hint, others, defaults=defaults), defaults=defaults)


def codecs_of(
    kind: Any,
    others: Mapping[Any, Codec],
    leave_out: Collection[str] = (),
    *,
    defaults: bool = False,
) -> dict[str, Codec]:
    """Return the codecs of the fields of a dataclass, by name; see `of_type`."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name not in leave_out]
    return {name: of_type(hints[name], others, defaults=defaults) for name in names}


def mapping(key: type, codec: Codec) -> Codec:
    """Return the codec of a mapping whose keys are texts, or another type that is made of a text."""

    def read(data: Any, path: str) -> dict[Any, Any]:
        check_mapping(data, path)
        return {key(name): codec.read(item, f"{path}.{name}") for name, item in data.items()}

    return Codec(
        lambda value, path: {str(k): codec.write(v, f"{path}.{k}") for k, v in value.items()}, read
    )


def _fixed(codecs: list[Codec]) -> Codec:
    """Return the codec of a tuple that has one value for each of these."""

    def each(method: str, kind: type) -> Callable[[Any, str], Any]:
        def apply(values: Any, path: str) -> Any:
            if not isinstance(values, (tuple, list)) or len(values) != len(codecs):
                raise ConfigError(f"{path} must be a list of {len(codecs)} items, got {values!r}")
            parts = zip(codecs, values, strict=True)
            return kind(getattr(c, method)(v, f"{path}[{i}]") for i, (c, v) in enumerate(parts))

        return apply

    return Codec(each("write", list), each("read", tuple))


def check_mapping(data: object, path: str) -> None:
    """Raise ConfigError unless data is an object with keys."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must be a dict, got {data!r}")


def check_keys(data: Mapping[Any, Any], known: Iterable[str], path: str) -> None:
    """Raise ConfigError where a key is unknown."""
    known = tuple(known)
    for key in data:
        if key not in known:
            hint = near_names(str(key), known)
            raise ConfigError(
                f"{path} has an unknown key {key!r}{hint}. Known keys: {', '.join(known)}"
            )


QSCHEMES = (
    *(torch.per_tensor_affine, torch.per_tensor_symmetric),
    *(torch.per_channel_affine, torch.per_channel_symmetric),
    torch.per_channel_affine_float_qparams,
)
DTYPE = named(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), "a dtype"
)
QSCHEME = named(QSCHEMES, "a scheme")
