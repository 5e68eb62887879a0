# SPDX-License-Identifier: Apache-2.0
"""The usual configurations, and how a configuration is written as JSON.

A specification has an ``observer``, or, where its parameters are fixed, ``scale`` and ``zero_point``::

    {"dtype": "int8", "qscheme": "per_tensor_affine", "quant_min": -128, "quant_max": 127,
     "observer": {"observer": "HistogramObserver", "args": {"power": 2.0}}}

Keys that are left out have their defaults. An observer without ``args`` is the class itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from qompose.errors import ConfigError, near_names
from qompose.json_codec import (
    BOOLEAN,
    DTYPE,
    INTEGER,
    NUMBER,
    QSCHEME,
    TEXT,
    Codec,
    check_keys,
    check_mapping,
    named,
    of_type,
    optional,
    record,
    sequence,
)
from qompose.observers import auto_range, fake_quantize, histogram_observers, min_max
from qompose.observers.auto_range import AutoRangeObserver
from qompose.observers.fake_quantize import (
    FakeQuantize,
    LearnableFakeQuantize,
)
from qompose.observers.histogram_observers import (
    EntropyObserver,
    HistogramObserver,
    OfHistogram,
    PercentileObserver,
    PerChannelHistogramObserver,
    SearchingObserver,
)
from qompose.observers.min_max import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    Observer,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.spec.algorithm_choice import algorithm_class, word_of
from qompose.spec.qparams import CASTS, FLOAT8
from qompose.spec.quantization_spec import (
    INTEGERS,
    FixedQParamsQuantizationSpec,
    ObserverFactory,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
    class_of,
)

ACTIVATION_RANGES: dict[str, ObserverFactory] = {
    "auto": AutoRangeObserver.with_args(),
    "histogram": HistogramObserver.with_args(),
    "mse": HistogramObserver.with_args(power=2.0),
    "percentile": PercentileObserver.with_args(),
    "entropy": EntropyObserver.with_args(),
    "minmax": MinMaxObserver.with_args(),
    "moving_average": MovingAverageMinMaxObserver.with_args(),
}
"""The words that configurations take for `range=`."""
DEFAULT_RANGE = "auto"
"""The word of configurations that name none."""
_AT_RUN_TIME = PlaceholderObserver.with_args(eps=torch.finfo(torch.float32).tiny)
"""For one scale per tensor: its least is one with a reciprocal in float32, so that small tensors have steps.

torch's operators per token have least scales of their own.
"""
OF_TORCH = "torch_histogram"
"""The word for torch's own `HistogramObserver`, for parameters that are its bit by bit."""


def observer_for_range(word: str) -> ObserverFactory:
    """Return the activation observer that a configuration's `range=` word stands for.

    Raises:
        ConfigError: there is no such word.
    """
    if word == OF_TORCH:
        from torch.ao.quantization.observer import HistogramObserver as OfTorch

        return ObserverFactory(OfTorch, ())
    if word not in ACTIVATION_RANGES:
        raise ConfigError(
            f"range must be one of {sorted([*ACTIVATION_RANGES, OF_TORCH])}, got {word!r}"
        )
    return ACTIVATION_RANGES[word]


WEIGHT_RANGES: dict[str, tuple[ObserverFactory, ObserverFactory]] = {
    "minmax": (PerChannelMinMaxObserver.with_args(), MinMaxObserver.with_args()),
    "mse": (
        PerChannelHistogramObserver.with_args(power=2.0),
        HistogramObserver.with_args(power=2.0),
    ),
    "histogram": (PerChannelHistogramObserver.with_args(), HistogramObserver.with_args()),
}
"""The words that configurations take for `weight_range=`, each for one scale per channel and per tensor."""


def weight_observer_for_range(word: str, *, per_channel: bool = True) -> ObserverFactory:
    """Return the observer of weights that a configuration's `weight_range=` word stands for.

    Raises:
        ConfigError: there is no such word.
    """
    if word not in WEIGHT_RANGES:
        raise ConfigError(f"weight_range must be one of {sorted(WEIGHT_RANGES)}, got {word!r}")
    channels, tensor = WEIGHT_RANGES[word]
    return channels if per_channel else tensor


def activation_spec(
    dtype: torch.dtype,
    low: int,
    high: int,
    *,
    range: str = DEFAULT_RANGE,
    is_dynamic: bool = False,
    per_token: bool = False,
) -> QuantizationSpec:
    """Return affine integers with one scale per tensor, or, if asked for, per token.

    Args:
        low, high: the bounds of the integers.
        range: how the range is estimated, see `observer_for_range`. Checked but unused if dynamic.
        is_dynamic: compute the scale when the model runs.
        per_token: compute one for each index of all dimensions but the last; needs `is_dynamic`.

    Raises:
        ConfigError: `range` is unknown, or `per_token` without `is_dynamic`.
    """
    estimated = observer_for_range(range)
    if per_token and not is_dynamic:
        raise ConfigError(
            "per_token=True requires is_dynamic=True: tokens are known only at run time"
        )
    return QuantizationSpec(
        dtype=dtype,
        observer_or_fake_quant_ctr=(
            estimated if not is_dynamic else PlaceholderObserver if per_token else _AT_RUN_TIME
        ),
        quant_min=low,
        quant_max=high,
        qscheme=torch.per_channel_affine if per_token else torch.per_tensor_affine,
        is_dynamic=is_dynamic,
        block_size=(-1,) if per_token else None,
    )


