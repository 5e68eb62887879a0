# SPDX-License-Identifier: Apache-2.0
"""Specifications and configurations as JSON, by the name of their observer.

A specification has an ``observer``, or, where its parameters are fixed, ``scale`` and ``zero_point``::

    {"dtype": "int8", "qscheme": "per_tensor_affine", "quant_min": -128, "quant_max": 127,
     "observer": {"observer": "HistogramObserver", "args": {"power": 2.0}}}

Keys that are left out have their defaults. An observer without ``args`` is the class itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from qompose.errors import ConfigError, near_names
from qompose.json_codec import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    QSCHEME,
    TEXT,
    Codec,
    check_keys,
    check_mapping,
    named,
    optional,
    record,
    sequence,
)
from qompose.observers import fake_quantize, histogram_observers, min_max
from qompose.observers.min_max import Observer
from qompose.spec.observer_factory import ObserverFactory
from qompose.spec.quantization_spec import (
    INTEGERS,
    SMOOTH_QUANT,
    FixedQParamsQuantizationSpec,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
    SmoothQuant,
)

ROLES = ("input_activation", "output_activation", "weight", "bias")
"""The fields of a configuration that hold specifications."""
OBSERVERS: dict[str, type[nn.Module]] = {
    name: value
    for part in (min_max, histogram_observers, fake_quantize)
    for name, value in vars(part).items()
    if isinstance(value, type) and issubclass(value, Observer) and not name.startswith("_")
    if value not in (Observer, min_max.RangeObserver, histogram_observers.SearchingObserver)
}
"""The observers that data may name."""


def config_to_json(config: QuantizationConfig | None) -> dict[str, Any] | None:
    """Return a configuration as JSON data, None for one that leaves operators in float.

    Raises:
        ConfigError: it holds what JSON cannot name, such as an observer that is not qompose's own.
    """
    data: dict[str, Any] | None = CONFIG.write(config, "config")
    return data


def config_from_json(data: Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Return the configuration that JSON data stands for.

    Raises:
        ConfigError: the data is malformed; the message names the place in it.
    """
    config: QuantizationConfig | None = CONFIG.read(data, "config")
    return config


def spec_to_json(spec: QuantizationSpecBase | None) -> dict[str, Any] | None:
    """Return a specification as JSON data; see `config_to_json`."""
    data: dict[str, Any] | None = SPEC.write(spec, "spec")
    return data


def spec_from_json(data: Mapping[str, Any] | None) -> Any:
    """Return the specification (a QuantizationSpec, or a fixed one) that JSON data stands for.

    Raises:
        ConfigError: the data is malformed; the message names the place in it.
    """
    return SPEC.read(data, "spec")


def _is_ours(factory: Any) -> bool:
    kind = factory.observer if isinstance(factory, ObserverFactory) else factory
    return OBSERVERS.get(getattr(kind, "__name__", "")) is kind


def _write_observer(factory: Any, path: str) -> dict[str, Any]:
    if not _is_ours(factory):
        raise ConfigError(
            f"{path} is {factory!r}, which is none of qompose's observers "
            f"({', '.join(OBSERVERS)}) nor their with_args(...), and data cannot name it"
        )
    if not isinstance(factory, ObserverFactory):
        return {"observer": factory.__name__}
    name = factory.observer.__name__
    arguments, codecs = dict(factory.arguments), _arguments(name)
    check_keys(arguments, codecs, f"{path}.args")
    return {
        "observer": name,
        "args": {k: codecs[k].write(v, f"{path}.args.{k}") for k, v in arguments.items()},
    }


def _read_observer(data: Any, path: str) -> Any:
    check_mapping(data, path)
    check_keys(data, ("observer", "args"), path)
    name = data.get("observer")
    if not isinstance(name, str) or name not in OBSERVERS:
        raise ConfigError(
            f"{path}.observer must be an observer of qompose ({', '.join(OBSERVERS)}), got {name!r}"
            f"{near_names(str(name), OBSERVERS)}"
        )
    if "args" not in data:
        return OBSERVERS[name]
    arguments, codecs = data["args"], _arguments(name)
    check_mapping(arguments, f"{path}.args")
    check_keys(arguments, codecs, f"{path}.args")
    values = {k: codecs[k].read(v, f"{path}.args.{k}") for k, v in arguments.items()}
    return ObserverFactory(OBSERVERS[name], tuple(values.items()))