def weight_spec(
    low: int,
    high: int,
    *,
    per_channel: bool = True,
    group_size: int | None = None,
    range: str = "minmax",
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizationSpec:
    """Return int8 storage with a scale for each output channel, in dimension 0.

    Args:
        low, high: the bounds of the integers; -8 and 7 for four bits.
        per_channel: False gives one scale for the whole weight; ignored with `group_size`.
        group_size: the number of consecutive inputs that share a scale, which is rounded to `scale_dtype`.
        range: how the range is estimated, see `weight_observer_for_range`; only "minmax" with `group_size`.
        symmetric: True sets all zero points to 0. False, only with `group_size`, gives each group its own.
        scale_dtype: the type whose numbers the scales of groups are; they are held as float32.

    Raises:
        ConfigError: an option is invalid, or options exclude each other.
    """
    estimated = weight_observer_for_range(range, per_channel=per_channel)
    if not symmetric and group_size is None:
        raise ConfigError(
            "symmetric=False requires group_size: weights without groups have no zero points"
        )
    if group_size is not None:
        if range != "minmax":
            raise ConfigError(
                f"the range of weights with group_size={group_size} can only be estimated by "
                f"'minmax', got {range!r}"
            )
        return QuantizationSpec(
            dtype=torch.int8,
            observer_or_fake_quant_ctr=PerBlockMinMaxObserver.with_args(scale_dtype=scale_dtype),
            quant_min=low,
            quant_max=high,
            qscheme=torch.per_channel_symmetric if symmetric else torch.per_channel_affine,
            block_size=(group_size,),
        )
    return QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=estimated,
        quant_min=low,
        quant_max=high,
        qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
        ch_axis=0 if per_channel else None,
    )


FAKE_QUANTIZERS = ("moving_average", "learned")
"""The words for how scales are found in training."""


def training_config(
    config: QuantizationConfig, fake_quantize: str = "moving_average", *, is_qat: bool = True
) -> QuantizationConfig:
    """Return a configuration for `prepare_qat_pt2e` that gives the same integers.

    Channels are not balanced, since training adapts the weights.

    Args:
        config: a configuration for calibration. Its observers are kept, except the default one for
            activations, whose search takes longer than a training step; a moving average replaces it.
        fake_quantize: "moving_average", or "learned": scales per tensor and per channel become parameters,
            initialized from the observers.
        is_qat: False returns `config` unchanged, for functions that have such an argument.

    Raises:
        ConfigError: `fake_quantize` is unknown or would have no effect; or `config` requests searched
            ranges or algorithms, which do not work in training.
    """
    if fake_quantize not in FAKE_QUANTIZERS:
        hint = near_names(str(fake_quantize), FAKE_QUANTIZERS)
        raise ConfigError(
            f"fake_quantize must be one of {FAKE_QUANTIZERS}, got {fake_quantize!r}{hint}"
        )
    learned = fake_quantize == "learned"
    if not is_qat:
        if learned:
            raise ConfigError("fake_quantize='learned' is for training; it requires is_qat=True")
        return config
    if config.algorithms:
        raise ConfigError(
            f"algorithms={config.algorithms} cannot be combined with training, which adapts "
            "the weights; remove algorithms="
        )
    return replace(
        config,
        input_activation=_trained(config.input_activation, learned),
        output_activation=_trained(config.output_activation, learned),
        weight=_trained(config.weight, learned),
        bias=_trained(config.bias, learned),
        is_qat=True,
        balance=False,
        algorithms=(),
        name=f"{config} trained{' with learned scales' if learned else ''}",
    )


def why_not_trained(config: QuantizationConfig) -> str | None:
    """Return why a configuration has no form for training, None where it has one."""
    try:
        training_config(config)
    except ConfigError as error:
        return str(error)
    return None