@cache
def _arguments(observer: str) -> dict[str, Codec]:
    """Return the arguments of an observer's constructor, those that it hands on included."""
    names: list[str] = []
    for kind in OBSERVERS[observer].__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = list(inspect.signature(vars(kind)["__init__"]).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if kind is Observer or not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return {name: CODECS[name] for name in dict.fromkeys(names)}


CODECS: dict[str, Codec] = {
    "dtype": named((*INTEGERS, torch.float16, torch.bfloat16), "a dtype"),
    "scale_dtype": named((torch.float32, torch.float16, torch.bfloat16), "a float dtype"),
    "qscheme": optional(QSCHEME),
    **dict.fromkeys(("quant_min", "quant_max", "ch_axis"), optional(INTEGER)),
    "zero_point": INTEGER,
    **dict.fromkeys(("scale", "eps", "power", "percentile", "averaging_constant"), NUMBER),
    "is_dynamic": BOOLEAN,
    "block_size": optional(sequence(INTEGER)),
    "use_grad_scaling": BOOLEAN,
    "observer": optional(Codec(_write_observer, _read_observer)),
    "observer_or_fake_quant_ctr": Codec(_write_observer, _read_observer),
}
"""By name of a field or argument: a name means the same wherever it occurs."""
_SPECS: dict[type, Codec] = {
    kind: record(kind, {field.name: CODECS[field.name] for field in fields(kind)})
    for kind in (QuantizationSpec, FixedQParamsQuantizationSpec)
}


def _write_spec(spec: Any, path: str) -> Any:
    codec = _SPECS.get(type(spec))
    if codec is None:
        raise ConfigError(
            f"{path} is a {type(spec).__name__}, and data can hold a QuantizationSpec or a "
            "FixedQParamsQuantizationSpec: others refer to the nodes of one graph"
        )
    return codec.write(spec, path)


def _read_spec(data: Any, path: str) -> Any:
    check_mapping(data, path)
    fixed = "observer" not in data and not {"scale", "zero_point"}.isdisjoint(data)
    return _SPECS[FixedQParamsQuantizationSpec if fixed else QuantizationSpec].read(data, path)


_SMOOTH_QUANT = record(SmoothQuant, {"alpha": optional(NUMBER)})


def _write_repair(repair: Any, path: str) -> Any:
    """Return a repair as data: its word, or with options an object that has the word as its key."""
    if not isinstance(repair, SmoothQuant):
        return TEXT.write(repair, path)
    return {SMOOTH_QUANT: _SMOOTH_QUANT.write(repair, path)}


def _read_repair(data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        return TEXT.read(data, path)
    check_keys(data, (SMOOTH_QUANT,), path)
    return _SMOOTH_QUANT.read(data.get(SMOOTH_QUANT), f"{path}.{SMOOTH_QUANT}")


def _write_listed_spec(spec: Any, path: str) -> Any:
    """Return a specification as data; of an observer of another package, it has the name."""
    factory = getattr(spec, "observer_or_fake_quant_ctr", None)
    if factory is None or _is_ours(factory):
        return _write_spec(spec, path)
    inner = getattr(factory, "p", factory)  # torch.ao's PartialWrapper
    inner = getattr(inner, "func", inner)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    data = _write_spec(replace(spec, observer_or_fake_quant_ctr=min_max.MinMaxObserver), path)
    return {**data, "observer": {"elsewhere": f"{inner.__module__}.{name}"}}


REPAIR = Codec(_write_repair, _read_repair)


def _settings(spec: Codec) -> Codec:
    fields_of_config = {
        **dict.fromkeys(ROLES, spec),
        **dict.fromkeys(("is_qat", "balance"), BOOLEAN),
        "name": TEXT,
        "repairs": sequence(REPAIR),
    }
    return record(QuantizationConfig, fields_of_config)


SPEC = optional(Codec(_write_spec, _read_spec))
CONFIG = optional(_settings(SPEC))
LISTED_SPEC = optional(Codec(_write_listed_spec, _read_spec))
LISTED_SETTINGS = _settings(LISTED_SPEC)
"""Configurations in data that only lists what backends can do, which is not read back."""