def _trained(spec: Any, learned: bool) -> Any:
    """Return a specification with a fake quantizer; those of other packages and fixed ones stay."""
    kind = class_of(getattr(spec, "observer_or_fake_quant_ctr", None))
    if not isinstance(spec, QuantizationSpec) or not _is_observer(kind):
        return spec
    factory: Any = spec.observer_or_fake_quant_ctr
    trainable = kind.estimates and not spec.is_dynamic and spec.block_size is None
    made: type[FakeQuantize] = FakeQuantize
    if learned and trainable and spec.dtype not in CASTS:
        made = LearnableFakeQuantize  # whose observer is asked once, for the first values
    elif kind is AutoRangeObserver or factory in (
        HistogramObserver,
        ACTIVATION_RANGES["histogram"],
    ):
        factory = MovingAverageMinMaxObserver
    elif issubclass(kind, SearchingObserver):
        raise ConfigError(
            f"{kind.__name__} searches for the best range, which is too slow for training. Use "
            'range="minmax" or "moving_average", weight_range="minmax", or fake_quantize="learned"'
        )
    return replace(spec, observer_or_fake_quant_ctr=ObserverFactory(made, (("observer", factory),)))


def _is_observer(kind: Any) -> bool:
    if not isinstance(kind, type) or not issubclass(kind, Observer):
        return False
    return not issubclass(kind, FakeQuantize)


ROLES = ("input_activation", "output_activation", "weight", "bias")
"""The fields of a configuration that hold specifications."""
OBSERVERS: dict[str, type[nn.Module]] = {
    name: value
    for part in (min_max, histogram_observers, auto_range, fake_quantize)
    for name, value in vars(part).items()
    if isinstance(value, type) and issubclass(value, Observer) and not name.startswith("_")
    if value not in (Observer, min_max.RangeObserver, SearchingObserver, OfHistogram)
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
            f"{path} is {factory!r}, which cannot be saved. Use a qompose observer "
            f"({', '.join(OBSERVERS)}), with or without with_args(...)"
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
            f"{path}.observer must be a qompose observer ({', '.join(OBSERVERS)}), got "
            f"{name!r}{near_names(str(name), OBSERVERS)}"
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
    "dtype": named((*INTEGERS, *FLOAT8, torch.float16, torch.bfloat16), "a dtype"),
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
            f"{path} must be a QuantizationSpec or FixedQParamsQuantizationSpec to be saved, got a "
            f"{type(spec).__name__}"
        )
    return codec.write(spec, path)


def _read_spec(data: Any, path: str) -> Any:
    check_mapping(data, path)
    fixed = "observer" not in data and not {"scale", "zero_point"}.isdisjoint(data)
    return _SPECS[FixedQParamsQuantizationSpec if fixed else QuantizationSpec].read(data, path)


def _write_algorithm(choice: Any, path: str) -> Any:
    """Return an algorithm as data: its word, or with options an object that has the word as its key."""
    if isinstance(choice, str):
        return TEXT.write(choice, path)
    word = word_of(choice)
    kind = algorithm_class(word, path)
    if type(choice) is not kind:
        raise ConfigError(
            f"{path} is {choice!r}, which cannot be saved: the name {word!r} refers to "
            f"another class, {kind.__name__}"
        )
    return {word: _options_of(kind, path).write(choice, f"{path}.{word}")}


def _read_algorithm(data: Any, path: str) -> Any:
    if isinstance(data, str) or not isinstance(data, Mapping):
        return TEXT.read(data, path)
    if len(data) != 1:
        raise ConfigError(f"{path} must be an algorithm name or {{name: options}}, got {data!r}")
    ((word, options),) = data.items()
    kind = algorithm_class(word, path)
    try:
        return _options_of(kind, path).read(options, f"{path}.{word}")
    except ConfigError:
        raise
    except Exception as error:  # what another package makes of a value
        raise ConfigError(f"{path}.{word}: {type(error).__name__}: {error}") from error


def _options_of(kind: type, path: str) -> Codec:
    """Return the codec of an algorithm's options, which are the fields of its dataclass."""
    if not is_dataclass(kind):
        raise ConfigError(
            f"{path}: {kind.__name__} is not a dataclass, so its options cannot be saved or read"
        )
    try:
        return of_type(kind, {torch.dtype: DTYPE})
    except (KeyError, TypeError, NameError, ValueError) as error:
        raise ConfigError(
            f"{path}: {kind.__name__} has options that cannot be saved ({error})"
        ) from error


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


ALGORITHM = Codec(_write_algorithm, _read_algorithm)


def _settings(spec: Codec) -> Codec:
    fields_of_config = {
        **dict.fromkeys(ROLES, spec),
        **dict.fromkeys(("is_qat", "balance"), BOOLEAN),
        "name": TEXT,
        "algorithms": optional(sequence(ALGORITHM)),
        "options": sequence(TEXT),
    }
    return record(QuantizationConfig, fields_of_config)


SPEC = optional(Codec(_write_spec, _read_spec))
CONFIG = optional(_settings(SPEC))
LISTED_SPEC = optional(Codec(_write_listed_spec, _read_spec))
LISTED_SETTINGS = _settings(LISTED_SPEC)
"""Configurations in data that only lists what backends can do, which is not read back."""
